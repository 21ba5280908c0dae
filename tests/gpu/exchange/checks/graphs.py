"""Captured steps: the losses of eager ones, under any delays, and faults that every rank reports."""

import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple
from unittest.mock import patch

import torch

from dlrm_overlap.config import Config
from dlrm_overlap.data.batch import Batch
from dlrm_overlap.dense.tensor_parallel import shards_of
from dlrm_overlap.embedding import distinct
from dlrm_overlap.embedding.capacity import CapacityTracker
from dlrm_overlap.embedding.options import PUTS
from dlrm_overlap.embedding.sharded_module import exchanges
from dlrm_overlap.train.graphs.captured import CapturedStep
from dlrm_overlap.train.graphs.train_pipeline import GraphTrainPipeline
from dlrm_overlap.train.model import DLRM
from dlrm_overlap.train.trainer import Trainer
from tests.agreement import LOSS_TOLERANCE, assert_all_near
from tests.distributed.foreign import PROGRAMS, compare
from tests.gpu.exchange.checks.faults import CULPRIT, TIMEOUT_S, expired_error
from tests.gpu.exchange.checks.training import (
    SAMPLES,
    assert_agree,
    check_resumes,
    make_trainer,
    rows_of,
    small_config,
    train_steps,
)
from tests.gpu.exchange.place import Check, Place, every
from tests.programs import two_lines

_STEPS = 40
_BORDERS = (0, 5, 9, 10, 23, _STEPS)  # of segments: one that ends with a single graph captured, one of a single step
_BACKENDS = ("pgas", "fused")


def graph_config(place: Place, backend: str, optimizer: str, known: bool) -> Config:
    config = small_config(place, backend, optimizer, pipeline="graph")
    if not known:
        return config
    tables = replace(config.data.tables, multi_hot=[4, 3, 1, 1, 2, 1, 1, 1])
    return replace(config, data=replace(config.data, tables=tables))


class Run(NamedTuple):
    """The results of a run in segments."""

    losses: list[float]
    evaluated: list[float]  # losses of the evaluations between the segments
    rows: dict[Any, torch.Tensor]  # at the end
    before: dict[Any, torch.Tensor]  # rows at the start
    joins_in_place: bool  # whether pooled embeddings are joined with the bottom MLP's output without a copy

    def assert_same(self, other: "Run", what: str) -> None:
        """Check that losses and rows are equal to another run's, bit for bit."""
        assert self.losses == other.losses, f"{what}: losses {self.losses}, not {other.losses}"
        assert self.evaluated == other.evaluated, f"{what}: evaluated {self.evaluated}, not {other.evaluated}"
        assert_all_near(self.rows, other.rows, 0.0, f"{what}:")

    def assert_near(self, other: "Run", tolerance: float, what: str) -> None:
        """Check that losses are equal to another run's except for rounding."""
        assert_agree(self.losses, other.losses, tolerance, what)
        assert_agree(self.evaluated, other.evaluated, tolerance, f"{what}, evaluated")


def train_in_segments(place: Place, config: Config, delays: bool = False, borders: Sequence[int] = _BORDERS) -> Run:
    """Train in segments, with an evaluation after each."""
    trainer = make_trainer(place, config)
    assert isinstance(trainer.pipeline, GraphTrainPipeline) == (config.train.pipeline == "graph")
    assert bool(shards_of(trainer.model)) == (config.model.top_parallel == "tensor" and place.world_size > 1)
    losses: list[float] = []
    evaluated: list[float] = []
    before = rows_of(trainer)
    with delayed(place, trainer.pipeline, delays):
        for first, end in pairwise(borders):
            losses += train_steps(place, trainer, first, end)
            evaluated.append(trainer.evaluate()["loss"])
    place.synchronize()
    trainer.check()
    models = [module for module in trainer.model.modules() if isinstance(module, DLRM)]
    run = Run(losses, evaluated, rows_of(trainer), before, models[0].joins_in_place)
    place.close(trainer)
    return run


@contextmanager
def delayed(place: Place, pipeline: Any, late: bool) -> Iterator[None]:
    """If `late`, delay each rank's GPU and host by random times before each step."""
    if not late:
        yield
        return
    progress, source = pipeline.progress, random.Random(place.rank)

    def delay(batches: Iterator[Batch]) -> object:
        if place.on_gpu:
            torch.cuda._sleep(source.choice([1, 1, 100_000, 2_000_000]))
        time.sleep(source.choice([0, 0, 1e-4, 2e-3]))
        return progress(batches)

    pipeline.progress = delay
    yield
    del pipeline.progress


def _check_losses(place: Place, optimizer: str, known: bool) -> None:
    config = graph_config(place, "pgas", optimizer, known)
    expected = train_in_segments(place, replace(config, train=replace(config.train, pipeline="torchrec")))
    for backend, put in (("pgas", "direct"), *(("fused", put) for put in PUTS)):
        config = graph_config(place, backend, optimizer, known)
        run = train_in_segments(place, replace(config, embedding=replace(config.embedding, put=put)))
        run.assert_near(expected, LOSS_TOLERANCE.get(optimizer, LOSS_TOLERANCE["adagrad"]), f"{backend}, put {put}")
        assert run.rows.keys() == expected.rows.keys()


def _check_row_shards(place: Place, known: bool) -> None:
    """Tables that are cut by rows train as whole ones do: eager, captured, and captured under delays."""

    def run(plan: str, backend: str, put: str, pipeline: str, late: bool) -> Run:
        config = graph_config(place, backend, "sgd", known)
        embedding = replace(config.embedding, plan=plan, put=put)  # type: ignore[arg-type]
        train = replace(config.train, pipeline=pipeline)  # type: ignore[arg-type]
        return train_in_segments(place, replace(config, embedding=embedding, train=train), late)

    expected = run("table_wise", "pgas", "direct", "torchrec", late=False)
    ways = [("nccl", "direct", "torchrec"), ("pgas", "direct", "torchrec"), ("pgas", "direct", "graph")]
    ways += [("fused", put, "graph") for put in PUTS]
    for backend, put, pipeline in ways:
        for late in (False, True) if (backend, pipeline) == ("pgas", "graph") else (False,):
            found = run("row_wise", backend, put, pipeline, late)
            found.assert_near(expected, LOSS_TOLERANCE["sgd"], f"{backend}, put {put}, pipeline {pipeline}")


def _check_bf16(place: Place, backend: str, arch: str) -> None:
    """Pooled embeddings that are sent in bfloat16 and joined in place train as those that the model rounds.

    They have the same bits, captured or eager, since the model rounds them before its first product in any case.
    """
    config = graph_config(place, backend, "rowwise_adagrad", known=True)
    model = replace(config.model, arch=arch, cross_layers=2, cross_rank=8) if arch == "dcn" else config.model
    config = replace(config, model=model, train=replace(config.train, precision="bf16"))
    for pipeline in ("graph", "torchrec"):
        in_place = replace(config, train=replace(config.train, pipeline=pipeline))
        rounded = replace(in_place, embedding=replace(config.embedding, wire_dtype="fp32"))
        expected, run = (train_in_segments(place, each) for each in (rounded, in_place))
        assert (expected.joins_in_place, run.joins_in_place) == (False, True)
        run.assert_same(expected, pipeline)


def _check_delays(place: Place, backend: str, known: bool) -> None:
    """Delays on any rank change no bit."""
    config = graph_config(place, backend, "rowwise_adagrad", known)
    expected = train_in_segments(place, config)
    for number in (1, 2):
        train_in_segments(place, config, delays=True).assert_same(expected, f"run {number}")


def _check_checkpoint(place: Place, pipelines: tuple[str, str]) -> None:
    """Each pipeline resumes from a checkpoint of the other."""
    config = small_config(place, "pgas", "adagrad")
    first, second = (replace(config, train=replace(config.train, pipeline=each)) for each in pipelines)
    check_resumes(place, first, second, _STEPS)


def _check_learning_rates(place: Place) -> None:
    """Tables and dense parameters follow a schedule of learning rates in every step."""
    config = small_config(place, "pgas", "adagrad")
    found: dict[str, list[float]] = {}
    for pipeline in ("torchrec", "graph"):
        trainer = make_trainer(place, replace(config, train=replace(config.train, pipeline=pipeline, warmup_steps=30)))
        found[pipeline] = train_steps(place, trainer, 0, _STEPS)
        place.close(trainer)
    assert_agree(found["graph"], found["torchrec"], LOSS_TOLERANCE["adagrad"], "graph")


def _spoiled(place: Place, trainer: Trainer, step: int, spoil: Callable[[Batch], Batch]) -> Iterator[Batch]:
    """Yield batches without end; rank CULPRIT changes the one of `step` by `spoil`."""
    number = 0
    while True:
        batch = trainer.train_data.read((number * place.world_size + place.rank) * SAMPLES, SAMPLES)
        yield spoil(batch) if number == step and place.rank == CULPRIT % place.world_size else batch
        number += 1


def _too_many(batch: Batch) -> Batch:
    """Return the batch with ids beyond the capacity: of table 0, whose bags have 4."""
    lengths, values = batch.sparse.lengths().clone(), batch.sparse.values()
    lengths[0] += 5
    return Batch.from_tensors(batch.dense, lengths, torch.cat([values[:5], values]), batch.labels)


def _outside(batch: Batch) -> Batch:
    values = batch.sparse.values().clone()
    values[7] = 10**9
    return Batch.from_tensors(batch.dense, batch.sparse.lengths(), values, batch.labels)


def _train_until_error(place: Place, trainer: Trainer, step: int, spoil: Callable[[Batch], Batch]) -> str:
    batches = _spoiled(place, trainer, step, spoil)
    try:
        for _ in range(step + 5):
            trainer.step(batches)
        place.synchronize()
        for exchange in exchanges(trainer.model):
            exchange.check()
    except (ValueError, RuntimeError) as error:
        try:
            for exchange in exchanges(trainer.model):
                exchange.check()
        except (ValueError, RuntimeError) as recorded:
            return str(recorded)
        return str(error)
    return "nothing"


def _check_overflow(place: Place, known: bool) -> None:
    """Every rank names the rank whose ids were not counted, or have changed since."""
    config = graph_config(place, "pgas", "sgd", known)
    with patch.multiple(CapacityTracker, is_within=lambda *_: True, are_captured=lambda *_: True):
        message = _train_until_error(place, make_trainer(place, config), 12, _too_many)
    culprit = CULPRIT % place.world_size
    assert message.startswith(f"the batch of rank {culprit} has "), message
    assert "correct the capacity's bag_sizes" in message, message
    place.leave()


def _check_bad_id(place: Place) -> None:
    """The owner of the table reports the id, its position and the rank of its batch."""
    config = graph_config(place, "pgas", "sgd", known=False)
    config = replace(config, embedding=replace(config.embedding, wait_timeout_s=TIMEOUT_S))
    trainer = make_trainer(place, config)
    (exchange,) = exchanges(trainer.model)
    owners = {shard.owner for owned in exchange.layout.by_owner for shard in owned if shard.feature_name == "t_00"}
    message = _train_until_error(place, trainer, 12, _outside)
    if place.rank in owners:
        assert "id 1000000000 is outside its table" in message, message
        assert f"in the batch of rank {CULPRIT % place.world_size}" in message, message
    else:
        assert "outside" not in message, message
    place.leave()


def _check_failed_capture(place: Place) -> None:
    """A step after a capture that has failed is refused on every rank."""
    trainer = make_trainer(place, graph_config(place, "pgas", "sgd", known=True))

    def fail(*_: Any) -> None:
        if torch.cuda.is_current_stream_capturing():
            raise ArithmeticError("in a capture")

    failing, messages = trainer.model.register_forward_hook(fail), list[str]()
    for _ in range(2):
        try:
            train_steps(place, trainer, 0, 12)
        except Exception as error:  # CUDA's, of the capture that ends unfinished, then ours
            messages.append(str(error))
        failing.remove()
    assert len(messages) == 2, messages
    assert "the capture of a step has failed" in messages[1], messages
    place.leave()


def _check_stalled_peer(place: Place) -> None:
    """All ranks except the culprit name the rank for which they waited, in time."""
    config = graph_config(place, "pgas", "sgd", known=False)
    config = replace(config, embedding=replace(config.embedding, wait_timeout_s=TIMEOUT_S))
    trainer = make_trainer(place, config)
    batches = _spoiled(place, trainer, -1, lambda batch: batch)
    for _ in range(10):
        trainer.step(batches)
    place.meet()
    if place.rank == CULPRIT:
        time.sleep(3 * TIMEOUT_S)
        place.leave()

    def steps() -> None:
        for _ in range(5):
            trainer.step(batches)

    message = expired_error(place, trainer.check, steps)
    assert f"of rank {CULPRIT}: expected epoch" in message, message
    place.leave()


def _check_program(place: Place, name: str) -> None:
    """A program with two lines changed has the same losses; its steps are replays, unless it calls collectives."""
    replays, replay = list[int](), CapturedStep.replay

    def count(step: CapturedStep) -> Any:
        replays.append(1)
        return replay(step)

    with patch.object(CapturedStep, "replay", count):
        two_lines.compare(name, 60, LOSS_TOLERANCE["programs_on_gpu"])
    captured = name != "two_tower"
    assert not place.on_gpu or (len(replays) > 20 if captured else not replays), f"{len(replays)} steps were replays"


def _check_foreign(place: Place, name: str, least_block: int = distinct._LEAST_BLOCK) -> None:
    with patch.object(distinct, "_LEAST_BLOCK", least_block):
        compare(name, place.group, place.device)


def _check_default_stream(place: Place, name: str) -> None:
    """Run a program on the default stream, as most run, which is not the stream that steps are captured on."""
    with torch.cuda.stream(torch.cuda.default_stream(place.device)):
        compare(name, place.group, place.device)


_RANGES = {"ranges": False}
_KNOWN = _RANGES | {"known": True}
_PIPELINES = (("torchrec", "graph"), ("graph", "torchrec"))
_resumed = {f"{writer}_{reader}": (writer, reader) for writer, reader in _PIPELINES}
CHECKS = (
    every("graph_losses", _check_losses, optimizer=["sgd"], known=_RANGES)
    | every("graph_losses", _check_losses, optimizer=["adagrad"], known={"known": True})
    | every("graph_losses", _check_losses, optimizer=("adam", "partial_rowwise_lamb"), known=_RANGES, gpu_only=True)
    | every("graph_rows", _check_row_shards, known=_KNOWN, gpu_only=True)
    | every("graph_losses", _check_bf16, arch={"dot_bf16": "dot"}, backend=["pgas"])
    | every("graph_losses", _check_bf16, arch={"dcn_bf16": "dcn"}, backend=["fused"])
    | every("graph_delays", _check_delays, backend=["pgas"], known=_RANGES)
    | every("graph_delays", _check_delays, backend=["fused"], known={"known": True})
    | every("graph_checkpoint", _check_checkpoint, pipelines=_resumed)
    | {"graph_learning_rates": Check(_check_learning_rates)}
    | every("program", _check_program, name=list(two_lines.PROGRAMS), timeout_s=150.0)
    | every("foreign", _check_foreign, name=list(PROGRAMS))
    | every("default_stream", _check_default_stream, name=("own_forwards", "longer_bags"), gpu_only=True)
    | {"foreign_sequences_in_blocks": Check(partial(_check_foreign, name="longer_sequences", least_block=1))}
)
LOST = (
    every("graph_overflow", _check_overflow, known=_KNOWN, alone=True)
    | every("graph_bad_id", _check_bad_id, alone=True)
    | every("graph_failed_capture", _check_failed_capture, alone=True, gpu_only=True)
    | every("graph_peer_stalls", _check_stalled_peer, alone=True)
)
