"""The zero-copy forward: each program pools bags and stores the result into the window of the samples' owner, with no
staging before and no unpacking after (Chen et al. 2024; zero-copy variant of arXiv 2305.06942).

Each rank owns a window [b, D_total] of the wire's type, where its model reads the pooled embeddings. That of a sample
and a feature is in the sample's row, from the feature's column on.

Example: two ranks of two samples, one table of dim 4 each. Rank 1 pools samples 0 .. 3 for its table. It stores those
of samples 0 and 1 to rows 0 and 1, columns 4 .. 7, of rank 0's window, and those of samples 2 and 3 to rows 0 and 1,
columns 4 .. 7, of its own.
"""

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
    values, offsets, id_weights, first_sample, features, windows, status,
    rank, world_size, features_here, blocks, batch,
    SCHEDULE: tl.constexpr, BAGS: tl.constexpr, UNROLL: tl.constexpr, STRIDE: tl.constexpr, DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr, WEIGHT: tl.constexpr, WIRE: tl.constexpr, ALIGNMENT: tl.constexpr,
    WINDOW_ALIGNMENT: tl.constexpr, COLUMN_ALIGNMENT: tl.constexpr, CHECK: tl.constexpr, LEAVES_OUT: tl.constexpr,
):  # fmt: skip
    """Do one task: pool BAGS bags of one feature, and store them into the window of the rank that owns the samples.

    Memory: the program reads the offsets, ids, weights and rows of its bags, which are in this rank's memory. It stores
    [BAGS, DIM] of the wire's type to as many rows of one window, this rank's or a peer's. With CHECK it may replace ids
    in `values`, see `check_ids`.

    Order: no two programs store to one place, so nothing is ordered among them. The stores are complete when the kernel
    ends; the kernel that raises the flags comes next on the stream, and its release covers them.

    Example: rank 1 of 2, 4 samples a rank, one feature of dim 4 at column 4, BAGS 2, balanced order. Program 0 pools
    samples 0 and 1, which are rank 0's, and stores them to rows 0 and 1, columns 4 .. 7, of rank 0's window. Program 1
    pools samples 4 and 5 and stores them to the same place of rank 1's window. Programs 2 and 3 fill rows 2 and 3.

    Source: Chen et al. 2024; zero-copy variant of arXiv 2305.06942.
    """
    destination, which, block = task_at(tl.program_id(0), rank, world_size, features_here, blocks, SCHEDULE)
    feature = features + which * FEATURE_COLUMNS
    first = tl.load(first_sample + destination)
    sample = block * BAGS + tl.arange(0, BAGS)
    live = sample < tl.load(first_sample + destination + 1) - first
    window = tl.multiple_of(tl.load(windows + destination).to(tl.pointer_type(WIRE)), WINDOW_ALIGNMENT)
    rows, filled = pool(
        values, offsets, id_weights, feature, first + sample, live, batch, status,
        BAGS, DIM, BLOCK_DIM, UNROLL, WEIGHT, ALIGNMENT, CHECK, LEAVES_OUT,
    )  # fmt: skip
    column = tl.multiple_of(tl.load(feature + COLUMN), COLUMN_ALIGNMENT)
    store_rows(rows, window, sample, column, filled, STRIDE, DIM, BLOCK_DIM)


def prepare_store_pooled(
    bags: Bags, features: FeatureTable, windows: Windows, status: torch.Tensor, options: PoolingOptions
) -> Launch:
    """Return a launch that takes values, offsets and weights at each call, see `Bags.tensors`.

    It pools every bag and stores the result straight into the window of the sample's owner. No flag is raised. The
    stores are complete when the kernel ends, so `signal_flags`, launched next on the stream, may report them to the
    peers. The ids have the types and the number of samples of `bags`. The launch keeps all other tensors alive, but not
    the rows: it may be called while these are at the addresses in `features`.

    Args:
        status: [1 + kinds] int64, see `Flags`; the kernel records an id outside its table there.
    """
    assert options.tuning.groups == 1, "a program does one task, which it pools as one group"
    world_size, features_here = windows.addresses.numel(), features.entries.shape[0]
    blocks = -(-bags.samples_per_rank // options.tuning.task_bags)
    arguments = (
        *bags.tensors, bags.first_sample, features.entries, windows.addresses, status,
        options.rank, world_size, features_here, blocks, bags.samples,
    )  # fmt: skip
    constants = pooling_constants(features, windows, options)
    return Launch(
        specialised(_store_pooled, num_warps=options.tuning.num_warps, **constants),
        world_size * features_here * blocks,
        tuple(each.dtype for each in bags.tensors),
        arguments,
        changing=("values", "offsets", "id_weights"),
    )
