"""The interval of a ratio of median step times, by a bootstrap over segments of the two runs.

Steps near each other in time are slow or fast together, so single steps cannot be drawn as if they were independent.
Each run is therefore cut into segments of consecutive steps, whole segments are drawn with replacement, and the ratio
is taken of the drawn steps: a block bootstrap (Künsch 1989), with blocks that do not overlap. Changes slower than a
segment, or from one run to the next one, are not in the interval. Of runs that took turns the same segments are drawn,
so a load that slowed both at one time cancels in their ratio.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

SEGMENTS = 20  # fewer show little of the spread, and shorter ones are less independent
_LEAST_STEPS = 2 * SEGMENTS
_DRAWS = 1000
_SEED = 0


class Interval(NamedTuple):
    """A range that holds a figure with a probability of 95%."""

    low: float
    high: float


def speedup_interval(reference_ms: Sequence[float], own_ms: Sequence[float], in_turns: bool = False) -> Interval | None:
    """Return the 95% interval of the median of `reference_ms` over that of `own_ms`.

    The same times give the same interval. Example: of 100 steps of 10 ms and 100 of 5 ms, all alike, any draw gives 2,
    so the interval is 2 to 2.

    Args:
        reference_ms: times of the reference's steps in ms, in the order in which they were taken.
        own_ms: the same of the other run.
        in_turns: whether the two took turns, so that their steps of one number are near in time. Then the same segments
            are drawn of both.

    Returns:
        None if a run has fewer than 40 steps, two a segment.
    """
    if min(len(reference_ms), len(own_ms)) < _LEAST_STEPS:
        return None
    generator = np.random.default_rng(_SEED)
    drawn = [generator.integers(SEGMENTS, size=(_DRAWS, SEGMENTS)) for _ in range(2)]
    if in_turns and len(reference_ms) == len(own_ms):
        drawn[1] = drawn[0]
    ratios = _drawn_medians(reference_ms, drawn[0]) / _drawn_medians(own_ms, drawn[1])
    low, high = np.quantile(ratios, [0.025, 0.975])
    return Interval(float(low), float(high))


def _drawn_medians(times_ms: Sequence[float], drawn: np.ndarray) -> np.ndarray:
    """Return [_DRAWS] medians, each of the segments that a row of `drawn` [_DRAWS, SEGMENTS] numbers."""
    segments = np.array_split(np.asarray(times_ms, dtype=np.float64), SEGMENTS)
    return np.array([np.median(np.concatenate([segments[i] for i in each])) for each in drawn])
