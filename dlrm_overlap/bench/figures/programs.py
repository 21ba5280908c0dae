"""`bench programs`: when does each program of the persistent kernel pool, put and wait?

The figure of arXiv 2305.06942 that shows 32 persistent workgroups. `fused`, with the configuration's put and schedule,
runs a few steps and then one whose kernel writes when each task began and ended. A row is a task of one of the programs
that are shown, on rank 0. `bench report` draws them. Outputs are compared with the baseline's first, and if they differ
nothing is told. A CPU's kernels have no clock, so the figure needs GPUs.
"""

from dataclasses import replace
from typing import Any

from dlrm_overlap.bench.harness.agreement import check_outputs
from dlrm_overlap.bench.harness.contenders import Baseline, Overlap, close_all
from dlrm_overlap.bench.harness.programs import describe_tasks, trace_programs
from dlrm_overlap.bench.harness.workload import make_workload, read_ids
from dlrm_overlap.bench.report.columns import describe
from dlrm_overlap.bench.report.rows import report
from dlrm_overlap.bench.stage_request import ProgramsRequest
from dlrm_overlap.train.ranks import Ranks

_BACKEND = "fused"
_SHOWN = ("program", "sm", "destination", "local", "begin_us", "end_us", "put_us", "wait_us")


def run(request: ProgramsRequest, ranks: Ranks) -> int:
    """Measure the figure; on rank 0 print its table and append its rows. All ranks call this.

    Returns:
        The exit code: 1 if outputs differ from the baseline's, and no row is told.
    """
    group = ranks.connect()
    config = request.shape(ranks.config, ranks.world.world_size)
    sparse = read_ids(config, group, ranks.device)
    workload = make_workload(
        config, sparse, group, ranks.device, ranks.world.local_world_size, precision=config.train.precision
    )
    options = replace(workload.exchange_options(config.embedding, _BACKEND), backward="collective")
    contenders = [Baseline(workload), Overlap(workload, options)]
    agreement = check_outputs(contenders, workload)[1]
    close_all(contenders, workload)
    schedule = options.resolved_schedule
    rows: list[dict[str, Any]] = []
    faults = [] if agreement.agrees else [f"{_BACKEND}: outputs differ from the baseline's; nothing is told"]
    if agreement.agrees:
        trace = trace_programs(workload, options, request.iterations)
        traced = describe_tasks(trace, schedule, workload.rank, group.size(), request.programs)
        shape = describe(config, workload)
        head = {"kind": request.kind, "contender": _BACKEND, "put": options.resolved_put, "schedule": schedule}
        rows = [head | {"rank": 0} | task | shape for task in traced]
    if ranks.world.rank == 0:
        headline = f"{len(rows)} tasks of {request.programs} programs on rank 0, {schedule}"
        report(rows, faults, request.output, headline, _SHOWN)
    return 1 if faults else 0
