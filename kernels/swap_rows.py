"""Rows that change places between a cache in GPU memory and their table, in memory that the GPU reaches by its link.

The kernel reads and writes the host's memory itself, so a captured step needs neither the CPU nor a copy
engine, and the number of rows is read on the device. Rows travel both ways at once, as the link does.
"""

from math import gcd

import torch
import triton
import triton.language as tl

from dlrm_overlap.kernels import reference
from dlrm_overlap.kernels.compiled import INTERPRETED, CompiledKernel, specialised
from dlrm_overlap.kernels.row_cache import Swaps
from dlrm_overlap.kernels.tuning import power_of_2

# Products of the step find no room on a multiprocessor beside a program, so few rows have few. Each has 32 KB under way
# each way while it stores 16.
_PROGRAMS = 2 if INTERPRETED else 16  # at most
_FEWEST = 1 if INTERPRETED else 4
_SHARE_WORDS = 4 << 20  # of 4 bytes, that a program swaps before there is another one
_NUM_WARPS = 8
_BLOCK_WORDS, _BLOCK_ROWS = 4096, 512  # at most, that a program stores at a time
_STAGES = 4  # of a block: its numbers are read, then its rows, which are under way for two turns, and stored


@triton.jit(do_not_specialize=["address"], do_not_specialize_on_alignment=["count"])
def _swap_rows(
    cached, address: tl.int64, slots, leaving, entering, count,
    WORDS: tl.constexpr, BLOCK_WORDS: tl.constexpr, ROWS: tl.constexpr, ALIGNMENT: tl.constexpr,
    FEWEST: tl.constexpr, SHARE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Move the rows of entries 0 .. count - 1, ROWS of them at a time, as program p of P.

    P is one for every SHARE words, at least FEWEST, and at most as many as are launched; the others return at once.

    Memory: rows are WORDS words of 4 bytes; `home` begins at `address`, a multiple of ALIGNMENT. Entry i stores row
    slots[i] of `cached` to row leaving[i] of `home`, unless that is below 0, and then row entering[i] of `home` to row
    slots[i] of `cached`, unless that is below 0. All three are int64, and no row of either memory is named twice. So
    the rows of STAGES - 2 blocks are on their way to shared memory while those of the block before are stored.

    Order: the thread that stores a word to a slot is the one that has read it before, since all blocks of rows have one
    layout, which `tests/kernels/vectors.py` checks; a barrier would keep Triton from reading ahead. The kernel's end
    orders all for those that follow on the stream.

    Example: slots 2 0, leaving 7 -1, entering 5 9. Slot 2 goes to row 7, row 5 comes to slot 2, and row 9 to slot 0.
    """
    home = tl.multiple_of(address.to(tl.pointer_type(tl.int32)), ALIGNMENT)
    rows = tl.load(count)
    column = tl.arange(0, BLOCK_WORDS)[None, :]
    programs = tl.minimum(tl.num_programs(0), tl.maximum(FEWEST, tl.cdiv(rows * WORDS, SHARE)))
    end = tl.where(tl.program_id(0) < programs, rows, 0)
    for first in tl.range(tl.program_id(0) * ROWS, end, programs * ROWS, num_stages=STAGES):
        i = first + tl.arange(0, ROWS)
        live = i < rows
        slot = tl.load(slots + i, mask=live, other=0)
        old = tl.load(leaving + i, mask=live, other=-1)
        new = tl.load(entering + i, mask=live, other=-1)
        leaves = (old >= 0)[:, None] & (column < WORDS)
        enters = (new >= 0)[:, None] & (column < WORDS)
        place = slot[:, None] * WORDS + column
        came = tl.load(home + new[:, None] * WORDS + column, mask=enters, other=0)
        left = tl.load(cached + place, mask=leaves, other=0)
        tl.store(home + old[:, None] * WORDS + column, left, mask=leaves)
        tl.store(cached + place, came, mask=enters)


def _compiled(words: int, alignment: int) -> CompiledKernel:
    block = power_of_2(words)
    return specialised(
        _swap_rows, num_warps=_NUM_WARPS,
        WORDS=words, BLOCK_WORDS=block, ROWS=max(1, min(_BLOCK_WORDS // block, _BLOCK_ROWS)), ALIGNMENT=alignment,
        FEWEST=_FEWEST, SHARE=_SHARE_WORDS, STAGES=_STAGES,
    )  # fmt: skip


def swap_rows(home: torch.Tensor, cached: torch.Tensor, swaps: Swaps) -> None:
    """Store rows of a cache to their table, and rows of the table to the cache in their stead.

    Args:
        home: [R, D] or [R], contiguous, of rows of a multiple of 4 bytes: the table, in memory that the device reaches.
        cached: [S, D] or [S] of the same type.
        swaps: which rows.
    """
    if not (home.is_cuda or INTERPRETED):
        reference.swap_rows(home, cached, swaps)
        return
    words = home.stride(0) * home.itemsize // 4
    alignment = gcd(16, home.data_ptr(), words * 4)
    _compiled(words, alignment)(_PROGRAMS, (), cached.view(torch.int32), home.data_ptr(), *swaps)
