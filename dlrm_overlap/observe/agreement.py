"""Whether the losses of a run agree with the losses of a reference run.

A loss agrees if its relative difference is at most a tolerance: `rtol` or, if greater, a multiple of the noise, up to
0.1. The noise at logged loss i, from 0 on, is the greatest difference between reference runs up to loss 1.25 i + 1. The
multiples are chosen to refuse fewer than 1 in 100 copies of a small DLRM. A fault that is smaller than the tolerance
is not found.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import accumulate

Losses = Mapping[int, float]
"""step -> logged training loss"""

_FACTOR_OF_ONE, _FACTOR_OF_MORE = 25.0, 10.0  # for one repeated run, and for more
_LOOK_AHEAD = 1.25
_GREATEST_NOISE = 0.1
_AGAIN = "a repeated run of the reference"
_LEAST_LOSS = 1e-30  # below it, a relative difference is meaningless and may overflow


def difference(loss: float | None, expected: float | None) -> float:
    """Return |loss - expected| / |expected|; infinite if either is missing or not finite."""
    if loss is None or expected is None or not (math.isfinite(loss) and math.isfinite(expected)):
        return math.inf
    return abs(loss - expected) / max(abs(expected), _LEAST_LOSS)


def greatest_difference(losses: Losses, reference: Losses) -> float | None:
    """Return the greatest relative difference over the steps; None if at no step both losses are finite."""
    found = (difference(losses.get(step), expected) for step, expected in reference.items())
    return max(filter(math.isfinite, found), default=None)


def loss_tolerance(reference: Losses, again: Sequence[Losses], rtol: float) -> dict[int, float]:
    """Return step -> greatest relative difference that still agrees; `again` has repeated runs of the reference."""
    steps = sorted(reference)
    factor = _FACTOR_OF_ONE if len(again) == 1 else _FACTOR_OF_MORE
    noise = [max((difference(run.get(step), reference[step]) for run in again), default=0.0) for step in steps]
    greatest = list(accumulate(noise, max))
    ahead = (min(math.ceil(i * _LOOK_AHEAD) + 1, len(steps) - 1) for i in range(len(steps)))
    tolerances = (max(rtol, min(factor * greatest[i], _GREATEST_NOISE)) for i in ahead)
    return dict(zip(steps, tolerances, strict=True))


def find_fault(losses: Losses, reference: Losses, again: Sequence[Losses], rtol: float) -> str | None:
    """Describe the first step at which `losses` exceed the tolerance, or any run's loss is missing or not finite.

    Returns None if there is no such step. If no run has a loss, this is a fault.
    """
    tolerance = loss_tolerance(reference, again, rtol)
    runs = [losses, reference, *again]
    if not any(runs):
        return "no run has logged a loss"
    for step in sorted({step for run in runs for step in run}):
        rule = f"tolerance {rtol:g}"
        pair = [run[step] for run in (losses, reference) if step in run]
        if any(step not in run for run in runs):
            fault = "one of the two is missing" if len(pair) < 2 else f"missing in {_AGAIN}"
        elif not all(math.isfinite(run[step]) for run in runs):
            fault = f"not finite in {_AGAIN}" if all(map(math.isfinite, pair)) else "not finite"
        elif (found := difference(losses[step], reference[step])) > tolerance[step]:
            fault = f"a relative difference of {found:.1e}"
            rule = f"tolerance {tolerance[step]:.1e}, from {len(again) + 1} reference runs" if again else rule
        else:
            continue
        return f"step {step}: loss {_show(losses.get(step))} against {_show(reference.get(step))}, {fault}; {rule}"
    return None


def _show(loss: float | None) -> str:
    return "-" if loss is None else format(loss, ".8g")
