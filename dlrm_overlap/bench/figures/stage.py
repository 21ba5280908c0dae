"""`bench stage`, `sweep`, `weak`, `strong`: how long does the embedding stage's forward take under every backend?

Every contender takes the same ids, rows and types in one run, and no time is reported on a shape unless the outputs of
all agree there with the baseline's (Chen et al. 2024: FBGEMM's lookup, All-to-All, unpacking). `sweep` goes over many
shapes; weak and strong scaling over 1, 2, 4, .. ranks, with the tables of a rank or those of all ranks kept.

Contenders: the baseline; the same in chunks of tables, so that NCCL sends one while FBGEMM looks up the next; `pgas`
and `fused`; but in a sweep also TorchRec's own path and `nccl`. On one shape `stage` adds `fused` with each other put
(GPUs) and `pgas` with a copy of its window, as the drop-in returns it; under `--embedding.hosts N` both between N
emulated hosts, whose messages take the links of this one; or instead both under each asked order of tasks, and `fused`
with each asked slice size and number of programs.

A row is a contender on a shape: its times, the bytes that the stage must move, how fast memory and links of these GPUs
move bytes, the part of that limit that it reaches. `median_ms` is of steps back to back, as the CPU issues them, so on
small shapes it is the CPU's; `gpu_ms` of a step whose kernels have been issued before it begins, as in a captured step.
"""

import itertools
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import torch.distributed as dist

from dlrm_overlap.backends import EXCHANGED
from dlrm_overlap.bench.harness.agreement import check_outputs, disagreements
from dlrm_overlap.bench.harness.chunked import make_chunked
from dlrm_overlap.bench.harness.contenders import Baseline, Contender, Overlap, TorchRec, close_all
from dlrm_overlap.bench.harness.limits import describe, forward_limit, measure_ceilings, times
from dlrm_overlap.bench.harness.timing import Turns, counted, greatest, time_contenders, time_parts
from dlrm_overlap.bench.harness.workload import Workload, collect_garbage, make_workload, read_ids
from dlrm_overlap.bench.report.rows import report
from dlrm_overlap.bench.request import ForwardRequest, StageRequest
from dlrm_overlap.comm.network import missing_puts
from dlrm_overlap.config import Config, EmbeddingConfig, parse_multi_hot
from dlrm_overlap.embedding.options import PUTS, ExchangeOptions
from dlrm_overlap.train.ranks import Ranks

_GPU_REPETITIONS = 10
_PARTS = ("lookup_ms", "all_to_all_ms", "unpack_ms")
_SETTINGS = ("schedule", "put", "slice_bags", "programs_per_sm")
_SHOWN = (
    "contender", *_SETTINGS, "median_ms", "p10_ms", "p90_ms", "host_ms", "gpu_ms", "limit_ms", "fraction_of_limit",
    "speedup", *_PARTS, "equal",
)  # fmt: skip


def run(request: ForwardRequest, ranks: Ranks) -> int:
    """Measure the figure; on rank 0 print each shape's table and append its rows. All ranks call this.

    Returns:
        The exit code: 1 if outputs disagree on some shape, for which no time is reported.
    """
    ranks.connect()
    world, device = ranks.world, ranks.device
    wrong = False
    # The most ranks come first: symmetric memory numbers its collectives by process, so the ranks of a group must have
    # taken part in all of the earlier ones.
    for world_size in reversed(request.worlds(world.world_size)):
        group = dist.group.WORLD if world_size == world.world_size else dist.new_group(list(range(world_size)))
        shapes = request.shapes(ranks.config, world_size) if world.rank < world_size else []
        for shape in counted("shapes", shapes):
            assert isinstance(group, dist.ProcessGroup)
            workload = make_workload(shape, read_ids(shape, group, device), group, device, world.local_world_size)
            rows, faults = _measure(request, shape, workload)
            if world.rank == 0:
                report(rows, faults, request.output, _SHOWN)
            wrong |= bool(faults)
            del workload
            collect_garbage(device)
        wrong = greatest([float(wrong)], device)[0] > 0  # ranks that took no part wait here
    return int(wrong)


def make_contenders(request: ForwardRequest, config: EmbeddingConfig, workload: Workload) -> list[Contender]:
    """Return who takes part, the baseline first."""
    hosts, config = config.hosts, replace(config, hosts="auto")
    every = [workload.exchange_options(config, name) for name in EXCHANGED]
    first = [Baseline(workload), *make_chunked(workload, request.chunks)]
    if request.kind == "sweep":
        return [*first, *(Overlap(workload, each) for each in every if each.backend != "nccl")]
    if isinstance(request, StageRequest):
        _, pgas, fused = every
        every += _settings(request, pgas, fused) or _variants(hosts, workload, pgas, fused)
    return [*first, TorchRec(workload), *(Overlap(workload, each) for each in every)]


def _settings(request: StageRequest, pgas: ExchangeOptions, fused: ExchangeOptions) -> list[ExchangeOptions]:
    staged = replace(fused, put="stores")  # in place there are no slices
    found = [replace(each, schedule=order) for each in (pgas, fused) for order in request.schedules]
    found += [replace(staged, slice_bags=bags) for bags in request.slice_bags]
    return found + [replace(fused, programs_per_sm=count) for count in request.programs_per_sm]


def _variants(hosts: Any, workload: Workload, pgas: ExchangeOptions, fused: ExchangeOptions) -> list[ExchangeOptions]:
    on_cpu = workload.device.type == "cpu"  # where processes have one way to put a slice
    puts = [replace(fused, put=put) for put in PUTS if put != fused.put and not on_cpu]
    carriers = ("messages",) if on_cpu or missing_puts() else ("messages", "puts")
    emulated = [
        replace(each, hosts=hosts, between_hosts=carrier)
        for each in (pgas, fused)
        for carrier in carriers
        if isinstance(hosts, int) and hosts > 1
    ]
    return [*puts, replace(pgas, copy_output=True), *emulated]


def _measure(request: ForwardRequest, config: Config, workload: Workload) -> tuple[list[dict[str, Any]], list[str]]:
    """Return a row for each contender and no fault, or no row and a fault for each contender that disagrees."""
    contenders = make_contenders(request, config.embedding, workload)
    agreements = check_outputs(contenders, workload)
    faults = disagreements(contenders, agreements)
    rows: list[dict[str, Any]] = []
    if not faults:
        limit = forward_limit(workload, measure_ceilings(workload.group, workload.device))
        timings = time_contenders(contenders, workload.batches, workload, request.iterations)
        turns = Turns(workload.group, workload.device)
        alone = turns.time([_cycle(each, workload) for each in contenders], _GPU_REPETITIONS)
        shape = describe(config, workload) | _axes(config, workload)
        for contender, agreement, timing, turn in zip(contenders, agreements, timings, alone, strict=True):
            is_baseline = not isinstance(contender, Overlap)
            rows.append(
                {"kind": request.kind, "contender": contender.name, "is_baseline": is_baseline}
                | {**dict.fromkeys(_SETTINGS), **contender.columns(), **shape}
                | times(timing, timings[0], limit)
                | {"gpu_ms": turn.median_ms}
                | asdict(agreement)
                | _parts(contender, workload, timing.steps)
            )
    close_all(contenders, workload)
    return rows, faults


def _axes(config: Config, workload: Workload) -> dict[str, Any]:
    """Return the columns of a map's axes that no other column gives."""
    spec = config.data.tables.multi_hot
    mean = None if isinstance(spec, list) else sum(parse_multi_hot(spec)) / 2
    return {"pooling_factor": mean, "tables_per_rank": len(workload.layout.by_owner[0])}


def _cycle(contender: Contender, workload: Workload) -> Callable[[], object]:
    """Return a function that takes the contender's next step, on one batch after the other."""
    following = itertools.cycle(workload.batches)
    return lambda: contender.step(next(following))


def _parts(contender: Contender, workload: Workload, steps: int) -> dict[str, float | None]:
    """Return the columns of the baseline's parts, which are empty for the other contenders."""
    if not isinstance(contender, Baseline):
        return dict.fromkeys(_PARTS)
    found = time_parts(contender.step, len(_PARTS), workload.batches, workload, steps)
    return dict(zip(_PARTS, found, strict=True))
