"""Divides published ids into shares, so that each owner of a row-wise sharded table reads only the ids of its rows.

A window (see `pull_ids`) holds the ids of T features and, from word `values_at` on, those of S shares, share after
share, bag after bag, each minus the share's first id. From word `offsets_at` on are the offsets: of the features' bags
[T * b]; b words, beginning with the end of the features' ids; of the shares' bags [S * b + 1]. So share s is read like
feature T + 1 + s.

If a table is one of any id, the window also has high words (see `wide_ids`). A share of such a table has the ids of a
range of buckets, unchanged.

Example: T = 1, b = 2, bags [5, 1] [7, 4], shares of the ids 0 .. 3 and 4 .. 7. The first share has the bags [1] [], the
second [1] [3, 0]. Shares of the buckets 0 .. 1 and 2 .. 3 of 4 have the bags [5, 1] [4] and [] [7].
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from dlrm_overlap.kernels.compiled import CompiledKernel, specialised
from dlrm_overlap.kernels.wide_ids import bucket_of, row_of

_BAGS = 128  # bags of a program, one a lane
_NUM_WARPS = 4

# Columns of the table of shares int64, [S, 3], or [S, 4] with WIDE.
FEATURE = tl.constexpr(0)
FIRST = tl.constexpr(1)
END = tl.constexpr(2)
SHARE_COLUMNS = tl.constexpr(3)
BUCKETS = tl.constexpr(3)
WIDE_COLUMNS = tl.constexpr(4)


class Shares(NamedTuple):
    entries: torch.Tensor
    """[S, 3] int64: feature, first id, and the id after the last; ids are unsigned. With high words [S, 4]: also the
    table's number of buckets, or 0; unless it is 0, the range is of buckets instead of ids"""
    room: int
    """words for the features' ids"""
    values_at: int
    """word where they begin"""
    values: int
    """words for the shares' ids"""
    offsets_at: int
    """word where the offsets begin"""
    features: int
    """T"""
    weights_at: int = 0
    """words from an id to its weight; 0 if ids have no weights"""
    high_at: int = 0
    """words from an id to its high word; 0 if ids are int32"""


@triton.jit(
    do_not_specialize=["samples", "blocks", "room", "offsets_at", "features", "values_end", "weights_at", "high_at"]
)
def _divide_ids(
    window,  # int32
    shares,  # [S, 3] int64; [S, 4] with WIDE
    counts,  # [1 + S * samples] int32: after the first element, ids of each bag
    samples,
    blocks,  # blocks of BAGS bags in a share
    room,  # words of the features' ids
    offsets_at,
    features,
    values_end,
    weights_at,
    high_at,
    FILL: tl.constexpr,
    WEIGHTED: tl.constexpr,
    WIDE: tl.constexpr,
    BAGS: tl.constexpr,
):
    """Count the ids of BAGS bags of one share or, with FILL, store them in the bag's order; a lane takes a bag.

    Memory: with FILL, stores ids, if WIDE their high words and if WEIGHTED weights, but no ids from word `values_end`
    on: a batch that exceeds its capacity overwrites nothing. Without FILL, stores to `counts`.

    Order: the fill runs after the cumulative sum of the counts, and before the flag that publishes the ids.
    """
    number = tl.program_id(0) // blocks
    sample = (tl.program_id(0) % blocks) * BAGS + tl.arange(0, BAGS)
    live = sample < samples
    share = shares + number * (WIDE_COLUMNS if WIDE else SHARE_COLUMNS)
    first_id = tl.load(share + FIRST)
    end_id = tl.load(share + END)
    if WIDE:
        buckets = tl.load(share + BUCKETS)
    bag = window + offsets_at + tl.load(share + FEATURE) * samples + sample
    # Offsets of a wrong batch may be anything: keep within the ids' words.
    begin = tl.minimum(tl.maximum(tl.load(bag, mask=live, other=0), 0), room)  # [BAGS]
    end = tl.minimum(tl.load(bag + 1, mask=live, other=0), room)  # [BAGS]
    length = tl.where(live, end - begin, 0)
    found = tl.zeros((BAGS,), tl.int32)
    into = tl.zeros((BAGS,), tl.int32)
    if FILL:
        into = tl.load(window + offsets_at + (features + 1 + number) * samples + sample, mask=live, other=0)
    # Turn k looks at the k-th id of every bag.
    for at in range(tl.max(length, 0)):
        value = tl.load(window + begin + at, mask=at < length, other=0)  # [BAGS]
        if WIDE:
            high = tl.load(window + high_at + begin + at, mask=at < length, other=0)  # [BAGS]
            row = row_of(value, high).to(tl.uint32, bitcast=True).to(tl.int64)
            index = tl.where(buckets > 0, bucket_of(value, high, buckets), row)
        else:
            index = value.to(tl.uint32, bitcast=True).to(tl.int64)
        inside = (at < length) & (index >= first_id) & (index < end_id)
        if FILL:
            fits = inside & (into + found < values_end)
            if WIDE:
                kept = tl.where(buckets > 0, value, (index - first_id).to(tl.int32))
                tl.store(window + into + found, kept, mask=fits)
                tl.store(window + high_at + into + found, tl.where(buckets > 0, high, kept >> 31), mask=fits)
            else:
                tl.store(window + into + found, (index - first_id).to(tl.int32), mask=fits)
            if WEIGHTED:
                weight = tl.load(window + weights_at + begin + at, mask=fits, other=0)
                tl.store(window + weights_at + into + found, weight, mask=fits)
        found += inside.to(tl.int32)
    if not FILL:
        tl.store(counts + 1 + number * samples + sample, found, mask=live)


def _compiled(fill: bool, wide: bool, weighted: bool = False) -> CompiledKernel:
    return specialised(_divide_ids, num_warps=_NUM_WARPS, FILL=fill, WEIGHTED=weighted, WIDE=wide, BAGS=_BAGS)


def divide_ids(window: torch.Tensor, shares: Shares, samples: int, counts: torch.Tensor) -> None:
    """Write the shares' ids and offsets to a window that holds the features' ids.

    `counts` [1 + S * b or more] int32 is scratch memory, except its first element, `values_at`.
    """
    number, wide = shares.entries.shape[0], shares.high_at > 0
    blocks = -(-samples // _BAGS)
    arguments = (
        window, shares.entries, counts, samples, blocks, shares.room, shares.offsets_at, shares.features,
        shares.values_at + shares.values, shares.weights_at, shares.high_at,
    )  # fmt: skip
    _compiled(fill=False, wide=wide)(number * blocks, (), *arguments)
    here = counts[: 1 + number * samples]
    first = shares.offsets_at + (shares.features + 1) * samples
    torch.cumsum(here, 0, dtype=torch.int32, out=window[first : first + here.numel()])
    _compiled(fill=True, wide=wide, weighted=shares.weights_at > 0)(number * blocks, (), *arguments)
