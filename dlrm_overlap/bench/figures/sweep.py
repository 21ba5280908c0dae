"""`bench sweep` and `bench grid`: on which shapes does it pay that the lookup sends the rows that it pools?

`sweep` goes over pooling factor, dim and batch; `grid` over batch and tables of a rank, the figure of arXiv 2305.06942.
Contenders: the baseline; the baseline in 2, 4 and 8 chunks, so that NCCL sends one while FBGEMM looks up the next; and
every backend that stores into its peers' memory. A backend is compared with the strongest baseline of a shape.

A row is a contender on a shape, with two times. `median_ms` is of steps back to back, as the CPU issues them, so on
small shapes it is the CPU's. `gpu_ms` is of a step whose kernels the CPU has issued before it begins, as those of a
captured step. Outputs of each shape are compared before it is timed; a shape on which
they differ gets no row. Rows are appended shape by shape, so those from before an end by force are there. On CPUs
all of it is a rehearsal, and the axes that are not given are those of toys.
"""

import itertools
import logging
from collections.abc import Callable
from typing import Any

from dlrm_overlap.backends import BACKENDS
from dlrm_overlap.bench.harness.agreement import check_outputs, disagreements
from dlrm_overlap.bench.harness.chunked import make_chunked
from dlrm_overlap.bench.harness.contenders import Baseline, Contender, Overlap, close_all
from dlrm_overlap.bench.harness.limits import describe, describe_tables, forward_limit, measure_ceilings, times
from dlrm_overlap.bench.harness.timing import in_time, time_contenders
from dlrm_overlap.bench.harness.turns import Turns
from dlrm_overlap.bench.harness.workload import Workload, collect_garbage, make_workload, read_ids
from dlrm_overlap.bench.report.map_plots import MAPS
from dlrm_overlap.bench.report.measured import Measured, hardware
from dlrm_overlap.bench.report.rows import append_rows, as_text, print_faults, print_table
from dlrm_overlap.bench.request import MapRequest
from dlrm_overlap.config import Config, parse_multi_hot
from dlrm_overlap.launching.environment import environment
from dlrm_overlap.train.ranks import Ranks

log = logging.getLogger("dlrm_overlap")

_GPU_REPETITIONS = 10


def run(request: MapRequest, ranks: Ranks) -> int:
    """Measure the figure; on rank 0 append its rows and print where it pays. All ranks call this.

    Returns:
        The exit code: 1 if outputs differ from the baseline's on some shape.
    """
    group = ranks.connect()
    ceilings = measure_ceilings(group, ranks.device)
    points = request.points(ranks.config, ranks.world.world_size, ranks.device.type)
    rows: list[dict[str, Any]] = []
    faults: list[str] = []
    workload, made_with = None, None
    for number, point in enumerate(in_time(request.most_seconds, "shapes", points, ranks.device, group), 1):
        tables = point.model.dim, point.data.tables.count
        ids = read_ids(point, group, ranks.device)
        if workload is None or tables != made_with:
            workload = None  # gives its tables back before the next ones are made
            collect_garbage(ranks.device)
            workload = make_workload(point, ids, group, ranks.device, ranks.world.local_world_size)
            made_with = tables
        else:
            workload = workload.with_ids(point, ids)
        found, wrong = _measure(request, point, workload, ceilings)
        rows += found
        faults += wrong
        if ranks.world.rank == 0 and found:
            append_rows(request.output, found)
        log.info("%s: shape %d of %d, %s", request.kind, number, len(points), _name(point))
    if ranks.world.rank == 0:
        print_faults(faults)
        if rows:
            print(hardware([environment()]))
            measured, layout = Measured(request.kind, request.kind, as_text(rows)), MAPS[request.kind]
            print("\n".join(layout.words(measured)))
            print_table(lines := layout.table(measured), list(lines[0]))
            print(f"rows in {request.output}")
    return 1 if faults else 0


def _name(point: Config) -> str:
    tables = describe_tables(point)
    return (
        f"{tables['tables']} tables of dim {tables['dim']}, {tables['multi_hot']} ids a bag, global batch "
        f"{point.train.global_batch_size}"
    )


def _measure(
    request: MapRequest, config: Config, workload: Workload, ceilings: tuple[float, float]
) -> tuple[list[dict[str, Any]], list[str]]:
    """Return a row for each contender and no fault, or no row and a fault for each contender that disagrees."""
    storing = [name for name, backend in BACKENDS.items() if backend.stores_to_peers]
    exchanges = [Overlap(workload, workload.exchange_options(config.embedding, name)) for name in storing]
    contenders: list[Contender] = [Baseline(workload), *make_chunked(workload, request.chunks), *exchanges]
    agreements = check_outputs(contenders, workload)
    faults = disagreements(contenders, agreements, f" on {_name(config)}")
    rows: list[dict[str, Any]] = []
    if not faults:
        limit = forward_limit(workload, ceilings)
        timings = time_contenders(contenders, workload.batches, workload, request.iterations, shown=False)
        pieces = [_cycle(contender, workload) for contender in contenders]
        alone = Turns(workload.group, workload.device).time(pieces, _GPU_REPETITIONS)
        baselines = [i for i, contender in enumerate(contenders) if not isinstance(contender, Overlap)]
        strongest = min(baselines, key=lambda i: timings[i].times.median_ms)
        gpu_ms = min(alone[i].median_ms for i in baselines)
        shape = describe(config, workload) | _axes(config, workload)
        for contender, timing, turn in zip(contenders, timings, alone, strict=True):
            rows.append(
                {"kind": request.kind, "contender": contender.name, "is_baseline": not isinstance(contender, Overlap)}
                | shape
                | times(timing, timings[0], limit)
                | {"speedup_over_strongest": timings[strongest].times.median_ms / timing.times.median_ms}
                | {"gpu_ms": turn.median_ms, "gpu_speedup_over_strongest": gpu_ms / turn.median_ms}
            )
    close_all(contenders, workload)
    return rows, faults


def _axes(config: Config, workload: Workload) -> dict[str, Any]:
    """Return the columns of the map's axes that no other figure has."""
    spec = config.data.tables.multi_hot
    mean = None if isinstance(spec, list) else sum(parse_multi_hot(spec)) / 2
    return {"pooling_factor": mean, "tables_per_rank": len(workload.layout.by_owner[0])}


def _cycle(contender: Contender, workload: Workload) -> Callable[[], object]:
    """Return a function that takes the contender's next step, on one batch after the other."""
    following = itertools.cycle(workload.batches)
    return lambda: contender.step(next(following))
