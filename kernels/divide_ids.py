"""Ids divided into shares where they are published: of a table that is cut by rows, each owner reads those of its rows.

A window (see `pull_ids`) has the ids of T features and then, from word `values_at` on, the ids of S shares, share after
share, bag after bag, each less the share's first id. From word `offsets_at` on are the offsets of the features' bags,
[T * b]; then b words of no interest, of which the first is the end of the last feature's ids; then the offsets of the
shares' bags, [S * b + 1]. So a share is read as a feature is, as number T + 1 and up.

Example: T = 1, b = 2, bags [5, 1] [7, 4]; shares of the ids 0 .. 3 and 4 .. 7. The ids of the first share are 1, of its
bags [1] []; those of the second are 1 3 0, of [1] [3, 0].
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from dlrm_overlap.kernels.compiled import CompiledKernel, specialised

_BAGS = 128  # of a program, a lane each
_NUM_WARPS = 4

# Columns of the table of shares [S, 3] int64.
FEATURE = tl.constexpr(0)
FIRST = tl.constexpr(1)
END = tl.constexpr(2)
SHARE_COLUMNS = tl.constexpr(3)


class Shares(NamedTuple):
    """The shares, and where they are in the window."""

    entries: torch.Tensor
    """[S, 3] int64: the feature, the first id, and the id after the last; a negative id counts as 2^32 more"""
    room: int
    """words of the window for the ids of the features"""
    values_at: int
    """first word of the ids of the shares"""
    values: int
    """the most ids of all shares"""
    offsets_at: int
    """first word of the offsets"""
    features: int
    """T"""
    weights_at: int = 0
    """words from an id to its weight; 0: ids have none"""


@triton.jit(do_not_specialize=["samples", "blocks", "room", "offsets_at", "features", "values_end", "weights_at"])
def _divide_ids(
    window, shares, counts,
    samples, blocks, room, offsets_at, features, values_end, weights_at,
    FILL: tl.constexpr, WEIGHTED: tl.constexpr, BAGS: tl.constexpr,
):  # fmt: skip
    """Count the ids of BAGS bags of one share, or with FILL store them; a lane takes a bag.

    Memory: the program reads the offsets and ids of its bags in the window. Without FILL it stores [BAGS] to `counts`
    [1 + S * b] int32, from the share's bags' place on, after the first word. With FILL it reads the offsets of the
    share's bags, and stores their ids in the order in which they are in the bag, each less the share's first, and
    WEIGHTED their weights. A batch beyond its bound, which is found later, stores nothing outside the words up to
    `values_end`.

    Order: the fill follows the sum of the counts on the stream, the flag that reports the ids follows the fill.

    Source: ours. TorchRec does so by FBGEMM's `block_bucketize_sparse_features` before its All-to-All.
    """
    number = tl.program_id(0) // blocks
    sample = (tl.program_id(0) % blocks) * BAGS + tl.arange(0, BAGS)
    live = sample < samples
    share = shares + number * SHARE_COLUMNS
    first_id = tl.load(share + FIRST)
    end_id = tl.load(share + END)
    bag = window + offsets_at + tl.load(share + FEATURE) * samples + sample
    begin = tl.minimum(tl.maximum(tl.load(bag, mask=live, other=0), 0), room)
    end = tl.minimum(tl.load(bag + 1, mask=live, other=0), room)
    length = tl.where(live, end - begin, 0)
    found = tl.zeros((BAGS,), tl.int32)
    into = tl.zeros((BAGS,), tl.int32)
    if FILL:
        into = tl.load(window + offsets_at + (features + 1 + number) * samples + sample, mask=live, other=0)
    for at in range(tl.max(length, 0)):
        value = tl.load(window + begin + at, mask=at < length, other=0)
        index = value.to(tl.uint32, bitcast=True).to(tl.int64)
        inside = (at < length) & (index >= first_id) & (index < end_id)
        if FILL:
            fits = inside & (into + found < values_end)
            tl.store(window + into + found, (index - first_id).to(tl.int32), mask=fits)
            if WEIGHTED:
                weight = tl.load(window + weights_at + begin + at, mask=fits, other=0)
                tl.store(window + weights_at + into + found, weight, mask=fits)
        found += inside.to(tl.int32)
    if not FILL:
        tl.store(counts + 1 + number * samples + sample, found, mask=live)


def _compiled(fill: bool, weighted: bool = False) -> CompiledKernel:
    return specialised(_divide_ids, num_warps=_NUM_WARPS, FILL=fill, WEIGHTED=weighted, BAGS=_BAGS)


def divide_ids(window: torch.Tensor, shares: Shares, samples: int, counts: torch.Tensor) -> None:
    """Publish the ids of the shares in a window that has those of the features, on the current stream.

    Args:
        window: int32, see above; the shares' ids and offsets are overwritten.
        samples: of a feature, b.
        counts: [1 + S * b or more] int32 that is overwritten but for the first element, which is `values_at`.
    """
    number = shares.entries.shape[0]
    blocks = -(-samples // _BAGS)
    arguments = (
        window, shares.entries, counts, samples, blocks, shares.room, shares.offsets_at, shares.features,
        shares.values_at + shares.values, shares.weights_at,
    )  # fmt: skip
    _compiled(fill=False)(number * blocks, (), *arguments)
    here = counts[: 1 + number * samples]
    first = shares.offsets_at + (shares.features + 1) * samples
    torch.cumsum(here, 0, dtype=torch.int32, out=window[first : first + here.numel()])
    _compiled(fill=True, weighted=shares.weights_at > 0)(number * blocks, (), *arguments)
