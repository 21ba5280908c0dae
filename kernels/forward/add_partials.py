"""The sum of partial sums: of a table that is cut by rows, several ranks pool shares of each bag, which arrive apart.

Each sum of a window is of some of its columns, see `PartialSums`. The first row shard's partial sums arrive where the
sum is stored, those of the others in columns of their own, later in the row.

Example: a window of rows of 12 columns, a table of dim 4 at column 0 that is cut over three ranks. The partial sums are
in columns 0 .. 3, 4 .. 7 and 8 .. 11 of each sample's row; the kernel stores their sum to 0 .. 3.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from dlrm_overlap.kernels.compiled import CompiledKernel

_ROWS = 8
_COLUMNS = 128
_NUM_WARPS = 4

# Columns of the table of sums [S, 3 + most] int64, in front of those of the other row shards' columns.
COLUMN = tl.constexpr(0)
DIM = tl.constexpr(1)
OTHERS = tl.constexpr(2)  # how many other row shards there are
FIRST_OTHER = tl.constexpr(3)


class PartialTable(NamedTuple):
    """The sums of a window."""

    entries: torch.Tensor
    """[S, 3 + most] int64, a row a sum: its first column, its dim, the number of other row shards, and the first
    columns of their partial sums"""
    alignment: int
    """elements, a power of two up to 16, that divide every column and dim"""


def partial_table(sums: Sequence[tuple[int, int, Sequence[int]]], alignment: int, device: torch.device) -> PartialTable:
    """Return the table of sums that are given by column, dim and the columns of the other row shards."""
    most = max(len(others) for _, _, others in sums)
    rows = [[column, dim, len(others), *others, *[0] * (most - len(others))] for column, dim, others in sums]
    return PartialTable(torch.tensor(rows, dtype=torch.int64, device=device), alignment)


@triton.jit(do_not_specialize=["samples", "blocks", "width"])
def _add_partials(
    window, sums, samples, blocks, width,
    STRIDE: tl.constexpr, ALIGNMENT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Add up one sum in ROWS rows of the window.

    Memory: the program reads the partial sums of its rows, COLUMNS columns at a time, adds them up in float32 in the
    order of the row shards, and stores the sum over the first one's. No other program touches these columns and rows.

    Order: the kernel comes after the wait for the peers' flags on the stream. Later kernels read the sum.

    Source: ours. TorchRec reduce-scatters the partial sums, `PooledEmbeddingsReduceScatter`.
    """
    sum_entry = sums + (tl.program_id(0) // blocks) * width
    row = (tl.program_id(0) % blocks) * ROWS + tl.arange(0, ROWS)
    at = window + row.to(tl.int64)[:, None] * STRIDE
    column = tl.multiple_of(tl.load(sum_entry + COLUMN), ALIGNMENT)
    dim = tl.multiple_of(tl.load(sum_entry + DIM), ALIGNMENT)
    others = tl.load(sum_entry + OTHERS)
    for first in range(0, dim, COLUMNS):
        here = first + tl.arange(0, COLUMNS)
        mask = (row < samples)[:, None] & (here < dim)[None, :]
        total = tl.load(at + (column + here)[None, :], mask=mask, other=0.0).to(tl.float32)
        for other in range(others):
            begin = tl.multiple_of(tl.load(sum_entry + FIRST_OTHER + other), ALIGNMENT)
            total += tl.load(at + (begin + here)[None, :], mask=mask, other=0.0).to(tl.float32)
        tl.store(at + (column + here)[None, :], total.to(window.dtype.element_ty), mask=mask)


_ARGUMENTS = ("window", "sums", "samples", "blocks", "width")


@lru_cache
def _compiled(stride: int, alignment: int) -> CompiledKernel:
    constants = {"STRIDE": stride, "ALIGNMENT": alignment, "ROWS": _ROWS, "COLUMNS": _COLUMNS}
    return CompiledKernel(_add_partials, _ARGUMENTS, constants, num_warps=_NUM_WARPS)


def add_partials(window: torch.Tensor, table: PartialTable) -> None:
    """Add up the partial sums in a window.

    Args:
        window: [b, columns] float32, bfloat16 or float16, rows of `stride(0)` elements; overwritten where sums are.
        table: the sums.
    """
    samples, (sums, width) = window.shape[0], table.entries.shape
    blocks = -(-samples // _ROWS)
    if blocks == 0:
        return
    kernel = _compiled(window.stride(0), table.alignment)
    kernel(blocks * sums, (window.dtype,), window, table.entries, samples, blocks, width)
