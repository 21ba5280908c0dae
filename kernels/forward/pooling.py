"""The common part of the forward's kernels: how to pool a task's bags and store the result, and their constants."""

from typing import Any

import triton
import triton.language as tl

from dlrm_overlap.kernels.bags import FeatureTable, Windows
from dlrm_overlap.kernels.compiled import TYPES
from dlrm_overlap.kernels.primitives import BAD_ID, record
from dlrm_overlap.kernels.tuning import PoolingOptions, power_of_2

# Columns of the feature table [F, 6] int64, which has a row for each feature that a launch pools.
ADDRESS = tl.constexpr(0)  # of the first row of the feature's table
ROWS = tl.constexpr(1)  # of its table, negative if ids outside it are not recorded
COLUMN = tl.constexpr(2)  # of the window, where its pooled embedding begins
INPUT_FEATURE = tl.constexpr(3)  # its index f in the input that has its bags: sample s has bag f * B + s
MEAN = tl.constexpr(4)  # 1: divide by the number of ids
LEFT_OUT = tl.constexpr(5)  # 1: an empty bag is not stored, since nobody reads it
FEATURE_COLUMNS = tl.constexpr(6)

_INTEGERS = ["rank", "world_size", "features_here", "blocks", "batch", "epoch", "timeout", "slots", "first_slot"]
# Shapes change from run to run, views of a batch begin anywhere: neither is worth a kernel of its own.
JIT_OPTIONS = {"do_not_specialize": _INTEGERS, "do_not_specialize_on_alignment": ["values", "offsets", "id_weights"]}


@triton.jit
def check_ids(ids, length, bag, batch, rows, status, BAGS: tl.constexpr, CHUNK: tl.constexpr):
    """Store 0 over ids outside a table of |`rows`| rows and, unless that is negative, record the last bag that has one.

    `ids` [BAGS] point to the first ids of the bags `bag`, `length` [BAGS] are their numbers of ids. The program reads
    CHUNK ids of each bag at a time, a lane each, and so brings them into the multiprocessor's L1 in few requests, where
    the pooling loop finds them.

    Order: after a store, a barrier, so that all threads then read the ids as they are stored. Whoever else pools the
    same bags, for another shard of the feature, stores the same 0.

    Example: bags [5, 7, 7] and [5] of a table of 6 rows. The first is recorded and becomes [5, 0, 0].
    """
    longest = tl.max(length, 0)
    at = tl.arange(0, CHUNK)[None, :]
    recorded = rows >= 0
    rows = tl.abs(rows)
    wrong = tl.zeros((BAGS, CHUNK), tl.int32)
    for first in range(0, longest, CHUNK):
        row = tl.load(ids[:, None] + first + at, mask=first + at < length[:, None], other=0).to(tl.int64)
        wrong = wrong | (row.to(tl.uint64, bitcast=True) >= rows.to(tl.uint64, bitcast=True)).to(tl.int32)
    # Only now, and seldom: a store in the loop would keep the compiler from loading ahead of it.
    if tl.max(tl.max(wrong, 1), 0) != 0:
        worst = tl.max(tl.where(tl.max(wrong, 1) != 0, bag.to(tl.int64), -1), 0)
        if recorded:
            record(status, BAD_ID, worst // batch, worst % batch, rows, 0, 0)
        for first in range(0, longest, CHUNK):
            here = first + at < length[:, None]
            row = tl.load(ids[:, None] + first + at, mask=here, other=0).to(tl.int64)
            outside = row.to(tl.uint64, bitcast=True) >= rows.to(tl.uint64, bitcast=True)
            tl.store(ids[:, None] + first + at, tl.zeros_like(row).to(ids.dtype.element_ty), mask=here & outside)
        tl.debug_barrier()


@triton.jit
def pool(
    values, offsets, id_weights, feature, sample, live, batch, status,
    BAGS: tl.constexpr, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, UNROLL: tl.constexpr, WEIGHT: tl.constexpr,
    ALIGNMENT: tl.constexpr, CHECK: tl.constexpr, LEAVES_OUT: tl.constexpr,
):  # fmt: skip
    """Return the pooled embeddings [BAGS, BLOCK_DIM] float32 of samples `sample` [BAGS] where `live`, else zeros; and
    which of them [BAGS] are to be stored: those that live or, with LEAVES_OUT, of a feature whose empty bags are left
    out, those that live and have ids.

    `feature` points to the feature's row of the feature table. The program adds the rows up in the order of the ids, in
    float32, and loads UNROLL rows of each bag at a time. Unless CHECK is 0, it looks at all ids first, CHECK of each
    bag at a time, see `check_ids`: 0 is stored over those outside the table, for which row 0 is so taken, here and in
    the backward. A table has at least one row: lanes that are masked read id 0. Where `id_weights` are float32, each
    row is multiplied by its id's weight; otherwise ids have none.

    Example: UNROLL 2, bags [5, 7, 7] and [5] of a table of 6 rows. The first bag becomes [5, 0, 0]. The first turn adds
    rows 5 and 0 to the first bag and row 5 to the second, the second turn row 0 to the first.
    """
    bag = tl.load(feature + INPUT_FEATURE) * batch + sample
    start = tl.load(offsets + bag, mask=live, other=0)
    # Of 32 bits, as all that the loop counts: registers decide how many rows a thread can await at once.
    length = (tl.load(offsets + bag + 1, mask=live, other=0) - start).to(tl.int32)
    ids = values + start
    if CHECK > 0:
        check_ids(ids, length, bag, batch, tl.load(feature + ROWS), status, BAGS, CHECK)
    weight = tl.load(feature + ADDRESS).to(tl.pointer_type(WEIGHT))
    weight = tl.multiple_of(weight, ALIGNMENT)
    column = tl.arange(0, BLOCK_DIM)
    total = tl.zeros((BAGS, BLOCK_DIM), tl.float32)
    for first in range(0, tl.max(length, 0), UNROLL):
        for turn in tl.static_range(UNROLL):
            here = first + turn < length
            row = tl.load(ids + first + turn, mask=here, other=0).to(tl.int64)
            at = weight + row[:, None] * DIM + column[None, :]
            mask = here[:, None] & (column < DIM)[None, :]
            part = tl.load(at, mask=mask, other=0.0).to(tl.float32)
            if id_weights.dtype.element_ty == tl.float32:
                part *= tl.load(id_weights + start + first + turn, mask=here, other=0.0)[:, None]
            total += part
    if tl.load(feature + MEAN) != 0:
        scale = 1.0 / tl.maximum(length, 1).to(tl.float32)
        total = total * scale[:, None]
    if LEAVES_OUT:
        live = live & ((length > 0) | (tl.load(feature + LEFT_OUT) == 0))
    return total, live


@triton.jit
def store_rows(
    rows, window, sample, column, live,
    STRIDE: tl.constexpr, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr,
):  # fmt: skip
    """Store `rows` [R, BLOCK_DIM] to the rows `sample` [R] of `window`, from `column` on, where `live`.

    The caller states the divisors of `window` and `column` where it loads them: a hint on an argument does not survive
    inlining, and without one each lane stores 4 bytes.
    """
    at = tl.arange(0, BLOCK_DIM)
    offset = sample.to(tl.int64)[:, None] * STRIDE + column + at[None, :]
    tl.store(window + offset, rows.to(window.dtype.element_ty), mask=live[:, None] & (at < DIM)[None, :])


def pooling_constants(features: FeatureTable, windows: Windows, options: PoolingOptions) -> dict[str, Any]:
    """Return the constants of `store_pooled`, which are also the last ones of the others, in their order."""
    tuning = options.tuning
    return {
        "SCHEDULE": options.schedule,
        "BAGS": tuning.task_bags // tuning.groups,
        "UNROLL": tuning.unroll,
        "STRIDE": windows.stride,
        "DIM": features.dim,
        "BLOCK_DIM": power_of_2(features.dim),
        "WEIGHT": TYPES[features.weight_dtype],
        "WIRE": TYPES[windows.dtype],
        "ALIGNMENT": features.alignment,
        "WINDOW_ALIGNMENT": windows.alignment,
        "COLUMN_ALIGNMENT": features.column_alignment,
        "CHECK": tuning.checked_ids if options.check_ids else 0,
        "LEAVES_OUT": features.leaves_out,
    }
