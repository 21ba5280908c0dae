"""The backward of ReLU and bias, and a last layer of one output, for which cuBLAS launches several kernels."""

from typing import Any

import torch
import triton
import triton.language as tl

from dlrm_overlap.kernels.compiled import CompiledKernel, specialised
from dlrm_overlap.kernels.dense.arguments import GROUP
from dlrm_overlap.kernels.tuning import power_of_2

_ROWS, _COLUMNS = 16, 128
_ELEMENTS = 4096


@triton.jit(do_not_specialize=["rows", "stride"], do_not_specialize_on_alignment=["sums"])
def _mask_and_sum(
    gradient,  # [rows, WIDTH]
    output,  # [rows, WIDTH]
    out,  # [rows, WIDTH]
    sums,  # [groups, WIDTH] float32
    rows,
    stride,  # elements between rows of `sums`
    WIDTH: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Compute out = gradient where output > 0, else 0, and its sums over the program's rows.

    Memory: a program has GROUP rows of COLUMNS columns; its sums are row `group` of `sums`.

    Order: no two programs share an element, and a program adds up in a fixed order.

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
        grad = tl.load(gradient + at, mask=mask, other=0)  # [ROWS, COLUMNS]
        passes = tl.load(output + at, mask=mask, other=0).to(tl.float32) > 0
        grad = tl.where(passes, grad, tl.zeros_like(grad))
        tl.store(out + at, grad, mask=mask)
        total += grad.to(tl.float32)
    tl.store(sums + group.to(tl.int64) * stride + column, tl.sum(total, 0), mask=within)


@triton.jit(do_not_specialize=["rows"])
def _logits(
    x,  # [rows, WIDTH]
    weight,  # [WIDTH]
    bias,  # [1]
    out,  # [rows]
    rows,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute out = x @ weight + bias for ROWS rows, added up in float32 and rounded once.

    Order: no two programs share an element.

    Example: x 1 2, weight 3 4, bias 5 give 16.
    """
    row, column = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK)
    mask = (row < rows)[:, None] & (column < WIDTH)[None, :]
    # [ROWS, BLOCK]
    each = tl.load(x + row.to(tl.int64)[:, None] * WIDTH + column[None, :], mask=mask, other=0).to(tl.float32)
    factor = tl.load(weight + column, mask=column < WIDTH, other=0).to(tl.float32)  # [BLOCK]
    total = tl.sum(each * factor[None, :], 1) + tl.load(bias).to(tl.float32)
    tl.store(out + row, total.to(out.dtype.element_ty), mask=row < rows)


@triton.jit(do_not_specialize=["rows", "stride"], do_not_specialize_on_alignment=["sums"])
def _gradient_of_logits(
    gradient,  # [rows]
    output,  # [rows, WIDTH]
    weight,  # [WIDTH]
    out,  # [rows, WIDTH]
    sums,  # [groups, 2 * WIDTH + 1] float32
    rows,
    stride,  # elements between rows of `sums`
    WIDTH: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Compute out = gradient * weight where output > 0, else 0, and sums of out, gradient * output and gradient.

    Memory: a program has GROUP rows of COLUMNS columns; row `group` of `sums` has the three sums: WIDTH, WIDTH and 1.

    Order: no two programs share an element, and a program adds up in a fixed order.

    Example: one row, gradient 2, output 3 0, weight 5 7 give out 10 0 and sums 10 0 6 0 2.
    """
    across: tl.constexpr = (WIDTH + COLUMNS - 1) // COLUMNS
    group, column = tl.program_id(0) // across, tl.program_id(0) % across * COLUMNS + tl.arange(0, COLUMNS)
    first = group * GROUP
    begin = first.to(tl.int64) * WIDTH
    gradient, output, out, sums = gradient + first, output + begin, out + begin, sums + group.to(tl.int64) * stride
    within = column < WIDTH
    factor = tl.load(weight + column, mask=within, other=0).to(tl.float32)[None, :]  # [1, COLUMNS]
    total, products = tl.zeros((ROWS, COLUMNS), tl.float32), tl.zeros((ROWS, COLUMNS), tl.float32)
    gradients = tl.zeros((ROWS,), tl.float32)
    for turn in range(GROUP // ROWS):
        row = turn * ROWS + tl.arange(0, ROWS)
        here = first + row < rows
        mask = here[:, None] & within[None, :]
        at = row[:, None] * WIDTH + column[None, :]
        grad = tl.load(gradient + row, mask=here, other=0).to(tl.float32)  # [ROWS]
        each = tl.load(output + at, mask=mask, other=0).to(tl.float32)  # [ROWS, COLUMNS]
        masked = tl.where(each > 0, grad[:, None] * factor, 0.0).to(out.dtype.element_ty)
        tl.store(out + at, masked, mask=mask)
        total += masked.to(tl.float32)
        products += grad[:, None] * each
        gradients += grad
    # Only the programs of the first columns store the sum of gradients.
    tl.store(sums + column, tl.sum(total, 0), mask=within)
    tl.store(sums + WIDTH + column, tl.sum(products, 0), mask=within)
    if tl.program_id(0) % across == 0:
        tl.store(sums + 2 * WIDTH, tl.sum(gradients, 0))


def _compiled(kernel: Any, width: int) -> CompiledKernel:
    return specialised(kernel, num_warps=4, WIDTH=width, GROUP=GROUP, ROWS=_ROWS, COLUMNS=_COLUMNS)


def mask_and_sum(gradient: torch.Tensor, output: torch.Tensor, out: torch.Tensor, sums: torch.Tensor) -> None:
    """Write the gradient of ReLU's input to `out`, and its sums, on the current stream.

    All are contiguous and of one dtype, but `sums` [ceil(b / GROUP), N] float32 are columns of a contiguous tensor.
    """
    rows, width = output.shape
    programs = len(sums) * -(-width // _COLUMNS)
    _compiled(_mask_and_sum, width)(programs, (output.dtype,), gradient, output, out, sums, rows, sums.stride(0))


def logits(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, out: torch.Tensor) -> None:
    """Write out [b] = x [b, N] @ weight [1, N] + bias [1], contiguous and of one dtype, on the current stream."""
    rows, width = x.shape
    block = power_of_2(width)
    here = max(1, _ELEMENTS // block)
    kernel = specialised(_logits, num_warps=4, WIDTH=width, ROWS=here, BLOCK=block)
    kernel(-(-rows // here), (x.dtype,), x, weight, bias, out, rows)


def gradient_of_logits(
    gradient: torch.Tensor, output: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, sums: torch.Tensor
) -> None:
    """Write the gradient of the input of a ReLU that a layer of one output follows, and sums, on the current stream.

    All are contiguous and of one dtype, but `sums` [ceil(b / GROUP), 2 N + 1] float32 are columns of a contiguous
    tensor.
    """
    rows, width = output.shape
    programs = len(sums) * -(-width // _COLUMNS)
    arguments = gradient, output, weight, out, sums, rows, sums.stride(0)
    _compiled(_gradient_of_logits, width)(programs, (output.dtype,), *arguments)
