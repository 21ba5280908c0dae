"""The optimizers' arithmetic on whole rows, the same as FBGEMM's.

To add one: a device function that updates the states and returns the step, an entry in `OPTIMIZERS` and in `STATES`,
and a twin in `reference.py`.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from dlrm_overlap.kernels.backward.rounding import rounded
from dlrm_overlap.kernels.optimizer_params import STATES, OptimizerParams

SEED_STEP = tl.constexpr(0x5EED)  # difference between the seeds of two steps
MOST_STATES = max(map(len, STATES.values()))
# Indices of `Rule.numbers`.
LR, EPS, L2, DECOUPLED, MAX_NORM, BETA1, BETA2, COUNT, HALFLIFE, DECAY_AFTER, MAX_RATE, LAZY = map(
    tl.constexpr, range(len(OptimizerParams._fields))
)


class OptimizerRows(NamedTuple):
    """Rows of one dim, type, optimizer and allocation, which are updated in the same way."""

    index: int
    """index of the range in `InputFeatures.boundaries`"""
    weights: torch.Tensor
    """float32, float16 or bfloat16: allocation of the rows, updated in place"""
    states: tuple[torch.Tensor, ...]
    """float32: allocation of each state, updated in place"""
    weight_at: int
    """may be negative: the row of key k begins at element 4 * weight_at + k * D"""
    state_at: tuple[int, ...]
    """the same for each state; with one number per row, key k has element state_at + k"""
    dim: int
    """a multiple of 4, at most 1024"""
    any_mean: bool
    """whether a feature of the range is a mean"""
    optimizer: str
    """a key of `OPTIMIZERS`"""
    stochastic_rounding: bool = False
    """for rows that are not float32"""
    reserved: tuple[int, int, int] = (0, 0, 0)
    """(period, first, shift): a row is not updated if (key - shift) % period >= first; period 0: all are updated"""


class Rule(NamedTuple):
    """The optimizer's numbers at one step, the last arguments of `RowUpdate`'s kernel."""

    numbers: torch.Tensor
    """[12] float32: `OptimizerParams`, with the `count` of step 0"""
    clock: torch.Tensor
    """[1] int64: added to `step`, see `comm/counters.py`"""
    step: int = 0
    """step minus `clock`, may be negative"""
    seed: int = 0
    """seed of stochastic rounding at step 0, from 0 to 2^31 - 1"""
    factor: float = 1.0
    """factor of the gradients' sums"""


class RowKind(NamedTuple):
    states: tuple[str | None, ...]
    """MOST_STATES: `elements`, `number` or None, see `STATES`"""
    dim: int
    block_dim: int
    weight_type: tl.dtype
    stochastic: bool
    period: int
    """these three as in `OptimizerRows.reserved`"""
    first_reserved: int
    shift: int


class RowPointers(NamedTuple):
    weights: Any
    states: Any
    weight_at: Any
    state_at: Any


class StepRule(NamedTuple):
    numbers: Any
    lr: Any
    eps: Any
    count: Any
    """steps of the optimizer, this one included"""
    seed: Any
    factor: Any


@triton.jit
def rule_at(numbers, clock, step, seed, factor):
    """Return the rule of the step `step` + clock[0]."""
    step += tl.load(clock)
    count = step.to(tl.float32) + tl.load(numbers + COUNT)
    seed = ((seed + SEED_STEP * step) & 0x7FFFFFFF).to(tl.int32)
    return StepRule(numbers, tl.load(numbers + LR), tl.load(numbers + EPS), count, seed, factor)


@triton.jit
def elements(first, key, ROW: tl.constexpr):
    """Return the offsets [N, block_dim] of the rows of `key` [N]; key 0 begins at unit `first`, of 4 elements."""
    return (first + key * (ROW.dim // 4))[:, None] * 4 + tl.arange(0, ROW.block_dim)[None, :]


@triton.jit
def load_rows(stored, key, mask, ROW: tl.constexpr):
    """Return the rows of `key` [N] int64 where `mask`, [N, block_dim] float32, and their states, or 0 without one."""
    both = mask[:, None] & (tl.arange(0, ROW.block_dim) < ROW.dim)[None, :]
    at = elements(stored.weight_at, key, ROW)
    weight = tl.load(stored.weights + at, mask=both, other=0.0).to(tl.float32)
    first = _load_state(stored, key, mask, 0, ROW)
    second = _load_state(stored, key, mask, 1, ROW)
    third = _load_state(stored, key, mask, 2, ROW)
    return weight, (first, second, third)


@triton.jit
def _load_state(stored, key, mask, INDEX: tl.constexpr, ROW: tl.constexpr):
    if ROW.states[INDEX] == "elements":
        both = mask[:, None] & (tl.arange(0, ROW.block_dim) < ROW.dim)[None, :]
        at = elements(stored.state_at[INDEX], key, ROW)
        return tl.load(stored.states[INDEX] + at, mask=both, other=0.0)
    elif ROW.states[INDEX] == "number":
        return tl.load(stored.states[INDEX] + stored.state_at[INDEX] + key, mask=mask, other=0.0)
    else:
        return 0.0


@triton.jit
def _store_state(stored, key, mask, value, INDEX: tl.constexpr, ROW: tl.constexpr):
    if ROW.states[INDEX] == "elements":
        both = mask[:, None] & (tl.arange(0, ROW.block_dim) < ROW.dim)[None, :]
        tl.store(stored.states[INDEX] + elements(stored.state_at[INDEX], key, ROW), value, mask=both)
    elif ROW.states[INDEX] == "number":
        tl.store(stored.states[INDEX] + stored.state_at[INDEX] + key, value, mask=mask)


@triton.jit
def store_updated_rows(
    stored,
    key,
    mask,
    weight,
    state,
    total,
    rule,
    UPDATE: tl.constexpr,
    ROW: tl.constexpr,
):
    """Update the rows of `load_rows` that are not reserved, by the gradient `total` [N, block_dim] times the factor."""
    if ROW.period > 0:
        mask = mask & ((key - ROW.shift) % ROW.period < ROW.first_reserved)
    step = UPDATE(stored, key, mask, weight, state, total * rule.factor, rule, ROW)
    at, both = elements(stored.weight_at, key, ROW), mask[:, None] & (tl.arange(0, ROW.block_dim) < ROW.dim)[None, :]
    value = rounded(weight - step, at, rule.seed, ROW.weight_type, ROW.stochastic)
    tl.store(stored.weights + at, value, mask=both)


@triton.jit
def _sum_of_squares(x, ROW: tl.constexpr):
    return tl.sum(tl.where((tl.arange(0, ROW.block_dim) < ROW.dim)[None, :], x * x, 0.0), 1)


@triton.jit
def _power(base, exponent):
    """Return base ^ exponent in float64: float32's logarithm has no digits left where `base` is near 1."""
    return tl.exp(exponent.to(tl.float64) * tl.log(base.to(tl.float64)))


# The optimizers: each stores the new states of the rows `key`, and returns the step [N, block_dim]. Their arguments are
# pointers, key and mask [N], weight [N, block_dim], states, gradient [N, block_dim], `StepRule` and `RowKind`.


@triton.jit
def _sgd(stored, key, mask, weight, state, gradient, rule, ROW: tl.constexpr):
    return rule.lr * gradient


@triton.jit
def _adagrad(stored, key, mask, weight, state, gradient, rule, ROW: tl.constexpr):
    squares = state[0] + gradient * gradient
    _store_state(stored, key, mask, squares, 0, ROW)
    return rule.lr * gradient / (tl.sqrt_rn(squares) + rule.eps)


@triton.jit
def _rowwise_adagrad(stored, key, mask, weight, state, gradient, rule, ROW: tl.constexpr):
    squares = state[0] + _sum_of_squares(gradient, ROW) / ROW.dim
    _store_state(stored, key, mask, squares, 0, ROW)
    return (rule.lr / (tl.sqrt_rn(squares) + rule.eps))[:, None] * gradient


@triton.jit
def _decaying_rowwise_adagrad(stored, key, mask, weight, state, gradient, rule, ROW: tl.constexpr):
    """Row-wise Adagrad with L2 or decoupled decay, and a limit of the row's norm."""
    gradient += tl.load(rule.numbers + L2) * weight
    step = _rowwise_adagrad(stored, key, mask, weight, state, gradient, rule, ROW)
    step += rule.lr * tl.load(rule.numbers + DECOUPLED) * weight
    # Scale the updated row down to the limit.
    norm = tl.sqrt_rn(_sum_of_squares(weight - step, ROW))
    limit = tl.load(rule.numbers + MAX_NORM)
    # Without a limit (inf), a row whose norm overflows keeps what its step makes of it, so that divergence is seen.
    return step + (weight - step) * tl.where(norm > limit, 1 - limit / norm, 0)[:, None]


@triton.jit
def _rowwise_adagrad_with_counter(stored, key, mask, weight, state, gradient, rule, ROW: tl.constexpr):
    """Row-wise Adagrad with a decay that depends on how often and how recently the row was used.

    States: the sum of squares, the count of the row's last step (0 before its first), and the row's counter.
    """
    halflife, after = tl.load(rule.numbers + HALFLIFE), tl.load(rule.numbers + DECAY_AFTER)
    l2, decoupled = tl.load(rule.numbers + L2), rule.lr * tl.load(rule.numbers + DECOUPLED)
    # Update the counter and the sum of squares.
    past = tl.where(state[1] == 0.0, 1.0, rule.count - state[1])
    kept = tl.where(halflife > 0.0, tl.exp(-0.6931471805599453 * past / tl.maximum(halflife, 1.0)), 1.0)
    counter = tl.where(halflife == 0.0, 1.0, 1.0 + kept * state[2])
    squares = state[0] + _sum_of_squares(gradient + l2 * weight, ROW) / ROW.dim
    _store_state(stored, key, mask, squares, 0, ROW)
    _store_state(stored, key, mask, tl.zeros_like(past) + rule.count, 1, ROW)
    _store_state(stored, key, mask, counter, 2, ROW)
    # Compute the learning rate and the decay of each row.
    root = tl.sqrt_rn(squares) + rule.eps
    rate, shrunk = tl.zeros_like(past) + rule.lr, (decoupled + l2 * rule.lr / root) * halflife / counter
    if tl.load(rule.numbers + LAZY) != 0.0:  # AdagradW, which also decays for the steps that the row has missed
        missed = tl.minimum(past, rule.count - after) - 1.0
        power = tl.where(missed == 0.0, 1.0, _power(1.0 - decoupled, missed).to(tl.float32))
        rate = tl.where(halflife == -1.0, rate * tl.sqrt_rn(counter), rate)
        rate = tl.where(halflife == -2.0, tl.minimum(rule.lr * counter, tl.load(rule.numbers + MAX_RATE)), rate) * power
        shrunk = 1.0 - (1.0 - decoupled) * power
    decays = rule.count > after
    rate, shrunk = tl.where(decays, rate, rule.lr) / root, tl.where(decays, shrunk, 0.0)
    return rate[:, None] * gradient + shrunk[:, None] * weight


@triton.jit
def _corrected(mean, rule, BETA: tl.constexpr):
    """Correct a moving mean that began at 0."""
    return mean / (1.0 - _power(tl.load(rule.numbers + BETA), rule.count)).to(tl.float32)


@triton.jit
def _moved(mean, x, rule, BETA: tl.constexpr):
    beta = tl.load(rule.numbers + BETA)
    return beta * mean + (1.0 - beta) * x


@triton.jit
def _adams_direction(stored, key, mask, weight, state, gradient, rule, ROW: tl.constexpr):
    """Return mean / (sqrt(mean of squares) + eps), both corrected, plus the decay. States: the two means."""
    mean = _moved(state[0], gradient, rule, BETA1)
    _store_state(stored, key, mask, mean, 0, ROW)
    if ROW.states[1] == "elements":
        squares = _moved(state[1], gradient * gradient, rule, BETA2)
        root = tl.sqrt_rn(_corrected(squares, rule, BETA2))
    else:
        squares = _moved(state[1], _sum_of_squares(gradient, ROW) / ROW.dim, rule, BETA2)
        root = tl.sqrt_rn(_corrected(squares, rule, BETA2))[:, None]
    _store_state(stored, key, mask, squares, 1, ROW)
    return _corrected(mean, rule, BETA1) / (root + rule.eps) + tl.load(rule.numbers + DECOUPLED) * weight


@triton.jit
def _adam(stored, key, mask, weight, state, gradient, rule, ROW: tl.constexpr):
    return rule.lr * _adams_direction(stored, key, mask, weight, state, gradient, rule, ROW)


@triton.jit
def _lamb(stored, key, mask, weight, state, gradient, rule, ROW: tl.constexpr):
    """Adam's step, scaled to the norm of lr times the row."""
    step = _adams_direction(stored, key, mask, weight, state, gradient, rule, ROW)
    norm = tl.sqrt_rn(_sum_of_squares(weight, ROW)) / tl.sqrt_rn(_sum_of_squares(step, ROW))
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
