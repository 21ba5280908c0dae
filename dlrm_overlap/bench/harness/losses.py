"""Whether contenders train alike: by how much their losses may part, and by how much they do."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

# Relative difference of a loss that rounding alone may cause within 20 steps at 3% of MLPerf's learning rates. A
# compiled dense part keeps more digits between its products than an eager one: on a CPU, MLPerf's DLRM-DCNv2 in bf16,
# losses of the two part by 1e-4. Tables that learn 10% too fast make 4.5e-4, tables that do not learn 4e-3.
_ROUNDING = {"fp32": 1e-4, "tf32": 3e-4, "bf16": 3e-4}
_NOISE_FACTOR = 4.0  # times what the reference parts from itself: one draw of a random number
_MOST_NOISE = 5e-4  # beyond, the tolerance would be 2e-3, half of what tables that do not learn make


@dataclass(frozen=True)
class LossAgreement:
    """Whether a contender's losses are the reference's."""

    max_relative_difference: float
    """at the step where it is greatest, compared with what that step tolerates"""
    tolerance: float
    """at that step"""
    step: int
    """that step, counted from 1"""

    @property
    def agrees(self) -> bool:
        """Whether no step's difference is above the tolerance; NaN is."""
        return self.max_relative_difference <= self.tolerance


def tolerances(precision: str, reference: Sequence[float], again: Sequence[float]) -> list[float]:
    """Return for each step the relative difference of a loss that still agrees.

    It is what rounding may cause or, if that is more, four times the greatest difference so far between two runs of
    the reference. These differ in the rounding of a compiled dense part, and on GPUs because FBGEMM's update does not
    repeat its bits where rows are hot; training makes either grow.

    Args:
        precision: of the dense part, fp32, tf32 or bf16.
        reference: the losses of the contender that the others are compared with.
        again: those of the same contender once more.
    """
    noise = accumulate(map(_relative_difference, again, reference), max)
    return [max(_ROUNDING[precision], _NOISE_FACTOR * each) for each in noise]


def check_noise(reference: Sequence[float], again: Sequence[float]) -> LossAgreement:
    """Return whether two runs of the reference are near enough to each other to judge others by them."""
    return compare_losses(again, reference, [_MOST_NOISE] * len(reference))


def compare_losses(losses: Sequence[float], reference: Sequence[float], tolerance: Sequence[float]) -> LossAgreement:
    """Compare losses step by step with the reference's."""
    found = [
        LossAgreement(_relative_difference(loss, expected), most, step)
        for step, (loss, expected, most) in enumerate(zip(losses, reference, tolerance, strict=True), 1)
    ]
    return max(found, key=lambda each: each.max_relative_difference / each.tolerance)


def _relative_difference(loss: float, expected: float) -> float:
    """Return |loss - expected| / |expected|, infinite unless both are finite."""
    difference = abs(loss - expected) / max(abs(expected), 1e-30)
    return difference if math.isfinite(difference) else math.inf
