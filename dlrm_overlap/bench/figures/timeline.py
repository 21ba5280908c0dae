"""`bench timeline`: what runs beside what in a training step, and how much of it is exposed communication?

Every contender is a trainer as in `bench step`, one after the other. It trains a few steps under torch.profiler, which
writes a trace a rank. The step is cut at kernels that mark its end on the main stream, where `bench step` takes its
times. Losses are not compared: `bench step` does so.

A row is a contender on one rank, the mean of its traced steps. `compute`, `exposed`, `copying` and `idle` are exclusive
and add up to the step; `observe.trace_summary` says what is exposed. `untraced_ms` is the median of steps before the
profiler was there, which shows by how much it slows steps down. The picture has a step of each contender on rank 0.
"""

from typing import Any

import torch.distributed as dist

from dlrm_overlap.bench.figures.step import build, contender_configs, describe_run
from dlrm_overlap.bench.harness.progress import counted
from dlrm_overlap.bench.harness.step_trace import TracedSteps, read_steps
from dlrm_overlap.bench.harness.training_runs import TrainingRun, read_batches
from dlrm_overlap.bench.harness.workload import collect_garbage
from dlrm_overlap.bench.report.rows import command_line, report
from dlrm_overlap.bench.report.timeline_picture import draw
from dlrm_overlap.bench.step_request import TimelineRequest
from dlrm_overlap.config import Config
from dlrm_overlap.data.batch import Batch
from dlrm_overlap.launching.environment import environment
from dlrm_overlap.observe.metrics import quantile
from dlrm_overlap.train.ranks import Ranks

_UNTRACED_STEPS = 50
_SHOWN = (
    "contender", "rank", "untraced_ms", "step_ms", "compute_ms", "exposed_ms", "exposed_most_ms", "copying_ms",
    "idle_ms", "exposed_fraction", "exposed_most_fraction", "idle_fraction",
)  # fmt: skip


def run(request: TimelineRequest, ranks: Ranks) -> int:
    """Measure the figure; on rank 0 print its table, append its rows and draw the picture. All ranks call this.

    Returns:
        The exit code 0.
    """
    rows: list[dict[str, Any]] = []
    traced: dict[str, TracedSteps] = {}
    batches: list[Batch] = []
    configs = contender_configs(ranks, request.contenders)
    ranks.connect()
    for name, config in counted("contenders", list(configs.items())):
        row, traced[name] = _trace(request, ranks, name, config, batches)
        collect_garbage(ranks.device)
        gathered: list[Any] = [None] * ranks.world.world_size
        dist.all_gather_object(gathered, row)
        rows += gathered
    if ranks.world.rank == 0:
        picture = request.output.with_suffix(".svg")
        first = rows[0]
        shape = (
            f"{first['tables']} tables, dim {first['dim']}, {first['arch']}, {first['precision']}, global batch "
            f"{first['global_batch']}"
        )
        draw(
            traced, f"A traced step on rank 0 of {environment().get('gpu', 'a CPU')}; {shape}", command_line(), picture
        )
        report(rows, [], request.output, f"{shape}, {ranks.world.world_size} ranks", _SHOWN)
        print(f"picture: {picture}\ntraces:  {request.output.with_suffix('')}")
    return 0


def _trace(
    request: TimelineRequest, ranks: Ranks, name: str, config: Config, batches: list[Batch]
) -> tuple[dict[str, Any], TracedSteps]:
    """Return this rank's row of the contender `name`, and its traced steps; the first call fills `batches`."""
    trainer = build(ranks, name, config)
    batches += [] if batches else read_batches(trainer, request.batches)
    run = TrainingRun(name, trainer, batches)
    untraced_ms, _ = run.time(_UNTRACED_STEPS)
    path = request.output.with_suffix("") / f"{name}_rank_{ranks.world.rank}.json.gz"
    run.trace(request.steps, path)
    steps = read_steps(path)
    row = (
        {"kind": request.kind, "contender": name, "rank": ranks.world.rank}
        | describe_run(run, request.batches)
        | {"untraced_ms": quantile(untraced_ms, 0.5)}
        | steps.columns()
    )
    run.close()
    return row, steps
