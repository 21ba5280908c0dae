"""`bench step`: how much faster is the whole training step under another backend? Contenders take turns.

Every contender is a trainer of the one configuration with a few keys of its own (`bench.step_contenders`), with the
same samples, seeds and types, and the first one's plan unless `own_plan` says otherwise. Each trains 20 steps from the
same weights on the same batches before anything is timed; one whose losses part from the first contender's gets no
speedup, and the exit code is 1. All train at 3% of the configuration's learning rates: at MLPerf's, Adagrad's first
steps make rounding grow to some percent of the loss within 20 steps, in which a wrong gradient would hide. A step
copies its batch to the device; the batches are read before.

A row is a contender. It has two times: `median_ms` by the clock, and `busy_ms`, the time of a traced step in which the
GPU is not idle, on the rank where that is least. On other ranks collectives run while they wait for a slower one; the
CPU's speed changes the first time and not the second. Of that step `exposed_ms` is exposed communication, as
`observe.trace_summary` defines it. Both speedups are over TorchRec as users run it, and over TorchRec at its strongest,
the fastest of the contenders here; `fraction_of_floor` is of the time that products, memory or links must take
(`harness.step_floor`), under the first contender's plan. A GPU holds few trainers at once, so contenders take turns in
groups (`step_contenders.heats`), whose rows are written one group after the other.
"""

import logging
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import SparseType
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.train_pipeline import TrainPipelineFusedSparseDist
from torchrec.distributed.types import ModuleSharder
from torchrec.optim.keyed import KeyedOptimizerWrapper

from dlrm_overlap.bench.harness.agreement import Agreement, check_noise, compare_losses, tolerances
from dlrm_overlap.bench.harness.limits import describe_tables, measure_ceilings
from dlrm_overlap.bench.harness.step_floor import find_floor
from dlrm_overlap.bench.harness.timing import Timing, counted, take_turns
from dlrm_overlap.bench.harness.training_runs import TrainingRun, mean_step_columns, read_batches
from dlrm_overlap.bench.harness.workload import collect_garbage
from dlrm_overlap.bench.report.measured import read_measured
from dlrm_overlap.bench.report.rows import report
from dlrm_overlap.bench.request import StepRequest
from dlrm_overlap.bench.step_contenders import STEP_CONTENDERS, contender_config, heats
from dlrm_overlap.config import Config, EmbeddingConfig
from dlrm_overlap.data.batch import Batch
from dlrm_overlap.embedding.plan import plan_record
from dlrm_overlap.embedding.sharder import (
    OverlapEmbeddingBagCollectionSharder,
    OverlapEmbeddingCollectionSharder,
    build_sharders,
    fused_params_of,
)
from dlrm_overlap.train.preflight import check_start
from dlrm_overlap.train.ranks import Ranks
from dlrm_overlap.train.trainer import Trainer

log = logging.getLogger("dlrm_overlap")

CHECKED_STEPS = 20
_RATE = 0.03  # of the configuration's learning rates
_TRACED_STEPS = 5
_TRACED = ("busy_ms", "exposed_ms", "exposed_most_ms")
_OPTIMIZERS: Mapping[str, Any] = {"sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad, "adam": torch.optim.Adam}
_BASELINES = ("torchrec", "strongest")
_SPEEDUPS = {"speedup_over": "median_ms", "busy_speedup_over": "busy_ms"}
_SHOWN = (
    "contender", "median_ms", *_TRACED, "p95_to_median", "host_ms", "samples_per_s",
    *(f"{speedup}_{name}" for speedup in _SPEEDUPS for name in _BASELINES), "dense_ms", "hbm_ms", "link_ms",
    "floor_ms", "fraction_of_floor", "max_difference", "tolerance",
)  # fmt: skip


def run(request: StepRequest, ranks: Ranks) -> int:
    """Measure the figure, print its table and append its rows on rank 0. All ranks call this.

    Returns:
        The exit code: 1 if losses disagree.
    """
    names = _possible(request.names, ranks)
    if request.resume and request.output.exists():
        done = {row["contender"] for row in read_measured(request.output).rows}
        left = [name for name in names if name not in done]
        if not left:
            return 0
        names = tuple(dict.fromkeys([names[0], *left, names[-1]]))
    configs = contender_configs(ranks, names)
    again, plan, batches, floor = _train_apart(ranks, configs, request)
    reference: dict[str, list[float]] = {}
    wrong = False
    for heat in heats(names, request.at_once):
        runs = [TrainingRun(name, build(ranks, name, configs[name]), batches) for name in counted("trainers", heat)]
        losses = reference | {each.name: each.losses(CHECKED_STEPS) for each in runs}
        reference = {names[0]: losses[names[0]]}
        agreements, faults = judge(ranks.config.train.precision, losses, again)
        timings = dict(zip(heat, take_turns([each.time for each in runs], request.steps, ranks.device), strict=True))
        rows = [
            {"kind": request.kind, "contender": each.name}
            | describe_run(each, request.batches)
            | {"own_plan": plan_record(each.trainer.plan) != plan}
            | _times(each, timings[each.name], _trace(each), floor)
            | {"checked_steps": CHECKED_STEPS}
            | {name: getattr(agreements[each.name], name) for name in ("max_difference", "tolerance", "agrees")}
            for each in runs
        ]
        for each in runs:
            each.close()
        del runs, each
        collect_garbage(ranks.device)
        if ranks.world.rank == 0:
            report(with_speedups(rows), faults, request.output, _SHOWN)
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


def _possible(names: Sequence[str], ranks: Ranks) -> tuple[str, ...]:
    """Return `names` without the contenders that would be others here.

    They have index dedup where all tables are pooled, or a dense optimizer that this torch cannot update by one kernel.
    """
    if ranks.config.model.sequence.history is None:
        names = [name for name in names if "index_dedup" not in STEP_CONTENDERS[name].extras]
    fused = {name for name in names if "fused_optimizer" in STEP_CONTENDERS[name].extras}
    parameter = torch.zeros(1, device=ranks.device, requires_grad=True)
    parameter.grad = torch.zeros_like(parameter)
    try:
        if fused:
            _OPTIMIZERS[ranks.config.train.optimizer]([parameter], fused=True).step()
    except RuntimeError as error:
        log.warning("bench step: without %s: %s", " ".join(fused), error)
        return tuple(name for name in names if name not in fused)
    return tuple(names)


def build(ranks: Ranks, name: str, config: Config) -> Trainer:
    """Return the trainer of the contender `name`, with what no key of `config` gives. All ranks call this."""
    extras = STEP_CONTENDERS[name].extras
    lookups: dict[str, Any] = {"embedding_table_index_type": torch.int32} if "int32_ids" in extras else {}
    if "bf16_output" in extras and ranks.device.type == "cuda":  # FBGEMM has no such output on CPUs
        lookups["output_dtype"] = SparseType.BF16
    make_sharders = _sharders_at_defaults if "drop_in" in extras else partial(build_sharders, fused_params=lookups)
    if "index_dedup" in extras and ranks.device.type == "cuda":  # FBGEMM finds distinct ids there alone
        make_sharders = partial(_sharders_with_index_dedup, fused_params=lookups)
    trainer = ranks.trainer(config, make_sharders)
    if "fused_optimizer" in extras:
        _fuse(trainer)
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


def _fuse(trainer: Trainer) -> None:
    """Make the dense optimizer, one of torch.optim that has taken no step, update all parameters by one kernel."""
    for name, keyed in trainer.optimizer.optimizers:
        if name != "dense":
            continue
        assert isinstance(keyed, KeyedOptimizerWrapper)
        inner = keyed._optimizer
        for group in inner.param_groups:
            group["fused"], group["foreach"] = True, False
        for parameter, state in inner.state.items():
            state["step"] = state["step"].to(parameter.device, torch.float32)


def _train_apart(
    ranks: Ranks, configs: Mapping[str, Config], request: StepRequest
) -> tuple[list[float], Any, list[Batch], dict[str, Any]]:
    """Return the losses of a second run of the first contender, its plan, all runs' batches, and its step's floor.

    The run is gone before the others come: a GPU may have no room for one more. Its dense part is compiled if any
    contender's is, so that its losses differ from the reference's by the same rounding.
    """
    name, config = next(iter(configs.items()))
    compiled = any(each.train.compile_dense for each in configs.values())
    trainer = build(ranks, name, replace(config, train=replace(config.train, compile_dense=compiled)))
    batches = read_batches(trainer, request.batches)
    floor = find_floor(trainer, batches, measure_ceilings(ranks.connect(), ranks.device), request.dense_tflop_per_s)
    plan = plan_record(trainer.plan)
    apart = TrainingRun(name, trainer, batches)
    losses = apart.losses(CHECKED_STEPS)
    apart.close()
    del trainer, apart
    collect_garbage(ranks.device)
    return losses, plan, batches, floor


def _trace(run: TrainingRun) -> dict[str, float | None]:
    """Return the columns of a traced step on the rank that is least busy; None in each on CPUs. A collective."""
    columns: Mapping[str, float] = {}
    if run.trainer.device.type == "cuda":
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json.gz"
            run.trace(_TRACED_STEPS, path)
            columns = mean_step_columns(path)
    gathered: list[Mapping[str, float]] = [{}] * run.trainer.world.world_size
    dist.all_gather_object(gathered, columns)
    least = min(gathered, key=lambda each: each.get("busy_ms", 0.0))
    return {name: least.get(name) for name in _TRACED}


def judge(precision: str, losses: dict[str, list[float]], again: list[float]) -> tuple[dict[str, Agreement], list[str]]:
    """Return how the contenders' losses agree with those of the first, and a line for each that does not.

    Args:
        precision: of the dense part.
        losses: contender -> its losses; the first contender is the reference.
        again: the reference's losses once more.
    """
    reference, expected = next(iter(losses.items()))
    noise = check_noise(expected, again)
    if not noise.agrees:  # no contender can be judged
        fault = (
            f"{reference}: its own losses differ by {noise.max_difference:.1e}, relatively, between two runs; "
            f"at most {noise.tolerance:g} separates right from wrong, so no speedup is reported; take lower learning "
            f"rates"
        )
        return dict.fromkeys(losses, noise), [fault]
    allowed = tolerances(precision, expected, again)
    agreements = {name: compare_losses(found, expected, allowed) for name, found in losses.items()}
    faults = [
        f"{name}: its loss differs from {reference}'s by {each.max_difference:.1e}, relatively; tolerance "
        f"{each.tolerance:.1e}; no speedup is reported"
        for name, each in agreements.items()
        if not each.agrees
    ]
    return agreements, faults


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
        "p95_to_median": timing.p95_ms / median_ms,
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
