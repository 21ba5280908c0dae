"""The embedding stage's forward alone: `bench stage | weak | strong | slice | occupancy | schedule`.

Every contender meets the same ids, rows and types in one run, and no time is told unless all outputs agree with the
baseline's (Chen et al. 2024: FBGEMM's lookup, All-to-All, unpacking). A row is a contender: its times, the bytes that
the stage must move, how fast memory and links of these GPUs move any, and the fraction of that limit it reaches.
"""

import gc
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dlrm_overlap.bench.contenders import BATCHES, Baseline, Contender, Overlap, Workload, make_workload
from dlrm_overlap.bench.limits import Limit
from dlrm_overlap.bench.report import append_row, format_rows
from dlrm_overlap.bench.request import Request
from dlrm_overlap.bench.rounds import Timing, check_agreement, find_limit, time_contenders, time_parts
from dlrm_overlap.bench.skew import measure_skew
from dlrm_overlap.bench.sweeps import make_contenders
from dlrm_overlap.config import Config
from dlrm_overlap.launcher import Launch

_SHOWN = (
    "contender", "schedule", "slice_bags", "programs_per_sm", "world_size", "median_ms", "p10_ms", "p90_ms", "host_ms",
    "fraction_of_limit", "speedup", "equal", "scaling_factor", "skew_fraction",
)  # fmt: skip


def run(request: Request, config: Config, launch: Launch, device: torch.device) -> int:
    """Measure, print a table and append the rows on rank 0. The process group must exist; all ranks call this.

    Returns:
        The exit code: 1 if outputs disagree, in which case no time is told.
    """
    agreed = True
    measured: list[tuple[list[dict[str, Any]], list[str]]] = []
    # Fewer and fewer ranks: symmetric memory numbers its collectives by process, so ranks must have met in all of them.
    for world_size in reversed(request.worlds(launch.world_size)):
        group = dist.group.WORLD if world_size == launch.world_size else dist.new_group(list(range(world_size)))
        if launch.rank < world_size:
            assert isinstance(group, dist.ProcessGroup)
            shape = request.shape(config, world_size)
            workload = make_workload(shape, group, device, launch.local_world_size, request.check_ids)
            measured.append(_measure(request, shape, workload))
            agreed = not measured[-1][1]
            del workload
            gc.collect()  # sharded modules refer to themselves
            if device.type == "cuda":
                torch.cuda.empty_cache()
        agreed = _all_agree(agreed, device)  # ranks that had no part wait here
        if not agreed:
            break
    if launch.rank == 0:
        measured.reverse()
        _add_scaling(request.kind, [rows for rows, _ in measured])
        for rows, faults in measured:
            _report(rows, faults, request.output)
    return 0 if agreed else 1


def _all_agree(agreed: bool, device: torch.device) -> bool:
    flag = torch.tensor(int(agreed), device=device)
    dist.all_reduce(flag, dist.ReduceOp.MIN)
    return bool(flag.item())


def _measure(request: Request, config: Config, workload: Workload) -> tuple[list[dict[str, Any]], list[str]]:
    """Return a row a contender, or else what disagrees."""
    contenders = make_contenders(request.kind, config.embedding, workload)
    agreements = check_agreement(contenders, workload)
    faults = [
        f"{contender.name}: outputs differ from the baseline's by {agreement.max_abs_difference:.1e}, tolerance "
        f"{agreement.tolerance:.1e}; no time is told"
        for contender, agreement in zip(contenders, agreements, strict=True)
        if not agreement.agrees
    ]
    rows: list[dict[str, Any]] = []
    if not faults:
        limit = find_limit(workload)
        timings = time_contenders(contenders, workload, request.iterations)
        shape = _describe(request, config, workload)
        for contender, agreement, timing in zip(contenders, agreements, timings, strict=True):
            rows.append(
                {"kind": request.kind, "contender": contender.name, **contender.columns(), **shape}
                | _times(timing, timings[0], limit)
                | asdict(agreement)
                | _parts(contender, workload, timing.steps)
                | _extras(request, contender, workload)
            )
    dist.barrier(workload.group)
    for contender in contenders:
        contender.close()
    return rows, faults


def _describe(request: Request, config: Config, workload: Workload) -> dict[str, Any]:
    """Return the columns that tell the shape; a list of the configuration's is written as one value."""
    tables = config.data.tables
    return {
        "world_size": workload.group.size(),
        "tables": len(workload.layout.names),
        "rows": str(tables.rows),
        "dim": config.model.dim,
        "multi_hot": str(tables.multi_hot),
        "zipf_alpha": str(tables.zipf_alpha),
        "global_batch": sum(workload.batch_sizes),
        "batches": BATCHES,
        "id_dtype": "int64",
        "weight_dtype": config.embedding.weight_dtype,
        "wire_dtype": config.embedding.wire_dtype,
        "check_ids": request.check_ids,
    }


def _times(timing: Timing, baseline: Timing, limit: Limit) -> dict[str, Any]:
    median = timing.times.median_ms
    return {
        "steps": timing.steps,
        **asdict(timing.times),
        "host_ms": timing.host_ms,
        **asdict(limit),
        "limit_ms": limit.ms,
        "fraction_of_limit": limit.ms / median,
        "speedup": baseline.times.median_ms / median,
    }


def _parts(contender: Contender, workload: Workload, steps: int) -> dict[str, float | None]:
    names = ("lookup_ms", "all_to_all_ms", "unpack_ms")
    if not isinstance(contender, Baseline):
        return dict.fromkeys(names)
    return dict(zip(names, time_parts(contender, workload, steps), strict=True))


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


def _report(rows: Sequence[dict[str, Any]], faults: Sequence[str], output: Path) -> None:
    for fault in faults:
        print(f"dlrm-overlap: {fault}", file=sys.stderr)
    if not rows:
        return
    first = rows[0]
    print(
        f"{first['tables']} tables x {first['rows']} x {first['dim']}, global batch {first['global_batch']}, "
        f"{first['multi_hot']} ids a bag, {first['world_size']} ranks: limit {first['limit_ms']:.3g} ms, memory "
        f"{first['hbm_bytes'] / 1e6:.4g} MB at {first['hbm_gb_per_s']:.4g} GB/s, links {first['link_bytes'] / 1e6:.4g} "
        f"MB at {first['link_gb_per_s']:.4g} GB/s; baseline: lookup {first['lookup_ms']:.3g}, All-to-All "
        f"{first['all_to_all_ms']:.3g}, unpacking {first['unpack_ms']:.3g} ms"
    )
    print(format_rows(rows, [column for column in _SHOWN if any(row.get(column) is not None for row in rows)]))
    for row in rows:
        append_row(output, row)
    print(f"rows in {output}")
