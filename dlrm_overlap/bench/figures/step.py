"""`bench step`: times the whole training step under TorchRec and under our backends.

Before timing, each contender (`bench.step_contenders`) trains 20 steps from the same weights on the same batches; if
its losses disagree with the losses of the first contender, it gets no speedup, and the exit code is 3. Learning rates
are 3% of the configured ones: at MLPerf's, rounding errors grow within 20 steps until they would hide a wrong gradient.

`busy_ms` and `exposed_ms` are the time in which the GPU is not idle, and exposed communication, of a step on the least
busy rank, means of five traced steps (`observe.trace_summary`). `work_ms` is the time in which the GPU is not idle on
the busiest rank if no rank waits for another to begin a collective. Speedups are over the fastest TorchRec contender in
the same group.
"""

import logging
from collections.abc import Mapping, Sequence
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.train_pipeline import TrainPipelineFusedSparseDist, TrainPipelineSparseDist
from torchrec.distributed.types import ModuleSharder

from dlrm_overlap.bench.harness.agreement import judge_losses
from dlrm_overlap.bench.harness.clocks import COLUMNS as CLOCK
from dlrm_overlap.bench.harness.clocks import clock_of
from dlrm_overlap.bench.harness.limits import find_floor, measure_ceilings, measure_products
from dlrm_overlap.bench.harness.our_dense import OurDensePipeline
from dlrm_overlap.bench.harness.timing import steps_in_turns, take_turns
from dlrm_overlap.bench.harness.torchrec_variants import CompiledPipeline, RegisteredPipeline, cast_cross_biases
from dlrm_overlap.bench.harness.training_runs import TracedSteps, TrainingRun, read_batches
from dlrm_overlap.bench.harness.workload import collect_garbage, config_digest, describe, describe_work, with_keys
from dlrm_overlap.bench.rows import append_csv, report, rows_to_continue
from dlrm_overlap.bench.step_contenders import OUR_DENSE, STEP_CONTENDERS, Keys, expand, is_torchrec, split_into_groups
from dlrm_overlap.config import Config, EmbeddingConfig, InputError
from dlrm_overlap.data.batch import Batch
from dlrm_overlap.embedding.configured_sharders import build_sharders, fused_params_of
from dlrm_overlap.embedding.sharder import OverlapEmbeddingBagCollectionSharder, OverlapEmbeddingCollectionSharder
from dlrm_overlap.launching.lifetime import DISAGREEMENT
from dlrm_overlap.observe.trace_summary import without_waits
from dlrm_overlap.train.ranks import Ranks, check_start
from dlrm_overlap.train.trainer import Trainer

log = logging.getLogger("dlrm_overlap")

CHECKED_STEPS = 20
_LR_SCALE = 0.03  # relative to the configuration's
_TRACED_STEPS = 5
_CLOCK_S = 1.5  # for which clock and power are sampled
# Arguments of the sharder of pooled tables.
_DROP_IN = {"drop_in_torchrec_ids": {"input_dist": "torchrec"}}
_ASYNC_COPY = "async_inplace_copy"  # argument of TorchRec's pipeline
_LEAST_BUSY = ("busy_ms", "exposed_ms", "exposed_most_ms")
_TRACED = ("work_ms", *_LEAST_BUSY)
_SPEEDUPS = {"speedup": "median_ms", "busy_speedup": "busy_ms", "work_speedup": "work_ms"}
_FLOOR = ("products_ms", "dense_ms", "hbm_ms", "link_ms", "floor_ms", "fraction_of_floor")
_ON_GPUS = (*CLOCK, *_FLOOR)  # not shown of a CPU
_SHOWN = ("contender", "median_ms", *_TRACED, "host_ms", *_SPEEDUPS, *_ON_GPUS, "max_difference", "tolerance")


def run(kind: str, ranks: Ranks) -> int:
    """Return `DISAGREEMENT` if losses disagree, here or in the rows that `--resume` continues."""
    values, output = ranks.values, Path(ranks.values.output)
    names, missing = split_by_installed(expand(values.contenders))
    if missing and ranks.world.rank == 0:
        log.warning("contenders: without %s, since this TorchRec has no %s", ", ".join(missing), _ASYNC_COPY)
    wrong = False
    if values.resume:
        options = {"batches": values.batches, "steps": steps_in_turns(values.steps)}
        work = {"precision": ranks.config.train.precision, **options, "config": config_digest(ranks.config)}
        done = rows_to_continue(output, describe_work(ranks.config, ranks.world.world_size) | work)
        wrong = any(row["contender"] in names and row["agrees"] == "False" for row in done)
        left = [name for name in names if name not in {row["contender"] for row in done}]
        if not left:
            if ranks.world.rank == 0:
                print(f"nothing is left to measure; rows in {output}")
            return DISAGREEMENT if wrong else 0
        names = tuple(dict.fromkeys([names[0], *left, names[-1]]))
    configs = contender_configs(ranks, names)
    repeated, batches, floor = _train_again(ranks, configs)
    reference: dict[str, list[float]] = {}
    # Check, time and trace one group of contenders after the other.
    for group in split_into_groups(names, values.at_once):
        runs = [TrainingRun(name, build(ranks, name, configs[name]), batches) for name in group]
        losses = reference | {each.name: each.losses(CHECKED_STEPS) for each in runs}
        reference = {names[0]: losses[names[0]]}
        agreements, faults = judge_losses(ranks.config.train.precision, losses, repeated)
        if values.batches > CHECKED_STEPS:  # the ids of later batches get their rows before steps are timed
            for each in runs:
                each.losses(values.batches)
        timings = take_turns([each.time for each in runs], values.steps, ranks.device)
        clocks = [clock_of(each, timing.median_ms, _CLOCK_S) for each, timing in zip(runs, timings, strict=True)]
        traces = [_trace(each) for each in runs]
        rows = [
            {"kind": kind, "contender": each.name, **describe_run(each, values.batches)}
            | {**vars(timing), **_columns(traced), **floor, "fraction_of_floor": floor["floor_ms"] / timing.median_ms}
            | {**clock, **agreements[each.name]._asdict(), "agrees": agreements[each.name].agrees}
            | {"config": config_digest(ranks.config)}
            for each, timing, traced, clock in zip(runs, timings, traces, clocks, strict=True)
        ]
        for each in runs:
            each.trainer.close()
        del runs, each
        collect_garbage(ranks.device)
        if ranks.world.rank == 0:
            shown = [name for name in _SHOWN if ranks.device.type == "cuda" or name not in _ON_GPUS]
            report(with_speedups(rows), faults, output, shown)
            if values.timeline is not None:
                _append_timelines(Path(values.timeline), group, traces)
        wrong |= bool(faults)
    return DISAGREEMENT if wrong else 0


def split_by_installed(names: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the contenders that the installed TorchRec can run, and the others.

    Raises:
        InputError: if it can run none of them.
    """
    has_it = _ASYNC_COPY in signature(TrainPipelineSparseDist).parameters
    missing = tuple(name for name in names if name.endswith("async_copy") and not has_it)
    if len(missing) == len(names):
        raise InputError(
            f"contenders: {', '.join(missing)} need TrainPipelineSparseDist({_ASYNC_COPY}=..), as TorchRec 1.9 has it; "
            f"add other contenders"
        )
    return tuple(name for name in names if name not in missing), missing


def contender_configs(ranks: Ranks, names: Sequence[str]) -> dict[str, Config]:
    """Return each contender's configuration; an InputError if one does not fit the device or the data."""
    embedding, train = ranks.config.embedding, ranks.config.train
    slowed = with_keys(ranks.config, {"embedding.lr": _LR_SCALE * embedding.lr, "train.lr": _LR_SCALE * train.lr})
    configs = {name: contender_config(slowed, STEP_CONTENDERS[name], ranks.device.type) for name in names}
    for config in configs.values():
        check_start(config, ranks.device)
    return configs


def contender_config(config: Config, keys: Keys, device_type: str) -> Config:
    on_cpu = {"train.graph_dense": False} if device_type == "cpu" else {}
    return with_keys(config, {**keys, **on_cpu})


def build(ranks: Ranks, name: str, config: Config) -> Trainer:
    """Return the trainer of the contender `name`, with the settings that no key expresses; a collective.

    `torchrec_strongest` looks up int32 ids. Variants of it use TrainPipelineFusedSparseDist, whose lookup overlaps with
    the optimizer; a thread of TrainPipelineSparseDist that issues the copies of batches; DDP's hook that averages dense
    gradients in bf16; index dedup for unpooled tables; or what `harness.torchrec_variants` has. `torchrec_our_dense`
    has our dense part (`harness.our_dense`). `drop_in` uses our sharders with their defaults; `drop_in_torchrec_ids`
    leaves the ids to TorchRec.
    """
    on_gpu = ranks.device.type == "cuda"
    is_strongest = name.startswith(("torchrec_strongest", OUR_DENSE))
    lookups: dict[str, Any] = {"embedding_table_index_type": torch.int32} if is_strongest else {}
    make_sharders = partial(build_sharders, fused_params=lookups)
    if name.startswith("drop_in"):
        make_sharders = partial(_sharders_at_defaults, **_DROP_IN.get(name, {}))
    elif name.endswith("index_dedup") and on_gpu:  # FBGEMM finds distinct ids only on GPUs
        make_sharders = partial(_sharders_with_index_dedup, fused_params=lookups)
    change_model = cast_cross_biases if name.endswith("bf16_biases") else None
    trainer = ranks.trainer(config, make_sharders, change_model=change_model)
    if name.endswith("fused_pipeline") and on_gpu:  # it needs CUDA streams
        trainer.pipeline = TrainPipelineFusedSparseDist(trainer.model, trainer.optimizer, trainer.device)
    if name.endswith("async_copy") and on_gpu:  # on a CPU nothing is copied
        trainer.pipeline = _pipeline_with_copy_thread(trainer.model, trainer.optimizer, trainer.device)
    if name.endswith("registered") and on_gpu:  # NCCL's memory
        trainer.pipeline = RegisteredPipeline(trainer.model, trainer.optimizer, trainer.device)
    if name.endswith("pt2"):
        trainer.pipeline = CompiledPipeline(trainer.model, trainer.optimizer, trainer.device)
    if name.startswith(OUR_DENSE):
        trainer.pipeline = OurDensePipeline(trainer)
    if name.endswith("bf16_gradients"):
        compress_gradients(trainer.model)
    return trainer


def compress_gradients(model: torch.nn.Module) -> int:
    """Let DDP average the dense gradients in bf16; return the number of modules that it wraps."""
    wrapped = [each for each in model.modules() if isinstance(each, DistributedDataParallel)]
    for each in wrapped:
        each.register_comm_hook(None, bf16_compress_hook)
    return len(wrapped)


def _pipeline_with_copy_thread(model: Any, optimizer: Any, device: torch.device) -> TrainPipelineSparseDist[Any, Any]:
    options: Any = {_ASYNC_COPY: True, "enable_inplace_copy_batch": True}  # the thread issues in-place copies only
    return TrainPipelineSparseDist(model, optimizer, device, execute_all_batches=True, **options)


def _sharders_at_defaults(config: EmbeddingConfig, *_: Any, **given: Any) -> list[ModuleSharder[Any]]:
    own = fused_params_of(config)
    return [OverlapEmbeddingBagCollectionSharder(own, **given), OverlapEmbeddingCollectionSharder(own)]


def _sharders_with_index_dedup(*args: Any, **kwargs: Any) -> list[ModuleSharder[Any]]:
    return [
        EmbeddingCollectionSharder(each.fused_params, each.qcomm_codecs_registry, use_index_dedup=True)
        if type(each) is EmbeddingCollectionSharder
        else each
        for each in build_sharders(*args, **kwargs)
    ]


def _train_again(ranks: Ranks, configs: Mapping[str, Config]) -> tuple[list[float], list[Batch], dict[str, Any]]:
    """Return the losses of a second run of the first contender, the batches, and the floor of a step.

    The dense part of this run is compiled if the dense part of any contender is, so that its losses show the same
    rounding. The run is closed before others are built, since a GPU may not have room for one more.
    """
    name, config = next(iter(configs.items()))
    compiled = any(each.train.compile_dense for each in configs.values())
    trainer = build(ranks, name, with_keys(config, {"train.compile_dense": compiled}))
    batches = read_batches(trainer, ranks.values.batches)
    ceilings = measure_ceilings(ranks.connect(), ranks.device)
    floor = find_floor(trainer, ceilings) | {"products_ms": measure_products(trainer)}
    run = TrainingRun(name, trainer, batches)
    losses = run.losses(CHECKED_STEPS)
    trainer.close()
    del trainer, run
    collect_garbage(ranks.device)
    return losses, batches, floor


def _trace(run: TrainingRun) -> list[TracedSteps]:
    """Return the traced steps of all ranks, the least busy one first; [] on CPUs. A collective."""
    if run.trainer.device.type == "cpu":
        return []
    ranks: list[Any] = [None] * run.trainer.world.world_size
    dist.all_gather_object(ranks, run.traced(_TRACED_STEPS))
    return sorted(ranks, key=lambda traced: traced.columns["busy_ms"])


def _columns(ranks: Sequence[TracedSteps]) -> Mapping[str, float | None]:
    if not ranks:
        return dict.fromkeys(_TRACED)
    works = without_waits([traced.work for traced in ranks])
    work_ms = max(traced.busy_ms(work) for traced, work in zip(ranks, works, strict=True))
    return {"work_ms": work_ms} | {name: ranks[0].columns[name] for name in _LEAST_BUSY}


def _append_timelines(path: Path, names: Sequence[str], traces: Sequence[Sequence[TracedSteps]]) -> None:
    """Append the median step of each contender's least busy rank."""
    rows = [
        {"contender": name, "kind": kind, "begin_us": begin_us, "end_us": end_us}
        for name, ranks in zip(names, traces, strict=True)
        for traced in ranks[:1]
        for kind, begin_us, end_us in traced.timeline
    ]
    if rows:
        append_csv(path, rows, "--timeline")


def describe_run(run: TrainingRun, batches: int) -> dict[str, Any]:
    keys = " ".join(f"{key}={value}" for key, value in STEP_CONTENDERS[run.name].items())
    return {"keys": keys, **describe(run.trainer.config, run.trainer.world.world_size), "batches": batches}


def with_speedups(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows with speedups. A row whose losses disagree gets none, and is not used as a baseline."""
    theirs = [row for row in rows if row["agrees"] and is_torchrec(row["contender"])]
    fastest = {time: min((row[time] for row in theirs if row[time]), default=None) for time in _SPEEDUPS.values()}

    def ratio(row: Mapping[str, Any], time: str) -> float | None:
        return fastest[time] / row[time] if fastest[time] and row["agrees"] else None

    return [row | {speedup: ratio(row, time) for speedup, time in _SPEEDUPS.items()} for row in rows]
