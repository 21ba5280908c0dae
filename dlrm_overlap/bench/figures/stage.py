"""`bench stage`, `sweep`, `weak`, `strong`: how long does the embedding stage's forward take under every backend?

Every contender takes the same ids, rows and types in one run, and no time is reported on a shape unless the outputs of
all agree there with the baseline's (Chen et al. 2024: FBGEMM's lookup, All-to-All, unpacking). `sweep` goes over many
shapes; weak and strong scaling over 1, 2, 4, .. ranks, with the tables of a rank or those of all ranks kept.

Contenders: the baseline; the same in chunks of tables, so that NCCL sends one while FBGEMM looks up the next; `pgas`
and `fused`; but in a sweep also TorchRec's own path and `nccl`. On one shape `stage` adds `fused` with each other put
(GPUs) and `pgas` with a copy of its window, as the drop-in returns it; or instead both under each asked order of tasks,
and `fused` with each asked slice size and number of programs.

A row is a contender on a shape: its times, the bytes that the stage must move, how fast memory and links of these GPUs
move bytes, the part of that limit that it reaches. `median_ms` is of steps back to back, as the CPU issues them, so on
small shapes it is the CPU's; `gpu_ms` of a step whose kernels have been issued before it begins, as in a captured step.
"""

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from dlrm_overlap.backends import EXCHANGED
from dlrm_overlap.bench.harness.agreement import check_outputs, disagreements
from dlrm_overlap.bench.harness.chunked import make_chunked
from dlrm_overlap.bench.harness.contenders import Baseline, Contender, Overlap, TorchRec, close_all
from dlrm_overlap.bench.harness.limits import RankIds, describe, find_limit, measure_ceilings, times
from dlrm_overlap.bench.harness.timing import counted, greatest, time_alone, time_contenders, time_parts
from dlrm_overlap.bench.harness.workload import Workload, collect_garbage, make_workload, read_ids
from dlrm_overlap.bench.rows import report
from dlrm_overlap.bench.shapes import shapes_of, worlds_of
from dlrm_overlap.config import Config, parse_multi_hot
from dlrm_overlap.embedding.options import PUTS, ExchangeOptions
from dlrm_overlap.train.ranks import Ranks

_GPU_REPETITIONS = 10
_PARTS = ("lookup_ms", "all_to_all_ms", "unpack_ms")
_SETTINGS = ("schedule", "put", "slice_bags", "programs_per_sm")
_SHOWN = (
    "contender", *_SETTINGS, "median_ms", "p10_ms", "p90_ms", "host_ms", "gpu_ms", "limit_ms", "fraction_of_limit",
    "speedup", *_PARTS, "equal",
)  # fmt: skip


def run(kind: str, ranks: Ranks) -> int:
    """Measure the figure; on rank 0 print each shape's table and append its rows. All ranks call this.

    Returns:
        The exit code: 1 if outputs disagree on some shape, for which no time is reported.
    """
    world, device, values = ranks.world, ranks.device, ranks.values
    shapes = {size: shapes_of(kind, values, ranks.config, size) for size in worlds_of(kind, world.world_size)}
    ranks.connect()
    wrong = False
    # The most ranks come first: symmetric memory numbers its collectives by process, so the ranks of a group must have
    # taken part in all of the earlier ones.
    for world_size in reversed(shapes):
        group = dist.group.WORLD if world_size == world.world_size else dist.new_group(list(range(world_size)))
        for shape in counted("shapes", shapes[world_size] if world.rank < world_size else []):
            assert isinstance(group, dist.ProcessGroup)
            workload = make_workload(shape, read_ids(shape, group, device), group, device, world.local_world_size)
            rows, faults = _measure(kind, values, shape, workload)
            if world.rank == 0:
                report(rows, faults, Path(values.output), _SHOWN)
            wrong |= bool(faults)
            del workload
            collect_garbage(device)
        wrong = greatest([float(wrong)], device)[0] > 0  # ranks that took no part wait here
    return int(wrong)


def make_contenders(kind: str, values: Any, config: Config, workload: Workload) -> list[Contender]:
    """Return who takes part, the baseline first."""
    every = [workload.exchange_options(config.embedding, name) for name in EXCHANGED]
    first = [Baseline(workload), *make_chunked(workload)]
    if kind == "sweep":
        return [*first, *(Overlap(workload, each) for each in every if each.backend != "nccl")]
    if kind == "stage":
        every += _settings(values, *every[1:]) or _variants(workload, *every[1:])
    return [*first, TorchRec(workload), *(Overlap(workload, each) for each in every)]


def _settings(values: Any, pgas: ExchangeOptions, fused: ExchangeOptions) -> list[ExchangeOptions]:
    staged = replace(fused, put="stores")  # in place there are no slices
    found = [replace(each, schedule=order) for each in (pgas, fused) for order in values.schedules]
    found += [replace(staged, slice_bags=bags) for bags in values.slice_bags]
    return found + [replace(fused, programs_per_sm=count) for count in values.programs_per_sm]


def _variants(workload: Workload, pgas: ExchangeOptions, fused: ExchangeOptions) -> list[ExchangeOptions]:
    others = [put for put in PUTS if put != fused.put]
    if workload.device.type == "cpu":  # where processes have one way to put a slice
        others = []
    return [*(replace(fused, put=put) for put in others), replace(pgas, copy_output=True)]


def _measure(kind: str, values: Any, config: Config, workload: Workload) -> tuple[list[dict[str, Any]], list[str]]:
    """Return a row for each contender and no fault, or no row and a fault for each contender that disagrees."""
    contenders, (group, device) = make_contenders(kind, values, config, workload), (workload.group, workload.device)
    agreements = check_outputs(contenders, workload)
    faults = disagreements(contenders, agreements)
    rows: list[dict[str, Any]] = []
    if not faults:
        counts = [own.forward_bytes(workload.wire_dtype) for own in RankIds.of_workload(workload)]
        limit, _ = find_limit(counts, measure_ceilings(group, device), group, device)
        timings = time_contenders(contenders, workload.batches, workload, values.iterations)
        alone = time_alone([each.cycle(workload.batches) for each in contenders], _GPU_REPETITIONS, device, group)
        shape = describe(config, workload) | _axes(config, workload)
        for contender, agreement, timing, turn in zip(contenders, agreements, timings, alone, strict=True):
            is_baseline = not isinstance(contender, Overlap)
            rows.append(
                {"kind": kind, "contender": contender.name, "is_baseline": is_baseline}
                | {**dict.fromkeys(_SETTINGS), **contender.columns(), **shape}
                | times(timing, timings[0], limit)
                | {"gpu_ms": turn.median_ms}
                | asdict(agreement)
                | dict.fromkeys(_PARTS)
            )
        parts = time_parts(contenders[0].step, len(_PARTS), workload.batches, workload, timings[0].steps)
        rows[0] |= dict(zip(_PARTS, parts, strict=True))
    close_all(contenders, workload)
    return rows, faults


def _axes(config: Config, workload: Workload) -> dict[str, Any]:
    """Return the columns of a map's axes that no other column gives."""
    spec = config.data.tables.multi_hot
    mean = None if isinstance(spec, list) else sum(parse_multi_hot(spec)) / 2
    return {"pooling_factor": mean, "tables_per_rank": len(workload.layout.by_owner[0])}
