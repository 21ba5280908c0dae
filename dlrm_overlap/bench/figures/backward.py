"""`bench backward`: how long does the embedding stage's backward take, by each way that gradients can go?

A step begins with the gradient [b, D_total] of every rank's samples and ends when the owners have updated their rows;
it is measured under one optimizer after the other. Every contender takes the same ids, rows, gradients and plan, and no
time is reported unless the rows and the optimizer's state that each leaves agree with the baseline's. A row is a
contender under an optimizer.

Contenders: the baseline (packing, All-to-All, FBGEMM's update), `push`, `push_exposed`, `dma`, and `atomic` where it
can run.
Extra columns: the optimizer, the packing, the bytes and the time of a cache without bounds, ids and touched rows,
whether a contender repeats its bits, and the times of the parts.
"""

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import torch

from dlrm_overlap.bench.harness.agreement import check_rows
from dlrm_overlap.bench.harness.backward_contenders import CollectiveBaseline, GradientBatch, Push, make_batches
from dlrm_overlap.bench.harness.contenders import Contender, close_all
from dlrm_overlap.bench.harness.limits import Limit, count_update, find_limit, measure_ceilings
from dlrm_overlap.bench.harness.rounds import time_contenders, time_parts
from dlrm_overlap.bench.harness.workload import Workload, collect_garbage, exchange_options, make_workload, read_ids
from dlrm_overlap.bench.report.columns import describe, times
from dlrm_overlap.bench.report.rows import report
from dlrm_overlap.bench.stage_request import BackwardRequest
from dlrm_overlap.config import Config, EmbeddingConfig
from dlrm_overlap.train.ranks import Ranks

_SHOWN = (
    "optimizer", "contender", "schedule", "packing", "median_ms", "p10_ms", "p90_ms", "host_ms", "prepare_ms",
    "limit_ms", "fraction_of_limit", "compulsory_ms", "speedup", "deterministic", "max_relative_difference",
)  # fmt: skip


def run(request: BackwardRequest, ranks: Ranks) -> int:
    """Measure the figure, print its table and append its rows on rank 0. All ranks call this.

    Returns:
        The exit code: 1 if rows or states disagree, in which case no time is reported.
    """
    world, device, group = ranks.world, ranks.device, ranks.connect()
    config = request.shape(ranks.config, world.world_size)
    sparse = read_ids(config, group, ranks.device)
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
        reported = [] if faults else rows
        report(reported, faults, request.output, _headline(reported) if reported else "", _SHOWN)
    return 1 if faults else 0


def _make_gradients(workload: Workload) -> list[torch.Tensor]:
    """Return a gradient [b, D_total] float32 for each batch; its elements have mean 0 and variance 1."""
    shape = workload.batch_sizes[workload.rank], workload.layout.total_dim
    generator = torch.Generator(workload.device).manual_seed(workload.rank)
    return [torch.randn(shape, generator=generator, device=workload.device) for _ in workload.batches]


def make_contenders(
    config: EmbeddingConfig, workload: Workload, optimizer: str, batches: Sequence[GradientBatch]
) -> list[Contender]:
    """Return who takes part under `optimizer`, the baseline first.

    Only SGD's update can be made of atomic additions, and only rows of float32 take part: narrower rows would be
    rounded after every addition.
    """
    options = replace(exchange_options(config, "pgas"), backward="push")
    contenders: list[Contender] = [
        CollectiveBaseline(workload, batches[0].gradient),
        Push("push", workload, options, batches),
        Push("push_exposed", workload, options, batches, exposed=True),
        Push("dma", workload, replace(options, backward="dma"), batches),
    ]
    if optimizer == "sgd" and config.weight_dtype == "fp32":
        contenders.append(Push("atomic", workload, replace(options, backward="atomic"), batches))
    return contenders


@torch.no_grad()
def _measure(
    request: BackwardRequest,
    config: Config,
    workload: Workload,
    optimizer: str,
    batches: Sequence[GradientBatch],
    ceilings: tuple[float, float],
) -> tuple[list[dict[str, Any]], list[str]]:
    """Return a row for each contender and no fault, or no row and a fault for each contender that disagrees."""
    contenders = make_contenders(config.embedding, workload, optimizer, batches)
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
    close_all(contenders, workload)
    return rows, faults


def _find_limit(
    workload: Workload, optimizer: str, ceilings: tuple[float, float]
) -> tuple[Limit, dict[str, int | float]]:
    """Return the limit, and further columns of the rank that has it."""
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
    """Return the columns of the parts that a contender has; the others are empty."""
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
