"""Whether contenders agree with a reference in outputs, rows or losses."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from dlrm_overlap.bench.harness.contenders import Contender
from dlrm_overlap.bench.harness.timing import max_over_ranks
from dlrm_overlap.bench.harness.workload import Workload
from dlrm_overlap.observe.agreement import difference

# Relative to the baseline's greatest element, by dtype of the wire or the rows: covers sums of a hundred rows in
# another order, or one unit in the last place.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}
# For rows, relative to their table's greatest change: a row of a skewed table sums hundreds of thousands of gradients
# in another order. Element-wise Adagrad divides by the element's sum, which is small where gradients cancel.
ROW_TOLERANCE = {"sgd": 1e-4, "rowwise_adagrad": 1e-4, "adagrad": 1e-3}

_ROW_STEPS = 2  # the second step starts from updated rows
_TINY = 1e-30  # scale of a table that does not change

# Relative difference of a loss that rounding alone may cause within 20 steps at 3% of MLPerf's learning rates. A
# compiled dense part keeps more digits between its products: for MLPerf's DLRM-DCNv2 in bf16 on a CPU, its losses
# differ from eager ones by 1e-4. Tables that learn 10% too fast cause 4.5e-4, tables that do not learn 4e-3.
_ROUNDING = {"fp32": 1e-4, "tf32": 3e-4, "bf16": 3e-4}
_NOISE_FACTOR = 4.0  # times the reference's difference from itself, which is a single sample
_MAX_NOISE = 5e-4  # above, the tolerance would exceed 2e-3, half the difference of tables that do not learn


class Agreement(NamedTuple):
    """Greatest difference between a contender and the reference, over batches, steps and ranks."""

    max_difference: float
    """0 if bit-identical, infinite if a value is not finite"""
    tolerance: float

    @property
    def agrees(self) -> bool:
        return self.max_difference <= self.tolerance


def disagreements(contenders: Sequence[Contender], agreements: Sequence[Agreement], what: str = "outputs") -> list[str]:
    return [
        f"{contender.name}: {what} differ from the baseline's by {agreement.max_difference:.1e}, tolerance "
        f"{agreement.tolerance:.1e}; no time is reported"
        for contender, agreement in zip(contenders, agreements, strict=True)
        if not agreement.agrees
    ]


@torch.no_grad()
def check_outputs(contenders: Sequence[Contender], workload: Workload) -> list[Agreement]:
    """Compare all contenders' outputs with the first contender's, on every batch; a collective."""
    found, scale = [0.0] * len(contenders), 0.0
    for ids in workload.batches:
        expected = contenders[0].step(ids).clone()
        scale = max(scale, expected.abs().max().item())
        for i, contender in enumerate(contenders):  # keep no output: its window must be free before the next step
            found[i] = max(found[i], _finite((contender.step(ids) - expected).abs().max().item()))
    scale, *found = max_over_ranks([scale, *found], workload.device)
    return [Agreement(difference, TOLERANCE[workload.wire_dtype] * scale) for difference in found]


@torch.no_grad()
def check_rows(
    contenders: Sequence[Contender], workload: Workload, batches: Sequence[object], optimizer: str
) -> list[Agreement]:
    """Compare each contender's rows and optimizer states after two updates with the first contender's; a collective.

    Differences of rows are relative to the greatest change in their table. States start with random values, so that
    reading the state of a wrong row makes a difference. Rows and states are restored at the end.
    """
    weights, states = rows_of(workload)
    generator = torch.Generator(workload.device).manual_seed(workload.rank)
    for state in states:
        state.uniform_(0.5, 1.5, generator=generator)
    live = weights + states
    start, reference = [tensor.clone() for tensor in live], list[torch.Tensor]()
    scales: list[torch.Tensor] = []
    found: list[float] = []
    for contender in contenders:
        torch._foreach_copy_(live, start)  # type: ignore[attr-defined]
        for batch in batches[:_ROW_STEPS]:
            contender.step(batch)
        if not reference:
            reference = [tensor.clone() for tensor in live]
            rows = zip(weights, start, strict=False)
            scales = [(end.float() - begin.float()).abs().max() for end, begin in rows] + reference[len(weights) :]
        differences = [
            ((ours.float() - theirs.float()).abs() / scale.clamp(min=_TINY)).max().item()
            for ours, theirs, scale in zip(live, reference, scales, strict=True)
        ]
        found.append(max(map(_finite, differences)))
    torch._foreach_copy_(live, start)  # type: ignore[attr-defined]
    tolerance = ROW_TOLERANCE[optimizer]
    for dtype in {workload.wire_dtype, weights[0].dtype} - {torch.float32}:
        tolerance = max(tolerance, _ROW_STEPS * TOLERANCE[dtype])
    return [Agreement(difference, tolerance) for difference in max_over_ranks(found, workload.device)]


def rows_of(workload: Workload) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return this rank's rows, a tensor [rows, D] per table, and its optimizer states, table by table."""
    shards, tables = workload.layout.by_owner[workload.rank], workload.tables
    return [tables.weight(shard) for shard in shards], [s for shard in shards for s in tables.states(shard)]


def _finite(difference: float) -> float:
    return difference if math.isfinite(difference) else math.inf


def judge_losses(
    precision: str, losses: Mapping[str, Sequence[float]], again: Sequence[float]
) -> tuple[dict[str, Agreement], list[str]]:
    """Return each contender's agreement with the losses of the first one, and a line for each contender that disagrees.

    The tolerance is the rounding error of `precision` or, if greater, four times the difference between the first
    contender and `again`, the losses of a second run of it.
    """
    reference, expected = next(iter(losses.items()))
    noise = _relative_difference(again, expected)
    if noise > _MAX_NOISE:  # no contender can be judged
        fault = (
            f"{reference}: its own losses differ by {noise:.1e}, relatively, between two runs, too much to judge "
            f"others (at most {_MAX_NOISE:g}), so no speedup is reported; lower the learning rates"
        )
        return dict.fromkeys(losses, Agreement(noise, _MAX_NOISE)), [fault]
    tolerance = max(_ROUNDING[precision], _NOISE_FACTOR * noise)
    agreements, faults = dict[str, Agreement](), list[str]()
    for name, found in losses.items():
        each = agreements[name] = Agreement(_relative_difference(found, expected), tolerance)
        if not each.agrees:
            faults.append(
                f"{name}: its loss differs from {reference}'s by {each.max_difference:.1e}, relatively; tolerance "
                f"{tolerance:.1e}; no speedup is reported"
            )
    return agreements, faults


def _relative_difference(losses: Sequence[float], expected: Sequence[float]) -> float:
    return max(difference(loss, wanted) for loss, wanted in zip(losses, expected, strict=True))
