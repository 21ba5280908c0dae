"""What each program of the persistent kernel does and when (arXiv 2305.06942 shows it of 32 workgroups)."""

import itertools
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from dlrm_overlap.bench.harness.progress import counted
from dlrm_overlap.bench.harness.recorded import LEAD_MS
from dlrm_overlap.bench.harness.workload import Workload
from dlrm_overlap.comm.turns import begin_together
from dlrm_overlap.config import InputError
from dlrm_overlap.embedding.backends.base import Forward
from dlrm_overlap.embedding.options import ExchangeOptions
from dlrm_overlap.embedding.steps import BatchSizes, Step
from dlrm_overlap.kernels.schedule import TaskGrid


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
    halves = workload.open_halves(replace(options, trace=True))
    for ids in counted("steps", list(itertools.islice(itertools.cycle(workload.batches), steps + 1))):
        step = Step(list(ids.inputs), BatchSizes.of(workload.batch_sizes))
        begin_together(workload.group, workload.device, LEAD_MS)
        halves.forward.start(step)
        halves.forward.finish(step)
    torch.cuda.synchronize(workload.device)
    trace = _trace_of(halves.forward)
    dist.barrier(workload.group)
    halves.close()
    return trace


def _trace_of(forward: Forward) -> torch.Tensor:
    from dlrm_overlap.embedding.backends.fused import SlicedForward

    assert isinstance(forward, SlicedForward)
    traces = list(forward.traces.values())
    if len(traces) != 1:
        raise InputError(f"{len(traces)} kernels pool these tables; give all tables one dim and type")
    return traces[0].cpu()


def describe_tasks(trace: torch.Tensor, schedule: str, rank: int, world_size: int, shown: int) -> list[dict[str, Any]]:
    """Return a row for each task of `shown` programs, those that began first, last and evenly between, in their order.

    Example: of 3 programs, 2 shown are the one that began first and the one that began last.

    Args:
        trace: [tasks, 6] int64 in the order of the tasks, columns as `slices.TRACE_COLUMNS` has them.
        schedule: linear | remote_first | balanced.
        rank: whose tasks they are.
        world_size: number of ranks.
        shown: greatest number of programs to tell of.

    Returns:
        Rows with `program` (0, 1, .. in the order of their begin), `sm`, `destination`, whether that is `local`, and in
        us `begin_us` and `end_us` since the first task of all began, `put_us` of these at the end in which the program
        counts the task, puts the slice and raises its flag, and `wait_us`, which a program waits for peers behind its
        last task.
    """
    tasks: list[list[int]] = trace.tolist()
    origin = min(start for _, _, start, *_ in tasks)
    began: dict[int, int] = {}  # program -> begin of its first task
    for program, _, start, *_ in tasks:
        began[program] = min(start, began.get(program, start))
    order = sorted(began, key=lambda program: began[program])
    count = min(shown, len(order))
    chosen = {order[round(i * (len(order) - 1) / max(1, count - 1))]: i for i in range(count)}
    # Who a task is for depends on how many tasks a destination has, not on how features and blocks share them.
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
