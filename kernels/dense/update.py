"""Updates all dense parameters in one pass over their flat tensors."""

import torch
import triton
import triton.language as tl

from dlrm_overlap.kernels.compiled import TYPES, CompiledKernel, specialised
from dlrm_overlap.kernels.dense.arguments import BLOCK, FACTORS, LINE, FlatUpdate

# Columns of `FlatUpdate.numbers`, in the order of `arguments`.
_LR, _EPS, _FIRST, _SECOND, _NESTEROV, _L2, _DECOUPLED = (tl.constexpr(column) for column in range(7))
_NUMBERS = tl.constexpr(7)

# Columns of `FlatUpdate.factors`. RATE: learning rate, bias-corrected; ROOT: bias correction of Adam's root; TAKE1 and
# TAKE2: weights of the gradient and its square in Adam's means; KEEP2: of the old mean of squares. With momentum,
# ROOT and TAKE2 weight gradient and buffer in the change, TAKE1 and KEEP2 in the new buffer.
RATE, EPS, ROOT, TAKE1, KEEP2, TAKE2, L2, SHRINK = (tl.constexpr(column) for column in range(FACTORS))
_FACTORS = tl.constexpr(FACTORS)


@triton.jit
def _begin_update(
    step,  # [R] float32
    numbers,  # [R, 7] float64
    factors,  # [R, 8] float32
    KIND: tl.constexpr,
    DECAYS: tl.constexpr,
):
    """Count the update of parameter r, and compute the factors that all programs of `_update_parameters` share.

    Arithmetic is float64: in float32 1 - beta2 would lose 3 of its 7 digits.

    Order: a kernel of its own, so that no program of the update reads a count that another has increased.

    Example: Adam's first update, beta1 0.9, beta2 0.99, learning rate 1: RATE 1 / (1 - 0.9) = 10, ROOT sqrt(1 - 0.99).

    Source: Kingma and Ba, Adam (arXiv 1412.6980), the end of section 2; torch.optim for the others.
    """
    row = tl.program_id(0)
    numbers += row * _NUMBERS
    factors += row * _FACTORS
    count = tl.load(step + row) + 1
    tl.store(step + row, count)
    rate = tl.load(numbers + _LR)
    tl.store(factors + EPS, tl.load(numbers + _EPS).to(tl.float32))
    if DECAYS:
        tl.store(factors + L2, tl.load(numbers + _L2).to(tl.float32))
        tl.store(factors + SHRINK, (1 - rate * tl.load(numbers + _DECOUPLED)).to(tl.float32))
    first, second = tl.load(numbers + _FIRST), tl.load(numbers + _SECOND)
    if KIND == "momentum":
        # The first gradient becomes the buffer, without dampening.
        nesterov = tl.load(numbers + _NESTEROV)
        tl.store(factors + ROOT, nesterov.to(tl.float32))
        tl.store(factors + TAKE1, tl.where(count == 1, 1, 1 - second).to(tl.float32))
        tl.store(factors + KEEP2, first.to(tl.float32))
        tl.store(factors + TAKE2, tl.where(nesterov == 0, 1, first).to(tl.float32))
    elif KIND == "adagrad":
        rate = rate / (1 + (count.to(tl.float64) - 1) * first)
    elif KIND == "adam":
        count = count.to(tl.float64)
        rate = rate / (1 - tl.exp(count * tl.log(first)))
        tl.store(factors + ROOT, tl.sqrt(1 - tl.exp(count * tl.log(second))).to(tl.float32))
        tl.store(factors + TAKE1, (1 - first).to(tl.float32))
        tl.store(factors + KEEP2, second.to(tl.float32))
        tl.store(factors + TAKE2, (1 - second).to(tl.float32))
    tl.store(factors + RATE, rate.to(tl.float32))


@triton.jit
def updated_weights(
    weight,
    gradient,
    state,
    square,
    at,
    mask,
    factors,
    KIND: tl.constexpr,
    DECAYS: tl.constexpr,
):
    """Return `weight` after an update by `gradient`, blocks of float32, and store the optimizer's states at `at`.

    `factors` points to a row of `FlatUpdate.factors`, one for each element.

    Example: adagrad, RATE 1, a sum of 9 and a gradient of 4: the sum becomes 25, and the weight loses 4 / (5 + EPS).

    Source: Adagrad (Duchi, Hazan and Singer, JMLR 12, 2011); Adam (Kingma and Ba, arXiv 1412.6980, algorithm 1), with
    epsilon as in torch.optim; AdamW (Loshchilov and Hutter, arXiv 1711.05101, algorithm 2).
    """
    rate = tl.load(factors + RATE)
    if DECAYS:
        gradient += tl.load(factors + L2) * weight
        weight *= tl.load(factors + SHRINK)
    if KIND == "sgd":
        weight -= rate * gradient
    elif KIND == "momentum":
        buffer = tl.load(factors + KEEP2) * tl.load(state + at, mask) + tl.load(factors + TAKE1) * gradient
        tl.store(state + at, buffer, mask)
        weight -= rate * (tl.load(factors + ROOT) * gradient + tl.load(factors + TAKE2) * buffer)
    elif KIND == "adagrad":
        total = tl.load(state + at, mask) + gradient * gradient
        tl.store(state + at, total, mask)
        weight -= tl.div_rn(rate * gradient, tl.sqrt_rn(total) + tl.load(factors + EPS))
    else:
        mean, spread = tl.load(state + at, mask), tl.load(square + at, mask)
        mean += tl.load(factors + TAKE1) * (gradient - mean)
        spread = spread * tl.load(factors + KEEP2) + tl.load(factors + TAKE2) * gradient * gradient
        tl.store(state + at, mean, mask)
        tl.store(square + at, spread, mask)
        root = tl.div_rn(tl.sqrt_rn(spread), tl.load(factors + ROOT)) + tl.load(factors + EPS)
        weight -= tl.div_rn(rate * mean, root)
    return weight


@triton.jit
def _update_parameters(
    weights,  # [n] float32
    gradients,  # [n] float32
    state,  # [n] float32: the kind's first state, if any
    square,  # [n] float32: its second state, if any
    shadow,  # [n] of type SHADOW
    rows,  # [n / LINE] int32: row of `factors` of each LINE elements; -1 leaves them unchanged
    factors,  # [R, 8] float32
    KIND: tl.constexpr,  # a key of `STATES`
    DECAYS: tl.constexpr,
    SHADOW: tl.constexpr,
    BLOCK: tl.constexpr,
    LINE: tl.constexpr,
):
    """Update BLOCK weights and the optimizer's state of each by their gradients.

    Memory: program i owns elements [i * BLOCK, (i + 1) * BLOCK) of all flat tensors, 16 bytes a lane.

    Order: no two programs share an element.
    """
    line = tl.program_id(0) * (BLOCK // LINE) + tl.arange(0, BLOCK // LINE)
    row = tl.load(rows + line)[:, None]  # [BLOCK / LINE, 1]
    at = line.to(tl.int64)[:, None] * LINE + tl.arange(0, LINE)[None, :]
    mask = (row >= 0) & (tl.arange(0, LINE)[None, :] >= 0)
    factors += tl.maximum(row, 0) * _FACTORS
    weight, gradient = tl.load(weights + at, mask), tl.load(gradients + at, mask)  # [BLOCK / LINE, LINE]
    weight = updated_weights(weight, gradient, state, square, at, mask, factors, KIND, DECAYS)
    tl.store(weights + at, weight, mask)
    if SHADOW is not None:
        tl.store(shadow + at, weight.to(SHADOW), mask)


def _compiled_update(kind: str, decays: bool, shadow: torch.dtype | None) -> CompiledKernel:
    form = TYPES[shadow] if shadow else None
    return specialised(_update_parameters, num_warps=4, KIND=kind, DECAYS=decays, SHADOW=form, BLOCK=BLOCK, LINE=LINE)


def begin_update(update: FlatUpdate) -> None:
    """Count an update and compute its factors, before the first `update_range`."""
    kernel = specialised(_begin_update, num_warps=1, KIND=update.kind, DECAYS=update.decays)
    kernel(update.step.numel(), (), update.step, update.numbers, update.factors)


def update_range(update: FlatUpdate, first: int, end: int) -> None:
    """Update the weights [first, end), multiples of `BLOCK`, on the current stream."""
    assert first % BLOCK == end % BLOCK == 0, f"elements {first} .. {end}; pad to multiples of {BLOCK}"
    kernel = _compiled_update(update.kind, update.decays, None if update.shadow is None else update.shadow.dtype)
    weights = update.weights[first:end]
    # Pass the weights for tensors that the kernel of this kind does not read.
    state, square = (*(state[first:end] for state in update.states), weights, weights)[:2]
    shadow = weights if update.shadow is None else update.shadow[first:end]
    rows = update.rows[first // LINE : end // LINE]
    programs = (end - first) // BLOCK
    kernel(programs, (), weights, update.gradients[first:end], state, square, shadow, rows, update.factors)
