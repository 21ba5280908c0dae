"""Whether contenders agree with a reference, in outputs, rows or losses. Figures report no time where one does not."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from dlrm_overlap.bench.harness.contenders import Contender
from dlrm_overlap.bench.harness.timing import greatest
from dlrm_overlap.bench.harness.workload import Workload

# The greatest difference from the baseline that agrees, relative to the baseline's greatest element: sums of a hundred
# rows in another order, or one unit in the last place of the type, the wire's or the rows'.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}
# The same for rows, relative to their table's greatest change: a row of a skewed table sums hundreds of thousands of
# gradients in another order. Element-wise Adagrad divides by the element's own sum, which is small where gradients
# cancel.
ROW_TOLERANCE = {"sgd": 1e-4, "rowwise_adagrad": 1e-4, "adagrad": 1e-3}

_ROW_STEPS = 2  # so that the second step starts from the rows that the first has left
_CHUNK_ELEMENTS = 1 << 26  # bounds the scratch of a comparison of large tables

# Relative difference of a loss that rounding alone may cause within 20 steps at 3% of MLPerf's learning rates. A
# compiled dense part keeps more digits between its products than an eager one: on a CPU, MLPerf's DLRM-DCNv2 in bf16,
# losses of the two part by 1e-4. Tables that learn 10% too fast make 4.5e-4, tables that do not learn 4e-3.
_ROUNDING = {"fp32": 1e-4, "tf32": 3e-4, "bf16": 3e-4}
_NOISE_FACTOR = 4.0  # times the reference's difference from itself: one draw of a random number
_MOST_NOISE = 5e-4  # beyond, the tolerance would be 2e-3, half of the difference that tables make that do not learn


@dataclass(frozen=True)
class Agreement:
    """The greatest difference of a contender from the reference, over all batches, steps and ranks."""

    max_difference: float
    """infinite where it is not a number"""
    tolerance: float
    """the greatest difference that agrees"""
    equal: bool
    """whether both are the same bit for bit"""

    @property
    def agrees(self) -> bool:
        """Whether the difference is within the tolerance."""
        return self.max_difference <= self.tolerance


def disagreements(contenders: Sequence[Contender], agreements: Sequence[Agreement], what: str = "outputs") -> list[str]:
    """Return a fault for each contender that disagrees in `what`."""
    return [
        f"{contender.name}: {what} differ from the baseline's by {agreement.max_difference:.1e}, tolerance "
        f"{agreement.tolerance:.1e}; no time is reported"
        for contender, agreement in zip(contenders, agreements, strict=True)
        if not agreement.agrees
    ]


@torch.no_grad()
def check_outputs(contenders: Sequence[Contender], workload: Workload) -> list[Agreement]:
    """Compare every contender's outputs with those of the first, on every batch and rank. All ranks call this."""
    found = [[0.0, 0.0] for _ in contenders]
    scale = 0.0
    for ids in workload.batches:
        expected = contenders[0].step(ids).clone()
        scale = max(scale, expected.abs().max().item())
        for i, contender in enumerate(contenders):
            output = contender.step(ids)
            difference = _finite((output - expected).abs().max().item())
            found[i] = [max(found[i][0], difference), max(found[i][1], float(not torch.equal(output, expected)))]
            del output  # it may be a window, which must be free before the next step
    tolerance = TOLERANCE[workload.wire_dtype] * greatest([scale], workload.device, workload.group)[0]
    by_contender = [greatest(values, workload.device, workload.group) for values in found]
    return [Agreement(difference, tolerance, not differs) for difference, differs in by_contender]


def _finite(difference: float) -> float:
    """Return `difference`, or infinity for NaN."""
    return difference if math.isfinite(difference) else math.inf


@torch.no_grad()
def check_rows(
    contenders: Sequence[Contender], workload: Workload, batches: Sequence[object], optimizer: str
) -> list[Agreement]:
    """Let every contender update the same rows from the same start, and compare them with the first's.

    Differences of rows are relative to their table's greatest change, of a state to its own value. All ranks call this.
    Each state starts at a random value between 0.5 and 1.5: so a contender that takes the state of another row is found
    out, and no sum of gradients that cancel is divided by itself. At the end the rows are as they were before the first
    step, and the states as they started.

    Args:
        contenders: the baseline first.
        workload: the tables whose rows are updated.
        batches: arguments of the contenders' `step`; the first two are used.
        optimizer: sgd | rowwise_adagrad | adagrad; it decides the tolerance.
    """
    weights, states = rows_of(workload)
    generator = torch.Generator(workload.device).manual_seed(workload.rank)
    for state in states:
        state.uniform_(0.5, 1.5, generator=generator)
    live = weights + states
    start, reference = [tensor.clone() for tensor in live], []
    found: list[list[float]] = []
    for contender in contenders:
        _restore(live, start)
        for batch in batches[:_ROW_STEPS]:
            contender.step(batch)
        reference = reference or [tensor.clone() for tensor in live]
        by_table = [_row_difference(*rows) for rows in zip(weights, reference, start, strict=False)]
        by_table += [
            _greatest(lambda a, b: ((a - b) / b).abs(), *state)
            for state in zip(states, reference[len(weights) :], strict=True)
        ]
        equal = all(torch.equal(*pair) for pair in zip(live, reference, strict=True))
        found.append([max(map(_finite, by_table)), float(not equal)])
    _restore(live, start)
    tolerance = ROW_TOLERANCE[optimizer]
    for dtype in {workload.wire_dtype, weights[0].dtype} - {torch.float32}:
        tolerance = max(tolerance, _ROW_STEPS * TOLERANCE[dtype])
    by_contender = [greatest(values, workload.device, workload.group) for values in found]
    return [Agreement(worst, tolerance, not unequal) for worst, unequal in by_contender]


def rows_of(workload: Workload) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return this rank's rows, a tensor [rows, D] a table, and the optimizer's state of each table; SGD has none."""
    shards, tables = workload.layout.by_owner[workload.rank], workload.tables
    states = [tables.state(shard) for shard in shards]
    return [tables.weight(shard) for shard in shards], [state for state in states if state is not None]


def _restore(live: Sequence[torch.Tensor], start: Sequence[torch.Tensor]) -> None:
    for tensor, copy in zip(live, start, strict=True):
        tensor.copy_(copy)


def _row_difference(rows: torch.Tensor, expected: torch.Tensor, start: torch.Tensor) -> float:
    difference = _greatest(lambda a, b: (a - b).abs(), rows, expected)
    change = _greatest(lambda a, b: (a - b).abs(), expected, start)
    return difference / change if change else math.inf if difference else 0.0


def _greatest(measure: Callable[..., torch.Tensor], *tensors: torch.Tensor) -> float:
    """Return the greatest element of the results of `measure` on `tensors`, NaN if one is NaN."""
    chunks = zip(*(tensor.view(-1).split(_CHUNK_ELEMENTS) for tensor in tensors), strict=True)
    return torch.stack([measure(*(part.float() for part in parts)).max() for parts in chunks]).max().item()


def tolerances(precision: str, reference: Sequence[float], again: Sequence[float]) -> list[float]:
    """Return for each step the relative difference of a loss that still agrees.

    It is the difference that rounding may cause or, if that is more, four times the greatest difference so far between
    two runs of the reference. These differ in the rounding of a compiled dense part, and on GPUs because FBGEMM's
    update does not repeat its bits where rows are hot; training makes either grow.

    Args:
        precision: of the dense part, fp32, tf32 or bf16.
        reference: the losses of the contender that the others are compared with.
        again: those of the same contender once more.
    """
    noise = accumulate(map(_relative_difference, again, reference), max)
    return [max(_ROUNDING[precision], _NOISE_FACTOR * each) for each in noise]


def check_noise(reference: Sequence[float], again: Sequence[float]) -> Agreement:
    """Return whether two runs of the reference are near enough to each other to judge others by them."""
    return compare_losses(again, reference, [_MOST_NOISE] * len(reference))


def compare_losses(losses: Sequence[float], reference: Sequence[float], tolerance: Sequence[float]) -> Agreement:
    """Compare losses with the reference's, relatively, at the step where the tolerance is exceeded most."""
    differences = map(_relative_difference, losses, reference)
    found = [Agreement(each, most, each == 0) for each, most in zip(differences, tolerance, strict=True)]
    return max(found, key=lambda each: each.max_difference / each.tolerance)


def _relative_difference(loss: float, expected: float) -> float:
    """Return |loss - expected| / |expected|, infinite unless both are finite."""
    return _finite(abs(loss - expected) / max(abs(expected), 1e-30))
