"""A small MLP in float32, forward and backward, one kernel each: up to four layers of at most 128 columns.

A program takes a block of samples, as columns, through all layers and keeps them in registers, as in Mueller et al.,
Real-time Neural Radiance Caching, 2021, section 4.1. The matrices are so small that launches, not products, take the
time of separate kernels.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
import triton
import triton.language as tl

from dlrm_overlap.kernels.compiled import INTERPRETED, CompiledKernel, specialised
from dlrm_overlap.kernels.dense.arguments import MLP_LAYERS, MLP_SAMPLES, MLPShape, product_block
from dlrm_overlap.kernels.target import is_amd


@triton.jit
def _dot(left, right, INTERPRETED: tl.constexpr):
    """Return left @ right of float32, nearly as exact as float32: on NVIDIA's tensor cores by three TF32 products."""
    if INTERPRETED:  # it has no targets
        precision: tl.constexpr = "ieee"
    else:
        precision: tl.constexpr = "ieee" if is_amd() else "tf32x3"
    return tl.dot(left, right, input_precision=precision)


@triton.jit
def _activate(z, GELU: tl.constexpr):
    if GELU:
        return 0.5 * z * (1.0 + tl.erf(z * 0.7071067811865476))
    return tl.maximum(z, 0.0, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _slope(z, GELU: tl.constexpr):
    """Return the derivative of `_activate`."""
    if GELU:
        density = 0.3989422804014327 * tl.exp(-0.5 * z * z)
        return 0.5 * (1.0 + tl.erf(z * 0.7071067811865476)) + z * density
    return (z > 0.0).to(tl.float32)


@triton.jit
def _matrix(data, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr):
    """Load a contiguous matrix; what the block has beyond it is 0."""
    row, column = tl.arange(0, BLOCK_R)[:, None], tl.arange(0, BLOCK_C)[None, :]
    return tl.load(data + row * COLUMNS + column, mask=(row < ROWS) & (column < COLUMNS), other=0.0)


@triton.jit
def _samples(data, sample, stride, samples, COLUMNS: tl.constexpr, BLOCK: tl.constexpr):
    """Load the first COLUMNS columns of rows `sample`, transposed: [BLOCK, BLOCK_B]; others are 0."""
    column = tl.arange(0, BLOCK)[:, None]
    inside = (sample < samples)[None, :] & (column < COLUMNS)
    return tl.load(data + sample[None, :] * stride + column, mask=inside, other=0.0)


@triton.jit
def _store_samples(data, value, sample, stride, samples, COLUMNS: tl.constexpr, BLOCK: tl.constexpr):
    column = tl.arange(0, BLOCK)[:, None]
    inside = (sample < samples)[None, :] & (column < COLUMNS)
    tl.store(data + sample[None, :] * stride + column, value, mask=inside)


@triton.jit(do_not_specialize=["samples"], do_not_specialize_on_alignment=["x"])
def _mlp(
    x,  # [b, N0]
    w1, b1, w2, b2, w3, b3, w4, b4,  # [N, K], [N]; those after the last layer are not read
    z,  # [b, N1 + N2 ..] of the layers with an activation
    out,  # [b, N of the last layer]
    samples,
    LAYERS: tl.constexpr,
    N0: tl.constexpr, N1: tl.constexpr, N2: tl.constexpr, N3: tl.constexpr, N4: tl.constexpr,
    B0: tl.constexpr, B1: tl.constexpr, B2: tl.constexpr, B3: tl.constexpr, B4: tl.constexpr,
    Z: tl.constexpr,
    ENDS_LINEAR: tl.constexpr,
    GELU: tl.constexpr,
    BLOCK_B: tl.constexpr,
    INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Apply each layer's product, bias and activation; the last layer has no activation if ENDS_LINEAR.

    Memory: reads x and the weights once per program, writes the sums before each activation to `z`.

    Order: no two programs share an element.
    """
    sample = tl.program_id(0).to(tl.int64) * BLOCK_B + tl.arange(0, BLOCK_B)
    h = _samples(x, sample, N0, samples, N0, B0)
    h = _layer(h, w1, b1, z, out, sample, samples, N0, N1, B0, B1, Z, LAYERS == 1, ENDS_LINEAR, GELU, INTERPRETED)
    if LAYERS > 1:
        z += N1
        h = _layer(h, w2, b2, z, out, sample, samples, N1, N2, B1, B2, Z, LAYERS == 2, ENDS_LINEAR, GELU, INTERPRETED)
    if LAYERS > 2:
        z += N2
        h = _layer(h, w3, b3, z, out, sample, samples, N2, N3, B2, B3, Z, LAYERS == 3, ENDS_LINEAR, GELU, INTERPRETED)
    if LAYERS > 3:
        z += N3
        _layer(h, w4, b4, z, out, sample, samples, N3, N4, B3, B4, Z, True, ENDS_LINEAR, GELU, INTERPRETED)


@triton.jit
def _layer(
    h, weight, bias, z, out, sample, samples,
    K: tl.constexpr, N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_N: tl.constexpr,
    Z: tl.constexpr, LAST: tl.constexpr, ENDS_LINEAR: tl.constexpr, GELU: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Apply a layer to h [BLOCK_K, BLOCK_B], write what the backward reads, and the last layer's output.

    Returns its activations [BLOCK_N, BLOCK_B]; rows from N on are 0.
    """
    n = tl.arange(0, BLOCK_N)
    sums = _dot(_matrix(weight, N, K, BLOCK_N, BLOCK_K), h, INTERPRETED)
    sums += tl.load(bias + n, mask=n < N, other=0.0)[:, None]
    result = sums
    if not (LAST and ENDS_LINEAR):
        _store_samples(z, sums, sample, Z, samples, N, BLOCK_N)
        result = _activate(sums, GELU)
    if LAST:
        _store_samples(out, result, sample, N, samples, N, BLOCK_N)
    return result


@triton.jit(do_not_specialize=["samples"], do_not_specialize_on_alignment=["x", "gradient"])
def _gradient_of_mlp(
    gradient,  # [b, N of the last layer]
    x,  # [b, N0]
    w1, w2, w3, w4,
    z,  # [b, Z], of `_mlp`
    partial_sums,  # [programs, P]: of each layer weight [N, K] and bias [N]
    out,  # [b, N0]; not written unless OF_INPUT
    samples,
    LAYERS: tl.constexpr,
    N0: tl.constexpr, N1: tl.constexpr, N2: tl.constexpr, N3: tl.constexpr, N4: tl.constexpr,
    B0: tl.constexpr, B1: tl.constexpr, B2: tl.constexpr, B3: tl.constexpr, B4: tl.constexpr,
    Z: tl.constexpr,
    P: tl.constexpr,
    OF_INPUT: tl.constexpr,
    ENDS_LINEAR: tl.constexpr,
    GELU: tl.constexpr,
    BLOCK_B: tl.constexpr,
    INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Compute each program's share of the parameters' gradients and, if OF_INPUT, the gradient of x.

    Memory: reads `gradient`, x, z and the weights once per program. Sums over a program's samples are float32.

    Order: no two programs share an element.
    """
    sample = tl.program_id(0).to(tl.int64) * BLOCK_B + tl.arange(0, BLOCK_B)
    sums = partial_sums + tl.program_id(0).to(tl.int64) * P
    # Where each layer's sums in `z` and its gradients in `partial_sums` begin.
    z1 = z
    z2 = z1 + N1
    z3 = z2 + N2
    p1 = sums
    p2 = p1 + N1 * (N0 + 1)
    p3 = p2 + N2 * (N1 + 1)
    # Go back from the last layer to the second: g is [B of the layer, BLOCK_B].
    if LAYERS > 3:
        g = _before_last(gradient, z3 + N3, sample, samples, N4, B4, Z, ENDS_LINEAR, GELU)
        g = _back(g, w4, z3, p3 + N3 * (N2 + 1), sample, samples, N3, N4, B3, B4, Z, GELU, INTERPRETED)
    if LAYERS == 3:
        g = _before_last(gradient, z3, sample, samples, N3, B3, Z, ENDS_LINEAR, GELU)
    if LAYERS > 2:
        g = _back(g, w3, z2, p3, sample, samples, N2, N3, B2, B3, Z, GELU, INTERPRETED)
    if LAYERS == 2:
        g = _before_last(gradient, z2, sample, samples, N2, B2, Z, ENDS_LINEAR, GELU)
    if LAYERS > 1:
        g = _back(g, w2, z1, p2, sample, samples, N1, N2, B1, B2, Z, GELU, INTERPRETED)
    if LAYERS == 1:
        g = _before_last(gradient, z1, sample, samples, N1, B1, Z, ENDS_LINEAR, GELU)
    # The first layer, whose input is x.
    before = _samples(x, sample, N0, samples, N0, B0)
    _store_sums(g, before, p1, N0, N1, B0, B1, INTERPRETED)
    if OF_INPUT:
        dx = _dot(tl.trans(_matrix(w1, N1, N0, B1, B0)), g, INTERPRETED)
        _store_samples(out, dx, sample, N0, samples, N0, B0)


@triton.jit
def _before_last(
    gradient, z, sample, samples,
    N: tl.constexpr, BLOCK: tl.constexpr, Z: tl.constexpr, ENDS_LINEAR: tl.constexpr, GELU: tl.constexpr,
):  # fmt: skip
    """Return [BLOCK, BLOCK_B]: the gradient before the last layer's activation, whose sums are at `z`."""
    g = _samples(gradient, sample, N, samples, N, BLOCK)
    if not ENDS_LINEAR:
        g *= _slope(_samples(z, sample, Z, samples, N, BLOCK), GELU)
    return g


@triton.jit
def _back(
    g, weight, z, sums, sample, samples,
    K: tl.constexpr, N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_N: tl.constexpr,
    Z: tl.constexpr, GELU: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Return [BLOCK_K, BLOCK_B], the gradient before the previous layer's activation; store the layer's gradients.

    g is [BLOCK_N, BLOCK_B], 0 for samples after the last one; `z` has the previous layer's sums.
    """
    before = _samples(z, sample, Z, samples, K, BLOCK_K)
    _store_sums(g, _activate(before, GELU), sums, K, N, BLOCK_K, BLOCK_N, INTERPRETED)
    return _dot(tl.trans(_matrix(weight, N, K, BLOCK_N, BLOCK_K)), g, INTERPRETED) * _slope(before, GELU)


@triton.jit
def _store_sums(
    g, before, sums,
    K: tl.constexpr, N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_N: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Store the gradients of a weight [N, K], g @ before^T, and of a bias [N]."""
    n, k = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)[None, :]
    tl.store(sums + n[:, None] * K + k, _dot(g, tl.trans(before), INTERPRETED), mask=(n < N)[:, None] & (k < K))
    tl.store(sums + N * K + n, tl.sum(g, axis=1), mask=n < N)


def _compiled(kernel: Any, shape: MLPShape, **more: int) -> CompiledKernel:
    padded = [*shape.widths, *[1] * (MLP_LAYERS + 1 - len(shape.widths))]
    blocks = [product_block(width) for width in padded]
    largest = max(left * right for left, right in pairwise(blocks))
    widths = {f"N{i}": width for i, width in enumerate(padded)} | {f"B{i}": block for i, block in enumerate(blocks)}
    return specialised(
        kernel, num_warps=4 if largest <= 2048 else 8, LAYERS=shape.layers, **widths, Z=shape.activated, **more,
        ENDS_LINEAR=shape.ends_linear, GELU=shape.gelu, BLOCK_B=MLP_SAMPLES, INTERPRETED=INTERPRETED,
    )  # fmt: skip


def _four(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [*tensors, *[tensors[0]] * (MLP_LAYERS - len(tensors))]


def mlp(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor],
    shape: MLPShape,
    z: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """Write the MLP's output [b, N] to `out`, and to `z` [b, shape.activated] what `gradient_of_mlp` reads.

    All tensors are float32 and contiguous.
    """
    pairs = [each for pair in zip(_four(weights), _four(biases), strict=True) for each in pair]
    _compiled(_mlp, shape)(-(-len(x) // MLP_SAMPLES), (), x, *pairs, z, out, len(x))


def gradient_of_mlp(
    gradient: torch.Tensor,
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    shape: MLPShape,
    z: torch.Tensor,
    partial_sums: torch.Tensor,
    out: torch.Tensor | None,
) -> None:
    """Write the gradient of x to `out`, unless it is None, and of the parameters to `partial_sums`.

    `partial_sums` is [ceil(b / MLP_SAMPLES), P]. The gradients are the sums of its rows: of each layer the weight
    [N, K], then the bias [N]. All tensors are float32 and contiguous.
    """
    kernel = _compiled(_gradient_of_mlp, shape, P=shape.parameters, OF_INPUT=out is not None)
    dx = partial_sums if out is None else out  # a pointer that is not used, if there is no `out`
    kernel(len(partial_sums), (), gradient, x, *_four(weights), z, partial_sums, dx, len(x))
