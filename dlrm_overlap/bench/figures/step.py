"""`bench step`: how much faster is the whole training step under another backend? Contenders take turns.

Every contender is a trainer of the one configuration with a few keys of its own (`bench.step_contenders`), with the
same samples, seeds and types. Each trains 20 steps from the same weights on the same batches before anything is timed;
one whose losses part from the first contender's gets no speedup, and the exit code is 1. All train at 3% of the
configuration's learning rates: at MLPerf's, Adagrad's first steps make rounding grow to some percent of the loss within
20 steps, in which a wrong gradient would hide. A step copies its batch to the device; the batches are read before.

A row is a contender. It has two times: `median_ms` by the clock, and `busy_ms`, the time of a traced step in which the
GPU is not idle, on the rank where that is least. On other ranks collectives run while they wait for a slower one; the
CPU's speed changes the first time and not the second. Of that step `exposed_ms` is exposed communication, as
`observe.trace_summary` defines it. Both speedups are over TorchRec as users run it, and over TorchRec at its strongest,
the fastest of the contenders here; `fraction_of_floor` is of the time that products, memory or links must take
(`harness.step_floor`), under the first contender's plan. A GPU holds few trainers at once, so contenders take turns in
groups (`step_contenders.heats`), whose rows are written one group after the other.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.train_pipeline import TrainPipelineFusedSparseDist
from torchrec.distributed.types import ModuleSharder

from dlrm_overlap.bench.harness.agreement import judge_losses
from dlrm_overlap.bench.harness.limits import describe_tables, measure_ceilings
from dlrm_overlap.bench.harness.step_floor import find_floor
from dlrm_overlap.bench.harness.timing import Timing, counted, take_turns
from dlrm_overlap.bench.harness.training_runs import TrainingRun, read_batches
from dlrm_overlap.bench.harness.workload import collect_garbage
from dlrm_overlap.bench.rows import read_measured, report
from dlrm_overlap.bench.step_contenders import STEP_CONTENDERS, contender_config, expand, heats
from dlrm_overlap.config import Config, EmbeddingConfig, InputError
from dlrm_overlap.data.batch import Batch
from dlrm_overlap.embedding.sharder import (
    OverlapEmbeddingBagCollectionSharder,
    OverlapEmbeddingCollectionSharder,
    build_sharders,
    fused_params_of,
)
from dlrm_overlap.train.ranks import Ranks, check_start
from dlrm_overlap.train.trainer import Trainer

CHECKED_STEPS = 20
_RATE = 0.03  # of the configuration's learning rates
_TRACED_STEPS = 5
_TRACED = ("busy_ms", "exposed_ms", "exposed_most_ms")
_BASELINES = ("torchrec", "strongest")
_SPEEDUPS = {"speedup_over": "median_ms", "busy_speedup_over": "busy_ms"}
_SHOWN = (
    "contender", "median_ms", *_TRACED, "host_ms", "samples_per_s",
    *(f"{speedup}_{name}" for speedup in _SPEEDUPS for name in _BASELINES), "dense_ms", "hbm_ms", "link_ms",
    "floor_ms", "fraction_of_floor", "max_difference", "tolerance",
)  # fmt: skip


def run(kind: str, ranks: Ranks) -> int:
    """Measure the figure, print its table and append its rows on rank 0. All ranks call this.

    Returns:
        The exit code: 1 if losses disagree.
    """
    values, output = ranks.values, Path(ranks.values.output)
    if values.at_once < 2:
        raise InputError(f"--at_once {values.at_once}: contenders take turns with the last one; take 2 or more")
    names = expand(values.contenders)
    if ranks.config.model.sequence.history is None:  # TorchRec's dedup is of tables that are not pooled
        names = tuple(name for name in names if "index_dedup" not in STEP_CONTENDERS[name].extras)
    if values.resume and output.exists():
        done = {row["contender"] for row in read_measured(output).rows}
        left = [name for name in names if name not in done]
        if not left:
            return 0
        names = tuple(dict.fromkeys([names[0], *left, names[-1]]))
    configs = contender_configs(ranks, names)
    again, batches, floor = _train_apart(ranks, configs)
    reference: dict[str, list[float]] = {}
    wrong = False
    for heat in heats(names, values.at_once):
        runs = [TrainingRun(name, build(ranks, name, configs[name]), batches) for name in counted("trainers", heat)]
        losses = reference | {each.name: each.losses(CHECKED_STEPS) for each in runs}
        reference = {names[0]: losses[names[0]]}
        agreements, faults = judge_losses(ranks.config.train.precision, losses, again)
        timings = take_turns([each.time for each in runs], values.steps, ranks.device)
        rows = [
            {"kind": kind, "contender": each.name}
            | describe_run(each, values.batches)
            | _times(each, timing, _trace(each), floor)
            | {"checked_steps": CHECKED_STEPS}
            | {name: getattr(agreements[each.name], name) for name in ("max_difference", "tolerance", "agrees")}
            for each, timing in zip(runs, timings, strict=True)
        ]
        for each in runs:
            each.close()
        del runs, each
        collect_garbage(ranks.device)
        if ranks.world.rank == 0:
            report(with_speedups(rows), faults, output, _SHOWN)
        wrong |= bool(faults)
    return int(wrong)


def contender_configs(ranks: Ranks, names: Sequence[str]) -> dict[str, Config]:
    """Return each contender's configuration at the learning rates of this figure; all are checked before one trains.

    Raises:
        InputError: if the device or the data do not fit one of them.
    """
    embedding, train = ranks.config.embedding, ranks.config.train
    slowed = replace(
        ranks.config, embedding=replace(embedding, lr=_RATE * embedding.lr), train=replace(train, lr=_RATE * train.lr)
    )
    configs = {name: contender_config(slowed, STEP_CONTENDERS[name], ranks.device.type) for name in names}
    for config in configs.values():
        check_start(config, ranks.device)
    return configs


def build(ranks: Ranks, name: str, config: Config) -> Trainer:
    """Return the trainer of the contender `name`, with what no key of `config` gives. All ranks call this."""
    extras = STEP_CONTENDERS[name].extras
    lookups: dict[str, Any] = {"embedding_table_index_type": torch.int32} if "int32_ids" in extras else {}
    make_sharders = _sharders_at_defaults if "drop_in" in extras else partial(build_sharders, fused_params=lookups)
    if "index_dedup" in extras and ranks.device.type == "cuda":  # FBGEMM finds distinct ids there alone
        make_sharders = partial(_sharders_with_index_dedup, fused_params=lookups)
    trainer = ranks.trainer(config, make_sharders)
    if "fused_pipeline" in extras and ranks.device.type == "cuda":  # it has streams alone
        trainer.pipeline = TrainPipelineFusedSparseDist(trainer.model, trainer.optimizer, trainer.device)
    return trainer


def _sharders_at_defaults(config: EmbeddingConfig, *_: Any) -> list[ModuleSharder[Any]]:
    """Return our sharders at their defaults, with the configured optimizer of the tables alone."""
    own = fused_params_of(config)
    return [OverlapEmbeddingBagCollectionSharder(own), OverlapEmbeddingCollectionSharder(own)]


def _sharders_with_index_dedup(*args: Any, **kwargs: Any) -> list[ModuleSharder[Any]]:
    """Return what `build_sharders` does, TorchRec's sharder of unpooled tables with `use_index_dedup`."""
    return [
        EmbeddingCollectionSharder(each.fused_params, each.qcomm_codecs_registry, use_index_dedup=True)
        if type(each) is EmbeddingCollectionSharder
        else each
        for each in build_sharders(*args, **kwargs)
    ]


def _train_apart(ranks: Ranks, configs: Mapping[str, Config]) -> tuple[list[float], list[Batch], dict[str, Any]]:
    """Return the losses of a second run of the first contender, all runs' batches, and the floor of its step.

    The run is gone before the others come: a GPU may have no room for one more. Its dense part is compiled if any
    contender's is, so that its losses differ from the reference's by the same rounding.
    """
    name, config = next(iter(configs.items()))
    compiled = any(each.train.compile_dense for each in configs.values())
    trainer = build(ranks, name, replace(config, train=replace(config.train, compile_dense=compiled)))
    batches = read_batches(trainer, ranks.values.batches)
    ceilings = measure_ceilings(ranks.connect(), ranks.device)
    floor = find_floor(trainer, batches, ceilings, ranks.values.dense_tflop_per_s)
    apart = TrainingRun(name, trainer, batches)
    losses = apart.losses(CHECKED_STEPS)
    apart.close()
    del trainer, apart
    collect_garbage(ranks.device)
    return losses, batches, floor


def _trace(run: TrainingRun) -> dict[str, float | None]:
    """Return the columns of a traced step on the rank that is least busy; None in each on CPUs. A collective."""
    columns = run.traced_columns(_TRACED_STEPS) if run.trainer.device.type == "cuda" else {}
    gathered: list[dict[str, float]] = [{}] * run.trainer.world.world_size
    dist.all_gather_object(gathered, columns)
    least = min(gathered, key=lambda each: each.get("busy_ms", 0.0))
    return {name: least.get(name) for name in _TRACED}


def describe_run(run: TrainingRun, batches: int) -> dict[str, Any]:
    """Return the columns of the contender's keys, and of the shape."""
    trainer, config = run.trainer, run.trainer.config
    return {
        "backend": config.embedding.backend,
        "extras": " ".join(sorted(STEP_CONTENDERS[run.name].extras)),
        "plan": config.embedding.plan,
        "pipeline": config.train.pipeline,
        "capture": config.train.capture,
        "flat_dense": config.train.flat_dense,
        "compile_dense": config.train.compile_dense,
        "graph_dense": config.train.graph_dense,
        "arch": config.model.arch,
        "precision": config.train.precision,
        "world_size": trainer.world.world_size,
        **describe_tables(config),
        "global_batch": trainer.global_batch,
        "batches": batches,
        "optimizer": config.embedding.optimizer,
        "weight_dtype": config.embedding.weight_dtype,
        "wire_dtype": config.embedding.resolved_wire_dtype(config.train.precision),
    }


def _times(run: TrainingRun, timing: Timing, traced: Mapping[str, Any], floor: Mapping[str, Any]) -> dict[str, Any]:
    """Return the columns of a run's times, and of how they compare with the floor."""
    median_ms = timing.median_ms
    return {
        **vars(timing),
        **traced,
        "samples_per_s": run.trainer.global_batch * 1e3 / median_ms,
        **floor,
        "fraction_of_floor": floor["floor_ms"] / median_ms,
    }


def with_speedups(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return `rows` with their speedups over TorchRec as users run it, and over its fastest contender, by both times.

    A row whose losses disagree has no speedup, and is no baseline.
    """
    agreeing = {row["contender"]: row for row in rows if row["agrees"]}
    theirs = [row for name, row in agreeing.items() if name.startswith("torchrec")]
    found = []
    for row in rows:
        ratios: dict[str, float | None] = {}
        for speedup, time in _SPEEDUPS.items():
            first = agreeing.get("torchrec", {}).get(time)
            fastest = min((each[time] for each in theirs if each[time]), default=None)
            for name, base in zip(_BASELINES, (first, fastest), strict=True):
                ratios[f"{speedup}_{name}"] = base / row[time] if base and row["agrees"] else None
        found.append(row | ratios)
    return found
