"""The backward of ReLU and of the bias before it, in one pass over a layer's output and its gradient."""

from functools import lru_cache

import torch
import triton
import triton.language as tl

from dlrm_overlap.kernels.compiled import CompiledKernel
from dlrm_overlap.kernels.dense.arguments import GROUP

_ROWS, _COLUMNS = 16, 128


@triton.jit(do_not_specialize=["rows", "stride"], do_not_specialize_on_alignment=["sums"])
def _mask_and_sum(
    gradient, output, out, sums, rows, stride, WIDTH: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """Compute out = gradient where output > 0, else 0, and its sums over the program's rows.

    Memory: a program has GROUP rows of COLUMNS columns of [rows, WIDTH]. It reads gradient and output, and writes out
    and row `group` of sums [groups, WIDTH] float32, whose rows are `stride` apart.

    Order: the end of the kernel orders what it writes for what comes next on the stream; no two programs share an
    element, and a program's sums have a fixed order.

    Example: gradient 5 6 7 and output 1 0 2 give 5 0 7.
    """
    across: tl.constexpr = (WIDTH + COLUMNS - 1) // COLUMNS
    group, column = tl.program_id(0) // across, tl.program_id(0) % across * COLUMNS + tl.arange(0, COLUMNS)
    first = group * GROUP
    begin = first.to(tl.int64) * WIDTH
    gradient, output, out = gradient + begin, output + begin, out + begin
    within = column < WIDTH
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for turn in range(GROUP // ROWS):
        row = turn * ROWS + tl.arange(0, ROWS)
        mask = (first + row < rows)[:, None] & within[None, :]
        at = row[:, None] * WIDTH + column[None, :]
        reaching = tl.load(gradient + at, mask=mask, other=0)
        passes = tl.load(output + at, mask=mask, other=0).to(tl.float32) > 0
        reaching = tl.where(passes, reaching, tl.zeros_like(reaching))
        tl.store(out + at, reaching, mask=mask)
        total += reaching.to(tl.float32)
    tl.store(sums + group.to(tl.int64) * stride + column, tl.sum(total, 0), mask=within)


@lru_cache
def _compiled(width: int) -> CompiledKernel:
    constants = {"WIDTH": width, "GROUP": GROUP, "ROWS": _ROWS, "COLUMNS": _COLUMNS}
    return CompiledKernel(
        _mask_and_sum, ("gradient", "output", "out", "sums", "rows", "stride"), constants, num_warps=4
    )


def mask_and_sum(gradient: torch.Tensor, output: torch.Tensor, out: torch.Tensor, sums: torch.Tensor) -> None:
    """Write the gradient of what ReLU was given, and its sums, on the current stream.

    Args:
        gradient: [b, N] contiguous, of ReLU's output.
        output: [b, N] contiguous, of ReLU.
        out: [b, N] contiguous; all three are of one type.
        sums: [ceil(b / GROUP), N] float32, over each `GROUP` rows; columns of a contiguous tensor.
    """
    assert all(each.is_contiguous() for each in (gradient, output, out)), "pass contiguous tensors"
    rows, width = output.shape
    programs = len(sums) * -(-width // _COLUMNS)
    _compiled(width)(programs, (output.dtype,), gradient, output, out, sums, rows, sums.stride(0))
