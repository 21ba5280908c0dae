"""Whether the losses of a run agree with those of the reference.

A loss agrees if its relative difference is at most `rtol`. On GPUs, atomics add in random order, and training amplifies
the rounding until even two runs of the reference differ by more. Repeated runs of the reference, with equal seeds,
measure this noise and widen the tolerance:

- The tolerance is a multiple of the greatest difference between these runs and the first one so far. Differences grow
exponentially, earlier in some runs than in others, so "so far" looks ahead by a quarter of the steps plus one logged
loss. - The multiple is larger if there is only one repeated run. Both were chosen by training many copies of a small
DLRM, so that fewer than 1 in 100 are refused. - The tolerance is never below `rtol`, and never widened beyond 0.1:
losses that far apart prove nothing.

A fault in the first steps is found while the tolerance is still `rtol`; a fault below the noise is not found. A model
whose loss depends on single activations or rows diverges in jumps, and a good run of it may be refused.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import accumulate

Losses = Mapping[int, float]
"""step -> logged training loss"""

_FACTOR_OF_ONE, _FACTOR_OF_MORE = 25.0, 10.0  # for one repeated run, and for more
_LOOK_AHEAD = 1.25
_GREATEST_NOISE = 0.1
_LEAST_LOSS = 1e-30  # below it, a relative difference is meaningless and may overflow


def difference(loss: float | None, expected: float | None) -> float:
    """Return |loss - expected| / |expected|; infinite if either is missing or not finite."""
    if loss is None or expected is None or not (math.isfinite(loss) and math.isfinite(expected)):
        return math.inf
    return abs(loss - expected) / max(abs(expected), _LEAST_LOSS)


def greatest_difference(losses: Losses, reference: Losses) -> float | None:
    """Return the greatest finite relative difference between a loss and the reference's, or None."""
    found = (difference(losses.get(step), expected) for step, expected in reference.items())
    return max(filter(math.isfinite, found), default=None)


def loss_bound(reference: Losses, again: Sequence[Losses], rtol: float) -> dict[int, float]:
    """Return step -> greatest relative difference from the reference's loss that agrees.

    Args:
        reference: losses of the reference.
        again: losses of its repeated runs; without any, every tolerance is `rtol`.
        rtol: least tolerance.

    Example: one repeated run differs by 1e-4 at the only step, so the tolerance is 25 times that.
    """
    steps = sorted(reference)
    factor = _FACTOR_OF_ONE if len(again) == 1 else _FACTOR_OF_MORE
    noise = [max((difference(run.get(step), reference[step]) for run in again), default=0.0) for step in steps]
    greatest = list(accumulate(noise, max))
    ahead = (min(math.ceil(i * _LOOK_AHEAD) + 1, len(steps) - 1) for i in range(len(steps)))
    bounds = (max(rtol, min(factor * greatest[i], _GREATEST_NOISE)) for i in ahead)
    return dict(zip(steps, bounds, strict=True))


def find_fault(losses: Losses, reference: Losses, again: Sequence[Losses], rtol: float) -> str | None:
    """Describe the first step whose loss is missing, not finite or out of tolerance; None if there is none.

    Args:
        losses: of the run to judge.
        reference: of the reference.
        again: of its repeated runs, which widen the tolerance (`loss_bound`) and must be complete and finite too.
        rtol: least tolerance.
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
