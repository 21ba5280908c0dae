# pyright: reportArgumentType=false, reportOperatorIssue=false
# Triton declares that a function that is called from a kernel takes constexprs, and may return a tuple.

import pytest
import torch
import triton
import triton.language as tl

from dlrm_overlap.kernels.compiled import CompiledKernel
from dlrm_overlap.kernels.primitives import clock, time_since

pytestmark = pytest.mark.gpu
PROGRAMS, TURNS, WARPS = 64, 50, 16


@triton.jit
def _times(seen, own, TURNS: tl.constexpr, THREADS: tl.constexpr):
    began = clock(0, False)
    thread = tl.arange(0, THREADS)
    for turn in range(TURNS):
        at = (tl.program_id(0) * TURNS + turn) * THREADS + thread
        tl.store(own + at, tl.zeros([THREADS], tl.int64) + (clock(0, False) - began))
        tl.store(seen + at, tl.zeros([THREADS], tl.int64) + time_since(began, turn, False, False))


def test_all_warps_of_a_program_see_one_time() -> None:
    seen, own = (torch.empty(PROGRAMS * TURNS, 32 * WARPS, dtype=torch.int64, device="cuda") for _ in range(2))
    CompiledKernel(_times, num_warps=WARPS, TURNS=TURNS, THREADS=32 * WARPS)(PROGRAMS, (), seen, own)
    assert (own != own[:, :1]).any(), "by their own clocks, warps see different times"
    assert (seen == seen[:, :1]).all()
    assert (seen.view(PROGRAMS, TURNS, -1)[:, -1] > 0).all(), "time passes"
