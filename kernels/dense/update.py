"""The update of all dense parameters by one pass over their flat tensors."""

from functools import lru_cache

import torch
import triton
import triton.language as tl

from dlrm_overlap.kernels.compiled import TYPES, CompiledKernel
from dlrm_overlap.kernels.dense.arguments import BLOCK, STATES, FlatUpdate

RATE, EPS, ROOT, TAKE1, KEEP2, TAKE2 = range(6)
"""places in `FlatUpdate.factors`"""


@triton.jit
def _begin_update(step, numbers, factors, ADAM: tl.constexpr):
    """Count the update, and work out the numbers that all programs of `_update_parameters` share.

    Memory: the one program adds 1 to `step` [1], reads `numbers` [4] float64, and writes `factors` [6] float32. It
    calculates in float64: 1 - beta2 to the power of 1 would lose 3 of its 7 digits in float32.

    Order: the end of the kernel orders `factors` for the update, the next kernel on the stream. To count here rather
    than in the update lets no program of the update read a count that another has raised.

    Example: Adam's first update with beta1 0.9, beta2 0.99 and learning rate 1: RATE 1 / (1 - 0.9) = 10, ROOT
    sqrt(1 - 0.99) = 0.1. So a mean 0.1 * g and a mean square 0.01 * g * g change a weight by g / (|g| + eps).

    Source: Kingma and Ba, Adam (arXiv 1412.6980), the end of section 2.
    """
    count = tl.load(step) + 1
    tl.store(step, count)
    rate = tl.load(numbers)
    tl.store(factors + 1, tl.load(numbers + 1).to(tl.float32))
    if ADAM:
        beta1, beta2 = tl.load(numbers + 2), tl.load(numbers + 3)
        count = count.to(tl.float64)
        rate = rate / (1 - tl.exp(count * tl.log(beta1)))
        tl.store(factors + 2, tl.sqrt(1 - tl.exp(count * tl.log(beta2))).to(tl.float32))
        tl.store(factors + 3, (1 - beta1).to(tl.float32))
        tl.store(factors + 4, beta2.to(tl.float32))
        tl.store(factors + 5, (1 - beta2).to(tl.float32))
    tl.store(factors, rate.to(tl.float32))


@triton.jit
def _update_parameters(
    weights, gradients, state, square, shadow, factors,
    KIND: tl.constexpr, SHADOW: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Update BLOCK weights, and the optimizer's state of each, by their gradients.

    Memory: program i owns the elements i * BLOCK .. (i + 1) * BLOCK - 1 of all flat tensors. It reads weights,
    gradients and states, and writes weights and states, 16 bytes a lane; where SHADOW is a type, it writes the weights
    rounded to it as well. Bytes an element: 12 under SGD, 20 under Adagrad, 28 under Adam, and 2 for a shadow.

    Order: the end of the kernel orders the weights for what comes next on the stream; no two programs share an element.

    Example: adagrad, BLOCK 4: program 1 updates the elements 4 .. 7. With RATE 1, a sum of 9 and a gradient of 4, the
    sum becomes 25 and the weight loses 4 / (5 + EPS).

    Source: Duchi, Hazan and Singer, Adaptive Subgradient Methods (JMLR 12, 2011), and Kingma and Ba, Adam
    (arXiv 1412.6980), algorithm 1, with torch.optim's placement of epsilon.
    """
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    weight, gradient = tl.load(weights + at), tl.load(gradients + at)
    rate = tl.load(factors)
    if KIND == "sgd":
        weight -= rate * gradient
    elif KIND == "adagrad":
        total = tl.load(state + at) + gradient * gradient
        tl.store(state + at, total)
        weight -= tl.div_rn(rate * gradient, tl.sqrt_rn(total) + tl.load(factors + 1))
    else:
        mean, spread = tl.load(state + at), tl.load(square + at)
        mean += tl.load(factors + 3) * (gradient - mean)
        spread = spread * tl.load(factors + 4) + tl.load(factors + 5) * gradient * gradient
        tl.store(state + at, mean)
        tl.store(square + at, spread)
        root = tl.div_rn(tl.sqrt_rn(spread), tl.load(factors + 2)) + tl.load(factors + 1)
        weight -= tl.div_rn(rate * mean, root)
    tl.store(weights + at, weight)
    if SHADOW is not None:
        tl.store(shadow + at, weight.to(SHADOW))


@lru_cache
def _compiled(kind: str, shadow: torch.dtype | None) -> tuple[CompiledKernel, CompiledKernel]:
    begin = CompiledKernel(_begin_update, ("step", "numbers", "factors"), {"ADAM": kind == "adam"}, num_warps=1)
    names = ("weights", "gradients", "state", "square", "shadow", "factors")
    constants = {"KIND": kind, "SHADOW": TYPES[shadow] if shadow else None, "BLOCK": BLOCK}
    return begin, CompiledKernel(_update_parameters, names, constants, num_warps=4)


def begin_update(update: FlatUpdate) -> None:
    """Count an update and work out its numbers, on the current stream, ahead of `update_range`."""
    assert len(update.states) == len(STATES[update.kind]), f"{update.kind} has the states {STATES[update.kind]}"
    begin, _ = _compiled(update.kind, update.shadow.dtype if update.shadow is not None else None)
    begin(1, (), update.step, update.numbers, update.factors)


def update_range(update: FlatUpdate, first: int, end: int) -> None:
    """Update the weights [first, end), multiples of `BLOCK`, on the current stream."""
    assert first % BLOCK == end % BLOCK == 0, f"elements {first} .. {end}; pad to multiples of {BLOCK}"
    _, change = _compiled(update.kind, update.shadow.dtype if update.shadow is not None else None)
    weights = update.weights[first:end]
    # Weights stand in for what the kind does not read.
    state, square = (*(state[first:end] for state in update.states), weights, weights)[:2]
    shadow = weights if update.shadow is None else update.shadow[first:end]
    change((end - first) // BLOCK, (), weights, update.gradients[first:end], state, square, shadow, update.factors)
