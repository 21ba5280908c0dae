"""The dot products of all pairs of a sample's embeddings, forward and backward, one kernel each.

DLRM's interaction (Naumov et al., arXiv 1906.00091, section 2.1): the first of F embeddings [D], then e_i . e_j of i <
j, row by row of the upper triangle. A program keeps a sample in registers and multiplies on tensor cores.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from dlrm_overlap.kernels.compiled import INTERPRETED, CompiledKernel, specialised
from dlrm_overlap.kernels.dense.arguments import product_block


@triton.jit
def _pair(i, j, FEATURES: tl.constexpr):
    """Return the number of the pair i < j: of 4 features (0, 2) is pair 1, and (1, 2) pair 3."""
    return i * (2 * FEATURES - 1 - i) // 2 + j - i - 1


@triton.jit
def _dot(left, right, INTERPRETED: tl.constexpr):
    if INTERPRETED:  # the interpreter would multiply the bits of bfloat16 as integers
        left, right = left.to(tl.float32), right.to(tl.float32)
    return tl.dot(left, right, input_precision="ieee")


@triton.jit
def _interact(
    embeddings,  # [b, FEATURES * DIM]
    out,  # [b, WIDTH]
    FEATURES: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_F: tl.constexpr,
    BLOCK_D: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Compute the interaction of one sample: the first embedding, FEATURES * (FEATURES - 1) / 2 products, and zeros.

    Memory: reads a row of `embeddings` once. Sums are float32 and rounded once.

    Order: no two programs share an element.

    Example: FEATURES 3, DIM 2, WIDTH 6; embeddings (1, 2), (3, 4), (5, 6) give 1 2 11 17 39 0.
    """
    sample = tl.program_id(0).to(tl.int64)
    embeddings, out = embeddings + sample * (FEATURES * DIM), out + sample * WIDTH
    i, column = tl.arange(0, BLOCK_F), tl.arange(0, BLOCK_D)
    inside = (i < FEATURES)[:, None] & (column < DIM)[None, :]
    each = tl.load(embeddings + i[:, None] * DIM + column[None, :], mask=inside, other=0)  # [BLOCK_F, BLOCK_D]
    tl.store(out + i[:, None] * WIDTH + column[None, :], each, mask=inside & (i == 0)[:, None])
    products = _dot(each, tl.trans(each), INTERPRETED)  # [BLOCK_F, BLOCK_F]
    row, j = i[:, None], i[None, :]
    is_pair = (row < j) & (j < FEATURES)
    tl.store(out + DIM + _pair(row, j, FEATURES), products.to(out.dtype.element_ty), mask=is_pair)
    used: tl.constexpr = DIM + FEATURES * (FEATURES - 1) // 2
    tl.store(out + used + i, tl.zeros((BLOCK_F,), out.dtype.element_ty), mask=used + i < WIDTH)


@triton.jit
def _gradient_of_interaction(
    gradient,  # [b, WIDTH]
    embeddings,  # [b, FEATURES * DIM]
    out,  # [b, FEATURES * DIM]
    FEATURES: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_F: tl.constexpr,
    BLOCK_D: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Compute the gradient of one sample's embeddings: S @ embeddings, where S [F, F] has the pairs' gradients.

    Memory: sums are float32 and rounded once. Columns of `gradient` after the pairs are not read.

    Order: no two programs share an element.

    Example: FEATURES 2, DIM 2; embeddings (1, 2), (3, 4), gradient 10 20 5 give (10 + 15, 20 + 20), (5, 10).
    """
    sample = tl.program_id(0).to(tl.int64)
    gradient += sample * WIDTH
    embeddings, out = embeddings + sample * (FEATURES * DIM), out + sample * (FEATURES * DIM)
    i, column = tl.arange(0, BLOCK_F), tl.arange(0, BLOCK_D)
    inside = (i < FEATURES)[:, None] & (column < DIM)[None, :]
    at = i[:, None] * DIM + column[None, :]
    each = tl.load(embeddings + at, mask=inside, other=0)  # [BLOCK_F, BLOCK_D]
    # The pairs' gradients as a symmetric matrix with a zero diagonal.
    low, high = tl.minimum(i[:, None], i[None, :]), tl.maximum(i[:, None], i[None, :])
    is_pair = (low < high) & (high < FEATURES)
    pairs = tl.load(gradient + DIM + _pair(low, high, FEATURES), mask=is_pair, other=0)  # [BLOCK_F, BLOCK_F]
    # The first embedding is also in the output itself.
    first = tl.load(gradient + at, mask=inside & (i == 0)[:, None], other=0).to(tl.float32)
    result = _dot(pairs, each, INTERPRETED) + first  # [BLOCK_F, BLOCK_D]
    tl.store(out + at, result.to(out.dtype.element_ty), mask=inside)


def _compiled(kernel: Any, features: int, dim: int, width: int) -> CompiledKernel:
    block_f, block_d = product_block(features), product_block(dim)
    return specialised(
        kernel, num_warps=min(8, max(1, block_f * max(block_f, block_d) // 4096)),
        FEATURES=features, DIM=dim, WIDTH=width, BLOCK_F=block_f, BLOCK_D=block_d, INTERPRETED=INTERPRETED,
    )  # fmt: skip


def interact(embeddings: torch.Tensor, features: int, out: torch.Tensor) -> None:
    """Write each sample's first embedding, the products of all pairs, and zeros, on the current stream.

    `embeddings` [b, F * D] and `out` [b, N] are contiguous and of one dtype.
    """
    kernel = _compiled(_interact, features, embeddings.shape[1] // features, out.shape[1])
    kernel(len(embeddings), (embeddings.dtype,), embeddings, out)


def gradient_of_interaction(gradient: torch.Tensor, embeddings: torch.Tensor, features: int, out: torch.Tensor) -> None:
    """Write the gradient of the contiguous `embeddings` [b, F * D] of `interact` to `out`, on the current stream."""
    kernel = _compiled(_gradient_of_interaction, features, embeddings.shape[1] // features, gradient.shape[1])
    kernel(len(embeddings), (embeddings.dtype,), gradient, embeddings, out)
