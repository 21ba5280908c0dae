"""`bench stage` and `bench sweep`: time the embedding stage's forward with every backend (docs/results/stage.md).

The baseline is FBGEMM's lookup, All-to-All and unpacking (Chen et al. 2024); it also runs in chunks of tables. For
`median_ms`, steps are issued back to back. For `gpu_ms`, a step is issued before the GPU starts it, as if captured.
"""

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

from dlrm_overlap.backends import EXCHANGED
from dlrm_overlap.bench.harness.agreement import check_outputs, disagreements
from dlrm_overlap.bench.harness.contenders import Baseline, Contender, Overlap, TorchRec, close_all, make_chunked
from dlrm_overlap.bench.harness.limits import find_limit, measure_ceilings, times
from dlrm_overlap.bench.harness.timing import time_alone, time_contenders, time_parts
from dlrm_overlap.bench.harness.workload import (
    Workload,
    collect_garbage,
    describe,
    exchange_options,
    make_workload,
    read_ids,
    shape_of,
    with_keys,
)
from dlrm_overlap.bench.rows import report
from dlrm_overlap.config import Config, InputError, parse_multi_hot
from dlrm_overlap.embedding.options import PUTS
from dlrm_overlap.launching.lifetime import DISAGREEMENT
from dlrm_overlap.train.ranks import Ranks

_GPU_REPETITIONS = 10
_PARTS = ("lookup_ms", "all_to_all_ms", "unpack_ms")
_SETTINGS = ("schedule", "put", "slice_bags", "programs_per_sm")
_SHOWN = (
    "contender", *_SETTINGS, "median_ms", "p10_ms", "p90_ms", "host_ms", "gpu_ms", "limit_ms", "fraction_of_limit",
    "speedup", *_PARTS, "max_difference",
)  # fmt: skip


def run(kind: str, ranks: Ranks) -> int:
    """Return `DISAGREEMENT` if outputs disagree on some shape, which then has no rows."""
    world, device = ranks.world, ranks.device
    shapes = shapes_of(ranks.values, ranks.config, world.world_size)
    group = ranks.connect()
    ceilings = measure_ceilings(group, device)
    wrong = False
    for shape in shapes:
        workload = make_workload(shape, read_ids(shape, group, device), group, device, world.local_world_size)
        rows, faults = _measure(kind, ranks.values.iterations, shape, workload, ceilings)
        if world.rank == 0:
            report(rows, faults, Path(ranks.values.output), _SHOWN)
        wrong |= bool(faults)
        del workload
        collect_garbage(device)
    return DISAGREEMENT if wrong else 0


def shapes_of(values: Any, config: Config, world_size: int) -> list[Config]:
    axes = [getattr(values, name, []) for name in ("dims", "global_batches", "pooling_factors")]
    if any(axes) and config.data.kind != "synthetic":
        raise InputError(
            f"data.kind: {config.data.kind}, but bench sweep changes the shape of the data; set data.kind synthetic"
        )
    shapes = []
    for dim, batch, mean_ids in itertools.product(*(axis or [None] for axis in axes)):
        mlp = [*config.model.bottom_mlp[:-1], dim]
        keys = {"model.dim": dim, "model.bottom_mlp": mlp} if dim else {}
        keys |= {"train.global_batch_size": batch} if batch else {}
        keys |= {"data.tables.multi_hot": f"0..{2 * mean_ids}"} if mean_ids else {}
        shapes.append(shape_of(with_keys(config, keys), world_size, values.tables_per_rank))
    return shapes


def make_contenders(kind: str, config: Config, workload: Workload) -> list[Contender]:
    nccl, pgas, fused = (exchange_options(config, name) for name in EXCHANGED)
    first, ours = [Baseline(workload), *make_chunked(workload)], [pgas, fused]
    if kind == "stage":
        first.append(TorchRec(workload))
        others = [put for put in PUTS if put != fused.put and workload.device.type == "cuda"]
        ours = [nccl, *ours, *(replace(fused, put=put) for put in others), replace(pgas, copy_output=True)]
    return [*first, *(Overlap(workload, each) for each in ours)]


def _measure(
    kind: str, iterations: int, config: Config, workload: Workload, ceilings: tuple[float, float]
) -> tuple[list[dict[str, Any]], list[str]]:
    contenders = make_contenders(kind, config, workload)
    agreements = check_outputs(contenders, workload)
    faults = disagreements(contenders, agreements)
    rows: list[dict[str, Any]] = []
    if not faults:
        limit, _ = find_limit(workload, ceilings)
        timings = time_contenders(contenders, workload.batches, workload, iterations)
        alone = time_alone([each.cycle(workload.batches) for each in contenders], _GPU_REPETITIONS, workload.device)
        spec, is_synthetic = config.data.tables.multi_hot, config.data.kind == "synthetic"
        shape = describe(config, workload.group.size()) | {
            "pooling_factor": sum(parse_multi_hot(spec)) / 2 if is_synthetic and not isinstance(spec, list) else None
        }
        rows = [
            {"kind": kind, "contender": contender.name, **dict.fromkeys(_SETTINGS), **contender.columns, **shape}
            | times(timing, timings[0], limit)
            | {"gpu_ms": turn.median_ms, **agreement._asdict(), **dict.fromkeys(_PARTS)}
            for contender, agreement, timing, turn in zip(contenders, agreements, timings, alone, strict=True)
        ]
        parts = time_parts(contenders[0].step, len(_PARTS), workload.batches, workload, iterations)
        rows[0] |= dict(zip(_PARTS, parts, strict=True))
    close_all(contenders)
    return rows, faults
