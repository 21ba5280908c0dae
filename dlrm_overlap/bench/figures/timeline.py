"""`bench timeline`: which kernels run side by side in a training step, and how much of it is exposed communication?

Every contender is a trainer as in `bench step`, one after the other. It trains a few steps under torch.profiler, which
writes a trace a rank; ui.perfetto.dev shows them. The step is cut at kernels that mark its end on the main stream,
where `bench step` takes its times. Losses are not compared: `bench step` does so.

A row is a contender on one rank, the mean of its traced steps. `compute`, `exposed`, `copying` and `idle` are exclusive
and add up to the step; `observe.trace_summary` defines exposed. `untraced_ms` is the median of steps before the
profiler was there, which shows by how much it slows steps down.
"""

from typing import Any

import torch.distributed as dist

from dlrm_overlap.bench.figures.step import build, contender_configs, describe_run
from dlrm_overlap.bench.harness.timing import counted
from dlrm_overlap.bench.harness.training_runs import TrainingRun, mean_step_columns, read_batches
from dlrm_overlap.bench.harness.workload import collect_garbage
from dlrm_overlap.bench.report.rows import report
from dlrm_overlap.bench.request import TimelineRequest
from dlrm_overlap.data.batch import Batch
from dlrm_overlap.observe.metrics import quantile
from dlrm_overlap.train.ranks import Ranks

_UNTRACED_STEPS = 50
_SHOWN = (
    "contender", "rank", "untraced_ms", "step_ms", "compute_ms", "exposed_ms", "exposed_most_ms", "copying_ms",
    "idle_ms", "exposed_fraction", "exposed_most_fraction", "idle_fraction",
)  # fmt: skip


def run(request: TimelineRequest, ranks: Ranks) -> int:
    """Measure the figure; on rank 0 print its table and append its rows. All ranks call this.

    Returns:
        The exit code 0.
    """
    rows: list[dict[str, Any]] = []
    batches: list[Batch] = []
    configs = contender_configs(ranks, request.names)
    ranks.connect()
    folder, rank = request.output.with_suffix(""), ranks.world.rank
    for name, config in counted("contenders", list(configs.items())):
        trainer = build(ranks, name, config)
        batches = batches or read_batches(trainer, request.batches)
        run = TrainingRun(name, trainer, batches)
        untraced_ms, _ = run.time(_UNTRACED_STEPS)
        path = folder / f"{name}_rank_{rank}.json.gz"
        run.trace(request.steps, path)
        row = {"kind": request.kind, "contender": name, "rank": rank} | describe_run(run, request.batches)
        row |= {"untraced_ms": quantile(untraced_ms, 0.5)} | mean_step_columns(path)
        run.close()
        del trainer, run
        collect_garbage(ranks.device)
        gathered: list[Any] = [None] * ranks.world.world_size
        dist.all_gather_object(gathered, row)
        rows += gathered
    if rank == 0:
        report(rows, [], request.output, _SHOWN)
        print(f"traces: {folder}")
    return 0
