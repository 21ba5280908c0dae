"""The zero-copy forward (`pgas`): programs pool bags and store the result into the window of the samples' rank."""

import torch
import triton
import triton.language as tl

from dlrm_overlap.kernels.bags import Bags, FeatureTable, Windows
from dlrm_overlap.kernels.compiled import specialised
from dlrm_overlap.kernels.forward.pooling import (
    COLUMN,
    FEATURE_COLUMNS,
    JIT_OPTIONS,
    pool,
    pooling_constants,
    store_rows,
)
from dlrm_overlap.kernels.launches import Launch
from dlrm_overlap.kernels.primitives import task_at
from dlrm_overlap.kernels.tuning import PoolingOptions


@triton.jit(**JIT_OPTIONS)
def _store_pooled(
    values,  # [ids] int32 or int64
    offsets,  # [features * batch + 1], of the bags
    id_weights,  # [ids] float32, or `values` again
    first_sample,  # [W + 1] int32
    features,  # [features_here, 6] int64
    windows,  # [W] int64, addresses
    status,  # see `record`
    rank,
    world_size,
    features_here,
    blocks,  # tasks of a feature for each destination
    batch,  # samples of all ranks
    POOLING: tl.constexpr,
):
    """Do one task: pool bags of one feature, and store them into the window of the rank that has the samples.

    Memory: stores [bags, dim] of the wire type to one window [b, D_total]. It may replace ids in `values`, see
    `check_ids`.

    Order: the next kernel on the stream signals; its release covers the stores.

    Example: rank 1 of 2, 4 samples a rank, a feature of dim 4 at column 4, 2 bags a task, balanced order. Program 0
    stores samples 0 and 1 to rows 0 and 1, columns 4 .. 7, of rank 0's window, program 1 samples 4 and 5 to the same
    rows of rank 1's window.

    Source: Chen et al. 2024; zero-copy variant of arXiv 2305.06942.
    """
    # Find the task's samples and their window.
    destination, which, block = task_at(tl.program_id(0), rank, world_size, features_here, blocks, POOLING.schedule)
    feature = features + which * FEATURE_COLUMNS
    first = tl.load(first_sample + destination)
    sample = block * POOLING.bags + tl.arange(0, POOLING.bags)
    live = sample < tl.load(first_sample + destination + 1) - first
    window = tl.load(windows + destination).to(tl.pointer_type(POOLING.wire_type))
    window = tl.multiple_of(window, POOLING.window_alignment)
    # Pool and store: rows [bags, block_dim].
    rows, filled = pool(values, offsets, id_weights, feature, first + sample, live, batch, status, POOLING)
    column = tl.multiple_of(tl.load(feature + COLUMN), POOLING.column_alignment)
    store_rows(rows, window, sample, column, filled, POOLING.stride, POOLING)


def prepare_store_pooled(
    bags: Bags, features: FeatureTable, windows: Windows, status: torch.Tensor, options: PoolingOptions
) -> Launch:
    """Return the launch that pools every bag into the windows; it is called with `Bags.tensors` of a step.

    It sends no signal: launch `signal_flags` next. A step's ids have the types and samples of `bags`. The launch holds
    all other tensors but the rows: it is valid while they are at the addresses in `features`.
    """
    assert options.tuning.groups == 1, "a program does one task, which it pools as one group"
    world_size, features_here = windows.addresses.numel(), features.entries.shape[0]
    blocks = -(-bags.samples_per_rank // options.tuning.task_bags)
    arguments = (
        *bags.tensors,
        bags.first_sample,
        features.entries,
        windows.addresses,
        status,
        options.rank,
        world_size,
        features_here,
        blocks,
        bags.samples,
    )
    pooling = pooling_constants(features, windows, options)
    return Launch(
        specialised(_store_pooled, num_warps=options.tuning.num_warps, POOLING=pooling),
        world_size * features_here * blocks,
        tuple(each.dtype for each in bags.tensors),
        arguments,
        changing=("values", "offsets", "id_weights"),
    )
