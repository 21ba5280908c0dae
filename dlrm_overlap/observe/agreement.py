"""Whether the losses of a run agree with those of one or more reference runs.

With one reference run, a loss agrees if its relative difference is at most `rtol`. On GPUs atomics add in an order of
chance, and training amplifies that rounding until two runs of the reference differ by more. Several reference runs from
the same seeds measure by how much, and `loss_bound` widens the tolerance accordingly:

- The unit is the standard deviation of the reference runs' losses about their mean, times sqrt(1 + 1 / runs), by which
  one more run would deviate from that mean.
- The bound follows the greatest unit so far, so that curves which cross by luck do not narrow it. Parting runs grow
  apart exponentially, each as if it were earlier or later than the others, so "so far" looks ahead by a quarter of the
  steps and one logged loss more.
- The factor is large for few runs, as Student's t is; only more runs lower it, more steps do not. The factors were
  chosen by training many copies of a small DLRM, of which fewer than 1 in 100 may be refused.
- The bound is never below `rtol`, and noise never widens it beyond a tenth: losses so far apart show nothing.

A fault of the first steps shows while the bound is still `rtol`. A fault below the noise is not found. A model in which
one activation or row makes a difference parts by jumps, which may refuse a good run.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

Losses = Mapping[int, float]
"""step -> logged training loss"""

_FACTORS = {2: 40.0, 3: 15.0}  # by the number of reference runs
_FACTOR_OF_MORE = 12.0
_LOOK_AHEAD = 1.25
_GREATEST_NOISE = 0.1
_LEAST_LOSS = 1e-30  # below it, a relative difference means nothing and may overflow


@dataclass(frozen=True)
class Verdict:
    """How a run's losses compare with those of the reference runs."""

    fault: str | None
    """the fault at the first step where they part; None if they agree"""
    max_difference: float | None
    """greatest relative difference of a loss from the reference runs' mean; None if no loss can be compared"""
    max_difference_step: int | None
    """its step"""


def loss_bound(reference: Sequence[Losses], rtol: float) -> dict[int, float]:
    """Return step -> greatest relative difference from the reference runs' mean loss that agrees.

    It is of each step at which every run has a finite loss.

    Example: two runs whose losses are 0.99 and 1.01 times their mean at their only step have a standard deviation of
    0.014, one more run deviates by 0.017, and the bound is 40 times that, cut to a tenth.

    Args:
        reference: the losses of each reference run. With one run, every bound is `rtol`.
        rtol: least bound.
    """
    steps, losses = _table(reference)
    runs = len(reference)
    if runs == 1 or not steps:
        return dict.fromkeys(steps, rtol)
    variances = (_differences(losses, losses.mean(0)) ** 2).sum(0) / (runs - 1)
    greatest = np.maximum.accumulate(np.sqrt(variances * (1 + 1 / runs)))
    ahead = np.minimum(np.ceil(np.arange(len(steps)) * _LOOK_AHEAD).astype(int) + 1, len(steps) - 1)
    bounds = np.minimum(_FACTORS.get(runs, _FACTOR_OF_MORE) * greatest[ahead], _GREATEST_NOISE)
    return dict(zip(steps, np.maximum(bounds, rtol).tolist(), strict=True))


def judge(losses: Losses, reference: Sequence[Losses], rtol: float) -> Verdict:
    """Compare `losses` with those of one or more reference runs.

    Args:
        losses: step -> loss of the run in question.
        reference: the same of each reference run; several widen the tolerance (`loss_bound`).
        rtol: greatest relative difference that agrees where no noise was measured.
    """
    steps, table = _table([losses, *reference])
    differences = dict(zip(steps, np.abs(_differences(table[0], table[1:].mean(0))).tolist(), strict=True))
    widest = max(differences, key=lambda step: differences[step], default=None)
    fault = _first_fault(losses, reference, differences, rtol)
    return Verdict(fault, None if widest is None else differences[widest], widest)


def _first_fault(
    losses: Losses, reference: Sequence[Losses], differences: Mapping[int, float], rtol: float
) -> str | None:
    """Describe the first step whose loss is missing, not finite or beyond its bound; None if none is."""
    bound = loss_bound(reference, rtol)
    for step in sorted(losses.keys() | {step for run in reference for step in run}):
        loss, wanted = losses.get(step), [run[step] for run in reference if step in run]
        rule = f"tolerance {rtol:g}"
        if loss is None or len(wanted) < len(reference):
            fault = "one of the two is missing"
        elif step not in differences:
            fault = "not finite"
        elif differences[step] > bound[step]:
            fault, runs = f"a relative difference of {differences[step]:.1e}", len(reference)
            rule = rule if runs == 1 else f"bound {bound[step]:.1e}, from {runs} reference runs"
        else:
            continue
        expected = sum(wanted) / len(wanted) if wanted else None
        return f"step {step}: loss {_show(loss)} against {_show(expected)}, {fault}; {rule}"
    return None


def _table(runs: Sequence[Losses]) -> tuple[list[int], np.ndarray]:
    """Return the steps at which every run has a finite loss, and these losses, [runs, steps]."""
    common = set(runs[0]).intersection(*runs[1:])
    steps = sorted(step for step in common if all(math.isfinite(run[step]) for run in runs))
    return steps, np.array([[run[step] for step in steps] for run in runs])


def _differences(losses: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """Return the signed relative differences of `losses` [.., steps] from `expected` [steps]."""
    return (losses - expected) / np.maximum(np.abs(expected), _LEAST_LOSS)


def _show(loss: float | None) -> str:
    return "-" if loss is None else format(loss, ".8g")
