"""Whether the losses of a run agree with those of the reference.

A loss agrees if its relative difference is at most `rtol`. On GPUs atomics add in an order of chance, and training
amplifies that rounding until two runs of the reference differ by more. Further runs of it from the same seeds measure
by how much, and widen the tolerance:

- The bound is a multiple of the greatest difference of these runs from the first so far. Parting runs grow apart
  exponentially, each as if it were earlier or later than the others, so "so far" looks ahead by a quarter of the steps
  and one logged loss more.
- The factor is larger for one run than for more. The factors were chosen by training many copies of a small DLRM, of
  which fewer than 1 in 100 may be refused.
- The bound is never below `rtol`, and noise never widens it beyond a tenth: losses so far apart show nothing.

A fault of the first steps shows while the bound is still `rtol`. A fault below the noise is not found. A model in which
one activation or row makes a difference parts by jumps, which may refuse a good run.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import accumulate

Losses = Mapping[int, float]
"""step -> logged training loss"""

_FACTOR_OF_ONE, _FACTOR_OF_MORE = 25.0, 10.0  # by the number of further runs
_LOOK_AHEAD = 1.25
_GREATEST_NOISE = 0.1
_LEAST_LOSS = 1e-30  # below it, a relative difference means nothing and may overflow


def difference(loss: float | None, expected: float | None) -> float:
    """Return |loss - expected| / |expected|, infinite unless both are there and finite."""
    if loss is None or expected is None or not (math.isfinite(loss) and math.isfinite(expected)):
        return math.inf
    return abs(loss - expected) / max(abs(expected), _LEAST_LOSS)


def greatest_difference(losses: Losses, reference: Losses) -> float | None:
    """Return the greatest finite relative difference of a loss from the reference's; None if there is none."""
    found = (difference(losses.get(step), expected) for step, expected in reference.items())
    return max(filter(math.isfinite, found), default=None)


def loss_bound(reference: Losses, again: Sequence[Losses], rtol: float) -> dict[int, float]:
    """Return step -> greatest relative difference from the reference's loss that agrees.

    Example: a further run parts by 1e-4 at the only step. The bound is 25 times that.

    Args:
        reference: the losses of the reference.
        again: those of its further runs; without one, every bound is `rtol`.
        rtol: least bound.
    """
    steps = sorted(reference)
    factor = _FACTOR_OF_ONE if len(again) == 1 else _FACTOR_OF_MORE
    noise = [max((difference(run.get(step), reference[step]) for run in again), default=0.0) for step in steps]
    greatest = list(accumulate(noise, max))
    ahead = (min(math.ceil(i * _LOOK_AHEAD) + 1, len(steps) - 1) for i in range(len(steps)))
    bounds = (max(rtol, min(factor * greatest[i], _GREATEST_NOISE)) for i in ahead)
    return dict(zip(steps, bounds, strict=True))


def find_fault(losses: Losses, reference: Losses, again: Sequence[Losses], rtol: float) -> str | None:
    """Describe the first step at which a loss is missing, not finite or beyond its bound; None if none is.

    Args:
        losses: of the run in question.
        reference: of the reference.
        again: of its further runs, which widen the tolerance (`loss_bound`) and must be whole and finite, too.
        rtol: greatest relative difference that agrees where no noise was measured.
    """
    bound = loss_bound(reference, again, rtol)
    runs = [losses, reference, *again]
    for step in sorted({step for run in runs for step in run}):
        rule = f"tolerance {rtol:g}"
        if any(step not in run for run in runs):
            fault = "one of the two is missing"
        elif not all(math.isfinite(run[step]) for run in runs):
            fault = "not finite"
        elif (found := difference(losses[step], reference[step])) > bound[step]:
            fault = f"a relative difference of {found:.1e}"
            rule = f"bound {bound[step]:.1e}, from {len(again) + 1} reference runs" if again else rule
        else:
            continue
        return f"step {step}: loss {_show(losses.get(step))} against {_show(reference.get(step))}, {fault}; {rule}"
    return None


def _show(loss: float | None) -> str:
    return "-" if loss is None else format(loss, ".8g")
