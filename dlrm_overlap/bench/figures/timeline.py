"""`bench timeline`: which kernels run side by side in a training step, and how much of it is exposed communication?

Every contender is a trainer as in `bench step`, one after the other. It trains a few steps under torch.profiler, which
writes a trace a rank. The step is cut at kernels that mark its end on the main stream, where `bench step` takes its
times. Losses are not compared: `bench step` does so.

A row is a contender on one rank, the mean of its traced steps. `compute`, `exposed`, `copying` and `idle` are exclusive
and add up to the step; `observe.trace_summary` defines exposed. `untraced_ms` is the median of steps before the
profiler was there, which shows by how much it slows steps down. The picture has a step of each contender on rank 0.
"""

import pathlib
import textwrap
from collections.abc import Mapping
from typing import Any

import matplotlib
import torch.distributed as dist
from matplotlib.figure import Figure

from dlrm_overlap.bench.figures.step import build, contender_configs, describe_run
from dlrm_overlap.bench.harness.timing import counted
from dlrm_overlap.bench.harness.traces import TracedSteps, read_steps
from dlrm_overlap.bench.harness.training_runs import TrainingRun, read_batches
from dlrm_overlap.bench.harness.workload import collect_garbage
from dlrm_overlap.bench.report.rows import command_line, report
from dlrm_overlap.bench.request import TimelineRequest
from dlrm_overlap.config import Config
from dlrm_overlap.data.batch import Batch
from dlrm_overlap.launching.environment import environment
from dlrm_overlap.observe.metrics import quantile
from dlrm_overlap.observe.timeline import draw_lanes, lanes_of, legend_keys
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
        report(rows, [], request.output, _SHOWN)
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


def draw(traced: Mapping[str, TracedSteps], title: str, command: str, path: pathlib.Path) -> None:
    """Draw a typical step of each contender, one below the other on one axis of time, and write it to `path`, an SVG.

    Args:
        traced: by contender.
        title: the shape and the hardware.
        command: that has measured it.
        path: the file's folder must exist.
    """
    drawn = {name: steps.during(steps.typical) for name, steps in traced.items()}
    ends_ms = [(steps.typical.end - steps.typical.begin) * 1e-3 for steps in traced.values()]
    heights = [len(lanes_of(work)) + 2.2 for work in drawn.values()]
    # Text stays text, and the same steps give the same file.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "timeline", "font.size": 8}):
        figure = Figure(figsize=(10, 1.1 + 0.24 * sum(heights)), layout="constrained")
        panels = figure.subplots(len(drawn), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
        for axes, (name, steps), end_ms in zip(panels, traced.items(), ends_ms, strict=True):
            draw_lanes(axes, drawn[name], steps.typical.begin, max(ends_ms))
            axes.axvline(end_ms, color="black", lw=1, ls="--")
            exposed, idle = (share / steps.shares.length for share in (steps.shares.exposed, steps.shares.idle))
            text = f"{exposed:.1%} exposed communication, {idle:.1%} idle"
            axes.set_title(f"{name}: this step {end_ms:.2f} ms; of {len(steps.steps)} steps {text}", loc="left")
        panels[-1].set(xlabel="time in the step, ms", xlim=(0, 1.01 * max(ends_ms)))
        keys = legend_keys([each for work in drawn.values() for each in work])
        figure.legend(handles=keys, loc="outside upper center", ncols=6, frameon=False, title=title)
        figure.supxlabel(textwrap.fill(command, 150), fontsize=7, family="monospace")
        figure.savefig(path, metadata={"Date": None})
