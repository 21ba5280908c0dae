"""Rounding to 8 bits: in the passes that write tensors, of the weights in both layouts, and of narrow tensors.

A tensor in 8 bits holds x * scale, rounded to nearest; the scale is a power of two, so it adds no error. What exceeds
the format saturates, and NaN stays NaN.
"""

import torch
import triton
import triton.language as tl

from dlrm_overlap.kernels.compiled import INTERPRETED, specialised
from dlrm_overlap.kernels.dense.arguments import FP8_TILE

_INTERPRETED = tl.constexpr(INTERPRETED)
_CAST = 4096
"""elements of a program"""


@triton.jit
def rounded_to_8_bits(value, SCALE: tl.constexpr, dtype: tl.constexpr):
    """Return value * SCALE, of float32, in `dtype`: float8e4nv or float8e5."""
    LARGEST: tl.constexpr = 448.0 if dtype == tl.float8e4nv else 57344.0
    scaled = tl.clamp(value * SCALE, -LARGEST, LARGEST, propagate_nan=tl.PropagateNan.ALL)
    return _interpreted_cast(scaled, dtype) if _INTERPRETED else scaled.to(dtype)


@triton.jit
def _interpreted_cast(value, dtype: tl.constexpr):
    """Round to nearest, ties to even, as GPUs do; the interpreter's own cast errs (Triton 3.6 to 3.8)."""
    MANTISSA: tl.constexpr = 3 if dtype == tl.float8e4nv else 2
    BIAS: tl.constexpr = 7 if dtype == tl.float8e4nv else 15
    DROPPED: tl.constexpr = 23 - MANTISSA
    bits = value.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    up = size + ((size >> DROPPED) & 1) + ((1 << (DROPPED - 1)) - 1)
    normal = (up >> DROPPED) - ((127 - BIAS) << MANTISSA)
    # Below the least normal number float32's own addition rounds to the format's smallest step.
    steps = size.to(tl.float32, bitcast=True) * (2.0 ** (BIAS - 1 + MANTISSA)) + 8388608.0
    subnormal = steps.to(tl.int32, bitcast=True) & 0xFF
    found = tl.where(size < ((128 - BIAS) << 23), subnormal, normal)
    found = tl.where(size > 0x7F800000, 0x7F, found) | ((bits >> 24) & 0x80)
    return found.to(tl.uint8).to(dtype, bitcast=True)


@triton.jit(do_not_specialize=["elements"])
def _cast(
    x,  # [elements]
    out,  # [elements], 8 bits
    elements,
    SCALE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Round a tensor to 8 bits.

    Example: x 0.5 and SCALE 16 give 8.
    """
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + at, mask=at < elements, other=0).to(tl.float32)
    tl.store(out + at, rounded_to_8_bits(value, SCALE, out.dtype.element_ty), mask=at < elements)


@triton.jit
def _cast_weights(
    weights,  # flat [n]
    tiles,  # [tiles, 4] int32: the matrix's first element, its rows and columns, the tile's number in it
    out,  # flat [n], 8 bits
    transposed,  # flat [n], 8 bits
    SCALE: tl.constexpr,
    TILE: tl.constexpr,
):
    """Round one tile of a matrix to 8 bits, and store it in the matrix and in its transpose at the same offset.

    Order: no two programs share an element.

    Example: the matrix 1 2 / 3 4 at offset 0 and SCALE 2 give 2 4 6 8 in `out`, and 2 6 4 8 in `transposed`.
    """
    tile = tiles + tl.program_id(0) * 4
    first, rows, columns, number = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2), tl.load(tile + 3)
    weights, out, transposed = weights + first, out + first, transposed + first
    across = (columns + TILE - 1) // TILE
    row, column = number // across * TILE + tl.arange(0, TILE), number % across * TILE + tl.arange(0, TILE)
    mask = (row < rows)[:, None] & (column < columns)[None, :]
    value = tl.load(weights + row[:, None] * columns + column[None, :], mask=mask, other=0).to(tl.float32)
    rounded = rounded_to_8_bits(value, SCALE, out.dtype.element_ty)  # [TILE, TILE]
    tl.store(out + row[:, None] * columns + column[None, :], rounded, mask=mask)
    across_rows = (column < columns)[:, None] & (row < rows)[None, :]
    tl.store(transposed + column[:, None] * rows + row[None, :], tl.trans(rounded), mask=across_rows)


def cast(x: torch.Tensor, out: torch.Tensor, scale: float) -> None:
    """Write out = x * scale, rounded to the 8 bits of `out`, on the current stream; both are contiguous."""
    kernel = specialised(_cast, num_warps=4, SCALE=scale, BLOCK=_CAST)
    kernel(-(-x.numel() // _CAST), (x.dtype, out.dtype), x, out, x.numel())


def cast_weights(
    weights: torch.Tensor, tiles: torch.Tensor, out: torch.Tensor, transposed: torch.Tensor, scale: float
) -> None:
    """Write matrices * scale in 8 bits to `out`, and their transposes to `transposed`, on the current stream.

    All but `tiles` [T, 4] int32, of `fp8_tiles`, are flat tensors in which the matrices have the same offsets.
    """
    kernel = specialised(_cast_weights, num_warps=4, SCALE=scale, TILE=FP8_TILE)
    kernel(len(tiles), (weights.dtype,), weights, tiles, out, transposed)
