"""`bench ablation`: how much time does each thing save that makes the step fast, alone and when it alone is left out?

There are two references: TorchRec as users run it, and our whole step as a CUDA graph. Every other contender is one of
the two with one thing more or less (`bench.step_contenders.ABLATION`). All are trainers of one configuration, checked
and timed as in `bench step`.

A GPU holds few trainers at once. So the contenders come in groups of three: a group's trainers are built, checked,
timed in turns with the two references, which stay, and closed. A row is a contender of a group, the references in every
group anew; `reference_ms` is the reference's median in the same turns, `over_reference` the quotient of the two.
`fullest_rank_rows` and `fullest_rank_columns` say how balanced the contender's plan is: the row elements that the
fullest rank reads, and its columns, over the mean of the ranks.
"""

from collections.abc import Sequence
from typing import Any

import torch._dynamo

from dlrm_overlap.bench.figures.step import CHECKED_STEPS, build, contender_configs, describe_run, judge, train_apart
from dlrm_overlap.bench.harness.agreement import LossAgreement
from dlrm_overlap.bench.harness.timing import Timing, counted, take_turns
from dlrm_overlap.bench.harness.training_runs import TrainingRun
from dlrm_overlap.bench.harness.workload import collect_garbage
from dlrm_overlap.bench.report.rows import report
from dlrm_overlap.bench.request import AblationRequest
from dlrm_overlap.bench.step_contenders import ABLATION
from dlrm_overlap.data.batch import table_keys
from dlrm_overlap.embedding.plan import fullest_rank
from dlrm_overlap.train.ranks import Ranks

_IN_A_GROUP = 3  # with both references five trainers, of some 20 GB a GPU on two GPUs where tables have 4M rows
_SHOWN = (
    "contender", "reference", "median_ms", "reference_ms", "over_reference", "host_ms", "fullest_rank_rows",
    "fullest_rank_columns", "max_relative_difference", "tolerance",
)  # fmt: skip


def run(request: AblationRequest, ranks: Ranks) -> int:
    """Measure the figure, print its table and append its rows on rank 0. All ranks call this.

    Returns:
        The exit code: 1 if losses disagree.
    """
    references = {name: reference for reference, others in ABLATION.items() for name in (reference, *others)}
    configs = contender_configs(ranks, (*ABLATION, *request.contenders))
    # Every trainer compiles the same functions, with layers of its own, which torch.compile takes for recompilations.
    with torch._dynamo.config.patch(recompile_limit=64):
        again, batches, _ = train_apart(ranks, configs, request.batches, lambda *_: None)

        def make(names: Sequence[str]) -> list[TrainingRun]:
            made = [TrainingRun(name, build(ranks, name, configs[name]), batches) for name in names]
            losses.update({each.name: each.losses(CHECKED_STEPS) for each in made})
            return made

        losses: dict[str, list[float]] = {}
        staying = make(tuple(ABLATION))
        rows = []
        for first in counted("groups", range(0, len(request.contenders), _IN_A_GROUP)):
            group = [*staying, *make(request.contenders[first : first + _IN_A_GROUP])]
            timings = take_turns([each.time for each in group], request.steps, ranks.device, shown=False)
            times = {each.name: timing for each, timing in zip(group, timings, strict=True)}
            columns = {"kind": request.kind, "group": first // _IN_A_GROUP}
            rows += [
                columns | _describe(each, request.batches) | _times(each.name, references[each.name], times)
                for each in group
            ]
            for each in group[len(staying) :]:
                each.close()
            del group, each
            collect_garbage(ranks.device)
    agreements, faults = judge(ranks.config.train.precision, losses, again)
    for row in rows:
        row |= _agreement(agreements[row["contender"]], agreements[row["reference"]], row["over_reference"])
    for each in staying:
        each.close()
    if ranks.world.rank == 0:
        report(rows, faults, request.output, _SHOWN)
    return 1 if faults else 0


def _describe(run: TrainingRun, batches: int) -> dict[str, Any]:
    """Return the columns of the contender's keys, of its plan and of the shape."""
    data = run.trainer.train_data
    pooling = dict(zip(table_keys(len(data.pooling)), data.pooling, strict=True))
    rows, columns = fullest_rank(run.trainer.plan, pooling, run.trainer.world.world_size)
    described = {"contender": run.name} | describe_run(run, batches)
    return described | {"fullest_rank_rows": rows, "fullest_rank_columns": columns}


def _times(name: str, reference: str, times: dict[str, Timing]) -> dict[str, Any]:
    """Return the columns of a contender's times, and of the reference's in the same turns."""
    timing, reference_ms = times[name], times[reference].times.median_ms
    return {
        "steps": timing.steps,
        **vars(timing.times),
        "p95_ms": timing.p95_ms,
        "host_ms": timing.host_ms,
        "reference": reference,
        "reference_ms": reference_ms,
        "over_reference": timing.times.median_ms / reference_ms,
    }


def _agreement(own: LossAgreement, reference: LossAgreement, over_reference: float) -> dict[str, Any]:
    """Return the columns of a contender's losses, and the quotient of the times if these and the reference's agree."""
    return {
        "over_reference": over_reference if own.agrees and reference.agrees else None,
        "checked_steps": CHECKED_STEPS,
        "max_relative_difference": own.max_relative_difference,
        "tolerance": own.tolerance,
        "agrees": own.agrees,
    }
