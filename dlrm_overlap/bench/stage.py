"""The embedding stage's forward alone: `bench stage | weak | strong | slice | occupancy | schedule`.

Every contender meets the same ids, rows and types in one run, and no time is told unless all outputs agree with the
baseline's (Chen et al. 2024: FBGEMM's lookup, All-to-All, unpacking). A row is a contender: its times, the bytes that
the stage must move, how fast memory and links of these GPUs move any, and the fraction of that limit it reaches.
"""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist

from dlrm_overlap.bench.agreement import check_outputs
from dlrm_overlap.bench.columns import describe, times
from dlrm_overlap.bench.contenders import Baseline, Contender, Overlap
from dlrm_overlap.bench.limits import Limit, count_bytes, find_limit, measure_ceilings
from dlrm_overlap.bench.report import report
from dlrm_overlap.bench.request import Request
from dlrm_overlap.bench.rounds import time_contenders, time_parts
from dlrm_overlap.bench.skew import measure_skew
from dlrm_overlap.bench.sweeps import make_contenders
from dlrm_overlap.bench.workload import Workload, collect_garbage, make_workload, read_ids
from dlrm_overlap.config import Config
from dlrm_overlap.launching.launcher import World

_SETTINGS = ("schedule", "slice_bags", "programs_per_sm")
_SHOWN = (
    "contender", *_SETTINGS, "world_size", "median_ms", "p10_ms", "p90_ms", "host_ms",
    "fraction_of_limit", "speedup", "equal", "scaling_factor", "skew_fraction",
)  # fmt: skip


def run(request: Request, config: Config, world: World, device: torch.device) -> int:
    """Measure, print a table and append the rows on rank 0. The process group must exist; all ranks call this.

    Returns:
        The exit code: 1 if outputs disagree, in which case no time is told.
    """
    agreed = True
    measured: list[tuple[list[dict[str, Any]], list[str]]] = []
    # Fewer and fewer ranks: symmetric memory numbers its collectives by process, so ranks must have met in all of them.
    for world_size in reversed(request.worlds(world.world_size)):
        group = dist.group.WORLD if world_size == world.world_size else dist.new_group(list(range(world_size)))
        if world.rank < world_size:
            assert isinstance(group, dist.ProcessGroup)
            shape = request.shape(config, world_size)
            sparse = read_ids(shape, group)
            workload = make_workload(shape, sparse, group, device, world.local_world_size, request.check_ids)
            measured.append(_measure(request, shape, workload))
            agreed = not measured[-1][1]
            del workload
            collect_garbage(device)
        agreed = _all_agree(agreed, device)  # ranks that had no part wait here
        if not agreed:
            break
    if world.rank == 0:
        measured.reverse()
        _add_scaling(request.kind, [rows for rows, _ in measured])
        for rows, faults in measured:
            report(rows, faults, request.output, _headline(rows) if rows else "", _SHOWN)
    return 0 if agreed else 1


def _all_agree(agreed: bool, device: torch.device) -> bool:
    flag = torch.tensor(int(agreed), device=device)
    dist.all_reduce(flag, dist.ReduceOp.MIN)
    return bool(flag.item())


def _measure(request: Request, config: Config, workload: Workload) -> tuple[list[dict[str, Any]], list[str]]:
    """Return a row a contender, or else what disagrees."""
    contenders = make_contenders(request.kind, config.embedding, workload)
    agreements = check_outputs(contenders, workload)
    faults = [
        f"{contender.name}: outputs differ from the baseline's by {agreement.max_abs_difference:.1e}, tolerance "
        f"{agreement.tolerance:.1e}; no time is told"
        for contender, agreement in zip(contenders, agreements, strict=True)
        if not agreement.agrees
    ]
    rows: list[dict[str, Any]] = []
    if not faults:
        limit = _find_limit(workload)
        timings = time_contenders(contenders, workload.batches, workload, request.iterations)
        shape = describe(config, workload) | {"check_ids": request.check_ids}
        for contender, agreement, timing in zip(contenders, agreements, timings, strict=True):
            rows.append(
                {"kind": request.kind, "contender": contender.name}
                | {**dict.fromkeys(_SETTINGS), **contender.columns(), **shape}
                | times(timing, timings[0], limit)
                | asdict(agreement)
                | _parts(contender, workload, timing.steps)
                | _extras(request, contender, workload)
            )
    dist.barrier(workload.group)
    for contender in contenders:
        contender.close()
    return rows, faults


def _find_limit(workload: Workload) -> Limit:
    counts = [
        count_bytes(workload.layout, workload.rank, workload.batch_sizes, list(ids.inputs), workload.wire_dtype)
        for ids in workload.batches
    ]
    ceilings = measure_ceilings(workload.group, workload.device)
    return find_limit(counts, ceilings, workload.group, workload.device)[0]


def _parts(contender: Contender, workload: Workload, steps: int) -> dict[str, float | None]:
    names = ("lookup_ms", "all_to_all_ms", "unpack_ms")
    if not isinstance(contender, Baseline):
        return dict.fromkeys(names)
    return dict(zip(names, time_parts(contender.step, len(names), workload.batches, workload, steps), strict=True))


def _extras(request: Request, contender: Contender, workload: Workload) -> dict[str, Any]:
    """Return the columns that only some kinds have."""
    if request.kind in ("weak", "strong"):
        return {"scaling_factor": None}
    if request.kind != "schedule":
        return {}
    if not isinstance(contender, Overlap):
        return dict.fromkeys(("own_ms", "skew_ms", "skew_fraction", "put_us", "wait_us"))
    return asdict(measure_skew(workload, contender.options, request.iterations))


def _add_scaling(kind: str, measured: Sequence[list[dict[str, Any]]]) -> None:
    """Add each contender's time on one rank over its time here; 1 is ideal under weak, the ranks under strong.

    Args:
        measured: the rows of each number of ranks, from one on.
    """
    if kind not in ("weak", "strong"):
        return
    for rows in measured:
        for row, alone in zip(rows, measured[0], strict=False):
            row["scaling_factor"] = alone["median_ms"] / row["median_ms"]


def _headline(rows: Sequence[dict[str, Any]]) -> str:
    first = rows[0]
    return (
        f"{first['tables']} tables x {first['rows']} x {first['dim']}, global batch {first['global_batch']}, "
        f"{first['multi_hot']} ids a bag, {first['world_size']} ranks: limit {first['limit_ms']:.3g} ms, memory "
        f"{first['hbm_bytes'] / 1e6:.4g} MB at {first['hbm_gb_per_s']:.4g} GB/s, links {first['link_bytes'] / 1e6:.4g} "
        f"MB at {first['link_gb_per_s']:.4g} GB/s; baseline: lookup {first['lookup_ms']:.3g}, All-to-All "
        f"{first['all_to_all_ms']:.3g}, unpacking {first['unpack_ms']:.3g} ms"
    )
