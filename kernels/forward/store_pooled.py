"""Zero-copy forward: pooled embeddings, stored by the kernel that computes them into the window of the sample's owner
(Chen et al. 2024; zero-copy variant of arXiv 2305.06942). No staging, no unpacking.

A window is [b, D_total] of the wire's type at its owner; the pooled embedding of (sample, feature) lies in row sample,
from the feature's column on: where the model reads it.

Example: two ranks of two samples, one table of dim 4 each. Rank 1 pools samples 0 .. 3 for its table and stores rows 0
and 1, columns 4 .. 7, of rank 0's window, and the same place of its own for samples 2 and 3.
"""

from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl

from dlrm_overlap.kernels.arguments import Bags, FeatureTable, PoolingOptions, Windows, power_of_2
from dlrm_overlap.kernels.compiled import TYPES, CompiledKernel
from dlrm_overlap.kernels.primitives import COLUMN, FEATURE_COLUMNS, pool, task_at

_INTEGERS = ["rank", "world_size", "features_here", "blocks", "batch", "epoch", "timeout", "slots", "first_slot"]
# Shapes change from run to run, views of a batch begin anywhere: neither is worth a kernel of its own.
GENERAL = {"do_not_specialize": _INTEGERS, "do_not_specialize_on_alignment": ["values", "offsets"]}


@triton.jit
def store_rows(
    rows,
    window,
    sample,
    column,
    live,
    STRIDE: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    """Store `rows` [R, BLOCK_DIM] to rows `sample` [R] of `window`, from `column` on, where `live`.

    The caller says what divides `window` and `column`, where they are loaded: a hint on an argument does not survive
    inlining, and without it each lane stores 4 bytes.
    """
    at = tl.arange(0, BLOCK_DIM)
    offset = sample.to(tl.int64)[:, None] * STRIDE + column + at[None, :]
    tl.store(window + offset, rows.to(window.dtype.element_ty), mask=live[:, None] & (at < DIM)[None, :])


@triton.jit(**GENERAL)
def _store_pooled(
    values,
    offsets,
    first_sample,
    features,
    windows,
    status,
    rank,
    world_size,
    features_here,
    blocks,
    batch,
    SCHEDULE: tl.constexpr,
    BAGS: tl.constexpr,
    UNROLL: tl.constexpr,
    STRIDE: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    WEIGHT: tl.constexpr,
    WIRE: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    WINDOW_ALIGNMENT: tl.constexpr,
    COLUMN_ALIGNMENT: tl.constexpr,
    CHECK: tl.constexpr,
):
    """Pool BAGS bags of one feature, and store them into the window of the rank that owns the samples; one task.

    The program reads the bags' offsets, ids and rows, which lie on this rank, and stores [BAGS, DIM] of the wire's type
    to as many rows of the destination's window, this rank's or a peer's. Ids outside their table are replaced by 0 in
    `values`, see `pool`. No two programs store to one place, and nothing is ordered among them: the stores are complete
    when the kernel is, and the kernel that raises the flags follows it on the stream.

    Example: of 2 ranks with 4 samples each, rank 1 has one table of dim 4 that lies at column 4, and BAGS is 2. In
    balanced order program 0 pools samples 0 and 1, which are rank 0's, and stores rows 0 and 1, columns 4 .. 7, of rank
    0's window; program 1 pools samples 4 and 5 to the same place of its own; programs 2 and 3 store rows 2 and 3.

    Source: Chen et al. 2024; zero-copy variant of arXiv 2305.06942.
    """
    destination, which, block = task_at(tl.program_id(0), rank, world_size, features_here, blocks, SCHEDULE)
    feature = features + which * FEATURE_COLUMNS
    first = tl.load(first_sample + destination)
    sample = block * BAGS + tl.arange(0, BAGS)
    live = sample < tl.load(first_sample + destination + 1) - first
    window = tl.multiple_of(tl.load(windows + destination).to(tl.pointer_type(WIRE)), WINDOW_ALIGNMENT)
    rows = pool(
        values, offsets, feature, first + sample, live, batch, status,
        BAGS, DIM, BLOCK_DIM, UNROLL, WEIGHT, ALIGNMENT, CHECK,
    )  # fmt: skip
    column = tl.multiple_of(tl.load(feature + COLUMN), COLUMN_ALIGNMENT)
    store_rows(rows, window, sample, column, live, STRIDE, DIM, BLOCK_DIM)


def shape_of(features: FeatureTable, windows: Windows, launch: PoolingOptions) -> tuple[Any, ...]:
    """Return what decides the form of both kernels."""
    alignments = features.alignment, windows.alignment, features.column_alignment
    return launch, features.dim, features.weight_dtype, windows.stride, windows.dtype, alignments


def constants_of(
    launch: PoolingOptions,
    dim: int,
    weight_dtype: torch.dtype,
    stride: int,
    wire_dtype: torch.dtype,
    alignments: tuple[int, int, int],
) -> dict[str, Any]:
    """Return the compile-time arguments of both kernels, in the order of their parameters."""
    return {
        "SCHEDULE": launch.schedule,
        "BAGS": launch.tuning.task_bags // launch.tuning.groups,
        "UNROLL": launch.tuning.unroll,
        "STRIDE": stride,
        "DIM": dim,
        "BLOCK_DIM": power_of_2(dim),
        "WEIGHT": TYPES[weight_dtype],
        "WIRE": TYPES[wire_dtype],
        "ALIGNMENT": alignments[0],
        "WINDOW_ALIGNMENT": alignments[1],
        "COLUMN_ALIGNMENT": alignments[2],
        "CHECK": launch.check_ids,
    }


@lru_cache
def _storing(*shape: Any) -> CompiledKernel:
    launch: PoolingOptions = shape[0]
    return CompiledKernel(_store_pooled, {"num_warps": launch.tuning.num_warps}, constants_of(*shape))


def store_pooled(
    bags: Bags, features: FeatureTable, windows: Windows, status: torch.Tensor, launch: PoolingOptions
) -> None:
    """Pool every bag and store the result straight into its owner's window; raises no flag, see `raise_flags`.

    The stores are complete when the kernel is: what follows on the stream may tell the peers.

    Args:
        status: [3] int64, see `Flags`: takes the record of an id outside its table.
    """
    assert launch.tuning.groups == 1, "a program that pools once has nothing to cut"
    world_size, here = windows.addresses.numel(), features.entries.shape[0]
    blocks = -(-bags.samples_per_rank // launch.tuning.task_bags)
    _storing(*shape_of(features, windows, launch))(
        world_size * here * blocks,
        (bags.values.dtype, bags.offsets.dtype),
        bags.values,
        bags.offsets,
        bags.first_sample,
        features.entries,
        windows.addresses,
        status,
        launch.rank,
        world_size,
        here,
        blocks,
        bags.samples,
    )
