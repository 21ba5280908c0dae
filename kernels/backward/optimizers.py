"""The optimizers' arithmetic on whole rows: SGD, Adagrad and row-wise Adagrad, as FBGEMM has them."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

SEED_STEP = tl.constexpr(0x5EED)  # between the seeds of two steps


class RowRange(NamedTuple):
    """Rows that are updated alike: they have one dim, one type, one optimizer and one allocation."""

    index: int
    """of the range in `InputFeatures.boundaries`"""
    weights: torch.Tensor
    """any shape, float32, float16 or bfloat16: the allocation that holds the rows, updated in place"""
    states: torch.Tensor
    """any shape, float32: the allocation that holds the optimizer's state, updated in place; any tensor under SGD"""
    weight_at: int
    """in units of 4 elements, may be negative: the row of key k begins at unit weight_at + k * D / 4 of the weights"""
    state_at: int
    """the same in the states; under row-wise Adagrad, with one number a row, that of key k is element state_at + k"""
    dim: int
    """D, a multiple of 4, at most 1024"""
    any_mean: bool
    """whether a feature of the range is a mean"""
    optimizer: str
    """sgd | adagrad | rowwise_adagrad | decaying_rowwise_adagrad, which reads decays and a norm of `Rule.numbers`"""
    stochastic_rounding: bool = False
    """of rows that are not float32"""


class Rule(NamedTuple):
    """The optimizer's numbers at one step: the last parameters of `RowUpdate`'s kernel, in their order.

    They lie on the device, where a captured step finds those of the step in which it is replayed.
    """

    numbers: torch.Tensor
    """[5] float32: learning rate, epsilon, L2 decay, decoupled decay, and the most that a row's norm may be"""
    clock: torch.Tensor
    """[1] int64: steps to add to those that `seed` has counted, see `comm/counters.py`"""
    seed: int = 0
    """of stochastic rounding, from 0 to 2^31 - 1"""
    factor: float = 1.0
    """of the gradients' sums"""


@triton.jit
def seed_at(seed, clock):
    """Return the seed [] int32 of the step that is `clock` [1] int64 steps after that of `seed`.

    Example: SEED_STEP 24301, seed 2^31 - 1, clock 1: 24300.
    """
    return ((seed + SEED_STEP * tl.load(clock)) & 0x7FFFFFFF).to(tl.int32)


@triton.jit
def elements(first, key, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr):
    """Return the offsets [N, BLOCK_DIM] of the elements of the rows of `key` [N]; that of key 0 begins at unit `first`.

    Example: DIM 8, first 3: the row of key 2 has the elements (3 + 2 * 2) * 4 = 28 .. 35.
    """
    return (first + key * (DIM // 4))[:, None] * 4 + tl.arange(0, BLOCK_DIM)[None, :]


@triton.jit
def load_rows(
    weights, states, weight_at, state_at, key, mask,
    OPTIMIZER: tl.constexpr, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr,
):  # fmt: skip
    """Return the rows of `key` [N] int64 where `mask`, [N, BLOCK_DIM] float32, and the state of their optimizer.

    The state is [N, BLOCK_DIM] float32 under Adagrad and [N] under row-wise Adagrad; under SGD it is the rows again.
    """
    both = mask[:, None] & (tl.arange(0, BLOCK_DIM) < DIM)[None, :]
    weight = tl.load(weights + elements(weight_at, key, DIM, BLOCK_DIM), mask=both, other=0.0).to(tl.float32)
    state = weight
    if OPTIMIZER == "adagrad":
        state = tl.load(states + elements(state_at, key, DIM, BLOCK_DIM), mask=both, other=0.0)
    elif OPTIMIZER != "sgd":
        state = tl.load(states + state_at + key, mask=mask, other=0.0)
    return weight, state


@triton.jit
def store_updated_rows(
    weights, states, weight_at, state_at, key, mask, weight, state, total, numbers, lr, eps, seed, factor,
    OPTIMIZER: tl.constexpr, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, WEIGHT: tl.constexpr, STOCHASTIC: tl.constexpr,
):  # fmt: skip
    """Update the result of `load_rows` by `factor` times the gradients `total` [N, BLOCK_DIM], and store it.

    SGD takes lr * total from the row. The others first add the squares of `total` to the state, row-wise Adagrad their
    mean over the row, and then take lr / (sqrt(state) + eps) * total from the row. Decaying row-wise Adagrad adds the
    row times the L2 decay to `total` before that, or shrinks the row by lr times the decoupled decay, and then to the
    most that its norm may be. Source: FBGEMM's rowwise_adagrad.
    """
    both = mask[:, None] & (tl.arange(0, BLOCK_DIM) < DIM)[None, :]
    total = total * factor
    if OPTIMIZER == "sgd":
        step = lr * total
    elif OPTIMIZER == "adagrad":
        state += total * total
        tl.store(states + elements(state_at, key, DIM, BLOCK_DIM), state, mask=both)
        step = lr * total / (tl.sqrt_rn(state) + eps)
    else:
        if OPTIMIZER == "decaying_rowwise_adagrad":
            total += tl.load(numbers + 2) * weight
        state += tl.sum(tl.where(both, total * total, 0.0), 1) / DIM
        tl.store(states + state_at + key, state, mask=mask)
        step = (lr / (tl.sqrt_rn(state) + eps))[:, None] * total
        if OPTIMIZER == "decaying_rowwise_adagrad":
            step += lr * tl.load(numbers + 3) * weight
            norm = tl.sqrt_rn(tl.sum(tl.where(both, (weight - step) * (weight - step), 0.0), 1))
            most = tl.load(numbers + 4)
            step += (weight - step) * (1 - most / tl.maximum(norm, most))[:, None]
    at = elements(weight_at, key, DIM, BLOCK_DIM)
    tl.store(weights + at, rounded(weight - step, at, seed, WEIGHT, STOCHASTIC), mask=both)


@triton.jit
def rounded(x, at, seed, TYPE: tl.constexpr, STOCHASTIC: tl.constexpr):
    """Return float32 `x` rounded to TYPE: to the nearest number or, if STOCHASTIC, up or down by chance.

    A number between two of TYPE is rounded to the upper one with the probability that keeps the mean; a number of TYPE
    stays as it is. The chance is a hash of `seed` and of `at`, the element's offset, so equal runs round alike. Numbers
    that are not below the greatest of TYPE in size are rounded to the nearest: so NaN stays NaN, infinity stays
    infinity, and no update overflows that would not without chance.

    Example: float16, whose numbers near 1 are 2^-10 apart. 1 + 2^-12 becomes 1 + 2^-10 one time in four, else 1. 65510
    becomes 65504, the greatest, and 65530 infinity.
    """
    if not STOCHASTIC:
        return x.to(TYPE)
    chance = tl.randint(seed, at.to(tl.int32)).to(tl.uint32, bitcast=True)
    bits = x.to(tl.uint32, bitcast=True)
    if tl.bfloat16 == TYPE:
        greatest = 3.3895313892515355e38
        near = ((bits + (chance & 0xFFFF)) & 0xFFFF0000).to(tl.float32, bitcast=True)
    else:
        greatest = 65504.0
        normal = ((bits + (chance & 0x1FFF)) & 0xFFFFE000).to(tl.float32, bitcast=True)
        # Below 2^-14 float16 has steps of 2^-24, up to 1024 of them. The chance, an odd multiple of 2^-14 below 1, can
        # be added to so many without rounding.
        fraction = ((chance & 0x3FFF) | 1).to(tl.float32) * 6.103515625e-05
        tiny = tl.floor(x * 16777216.0 + fraction) * 5.9604644775390625e-08
        near = tl.where(tl.abs(x) < 6.103515625e-05, tiny, normal)
    # NaN is not below the greatest, so it is kept: of CUDA's own, all ones, chance would carry bits into the sign.
    return tl.where(tl.abs(x) < greatest, near, x).to(TYPE)
