"""`bench step`: how much faster is the whole training step under another backend? Contenders take turns.

Every contender is a trainer of the one configuration with a few keys of its own (`bench.step_contenders`), with the
same samples, seeds and types. Each trains 20 steps from the same weights on the same batches before anything is timed;
one whose losses part from the first contender's gets no speedup, and the exit code is 1. All train at 3% of the
configuration's learning rates: at MLPerf's, Adagrad's first steps make rounding grow to some percent of the loss within
20 steps, in which a wrong gradient would hide. A step copies its batch to the device; the batches are read before.

A row is a contender. It has two times: `median_ms` by the clock, and `busy_ms`, the time of a traced step in which the
GPU is not idle, on the rank where that is least. Of that step `exposed_ms` is exposed communication, as
`observe.trace_summary` defines it. Both speedups are over the fastest of TorchRec's contenders in the same turns;
`fraction_of_floor` is of the time that products, memory or links must take (`limits.find_floor`). A GPU holds few
trainers at once, so contenders take turns in groups (`step_contenders.heats`), whose rows are written one group after
the other.
"""

import csv
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.train_pipeline import TrainPipelineFusedSparseDist
from torchrec.distributed.types import ModuleSharder

from dlrm_overlap.bench.harness.agreement import judge_losses
from dlrm_overlap.bench.harness.limits import find_floor, measure_ceilings
from dlrm_overlap.bench.harness.timing import take_turns
from dlrm_overlap.bench.harness.training_runs import TracedSteps, TrainingRun, read_batches
from dlrm_overlap.bench.harness.workload import collect_garbage, describe, with_keys
from dlrm_overlap.bench.rows import report
from dlrm_overlap.bench.step_contenders import STEP_CONTENDERS, Keys, expand, heats
from dlrm_overlap.config import Config, EmbeddingConfig
from dlrm_overlap.data.batch import Batch
from dlrm_overlap.embedding.configured_sharders import build_sharders, fused_params_of
from dlrm_overlap.embedding.sharder import OverlapEmbeddingBagCollectionSharder, OverlapEmbeddingCollectionSharder
from dlrm_overlap.train.ranks import Ranks, check_start
from dlrm_overlap.train.trainer import Trainer

CHECKED_STEPS = 20
_RATE = 0.03  # of the configuration's learning rates
_TRACED_STEPS = 5
_TRACED = ("busy_ms", "exposed_ms", "exposed_most_ms")
_SPEEDUPS = {"speedup": "median_ms", "busy_speedup": "busy_ms"}
_SHOWN = (
    "contender", "median_ms", *_TRACED, "host_ms", *_SPEEDUPS, "dense_ms", "hbm_ms", "link_ms", "floor_ms",
    "fraction_of_floor", "max_difference", "tolerance",
)  # fmt: skip


def run(kind: str, ranks: Ranks) -> int:
    """Measure the figure, print its table and append its rows on rank 0. All ranks call this.

    Returns:
        The exit code: 1 if losses disagree.
    """
    values, output = ranks.values, Path(ranks.values.output)
    names = expand(values.contenders)
    if values.resume and output.exists():
        with output.open(newline="") as file:
            done = {row.get("contender") for row in csv.DictReader(file)}
        left = [name for name in names if name not in done]
        if not left:
            return 0
        names = tuple(dict.fromkeys([names[0], *left, names[-1]]))
    configs = contender_configs(ranks, names)
    again, batches, floor = _train_apart(ranks, configs)
    reference: dict[str, list[float]] = {}
    wrong = False
    for heat in heats(names, values.at_once):
        runs = [TrainingRun(name, build(ranks, name, configs[name]), batches) for name in heat]
        losses = reference | {each.name: each.losses(CHECKED_STEPS) for each in runs}
        reference = {names[0]: losses[names[0]]}
        agreements, faults = judge_losses(ranks.config.train.precision, losses, again)
        timings = take_turns([each.time for each in runs], values.steps, ranks.device)
        traces = [_trace(each) for each in runs]
        rows = [
            {"kind": kind, "contender": each.name, **describe_run(each, values.batches)}
            | {**vars(timing), **_columns(traced), **floor, "fraction_of_floor": floor["floor_ms"] / timing.median_ms}
            | {**agreements[each.name]._asdict(), "agrees": agreements[each.name].agrees}
            for each, timing, traced in zip(runs, timings, traces, strict=True)
        ]
        for each in runs:
            each.trainer.close()
        del runs, each
        collect_garbage(ranks.device)
        if ranks.world.rank == 0:
            report(with_speedups(rows), faults, output, _SHOWN)
            if values.timeline is not None:
                _write_timelines(Path(values.timeline), heat, traces)
        wrong |= bool(faults)
    return int(wrong)


def contender_configs(ranks: Ranks, names: Sequence[str]) -> dict[str, Config]:
    """Return each contender's configuration at the learning rates of this figure; all are checked before one trains.

    Raises:
        InputError: if the device or the data do not fit one of them.
    """
    embedding, train = ranks.config.embedding, ranks.config.train
    slowed = with_keys(ranks.config, {"embedding.lr": _RATE * embedding.lr, "train.lr": _RATE * train.lr})
    configs = {name: contender_config(slowed, STEP_CONTENDERS[name], ranks.device.type) for name in names}
    for config in configs.values():
        check_start(config, ranks.device)
    return configs


def contender_config(config: Config, keys: Keys, device_type: str) -> Config:
    """Return `config` with a contender's keys; on a CPU without CUDA graphs of the dense part."""
    on_cpu = {"train.graph_dense": False} if device_type == "cpu" else {}
    return with_keys(config, {**keys, **on_cpu})


def build(ranks: Ranks, name: str, config: Config) -> Trainer:
    """Return the trainer of the contender `name`, with what no key of `config` gives. All ranks call this.

    TorchRec at its strongest has lookups with int32 ids; it may have TrainPipelineFusedSparseDist, which looks up
    beside the optimizer, or index dedup of the tables that are not pooled. The drop-in has our sharders at their
    defaults.
    """
    on_gpu = ranks.device.type == "cuda"
    is_strongest = name.startswith("torchrec_strongest")
    lookups: dict[str, Any] = {"embedding_table_index_type": torch.int32} if is_strongest else {}
    make_sharders = partial(build_sharders, fused_params=lookups)
    if name.startswith("drop_in"):
        make_sharders = _sharders_at_defaults
    elif name.endswith("index_dedup") and on_gpu:  # FBGEMM finds distinct ids there alone
        make_sharders = partial(_sharders_with_index_dedup, fused_params=lookups)
    trainer = ranks.trainer(config, make_sharders)
    if name.endswith("fused_pipeline") and on_gpu:  # it has streams alone
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
    trainer = build(ranks, name, with_keys(config, {"train.compile_dense": compiled}))
    batches = read_batches(trainer, ranks.values.batches)
    ceilings = measure_ceilings(ranks.connect(), ranks.device)
    floor = find_floor(trainer, ceilings)
    apart = TrainingRun(name, trainer, batches)
    losses = apart.losses(CHECKED_STEPS)
    trainer.close()
    del trainer, apart
    collect_garbage(ranks.device)
    return losses, batches, floor


def _trace(run: TrainingRun) -> TracedSteps | None:
    """Return the traced steps of the rank that is least busy; None on CPUs. A collective."""
    if run.trainer.device.type == "cpu":
        return None
    ranks: list[TracedSteps] = [TracedSteps({}, [])] * run.trainer.world.world_size
    dist.all_gather_object(ranks, run.traced(_TRACED_STEPS))
    return min(ranks, key=lambda traced: traced.columns["busy_ms"])


def _columns(traced: TracedSteps | None) -> dict[str, float | None]:
    return {name: traced.columns[name] if traced is not None else None for name in _TRACED}


def _write_timelines(path: Path, names: Sequence[str], traces: Sequence[TracedSteps | None]) -> None:
    """Append the timeline of each contender: a row for each time in which the GPU did one kind of work."""
    is_new = not path.exists()
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", newline="") as file:
        writer = csv.writer(file)
        if is_new:
            writer.writerow(["contender", "kind", "begin_us", "end_us"])
        for name, traced in zip(names, traces, strict=True):
            writer.writerows([name, *span] for span in (traced.timeline if traced is not None else []))


def describe_run(run: TrainingRun, batches: int) -> dict[str, Any]:
    """Return the columns of the contender's keys, and of the shape."""
    keys = " ".join(f"{key}={value}" for key, value in STEP_CONTENDERS[run.name].items())
    return {"keys": keys, **describe(run.trainer.config, run.trainer.world.world_size), "batches": batches}


def with_speedups(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return `rows` with their speedups over the fastest contender that is TorchRec's, by both times.

    A row whose losses disagree has no speedup, and is no baseline.
    """
    theirs = [row for row in rows if row["agrees"] and row["contender"].startswith("torchrec")]
    fastest = {time: min((row[time] for row in theirs if row[time]), default=None) for time in _SPEEDUPS.values()}

    def ratio(row: Mapping[str, Any], time: str) -> float | None:
        return fastest[time] / row[time] if fastest[time] and row["agrees"] else None

    return [row | {speedup: ratio(row, time) for speedup, time in _SPEEDUPS.items()} for row in rows]
