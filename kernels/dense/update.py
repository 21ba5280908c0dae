"""The update of all dense parameters by one pass over their flat tensors."""

import torch
import triton
import triton.language as tl

from dlrm_overlap.kernels.compiled import TYPES, CompiledKernel, specialised
from dlrm_overlap.kernels.dense.arguments import BLOCK, FACTORS, LINE, FlatUpdate

RATE, EPS, ROOT, TAKE1, KEEP2, TAKE2, L2, SHRINK = range(FACTORS)
"""columns of `FlatUpdate.factors`"""


@triton.jit
def _begin_update(step, numbers, factors, KIND: tl.constexpr, DECAYS: tl.constexpr):
    """Count the update, and work out the numbers that all programs of `_update_parameters` share.

    Memory: program r adds 1 to element r of `step` [R], reads row r of `numbers` [R, 7] float64, and writes row r of
    `factors` [R, 8] float32. It calculates in float64: 1 - beta2 to the power of 1 would lose 3 of its 7 digits in
    float32.

    Order: the end of the kernel orders `factors` for the update, the next kernel on the stream. To count here rather
    than in the update lets no program of the update read a count that another has raised.

    Example: Adam's first update with beta1 0.9, beta2 0.99 and learning rate 1: RATE 1 / (1 - 0.9) = 10, ROOT
    sqrt(1 - 0.99) = 0.1. So a mean 0.1 * g and a mean square 0.01 * g * g change a weight by g / (|g| + eps).

    Under momentum ROOT and TAKE2 are the shares of gradient and buffer in the change: 0 and 1, or 1 and the momentum as
    Nesterov has it; KEEP2 and TAKE1 are those of buffer and gradient in the new buffer. The first gradient is the
    buffer, undampened.

    Source: Kingma and Ba, Adam (arXiv 1412.6980), the end of section 2; torch.optim for the others.
    """
    row = tl.program_id(0)
    numbers += row * 7
    factors += row * 8
    count = tl.load(step + row) + 1
    tl.store(step + row, count)
    rate = tl.load(numbers)
    tl.store(factors + 1, tl.load(numbers + 1).to(tl.float32))
    if DECAYS:
        tl.store(factors + 6, tl.load(numbers + 5).to(tl.float32))
        tl.store(factors + 7, (1 - rate * tl.load(numbers + 6)).to(tl.float32))
    first, second = tl.load(numbers + 2), tl.load(numbers + 3)
    if KIND == "momentum":
        nesterov = tl.load(numbers + 4)
        tl.store(factors + 2, nesterov.to(tl.float32))
        tl.store(factors + 3, tl.where(count == 1, 1, 1 - second).to(tl.float32))
        tl.store(factors + 4, first.to(tl.float32))
        tl.store(factors + 5, tl.where(nesterov == 0, 1, first).to(tl.float32))
    elif KIND == "adagrad":
        rate = rate / (1 + (count.to(tl.float64) - 1) * first)
    elif KIND == "adam":
        count = count.to(tl.float64)
        rate = rate / (1 - tl.exp(count * tl.log(first)))
        tl.store(factors + 2, tl.sqrt(1 - tl.exp(count * tl.log(second))).to(tl.float32))
        tl.store(factors + 3, (1 - first).to(tl.float32))
        tl.store(factors + 4, second.to(tl.float32))
        tl.store(factors + 5, (1 - second).to(tl.float32))
    tl.store(factors, rate.to(tl.float32))


@triton.jit
def _update_parameters(
    weights, gradients, state, square, shadow, rows, factors,
    KIND: tl.constexpr, DECAYS: tl.constexpr, SHADOW: tl.constexpr, BLOCK: tl.constexpr, LINE: tl.constexpr,
):  # fmt: skip
    """Update BLOCK weights, and the optimizer's state of each, by their gradients.

    Memory: program i owns the elements i * BLOCK .. (i + 1) * BLOCK - 1 of all flat tensors. It reads weights,
    gradients and states, and writes weights and states, 16 bytes a lane; where SHADOW is a type, it writes the weights
    rounded to it as well. Bytes an element: 12 under SGD, 20 under momentum and Adagrad, 28 under Adam, and 2 for a
    shadow. Each LINE elements have a row of `factors`, as `rows` says; those of row -1 are left alone.

    Order: the end of the kernel orders the weights for what comes next on the stream; no two programs share an element.

    Example: adagrad, BLOCK 4: program 1 updates the elements 4 .. 7. With RATE 1, a sum of 9 and a gradient of 4, the
    sum becomes 25 and the weight loses 4 / (5 + EPS).

    Source: Duchi, Hazan and Singer, Adaptive Subgradient Methods (JMLR 12, 2011), Kingma and Ba, Adam
    (arXiv 1412.6980), algorithm 1, with torch.optim's placement of epsilon, and Loshchilov and Hutter, Decoupled Weight
    Decay Regularization (arXiv 1711.05101), algorithm 2.
    """
    line = tl.program_id(0) * (BLOCK // LINE) + tl.arange(0, BLOCK // LINE)
    row = tl.load(rows + line)[:, None]
    at = line.to(tl.int64)[:, None] * LINE + tl.arange(0, LINE)[None, :]
    mask = (row >= 0) & (tl.arange(0, LINE)[None, :] >= 0)
    factors += tl.maximum(row, 0) * 8
    weight, gradient = tl.load(weights + at, mask), tl.load(gradients + at, mask)
    rate = tl.load(factors)
    if DECAYS:
        gradient += tl.load(factors + 6) * weight
        weight *= tl.load(factors + 7)
    if KIND == "sgd":
        weight -= rate * gradient
    elif KIND == "momentum":
        buffer = tl.load(factors + 4) * tl.load(state + at, mask) + tl.load(factors + 3) * gradient
        tl.store(state + at, buffer, mask)
        weight -= rate * (tl.load(factors + 2) * gradient + tl.load(factors + 5) * buffer)
    elif KIND == "adagrad":
        total = tl.load(state + at, mask) + gradient * gradient
        tl.store(state + at, total, mask)
        weight -= tl.div_rn(rate * gradient, tl.sqrt_rn(total) + tl.load(factors + 1))
    else:
        mean, spread = tl.load(state + at, mask), tl.load(square + at, mask)
        mean += tl.load(factors + 3) * (gradient - mean)
        spread = spread * tl.load(factors + 4) + tl.load(factors + 5) * gradient * gradient
        tl.store(state + at, mean, mask)
        tl.store(square + at, spread, mask)
        root = tl.div_rn(tl.sqrt_rn(spread), tl.load(factors + 2)) + tl.load(factors + 1)
        weight -= tl.div_rn(rate * mean, root)
    tl.store(weights + at, weight, mask)
    if SHADOW is not None:
        tl.store(shadow + at, weight.to(SHADOW), mask)


def _updating(kind: str, decays: bool, shadow: torch.dtype | None) -> CompiledKernel:
    form = TYPES[shadow] if shadow else None
    return specialised(_update_parameters, num_warps=4, KIND=kind, DECAYS=decays, SHADOW=form, BLOCK=BLOCK, LINE=LINE)


def begin_update(update: FlatUpdate) -> None:
    """Count an update and work out its numbers, on the current stream, ahead of `update_range`."""
    kernel = specialised(_begin_update, num_warps=1, KIND=update.kind, DECAYS=update.decays)
    kernel(update.step.numel(), (), update.step, update.numbers, update.factors)


def update_range(update: FlatUpdate, first: int, end: int) -> None:
    """Update the weights [first, end), multiples of `BLOCK`, on the current stream."""
    assert first % BLOCK == end % BLOCK == 0, f"elements {first} .. {end}; pad to multiples of {BLOCK}"
    kernel = _updating(update.kind, update.decays, None if update.shadow is None else update.shadow.dtype)
    weights = update.weights[first:end]
    # Weights stand in for what the kind does not read.
    state, square = (*(state[first:end] for state in update.states), weights, weights)[:2]
    shadow = weights if update.shadow is None else update.shadow[first:end]
    rows = update.rows[first // LINE : end // LINE]
    programs = (end - first) // BLOCK
    kernel(programs, (), weights, update.gradients[first:end], state, square, shadow, rows, update.factors)
