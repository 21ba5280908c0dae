"""The elementwise part of a low-rank cross network, forward and backward, between cuBLAS's products.

Layer l of L computes x_{l+1} = x_0 * (w_l + b_l) + x_l, where w_l = (x_l V_l^T) W_l^T (Wang et al., DCN V2, arXiv
2008.13535, sections 3.2 and 3.3). Its gradients, from g_L = dL/dx_L down to layer 0:

    du_l = g_{l+1} * x_0                        gradient of w_l; its sum over the samples is the gradient of b_l
    p_l  = (du_l W_l) V_l                       gradient that reaches x_l through the products
    g_l  = g_{l+1} + p_l
    dx_0 = sum over l of g_{l+1} * (w_l + b_l), plus g_0

All activations are [b, N] of one float type; arithmetic is float32 and rounds once, where it stores.
"""

import torch
import triton
import triton.language as tl

from dlrm_overlap.kernels.compiled import specialised
from dlrm_overlap.kernels.dense.arguments import STACKED, CrossGradient

_COLUMNS, _NUM_WARPS = 128, 4
_FORWARD, _BACKWARD, _BACKWARD_FIRST = (16, 2), (32, 2), (16, 4)
"""rows at a time, and turns"""


@triton.jit
def _program(WIDTH: tl.constexpr, COLUMNS: tl.constexpr):
    """Return this program's group of rows, and its columns [COLUMNS]; programs of the same rows are consecutive."""
    across: tl.constexpr = (WIDTH + COLUMNS - 1) // COLUMNS
    return tl.program_id(0) // across, tl.program_id(0) % across * COLUMNS + tl.arange(0, COLUMNS)


@triton.jit(do_not_specialize=["rows"])
def _add_layer(
    x0,  # [rows, WIDTH]
    x,  # [rows, WIDTH]
    w,  # [rows, WIDTH]
    bias,  # [WIDTH] float32
    out,  # [rows, WIDTH]
    rows,
    FIRST: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    TURNS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Compute x_{l+1} = x_0 * (w_l + b_l) + x_l; FIRST for l = 0, where x_l is x_0.

    Memory: a program has ROWS * TURNS rows of COLUMNS columns, 16 bytes a lane if WIDTH allows.

    Order: no two programs share an element.

    Example: x_0 = 2, w = 3, b = 1 and x_l = 5 give 2 * (3 + 1) + 5 = 13.
    """
    group, column = _program(WIDTH, COLUMNS)  # type: ignore[misc]
    first = group * (ROWS * TURNS)
    begin = first.to(tl.int64) * WIDTH
    x0, x, w, out = x0 + begin, x + begin, w + begin, out + begin
    within = column < WIDTH
    shift = tl.load(bias + column, mask=within, other=0)[None, :]  # [1, COLUMNS]
    for turn in range(TURNS):
        row = turn * ROWS + tl.arange(0, ROWS)
        mask = (first + row < rows)[:, None] & within[None, :]
        at = row[:, None] * WIDTH + column[None, :]
        factor = tl.load(x0 + at, mask=mask, other=0).to(tl.float32)  # [ROWS, COLUMNS]
        given = factor if FIRST else tl.load(x + at, mask=mask, other=0).to(tl.float32)
        product = tl.load(w + at, mask=mask, other=0).to(tl.float32)
        tl.store(out + at, (factor * (product + shift) + given).to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=["sums"])
def _gradient_of_layer(
    gradient,  # [rows, WIDTH]: g_L
    later,  # stack [LAYERS - 1, rows, WIDTH]: p_k is layer k - 1
    x0,  # [rows, WIDTH]
    w,  # stack [LAYERS, rows, WIDTH], for l = 0
    bias,  # [LAYERS, WIDTH] float32, for l = 0
    du,  # [rows, WIDTH]
    dx,  # [rows, WIDTH], for l = 0
    sums,  # [groups, WIDTH] float32
    rows,
    LAYERS: tl.constexpr,
    LAYER: tl.constexpr,
    STACKED: tl.constexpr,  # elements: layers of a stack begin at multiples
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    TURNS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Compute du = g_{l+1} * x_0 and its sums over the program's rows; for l = 0 also dx = dx_0 - p_0.

    g_{l+1} = g_L + p_{L-1} + .. + p_{l+1} is computed from its terms, which costs less than storing and reading g.
    Layer 0 computes all g, so it sums dx_0 in the same pass.

    Memory: a program has ROWS * TURNS rows of COLUMNS columns; its sums are row `group` of `sums`.

    Order: no two programs share an element, and a program adds up in a fixed order.

    Example: L = 2, g_2 = 1, p_1 = 2, x_0 = 3, w = (10, 20), b = (0, 1). Layer 1: du = 1 * 3. Layer 0: g_1 = 1 + 2, du =
    3 * 3, and dx = 1 * (20 + 1) + 3 * (10 + 0) + 3 = 54.
    """
    group, column = _program(WIDTH, COLUMNS)  # type: ignore[misc]
    first = group * (ROWS * TURNS)
    begin = first.to(tl.int64) * WIDTH
    stride = (rows.to(tl.int64) * WIDTH + STACKED - 1) // STACKED * STACKED
    gradient, later, x0, w = gradient + begin, later + begin, x0 + begin, w + begin
    du, dx = du + begin, dx + begin
    within = column < WIDTH
    # Load the biases once: they reach the layout of the other tensors through shared memory.
    shifts = ()
    if LAYER == 0:
        for k in tl.static_range(LAYERS):
            shifts += (tl.load(bias + k * WIDTH + column, mask=within, other=0)[None, :],)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for turn in range(TURNS):
        row = turn * ROWS + tl.arange(0, ROWS)
        mask = (first + row < rows)[:, None] & within[None, :]
        at = row[:, None] * WIDTH + column[None, :]
        # g_{l+1}, from g_L down; for layer 0 also dx_0.
        g = tl.load(gradient + at, mask=mask, other=0).to(tl.float32)  # [ROWS, COLUMNS]
        factor = tl.load(x0 + at, mask=mask, other=0).to(tl.float32)
        if LAYER == 0:
            product = tl.load(w + (LAYERS - 1) * stride + at, mask=mask, other=0).to(tl.float32)
            dx0 = g * (product + shifts[LAYERS - 1])
        for k in tl.static_range(LAYERS - 1, LAYER, -1):
            g += tl.load(later + (k - 1) * stride + at, mask=mask, other=0).to(tl.float32)
            if LAYER == 0:
                product = tl.load(w + (k - 1) * stride + at, mask=mask, other=0).to(tl.float32)
                dx0 += g * (product + shifts[k - 1])
        # Store du and add it up; for layer 0 store dx.
        change = g * factor
        tl.store(du + at, change.to(du.dtype.element_ty), mask=mask)
        total += change
        if LAYER == 0:
            tl.store(dx + at, (dx0 + g).to(dx.dtype.element_ty), mask=mask)
    tl.store(sums + group.to(tl.int64) * WIDTH + column, tl.sum(total, 0), mask=within)


def _programs(rows: int, width: int, tile: tuple[int, int]) -> int:
    return -(-rows // (tile[0] * tile[1])) * -(-width // _COLUMNS)


def add_layer(x0: torch.Tensor, x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor, out: torch.Tensor) -> None:
    """Write out = x0 * (w + bias) + x on the current stream: [b, N] contiguous, of one dtype; bias is [N] float32.

    In the first layer `x` is `x0`.
    """
    rows, width = x0.shape
    at_once, turns = _FORWARD
    kernel = specialised(
        _add_layer, num_warps=_NUM_WARPS, FIRST=x is x0, WIDTH=width, ROWS=at_once, TURNS=turns, COLUMNS=_COLUMNS
    )
    kernel(_programs(rows, width, _FORWARD), (x0.dtype,), x0, x, w, bias, out, rows)


def gradient_of_layer(tensors: CrossGradient, layer: int, layers: int) -> None:
    """Write the outputs of `CrossGradient` for layer `layer`, from 0, of `layers`."""
    tile = _BACKWARD if layer > 0 else _BACKWARD_FIRST
    (rows, width), (at_once, turns) = tensors.x0.shape, tile
    kernel = specialised(
        _gradient_of_layer, num_warps=_NUM_WARPS, LAYERS=layers, LAYER=layer, STACKED=STACKED,
        WIDTH=width, ROWS=at_once, TURNS=turns, COLUMNS=_COLUMNS,
    )  # fmt: skip
    kernel(_programs(rows, width, tile), (tensors.x0.dtype,), *tensors, rows)
