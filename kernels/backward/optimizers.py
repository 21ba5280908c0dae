"""The optimizers' arithmetic on whole rows, as FBGEMM has it, and the states that each keeps of a row.

One more is a function that updates states and returns the step, lines in `OPTIMIZERS` and `STATES`, and a twin in
`reference.py`.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from dlrm_overlap.kernels.backward.rounding import rounded
from dlrm_overlap.kernels.optimizer_params import STATES, OptimizerParams

SEED_STEP = tl.constexpr(0x5EED)  # between the seeds of two steps
MOST_STATES = max(map(len, STATES.values()))
# Indices of `Rule.numbers`.
LR, EPS, L2, DECOUPLED, MOST_NORM, BETA1, BETA2, COUNT, HALFLIFE, DECAY_AFTER, MOST_RATE, LAZY = map(
    tl.constexpr, range(len(OptimizerParams._fields))
)


class OptimizerRows(NamedTuple):
    """Rows that are updated alike: they have one dim, one type, one optimizer and one allocation."""

    index: int
    """of the range in `InputFeatures.boundaries`"""
    weights: torch.Tensor
    """any shape, float32, float16 or bfloat16: the allocation that holds the rows, updated in place"""
    states: tuple[torch.Tensor, ...]
    """any shape, float32: of each state of the optimizer the allocation that holds it, updated in place"""
    weight_at: int
    """in units of 4 elements, may be negative: the row of key k begins at unit weight_at + k * D / 4 of the weights"""
    state_at: tuple[int, ...]
    """the same in each state; of a state of one number a row, that of key k is element state_at + k"""
    dim: int
    """D, a multiple of 4, at most 1024"""
    any_mean: bool
    """whether a feature of the range is a mean"""
    optimizer: str
    """a key of `OPTIMIZERS`"""
    stochastic_rounding: bool = False
    """of rows that are not float32"""


class Rule(NamedTuple):
    """The optimizer's numbers at one step: the last parameters of `RowUpdate`'s kernel, in their order.

    They lie on the device, where a captured step finds those of the step in which it is replayed.
    """

    numbers: torch.Tensor
    """[12] float32, see `OptimizerParams`, whose `count` is that of step 0"""
    clock: torch.Tensor
    """[1] int64: steps to add to `step`, see `comm/counters.py`"""
    step: int = 0
    """the step's number less `clock`, may be negative"""
    seed: int = 0
    """of stochastic rounding at step 0, from 0 to 2^31 - 1"""
    factor: float = 1.0
    """of the gradients' sums"""


class RowPointers(NamedTuple):
    """Where a kernel finds the rows: the fields of `OptimizerRows`, with as many states as any optimizer has."""

    weights: Any
    states: Any
    weight_at: Any
    state_at: Any


class StepRule(NamedTuple):
    """The rule of one step in a kernel's registers, and the memory of the numbers that few optimizers read."""

    numbers: Any
    lr: Any
    eps: Any
    count: Any
    """of the optimizer's steps, this one included, float32"""
    seed: Any
    factor: Any


@triton.jit
def rule_at(numbers, clock, step, seed, factor):
    """Return the rule of the step `step` + clock[0].

    Example of the seed: SEED_STEP 24301, seed 2^31 - 1, step 2, clock -1: 24300.
    """
    step += tl.load(clock)
    count = step.to(tl.float32) + tl.load(numbers + COUNT)
    seed = ((seed + SEED_STEP * step) & 0x7FFFFFFF).to(tl.int32)
    return StepRule(numbers, tl.load(numbers + LR), tl.load(numbers + EPS), count, seed, factor)


@triton.jit
def elements(first, key, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr):
    """Return the offsets [N, BLOCK_DIM] of the elements of the rows of `key` [N]; that of key 0 begins at unit `first`.

    Example: DIM 8, first 3: the row of key 2 has the elements (3 + 2 * 2) * 4 = 28 .. 35.
    """
    return (first + key * (DIM // 4))[:, None] * 4 + tl.arange(0, BLOCK_DIM)[None, :]


@triton.jit
def load_rows(stored, key, mask, STATES: tl.constexpr, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr):
    """Return the rows of `key` [N] int64 where `mask`, [N, BLOCK_DIM] float32, and the states of their optimizer.

    A state is [N, BLOCK_DIM] or [N] float32, as STATES says; one that there is not is 0.
    """
    both = mask[:, None] & (tl.arange(0, BLOCK_DIM) < DIM)[None, :]
    at = elements(stored.weight_at, key, DIM, BLOCK_DIM)
    weight = tl.load(stored.weights + at, mask=both, other=0.0).to(tl.float32)
    first = _load_state(stored, key, mask, 0, STATES, DIM, BLOCK_DIM)
    second = _load_state(stored, key, mask, 1, STATES, DIM, BLOCK_DIM)
    third = _load_state(stored, key, mask, 2, STATES, DIM, BLOCK_DIM)
    return weight, (first, second, third)


@triton.jit
def _load_state(
    stored, key, mask, INDEX: tl.constexpr, STATES: tl.constexpr, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr
):
    if STATES[INDEX] == "elements":
        both = mask[:, None] & (tl.arange(0, BLOCK_DIM) < DIM)[None, :]
        at = elements(stored.state_at[INDEX], key, DIM, BLOCK_DIM)
        return tl.load(stored.states[INDEX] + at, mask=both, other=0.0)
    elif STATES[INDEX] == "number":
        return tl.load(stored.states[INDEX] + stored.state_at[INDEX] + key, mask=mask, other=0.0)
    else:
        return 0.0


@triton.jit
def _store_state(
    stored, key, mask, value, INDEX: tl.constexpr, STATES: tl.constexpr, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr
):
    if STATES[INDEX] == "elements":
        both = mask[:, None] & (tl.arange(0, BLOCK_DIM) < DIM)[None, :]
        tl.store(stored.states[INDEX] + elements(stored.state_at[INDEX], key, DIM, BLOCK_DIM), value, mask=both)
    elif STATES[INDEX] == "number":
        tl.store(stored.states[INDEX] + stored.state_at[INDEX] + key, value, mask=mask)


@triton.jit
def store_updated_rows(
    stored, key, mask, weight, state, total, rule,
    UPDATE: tl.constexpr, STATES: tl.constexpr, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr,
    WEIGHT: tl.constexpr, STOCHASTIC: tl.constexpr,
):  # fmt: skip
    """Update the result of `load_rows` by the gradients `total` [N, BLOCK_DIM] times the rule's factor, and store it.

    UPDATE is an optimizer's function: it stores the rows' new states, and returns the step to take from the rows.
    """
    step = UPDATE(stored, key, mask, weight, state, total * rule.factor, rule, STATES, DIM, BLOCK_DIM)
    at, both = elements(stored.weight_at, key, DIM, BLOCK_DIM), mask[:, None] & (tl.arange(0, BLOCK_DIM) < DIM)[None, :]
    tl.store(stored.weights + at, rounded(weight - step, at, rule.seed, WEIGHT, STOCHASTIC), mask=both)


@triton.jit
def _sum_of_squares(x, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr):
    """Return the sum [N] of the squares of the DIM columns of `x` [N, BLOCK_DIM]."""
    return tl.sum(tl.where((tl.arange(0, BLOCK_DIM) < DIM)[None, :], x * x, 0.0), 1)


@triton.jit
def _power(base, exponent):
    """Return base ^ exponent, computed in float64: float32's logarithm has no digits left where `base` is near 1."""
    return tl.exp(exponent.to(tl.float64) * tl.log(base.to(tl.float64)))


@triton.jit
def _sgd(
    stored, key, mask, weight, state, gradient, rule,
    STATES: tl.constexpr, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr,
):  # fmt: skip
    """Take lr * gradient."""
    return rule.lr * gradient


@triton.jit
def _adagrad(
    stored, key, mask, weight, state, gradient, rule,
    STATES: tl.constexpr, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr,
):  # fmt: skip
    """Add the squares of the gradient to the state; take lr / (sqrt(state) + eps) * gradient."""
    squares = state[0] + gradient * gradient
    _store_state(stored, key, mask, squares, 0, STATES, DIM, BLOCK_DIM)
    return rule.lr * gradient / (tl.sqrt_rn(squares) + rule.eps)


@triton.jit
def _rowwise_adagrad(
    stored, key, mask, weight, state, gradient, rule,
    STATES: tl.constexpr, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr,
):  # fmt: skip
    """As Adagrad, but add the mean of a row's squares to one number."""
    squares = state[0] + _sum_of_squares(gradient, DIM, BLOCK_DIM) / DIM
    _store_state(stored, key, mask, squares, 0, STATES, DIM, BLOCK_DIM)
    return (rule.lr / (tl.sqrt_rn(squares) + rule.eps))[:, None] * gradient


@triton.jit
def _decaying_rowwise_adagrad(
    stored, key, mask, weight, state, gradient, rule,
    STATES: tl.constexpr, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr,
):  # fmt: skip
    """As row-wise Adagrad. Before, add the row times the L2 decay to the gradient; or shrink the row by lr times the
    decoupled decay; and then to the most that its norm may be.
    """
    gradient += tl.load(rule.numbers + L2) * weight
    step = _rowwise_adagrad(stored, key, mask, weight, state, gradient, rule, STATES, DIM, BLOCK_DIM)
    step += rule.lr * tl.load(rule.numbers + DECOUPLED) * weight
    norm = tl.sqrt_rn(_sum_of_squares(weight - step, DIM, BLOCK_DIM))
    most = tl.load(rule.numbers + MOST_NORM)
    return step + (weight - step) * (1 - most / tl.maximum(norm, most))[:, None]


@triton.jit
def _rowwise_adagrad_with_counter(
    stored, key, mask, weight, state, gradient, rule,
    STATES: tl.constexpr, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr,
):  # fmt: skip
    """As row-wise Adagrad, with a decay that depends on how often, and how long ago, ids have named the row.

    States are the sum of squares, the count of the row's last step, 0 before its first, and the row's counter. A
    halflife of 0 has the counter stay 1, a negative one has it count steps.
    """
    halflife, after = tl.load(rule.numbers + HALFLIFE), tl.load(rule.numbers + DECAY_AFTER)
    l2, decoupled = tl.load(rule.numbers + L2), rule.lr * tl.load(rule.numbers + DECOUPLED)
    past = tl.where(state[1] == 0.0, 1.0, rule.count - state[1])
    kept = tl.where(halflife > 0.0, tl.exp(-0.6931471805599453 * past / tl.maximum(halflife, 1.0)), 1.0)
    counter = tl.where(halflife == 0.0, 1.0, 1.0 + kept * state[2])
    squares = state[0] + _sum_of_squares(gradient + l2 * weight, DIM, BLOCK_DIM) / DIM
    _store_state(stored, key, mask, squares, 0, STATES, DIM, BLOCK_DIM)
    _store_state(stored, key, mask, tl.zeros_like(past) + rule.count, 1, STATES, DIM, BLOCK_DIM)
    _store_state(stored, key, mask, counter, 2, STATES, DIM, BLOCK_DIM)
    root = tl.sqrt_rn(squares) + rule.eps
    rate, shrunk = tl.zeros_like(past) + rule.lr, (decoupled + l2 * rule.lr / root) * halflife / counter
    if tl.load(rule.numbers + LAZY) != 0.0:  # AdagradW, which makes up for the steps that the row has missed
        missed = tl.minimum(past, rule.count - after) - 1.0
        power = tl.where(missed == 0.0, 1.0, _power(1.0 - decoupled, missed).to(tl.float32))
        rate = tl.where(halflife == -1.0, rate * tl.sqrt_rn(counter), rate)
        rate = (
            tl.where(halflife == -2.0, tl.minimum(rule.lr * counter, tl.load(rule.numbers + MOST_RATE)), rate) * power
        )
        shrunk = 1.0 - (1.0 - decoupled) * power
    decays = rule.count > after
    rate, shrunk = tl.where(decays, rate, rule.lr) / root, tl.where(decays, shrunk, 0.0)
    return rate[:, None] * gradient + shrunk[:, None] * weight


@triton.jit
def _corrected(mean, rule, BETA: tl.constexpr):
    """Return a moving mean that began at 0 as if it had not."""
    return mean / (1.0 - _power(tl.load(rule.numbers + BETA), rule.count)).to(tl.float32)


@triton.jit
def _moved(mean, x, rule, BETA: tl.constexpr):
    """Return a moving mean after `x`."""
    beta = tl.load(rule.numbers + BETA)
    return beta * mean + (1.0 - beta) * x


@triton.jit
def _adams_direction(
    stored, key, mask, weight, state, gradient, rule,
    STATES: tl.constexpr, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr,
):  # fmt: skip
    """Return mean / (sqrt(mean of squares) + eps), both corrected, plus the row times the decay.

    States are both means; that of the squares is an element's or, as one number, of the row's mean square.
    """
    mean = _moved(state[0], gradient, rule, BETA1)
    _store_state(stored, key, mask, mean, 0, STATES, DIM, BLOCK_DIM)
    if STATES[1] == "elements":
        squares = _moved(state[1], gradient * gradient, rule, BETA2)
        root = tl.sqrt_rn(_corrected(squares, rule, BETA2))
    else:
        squares = _moved(state[1], _sum_of_squares(gradient, DIM, BLOCK_DIM) / DIM, rule, BETA2)
        root = tl.sqrt_rn(_corrected(squares, rule, BETA2))[:, None]
    _store_state(stored, key, mask, squares, 1, STATES, DIM, BLOCK_DIM)
    return _corrected(mean, rule, BETA1) / (root + rule.eps) + tl.load(rule.numbers + DECOUPLED) * weight


@triton.jit
def _adam(
    stored, key, mask, weight, state, gradient, rule,
    STATES: tl.constexpr, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr,
):  # fmt: skip
    """Take lr times Adam's direction."""
    return rule.lr * _adams_direction(stored, key, mask, weight, state, gradient, rule, STATES, DIM, BLOCK_DIM)


@triton.jit
def _lamb(
    stored, key, mask, weight, state, gradient, rule,
    STATES: tl.constexpr, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr,
):  # fmt: skip
    """As Adam, but with a step of the norm of lr times the row."""
    step = _adams_direction(stored, key, mask, weight, state, gradient, rule, STATES, DIM, BLOCK_DIM)
    norm = tl.sqrt_rn(_sum_of_squares(weight, DIM, BLOCK_DIM)) / tl.sqrt_rn(_sum_of_squares(step, DIM, BLOCK_DIM))
    return (rule.lr * norm)[:, None] * step


OPTIMIZERS: dict[str, Any] = {
    "sgd": _sgd,
    "adagrad": _adagrad,
    "rowwise_adagrad": _rowwise_adagrad,
    "decaying_rowwise_adagrad": _decaying_rowwise_adagrad,
    "rowwise_adagrad_with_counter": _rowwise_adagrad_with_counter,
    "adam": _adam,
    "partial_rowwise_adam": _adam,
    "lamb": _lamb,
    "partial_rowwise_lamb": _lamb,
}
"""the update of each, by FBGEMM's name; `STATES` has what it keeps"""
