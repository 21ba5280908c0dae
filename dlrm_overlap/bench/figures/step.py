"""`bench step`: how much faster is the whole training step under another backend? Contenders take turns.

Every contender is a trainer of the one configuration with a few keys of its own (`bench.step_contenders`), with the
same samples, seeds and types, and the first one's plan unless `own_plan` says otherwise. Each trains 20 steps from the
same weights on the same batches before anything is timed; one whose losses part from the first contender's gets no
speedup, and the exit code is 1. All train at 3% of the configuration's learning rates: at MLPerf's, Adagrad's first
steps make rounding grow to some percent of the loss within 20 steps, in which a wrong gradient would hide. A step
copies its batch to the device; the batches are read before.

A row is a contender. Its speedups are over the two contenders of TorchRec, as users run it and at its strongest;
`fraction_of_floor` is of the time that products, memory or links must take (`harness.step_floor`), under the first
contender's plan. A GPU holds few trainers at once: an ablation takes several calls, each with its reference first.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from dlrm_overlap.bench.harness.agreement import Agreement, check_noise, compare_losses, tolerances
from dlrm_overlap.bench.harness.limits import describe_tables, measure_ceilings
from dlrm_overlap.bench.harness.step_floor import find_floor
from dlrm_overlap.bench.harness.timing import Timing, counted, take_turns
from dlrm_overlap.bench.harness.training_runs import TrainingRun, read_batches
from dlrm_overlap.bench.harness.workload import collect_garbage
from dlrm_overlap.bench.report.rows import report
from dlrm_overlap.bench.request import StepRequest
from dlrm_overlap.bench.step_contenders import STEP_CONTENDERS, contender_config
from dlrm_overlap.config import Config
from dlrm_overlap.data.batch import Batch
from dlrm_overlap.embedding.plan import describe_plan
from dlrm_overlap.train.preflight import check_start
from dlrm_overlap.train.ranks import Ranks
from dlrm_overlap.train.trainer import Trainer

CHECKED_STEPS = 20
_RATE = 0.03  # of the configuration's learning rates
_BASELINES = ("torchrec", "torchrec_strongest")
_SHOWN = (
    "contender", "median_ms", "p95_to_median", "host_ms", "samples_per_s",
    *(f"speedup_over_{name}" for name in _BASELINES), "dense_ms", "hbm_ms", "link_ms",
    "floor_ms", "fraction_of_floor", "max_difference", "tolerance",
)  # fmt: skip


def run(request: StepRequest, ranks: Ranks) -> int:
    """Measure the figure, print its table and append its rows on rank 0. All ranks call this.

    Returns:
        The exit code: 1 if losses disagree.
    """
    configs = contender_configs(ranks, request.contenders)

    again, batches, floor = _train_apart(ranks, configs, request)
    runs = [
        TrainingRun(name, build(ranks, name, config), batches)
        for name, config in counted("trainers to build", list(configs.items()))
    ]
    plan = describe_plan(runs[0].trainer.plan)
    losses = {each.name: each.losses(CHECKED_STEPS) for each in counted("contenders to check", runs)}
    agreements, faults = judge(ranks.config.train.precision, losses, again)
    timings = dict(zip(configs, take_turns([each.time for each in runs], request.steps, ranks.device), strict=True))
    rows = [
        {"kind": request.kind, "contender": each.name}
        | describe_run(each, request.batches)
        | {"own_plan": describe_plan(each.trainer.plan) != plan}
        | _times(each, timings, agreements, floor)
        for each in runs
    ]
    for each in runs:
        each.close()
    if ranks.world.rank == 0:
        report(rows, faults, request.output, _SHOWN)
    return 1 if faults else 0


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
    """Return the trainer of the contender `name`. All ranks call this."""
    int32_ids = STEP_CONTENDERS[name].int32_ids
    return ranks.trainer(config, {"embedding_table_index_type": torch.int32} if int32_ids else {})


def _train_apart(
    ranks: Ranks, configs: Mapping[str, Config], request: StepRequest
) -> tuple[list[float], list[Batch], dict[str, Any]]:
    """Return the losses of a second run of the first contender, all runs' batches, and the floor of its step.

    The run is gone before the others come: a GPU may have no room for one more. Its dense part is compiled if any
    contender's is, so that its losses differ from the reference's by the same rounding.
    """
    name, config = next(iter(configs.items()))
    compiled = any(each.train.compile_dense for each in configs.values())
    trainer = build(ranks, name, replace(config, train=replace(config.train, compile_dense=compiled)))
    batches = read_batches(trainer, request.batches)
    floor = find_floor(trainer, batches, measure_ceilings(ranks.connect(), ranks.device), request.dense_tflop_per_s)
    apart = TrainingRun(name, trainer, batches)
    losses = apart.losses(CHECKED_STEPS)
    apart.close()
    del trainer, apart
    collect_garbage(ranks.device)
    return losses, batches, floor


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
        "int32_ids": STEP_CONTENDERS[run.name].int32_ids,
        "plan": config.embedding.plan,
        "gradient_parts": config.embedding.gradient_parts,
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


def _times(
    run: TrainingRun, timings: dict[str, Timing], agreements: dict[str, Agreement], floor: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the columns of a run's times, of how they compare with the floor and the baselines', and of its losses."""
    timing, agreement = timings[run.name], agreements[run.name]
    median_ms = timing.median_ms
    return {
        **vars(timing),
        "p95_to_median": timing.p95_ms / median_ms,
        "samples_per_s": run.trainer.global_batch * 1e3 / median_ms,
        **{
            f"speedup_over_{name}": timings[name].median_ms / median_ms
            if name in timings and agreement.agrees and agreements[name].agrees
            else None
            for name in _BASELINES
        },
        **floor,
        "fraction_of_floor": floor["floor_ms"] / median_ms,
        "checked_steps": CHECKED_STEPS,
        "max_difference": agreement.max_difference,
        "tolerance": agreement.tolerance,
        "agrees": agreement.agrees,
    }
