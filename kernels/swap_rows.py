"""Swaps rows between a cache in GPU memory and their table in host memory that the GPU can access.

The kernel reads the number of rows on the device, so a captured step needs neither the CPU nor a copy engine.
"""

from math import gcd

import torch
import triton
import triton.language as tl

from dlrm_overlap.kernels import reference
from dlrm_overlap.kernels.compiled import INTERPRETED, CompiledKernel, specialised
from dlrm_overlap.kernels.row_cache import Swaps
from dlrm_overlap.kernels.tuning import power_of_2

# The step's matrix products cannot share a multiprocessor with a program of this kernel, so few rows get few programs.
# Each program has 32 KB in flight in each direction while it stores 16 KB.
_MAX_PROGRAMS = 2 if INTERPRETED else 16
_MIN_PROGRAMS = 1 if INTERPRETED else 4
_SHARE_WORDS = 4 << 20  # words of 4 bytes for which one more program is used
_NUM_WARPS = 8
_BLOCK_WORDS, _BLOCK_ROWS = 4096, 512  # upper limits of what a program stores at a time
_STAGES = 4  # of the pipelined loop: indices are loaded, then rows, which are in flight for two turns, then stored


@triton.jit(do_not_specialize=["address"], do_not_specialize_on_alignment=["count"])
def _swap_rows(
    cached,  # [slots, WORDS] int32
    address: tl.int64,  # of `home` [rows, WORDS] int32, a multiple of ALIGNMENT
    slots,  # [entries] int64
    leaving,  # [entries] int64, negative: no row leaves
    entering,  # [entries] int64, negative: no row enters
    count,  # [1] int64
    WORDS: tl.constexpr,
    BLOCK_WORDS: tl.constexpr,
    ROWS: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    MIN_PROGRAMS: tl.constexpr,
    SHARE: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Swap the rows of entries 0 .. count - 1, as program p of P the blocks p, p + P, .. of ROWS entries.

    P is one for every SHARE words, at least MIN_PROGRAMS and at most what is launched; others return at once.

    Memory: entry i copies row slots[i] of `cached` to row leaving[i] of `home`, then row entering[i] of `home` to row
    slots[i]. No row is named twice, so STAGES - 2 blocks are loaded ahead.

    Order: the thread that stores a word of a slot has loaded it before, since all blocks have the same layout, which
    `tests/kernels/vectors.py` checks; a barrier would keep Triton from pipelining the loop.
    """
    home = tl.multiple_of(address.to(tl.pointer_type(tl.int32)), ALIGNMENT)
    rows = tl.load(count)
    column = tl.arange(0, BLOCK_WORDS)[None, :]
    programs = tl.minimum(tl.num_programs(0), tl.maximum(MIN_PROGRAMS, tl.cdiv(rows * WORDS, SHARE)))
    end = tl.where(tl.program_id(0) < programs, rows, 0)
    for first in tl.range(tl.program_id(0) * ROWS, end, programs * ROWS, num_stages=STAGES):
        i = first + tl.arange(0, ROWS)
        live = i < rows
        slot = tl.load(slots + i, mask=live, other=0)  # [ROWS]
        old = tl.load(leaving + i, mask=live, other=-1)  # [ROWS]
        new = tl.load(entering + i, mask=live, other=-1)  # [ROWS]
        leaves = (old >= 0)[:, None] & (column < WORDS)
        enters = (new >= 0)[:, None] & (column < WORDS)
        at = slot[:, None] * WORDS + column
        # Both loads come before both stores, and each thread stores the words of a slot that it loaded.
        new_rows = tl.load(home + new[:, None] * WORDS + column, mask=enters, other=0)  # [ROWS, BLOCK_WORDS]
        old_rows = tl.load(cached + at, mask=leaves, other=0)  # [ROWS, BLOCK_WORDS]
        tl.store(home + old[:, None] * WORDS + column, old_rows, mask=leaves)
        tl.store(cached + at, new_rows, mask=enters)


def _compiled(words: int, alignment: int) -> CompiledKernel:
    block = power_of_2(words)
    return specialised(
        _swap_rows, num_warps=_NUM_WARPS,
        WORDS=words, BLOCK_WORDS=block, ROWS=max(1, min(_BLOCK_WORDS // block, _BLOCK_ROWS)), ALIGNMENT=alignment,
        MIN_PROGRAMS=_MIN_PROGRAMS, SHARE=_SHARE_WORDS, STAGES=_STAGES,
    )  # fmt: skip


def swap_rows(home: torch.Tensor, cached: torch.Tensor, swaps: Swaps) -> None:
    """Copy rows of a cache to their table, and other rows of the table to their slots.

    `home` [R, D] or [R] is contiguous, with rows of a multiple of 4 bytes, in memory that the device can access;
    `cached` [S, D] or [S] has the same type.
    """
    if not (home.is_cuda or INTERPRETED):
        reference.swap_rows(home, cached, swaps)
        return
    words = home.stride(0) * home.itemsize // 4
    alignment = gcd(16, home.data_ptr(), words * 4)
    _compiled(words, alignment)(_MAX_PROGRAMS, (), cached.view(torch.int32), home.data_ptr(), *swaps)
