"""The embedding stage's backward alone: `bench backward`.

The gradient [b, D_total] of every rank's samples in, rows updated out, by one optimizer after the other. All contenders
meet the same ids, rows, gradients and plan, and no time is told unless the rows and the optimizer's state that each
leaves agree with the baseline's. A row is a contender under an optimizer.
"""

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import torch
import torch.distributed as dist

from dlrm_overlap.bench.agreement import check_rows
from dlrm_overlap.bench.backward_contenders import (
    CollectiveBaseline,
    GradientBatch,
    Push,
    make_backward_contenders,
    make_batches,
)
from dlrm_overlap.bench.columns import describe, times
from dlrm_overlap.bench.contenders import Contender
from dlrm_overlap.bench.limits import Limit, count_update, find_limit, measure_ceilings
from dlrm_overlap.bench.report import report
from dlrm_overlap.bench.request import Request
from dlrm_overlap.bench.rounds import time_contenders, time_parts
from dlrm_overlap.bench.workload import Workload, collect_garbage, make_workload, read_ids
from dlrm_overlap.config import Config
from dlrm_overlap.launching.launcher import World

_SHOWN = (
    "optimizer", "contender", "schedule", "packing", "median_ms", "p10_ms", "p90_ms", "host_ms", "prepare_ms",
    "limit_ms", "fraction_of_limit", "compulsory_ms", "speedup", "deterministic", "max_relative_difference",
)  # fmt: skip


def run(request: Request, config: Config, world: World, device: torch.device) -> int:
    """Measure, print a table and append the rows on rank 0. The process group must exist; all ranks call this.

    Returns:
        The exit code: 1 if rows disagree, in which case no time is told.
    """
    group = dist.group.WORLD
    assert isinstance(group, dist.ProcessGroup)
    config = request.shape(config, world.world_size)
    sparse = read_ids(config, group)
    ceilings = measure_ceilings(group, device)
    gradients: list[torch.Tensor] = []
    rows: list[dict[str, Any]] = []
    faults: list[str] = []
    for optimizer in request.optimizers:
        workload = make_workload(config, sparse, group, device, world.local_world_size, optimizer=optimizer)
        gradients = gradients or _make_gradients(workload)
        found, faults = _measure(request, config, workload, optimizer, make_batches(workload, gradients), ceilings)
        rows += found
        del workload
        collect_garbage(device)
        if faults:
            break
    if world.rank == 0:
        told = [] if faults else rows
        report(told, faults, request.output, _headline(told) if told else "", _SHOWN)
    return 1 if faults else 0


def _make_gradients(workload: Workload) -> list[torch.Tensor]:
    """Return a gradient [b, D_total] for each batch, its elements of mean 0 and variance 1."""
    shape = workload.batch_sizes[workload.rank], workload.layout.total_dim
    generator = torch.Generator(workload.device).manual_seed(workload.rank)
    return [torch.randn(shape, generator=generator, device=workload.device) for _ in workload.batches]


@torch.no_grad()
def _measure(
    request: Request,
    config: Config,
    workload: Workload,
    optimizer: str,
    batches: Sequence[GradientBatch],
    ceilings: tuple[float, float],
) -> tuple[list[dict[str, Any]], list[str]]:
    """Return a row a contender, or else what disagrees."""
    contenders = make_backward_contenders(config.embedding, workload, optimizer, batches)
    agreements = check_rows(contenders, workload, batches, optimizer)
    faults = [
        f"{contender.name}, {optimizer}: rows or state differ from the baseline's by "
        f"{agreement.max_relative_difference:.1e}, relatively, tolerance {agreement.tolerance:.1e}; no time is told"
        for contender, agreement in zip(contenders, agreements, strict=True)
        if not agreement.agrees
    ]
    rows: list[dict[str, Any]] = []
    if not faults:
        limit, counts = _find_limit(workload, optimizer, ceilings)
        timings = time_contenders(contenders, batches, workload, request.iterations)
        for contender, agreement, timing in zip(contenders, agreements, timings, strict=True):
            rows.append(
                {"kind": request.kind, "contender": contender.name, "optimizer": optimizer}
                | {"schedule": None, "packing": None, **contender.columns()}
                | describe(config, workload)
                | times(timing, timings[0], limit)
                | counts
                | asdict(agreement)
                | _parts(contender, batches, workload, timing.steps)
            )
    dist.barrier(workload.group)
    for contender in contenders:
        contender.close()
    return rows, faults


def _find_limit(
    workload: Workload, optimizer: str, ceilings: tuple[float, float]
) -> tuple[Limit, dict[str, int | float]]:
    """Return the limit, and the columns that tell more of the rank that has it."""
    layout, rank = workload.layout, workload.rank
    counts = [
        count_update(layout, rank, workload.batch_sizes, list(ids.inputs), workload.wire_dtype, optimizer)
        for ids in workload.batches
    ]
    limit, (compulsory_bytes, ids, touched_rows) = find_limit(counts, ceilings, workload.group, workload.device)
    return limit, {
        "compulsory_bytes": compulsory_bytes,
        "compulsory_ms": replace(limit, hbm_bytes=compulsory_bytes).ms,
        "ids": ids,
        "touched_rows": touched_rows,
    }


def _parts(
    contender: Contender, batches: Sequence[GradientBatch], workload: Workload, steps: int
) -> dict[str, float | None]:
    parts: dict[str, float | None] = dict.fromkeys(("pack_ms", "all_to_all_ms", "update_ms", "prepare_ms"))
    if isinstance(contender, CollectiveBaseline):
        parts.update(zip(parts, time_parts(contender.step, 3, batches, workload, steps), strict=False))
    elif isinstance(contender, Push) and contender.prepares:
        (parts["prepare_ms"],) = time_parts(contender.prepare, 1, batches, workload, steps)
    return parts


def _headline(rows: Sequence[dict[str, Any]]) -> str:
    first = rows[0]
    limits = ", ".join(
        f"{row['optimizer']} memory {row['hbm_bytes'] / 1e6:.4g} MB (at least {row['compulsory_bytes'] / 1e6:.4g})"
        for row in rows
        if row["contender"] == "baseline"
    )
    return (
        f"{first['tables']} tables x {first['rows']} x {first['dim']}, global batch {first['global_batch']}, "
        f"{first['multi_hot']} ids a bag, {first['world_size']} ranks; the one with the greatest limit: {first['ids']} "
        f"ids of {first['touched_rows']} rows; {limits} at {first['hbm_gb_per_s']:.4g} GB/s, links "
        f"{first['link_bytes'] / 1e6:.4g} MB at {first['link_gb_per_s']:.4g} GB/s; baseline: packing "
        f"{first['pack_ms']:.3g}, All-to-All {first['all_to_all_ms']:.3g}, update {first['update_ms']:.3g} ms"
    )
