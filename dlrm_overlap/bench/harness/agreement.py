"""Whether contenders agree with a reference, in outputs, rows or losses. Figures report no time where one does not."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from dlrm_overlap.bench.harness.contenders import Contender
from dlrm_overlap.bench.harness.turns import greatest
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
    """The difference of a contender's outputs from the baseline's, over all batches and ranks."""

    equal: bool
    """whether all outputs are the same bit for bit"""
    max_abs_difference: float
    """of an element"""
    tolerance: float
    """the greatest difference that agrees"""

    @property
    def agrees(self) -> bool:
        """Whether the difference is finite and within the tolerance."""
        return self.max_abs_difference <= self.tolerance


@dataclass(frozen=True)
class RowAgreement:
    """The difference of a contender's rows and states from the baseline's after the same steps, on any rank."""

    equal: bool
    """whether rows and states are the same bit for bit"""
    deterministic: bool
    """whether the contender left the same bits when it took the same steps once more"""
    max_relative_difference: float
    """of rows relative to their table's greatest change, of a state relative to its own value"""
    tolerance: float
    """the greatest difference that agrees"""

    @property
    def agrees(self) -> bool:
        """Whether the difference is finite and within the tolerance."""
        return self.max_relative_difference <= self.tolerance


@dataclass(frozen=True)
class LossAgreement:
    """The difference of a contender's losses from the reference's."""

    max_relative_difference: float
    """at the step where it is greatest, compared with that step's tolerance"""
    tolerance: float
    """at that step"""
    step: int
    """that step, counted from 1"""

    @property
    def agrees(self) -> bool:
        """Whether no step's difference is above the tolerance; NaN is."""
        return self.max_relative_difference <= self.tolerance


def disagreements(contenders: Sequence[Contender], agreements: Sequence[Agreement], where: str = "") -> list[str]:
    """Return a fault for each contender whose outputs disagree; `where` follows its name."""
    return [
        f"{contender.name}{where}: outputs differ from the baseline's by {agreement.max_abs_difference:.1e}, tolerance "
        f"{agreement.tolerance:.1e}; no time is reported"
        for contender, agreement in zip(contenders, agreements, strict=True)
        if not agreement.agrees
    ]


@torch.no_grad()
def check_outputs(contenders: Sequence[Contender], workload: Workload) -> list[Agreement]:
    """Compare every contender's outputs with those of the first, on every batch and rank.

    All ranks call this. A difference that is not finite counts as infinite.
    """
    differences = [0.0] * len(contenders)
    unequal = [0.0] * len(contenders)
    scale = 0.0
    for ids in workload.batches:
        expected = contenders[0].step(ids).clone()
        scale = max(scale, expected.abs().max().item())
        for i, contender in enumerate(contenders):
            output = contender.step(ids)
            differences[i] = max(differences[i], _finite((output - expected).abs().max().item()))
            unequal[i] = max(unequal[i], float(not torch.equal(output, expected)))
            del output  # it may be a window, which must be free before the next step
    device, group = workload.device, workload.group
    tolerance = TOLERANCE[workload.wire_dtype] * greatest([scale], device, group)[0]
    pairs = zip(greatest(unequal, device, group), greatest(differences, device, group), strict=True)
    return [Agreement(not differs, difference, tolerance) for differs, difference in pairs]


def _finite(difference: float) -> float:
    """Return `difference`, or infinity for NaN."""
    return difference if math.isfinite(difference) else math.inf


@torch.no_grad()
def check_rows(
    contenders: Sequence[Contender], workload: Workload, batches: Sequence[object], optimizer: str
) -> list[RowAgreement]:
    """Let every contender update the same rows, twice from the same start, and compare them with the first's.

    All ranks call this. Each state starts at a random value between 0.5 and 1.5: so a contender that takes the state of
    another row is found out, and no sum of gradients that cancel is divided by itself. At the end the rows are as they
    were before the first step, and the states as they started.

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
        prints = []
        for _ in range(2):
            _restore(live, start)
            for batch in batches[:_ROW_STEPS]:
                contender.step(batch)
            prints.append(fingerprint(live))
        reference = reference or [tensor.clone() for tensor in live]
        by_table = [_row_difference(*rows) for rows in zip(weights, reference, start, strict=False)]
        by_table += [
            _greatest(lambda a, b: ((a - b) / b).abs(), *state)
            for state in zip(states, reference[len(weights) :], strict=True)
        ]
        equal = all(torch.equal(*pair) for pair in zip(live, reference, strict=True))
        found.append([float(not equal), float(prints[0] != prints[1]), max(map(_finite, by_table))])
    _restore(live, start)
    tolerance = ROW_TOLERANCE[optimizer]
    for dtype in {workload.wire_dtype, weights[0].dtype} - {torch.float32}:
        tolerance = max(tolerance, _ROW_STEPS * TOLERANCE[dtype])
    by_contender = [greatest(values, workload.device, workload.group) for values in found]
    return [RowAgreement(not unequal, not differs, worst, tolerance) for unequal, differs, worst in by_contender]


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


def fingerprint(tensors: Sequence[torch.Tensor]) -> int:
    """Return a number made of all bits of `tensors`. Two different contents share it with a chance of about 2^-60."""
    number = 0
    for tensor in tensors:
        bits = torch.int32 if tensor.dtype.itemsize == 4 else torch.int16
        for chunk in tensor.view(-1).view(bits).split(_CHUNK_ELEMENTS):
            odd = torch.arange(1, 2 * chunk.numel(), 2, device=chunk.device)
            number = hash((number, (chunk * odd).sum().item()))
    return number


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
    return _finite(abs(loss - expected) / max(abs(expected), 1e-30))
