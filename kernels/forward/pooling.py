"""Constants and device functions of the forward's kernels, which pool bags and store the result."""

from typing import NamedTuple

import triton
import triton.language as tl

from dlrm_overlap.kernels.bags import FeatureTable, Windows
from dlrm_overlap.kernels.compiled import TYPES
from dlrm_overlap.kernels.primitives import BAD_ID, record
from dlrm_overlap.kernels.tuning import PoolingOptions, power_of_2

# Columns of the feature table [F, 6] int64, which has one row for each feature of a launch.
ADDRESS = tl.constexpr(0)  # of the first row of the feature's table
ROWS = tl.constexpr(1)  # of its table; negative if ids outside it are not recorded
COLUMN = tl.constexpr(2)  # of the window, where its pooled embedding begins
INPUT_FEATURE = tl.constexpr(3)  # its index f in the input: sample s has bag f * B + s
MEAN = tl.constexpr(4)  # 1: divide by the number of ids
LEFT_OUT = tl.constexpr(5)  # 1: do not store an empty bag, since nobody reads it
FEATURE_COLUMNS = tl.constexpr(6)

_INTEGERS = ["rank", "world_size", "features_here", "blocks", "batch", "epoch", "timeout", "slots", "first_slot"]
# Sizes change from run to run, and views of a batch begin anywhere: neither is worth another compilation.
JIT_OPTIONS = {"do_not_specialize": _INTEGERS, "do_not_specialize_on_alignment": ["values", "offsets", "id_weights"]}


class Pooling(NamedTuple):
    schedule: str
    bags: int
    """bags that a program pools at a time"""
    unroll: int
    stride: int
    dim: int
    block_dim: int
    """the next power of two"""
    weight_type: tl.dtype
    wire_type: tl.dtype
    alignment: int
    """bytes that divide a table's address and its rows' size"""
    window_alignment: int
    """bytes that divide a window's address"""
    column_alignment: int
    """elements that divide a column of the window"""
    check: int
    """ids of each bag that are checked at a time; 0: none"""
    leaves_out: bool


def pooling_constants(features: FeatureTable, windows: Windows, options: PoolingOptions) -> Pooling:
    tuning = options.tuning
    return Pooling(
        schedule=options.schedule,
        bags=tuning.task_bags // tuning.groups,
        unroll=tuning.unroll,
        stride=windows.stride,
        dim=features.dim,
        block_dim=power_of_2(features.dim),
        weight_type=TYPES[features.weight_dtype],
        wire_type=TYPES[windows.dtype],
        alignment=features.alignment,
        window_alignment=windows.alignment,
        column_alignment=features.column_alignment,
        check=tuning.checked_ids if options.check_ids else 0,
        leaves_out=features.leaves_out,
    )


@triton.jit
def check_ids(
    ids,
    length,
    bag,
    batch,
    rows,
    status,
    BAGS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Replace ids outside a table of |`rows`| rows by 0 and, unless `rows` is negative, record the last such bag.

    Memory: `ids` [BAGS] point to the first ids of the bags `bag`, which have `length` [BAGS] ids. CHUNK ids of each bag
    are read at a time, one per lane, which brings them to L1 in few requests.

    Order: a barrier follows the stores. Programs that pool the same bags for another shard store the same 0.
    """
    longest = tl.max(length, 0)
    at = tl.arange(0, CHUNK)[None, :]
    recorded = rows >= 0
    rows = tl.abs(rows)
    wrong = tl.zeros((BAGS, CHUNK), tl.int32)
    for first in range(0, longest, CHUNK):
        # [BAGS, CHUNK]
        row = tl.load(ids[:, None] + first + at, mask=first + at < length[:, None], other=0).to(tl.int64)
        wrong = wrong | (row.to(tl.uint64, bitcast=True) >= rows.to(tl.uint64, bitcast=True)).to(tl.int32)
    # Rare, and after the loop: a store in the loop would keep the compiler from loading ahead of it.
    if tl.max(tl.max(wrong, 1), 0) != 0:
        worst = tl.max(tl.where(tl.max(wrong, 1) != 0, bag.to(tl.int64), -1), 0)
        if recorded:
            record(status, BAD_ID, worst // batch, worst % batch, rows, 0, 0)
        for first in range(0, longest, CHUNK):
            here = first + at < length[:, None]
            # [BAGS, CHUNK]
            row = tl.load(ids[:, None] + first + at, mask=here, other=0).to(tl.int64)
            outside = row.to(tl.uint64, bitcast=True) >= rows.to(tl.uint64, bitcast=True)
            tl.store(ids[:, None] + first + at, tl.zeros_like(row).to(ids.dtype.element_ty), mask=here & outside)
        tl.debug_barrier()  # all threads have stored before any reads the ids again


@triton.jit
def pool(
    values,
    offsets,
    id_weights,
    feature,
    sample,
    live,
    batch,
    status,
    POOLING: tl.constexpr,
):
    """Return the pooled embeddings [bags, block_dim] float32 of samples `sample` [bags], and which of them to store
    [bags].

    `feature` points to a row of the feature table. Rows are added in the order of the ids, in float32, times the ids'
    weights if `id_weights` are float32; the result is 0 where `live` is false. A table has at least one row: ids
    outside it are replaced by 0.
    """
    # Find the bags.
    bag = tl.load(feature + INPUT_FEATURE) * batch + sample
    start = tl.load(offsets + bag, mask=live, other=0)
    # 32 bits, like all counts of the loop: registers limit the number of rows in flight.
    length = (tl.load(offsets + bag + 1, mask=live, other=0) - start).to(tl.int32)
    ids = values + start
    if POOLING.check > 0:
        check_ids(ids, length, bag, batch, tl.load(feature + ROWS), status, POOLING.bags, POOLING.check)

    # Add up the rows.
    weight = tl.load(feature + ADDRESS).to(tl.pointer_type(POOLING.weight_type))
    weight = tl.multiple_of(weight, POOLING.alignment)
    column = tl.arange(0, POOLING.block_dim)
    total = tl.zeros((POOLING.bags, POOLING.block_dim), tl.float32)
    for first in range(0, tl.max(length, 0), POOLING.unroll):
        for turn in tl.static_range(POOLING.unroll):
            here = first + turn < length
            # [bags]
            row = tl.load(ids + first + turn, mask=here, other=0).to(tl.int64)
            at = weight + row[:, None] * POOLING.dim + column[None, :]
            mask = here[:, None] & (column < POOLING.dim)[None, :]
            # [bags, block_dim]
            part = tl.load(at, mask=mask, other=0.0).to(tl.float32)
            if id_weights.dtype.element_ty == tl.float32:
                part *= tl.load(id_weights + start + first + turn, mask=here, other=0.0)[:, None]
            total += part

    # Turn sums into means, and leave empty bags out.
    if tl.load(feature + MEAN) != 0:
        scale = 1.0 / tl.maximum(length, 1).to(tl.float32)
        total = total * scale[:, None]
    if POOLING.leaves_out:
        live = live & ((length > 0) | (tl.load(feature + LEFT_OUT) == 0))
    return total, live


@triton.jit
def store_rows(
    rows,
    window,
    sample,
    column,
    live,
    STRIDE: tl.constexpr,
    POOLING: tl.constexpr,
):
    """Store `rows` [R, block_dim] to rows `sample` [R] of `window`, STRIDE apart, from `column` on, where `live`.

    The caller applies `tl.multiple_of` to `window` and `column` where it loads them, so that lanes store 16 bytes:
    inlining loses such hints on arguments.
    """
    at = tl.arange(0, POOLING.block_dim)
    offset = sample.to(tl.int64)[:, None] * STRIDE + column + at[None, :]
    # [R, block_dim]
    tl.store(window + offset, rows.to(window.dtype.element_ty), mask=live[:, None] & (at < POOLING.dim)[None, :])
