"""`bench programs`: when does each program of the persistent kernel pool, put and wait?

The figure of arXiv 2305.06942 that shows 32 persistent workgroups. `fused`, with the configuration's put and schedule,
runs a few steps and then one whose kernel writes when each task began and ended. A row is a task of one of the programs
that are shown, on rank 0. `bench report` draws them. Outputs are compared with the baseline's first, and if they differ
no row is reported. A CPU's kernels have no clock, so the figure needs GPUs.
"""

import itertools
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from dlrm_overlap.bench.harness.agreement import check_outputs, disagreements
from dlrm_overlap.bench.harness.contenders import Baseline, Overlap, close_all
from dlrm_overlap.bench.harness.limits import describe
from dlrm_overlap.bench.harness.timing import counted
from dlrm_overlap.bench.harness.traces import LEAD_MS
from dlrm_overlap.bench.harness.turns import begin_together
from dlrm_overlap.bench.harness.workload import Workload, make_workload, read_ids
from dlrm_overlap.bench.report.rows import report
from dlrm_overlap.bench.request import ProgramsRequest
from dlrm_overlap.config import InputError
from dlrm_overlap.embedding.options import ExchangeOptions
from dlrm_overlap.embedding.steps import BatchSizes, Step
from dlrm_overlap.kernels.schedule import TaskGrid
from dlrm_overlap.train.ranks import Ranks

_BACKEND = "fused"
_PROGRAMS = 32  # that are shown
_SHOWN = ("program", "sm", "destination", "local", "begin_us", "end_us", "put_us", "wait_us")


def run(request: ProgramsRequest, ranks: Ranks) -> int:
    """Measure the figure; on rank 0 print its table and append its rows. All ranks call this.

    Returns:
        The exit code: 1 if outputs differ from the baseline's, and there is no row.
    """
    group = ranks.connect()
    config = request.shape(ranks.config, ranks.world.world_size)
    sparse = read_ids(config, group, ranks.device)
    workload = make_workload(config, sparse, group, ranks.device, ranks.world.local_world_size)
    options = replace(workload.exchange_options(config.embedding, _BACKEND), backward="collective")
    contenders = [Baseline(workload), Overlap(workload, options)]
    faults = disagreements(contenders, check_outputs(contenders, workload))
    close_all(contenders, workload)
    schedule = options.resolved_schedule
    rows: list[dict[str, Any]] = []
    if not faults:
        trace = trace_programs(workload, options, request.iterations)
        head = {"kind": request.kind, "contender": _BACKEND, "put": options.resolved_put, "schedule": schedule}
        tasks = describe_tasks(trace, schedule, workload.rank, group.size(), _PROGRAMS)
        rows = [head | {"rank": 0} | task | describe(config, workload) for task in tasks]
    if ranks.world.rank == 0:
        title = f"{len(rows)} tasks of {_PROGRAMS} programs on rank 0, {schedule}"
        report(rows, faults, request.output, _SHOWN, title)
    return 1 if faults else 0


@torch.no_grad()
def trace_programs(workload: Workload, options: ExchangeOptions, steps: int) -> torch.Tensor:
    """Run `steps` steps and one more, and return the trace of that one, [tasks, 6] int64, see `TRACE_COLUMNS`.

    All ranks call this, on GPUs.

    Args:
        workload: tables and ids.
        options: of a backend with slices.
        steps: before the traced one; one at least, since the first compiles the kernel.

    Raises:
        InputError: if one kernel does not pool all tables.
    """
    from dlrm_overlap.embedding.backends.fused import SlicedForward

    halves = workload.open_halves(replace(options, trace=True))
    forward = halves.forward
    assert isinstance(forward, SlicedForward)
    for ids in counted("steps", list(itertools.islice(itertools.cycle(workload.batches), steps + 1))):
        step = Step(list(ids.inputs), BatchSizes.of(workload.batch_sizes))
        begin_together(workload.group, workload.device, LEAD_MS)
        forward.start(step)
        forward.finish(step)
    torch.cuda.synchronize(workload.device)
    traces = [trace.cpu() for trace in forward.traces.values()]
    dist.barrier(workload.group)
    halves.close()
    if len(traces) != 1:
        raise InputError(f"{len(traces)} kernels pool these tables; give all tables one dim and type")
    return traces[0]


def describe_tasks(trace: torch.Tensor, schedule: str, rank: int, world_size: int, shown: int) -> list[dict[str, Any]]:
    """Return a row for each task of `shown` programs, those that began first, last and evenly between, in their order.

    Example: of 3 programs, 2 shown are the one that began first and the one that began last.

    Args:
        trace: [tasks, 6] int64 in the order of the tasks, columns as `slices.TRACE_COLUMNS` has them.
        schedule: linear | remote_first | balanced.
        rank: whose tasks they are.
        world_size: number of ranks.
        shown: greatest number of programs.

    Returns:
        Rows with `program` (0, 1, .. in the order of their begin), `sm`, `destination`, whether that is `local`, and in
        us `begin_us` and `end_us` since the first task of all began, `put_us` of these at the end in which the program
        counts the task, puts the slice and raises its flag, and `wait_us`, the program's wait for peers after its last
        task.
    """
    tasks: list[list[int]] = trace.tolist()
    origin = min(start for _, _, start, *_ in tasks)
    began: dict[int, int] = {}  # program -> begin of its first task
    for program, _, start, *_ in tasks:
        began[program] = min(start, began.get(program, start))
    by_begin = sorted(began, key=lambda program: began[program])
    count = min(shown, len(by_begin))
    chosen = {by_begin[round(i * (len(by_begin) - 1) / max(1, count - 1))]: i for i in range(count)}
    # A task's destination depends on how many tasks a destination has, not on how features and blocks share them.
    grid = TaskGrid(rank, world_size, 1, len(tasks) // world_size, 1, 1)
    rows = []
    for position, (program, sm, start, end, put, wait) in enumerate(tasks):
        if program in chosen:
            destination = grid.task_at(position, schedule).destination
            times = {"begin_us": start - origin, "end_us": end - origin, "put_us": put, "wait_us": wait}
            rows.append(
                {"program": chosen[program], "sm": sm, "destination": destination, "local": destination == rank}
                | {name: ns / 1e3 for name, ns in times.items()}
            )
    return sorted(rows, key=lambda row: (row["program"], row["begin_us"]))
