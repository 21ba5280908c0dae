"""Adds up the partial sums of a table that is cut by rows: each rank with some of its rows stores its share of a bag.

Example: a table of dim 4 cut over three ranks. The partial sums are in columns 0 .. 3, 4 .. 7 and 8 .. 11 of a sample's
row; the kernel stores their sum to 0 .. 3.
"""

from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from dlrm_overlap.kernels.bags import Partials
from dlrm_overlap.kernels.compiled import specialised

_ROWS = 8
_COLUMNS = 128
_NUM_WARPS = 4

# Columns of the table of sums [S, 2 + 2 * most] int64, followed by a pair for each row shard.
DIM = tl.constexpr(0)
SHARDS = tl.constexpr(1)  # number of row shards
FIRST_SHARD = tl.constexpr(2)  # pairs: first column of the row shard's partial sum, its share


class PartialTable(NamedTuple):
    entries: torch.Tensor
    """[S, 2 + 2 * most] int64: see the columns above"""
    alignment: int
    """elements, a power of two up to 16, that divide every column and dim"""


def partial_table(sums: Sequence[Partials], alignment: int, device: torch.device) -> PartialTable:
    most = max(len(each.columns) for each in sums)
    rows = []
    for columns, dim, shares in sums:
        pairs = zip(columns, shares or [0] * len(columns), strict=True)
        row = [dim, len(columns), *chain.from_iterable(pairs)]
        rows.append(row + [0] * (2 + 2 * most - len(row)))
    return PartialTable(torch.tensor(rows, dtype=torch.int64, device=device), alignment)


@triton.jit(do_not_specialize=["samples", "blocks", "width"], do_not_specialize_on_alignment=["offsets"])
def _add_partials(
    window,  # [samples, STRIDE]
    sums,  # [S, width] int64
    offsets,  # [shares * samples + 1] int32, of the bags
    samples,
    blocks,  # programs of each sum
    width,
    STRIDE: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    SOME: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Add up one sum in ROWS rows of the window.

    Memory: partial sums are added in float32 in the order of the row shards, and the total overwrites the first. With
    SOME, partial sums of empty bags are not read, unless the share is EVERY_BAG.

    Order: on the stream, the kernel follows the wait for the peers' flags.
    """
    sum_entry = sums + (tl.program_id(0) // blocks) * width
    row = (tl.program_id(0) % blocks) * ROWS + tl.arange(0, ROWS)
    at = window + row.to(tl.int64)[:, None] * STRIDE
    dim = tl.multiple_of(tl.load(sum_entry + DIM), ALIGNMENT)
    shards = tl.load(sum_entry + SHARDS)
    into = tl.multiple_of(tl.load(sum_entry + FIRST_SHARD), ALIGNMENT)
    for first in range(0, dim, COLUMNS):
        here = first + tl.arange(0, COLUMNS)
        mask = (row < samples)[:, None] & (here < dim)[None, :]
        total = tl.zeros((ROWS, COLUMNS), tl.float32)
        for shard in range(shards):
            column = tl.multiple_of(tl.load(sum_entry + FIRST_SHARD + 2 * shard), ALIGNMENT)
            arrived = mask
            if SOME:
                share = tl.load(sum_entry + FIRST_SHARD + 2 * shard + 1)
                known = (row < samples) & (share >= 0)
                bag = offsets + share * samples + row
                begin = tl.load(bag, mask=known, other=0)
                arrived = mask & (tl.load(bag + 1, mask=known, other=1) > begin)[:, None]
            # [ROWS, COLUMNS]
            total += tl.load(at + (column + here)[None, :], mask=arrived, other=0.0).to(tl.float32)
        tl.store(at + (into + here)[None, :], total.to(window.dtype.element_ty), mask=mask)


def add_partials(window: torch.Tensor, table: PartialTable, offsets: torch.Tensor | None = None) -> None:
    """Add up the partial sums in a window [b, columns] float32, bfloat16 or float16, in place.

    `offsets` [shares * b + 1] int32 are the bags of each share; empty ones have no partial sum. None: all have one.
    """
    samples, (sums, width) = window.shape[0], table.entries.shape
    blocks = -(-samples // _ROWS)
    if blocks == 0:
        return
    kernel = specialised(
        _add_partials,
        num_warps=_NUM_WARPS,
        STRIDE=window.stride(0),
        ALIGNMENT=table.alignment,
        SOME=offsets is not None,
        ROWS=_ROWS,
        COLUMNS=_COLUMNS,
    )
    bags = table.entries if offsets is None else offsets  # without offsets any tensor, which is not read
    types = window.dtype, bags.dtype
    kernel(blocks * sums, types, window, table.entries, bags, samples, blocks, width)
