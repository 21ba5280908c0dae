"""Memory that captured steps read stays valid, whatever runs between them: other sizes, states or models."""

import gc
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dlrm_overlap.checkpoint.checkpoint import Checkpointer, extents_to_store
from dlrm_overlap.comm.order import CommunicationOrder
from dlrm_overlap.config import Config, InputError
from dlrm_overlap.data.batch import Batch
from dlrm_overlap.embedding.capacity import CapacityTracker
from dlrm_overlap.embedding.options import PUTS
from dlrm_overlap.embedding.sharded_module import exchanges
from dlrm_overlap.kernels import launches
from dlrm_overlap.train.trainer import Trainer
from tests.agreement import assert_all_near
from tests.gpu.exchange.checks.graphs import graph_config
from tests.gpu.exchange.checks.training import SAMPLES, make_trainer, rows_of, train_steps
from tests.gpu.exchange.place import Check, Place, every

_BORDERS = (0, 5, 9, 10, 17, 20)  # of segments: one that ends with a single graph captured, one of a single step
_BETWEEN = (3, 4, 6, 12, 13, 16)  # steps followed by an evaluation: with one graph captured, and with both
_SIZES = (1, 7, 200, 3, 64, 33, 250, 90, 5, 17)  # samples a rank, at a fixed capacity for ids: short and long bags
_MOST = 4  # values that are kept of each kind: fewer than sizes, and as many as a step uses
_LONG_CYCLES = 50_000_000  # longer than the CPU takes to issue an eager step
_GARBAGE = 2**30 + 1  # two of them are an invalid address

Between = Callable[[Trainer, int], None]


def _train(place: Place, trainers: Sequence[Trainer], between: Between) -> list[list[float]]:
    """Return each trainer's losses; trainers take their steps in turns, and `between` runs after each step."""
    losses: list[list[torch.Tensor]] = [[] for _ in trainers]
    for first, end in pairwise(_BORDERS):
        segments = []
        for trainer in trainers:
            trainer.pipeline.reset()
            starts = [(step * place.world_size + place.rank) * SAMPLES for step in range(first, end)]
            segments.append(iter([trainer.train_data.read(start, SAMPLES) for start in starts]))
        for step in range(first, end):
            for trainer, segment, taken in zip(trainers, segments, losses, strict=True):
                trainer.learning_rate.set(step)
                taken.append(trainer.step(segment).detach().clone())
                between(trainer, step)
    place.synchronize()
    return [torch.stack(taken).tolist() for taken in losses]


def _nothing(trainer: Trainer, step: int) -> None:
    pass


def _run(place: Place, config: Config, between: Between) -> tuple[list[float], dict[Any, torch.Tensor]]:
    trainer = make_trainer(place, config)
    (losses,) = _train(place, [trainer], between)
    rows = rows_of(trainer)
    trainer.check()
    place.close(trainer)
    return losses, rows


def _evaluate(place: Place, trainer: Trainer, sizes: Sequence[int]) -> None:
    trainer.model.eval()
    with torch.no_grad():
        for size in sizes:
            trainer.pipeline.progress(iter([trainer.train_data.read(place.rank * SAMPLES, size)]))
    trainer.model.train()


def _fill_freed(place: Place, trainer: Trainer) -> list[torch.Tensor]:
    """Return tensors of garbage in memory that was freed, on each stream that steps allocate on."""
    if not place.on_gpu:
        return []
    pipeline: Any = trainer.pipeline
    owners: list[Any] = [pipeline._streams, *exchanges(trainer.model)]
    owners += [part for exchange in exchanges(trainer.model) for part in exchange._parts or () if part is not None]
    owners += [transport for owner in owners if (transport := getattr(owner, "transport", None)) is not None]
    streams = [each for owner in owners for each in vars(owner).values() if isinstance(each, torch.cuda.Stream)]
    held: list[torch.Tensor] = []
    for stream in {torch.cuda.default_stream(place.device), *streams}:
        with torch.cuda.stream(stream):
            for words in (2, 130, 520, 2100, 8300):
                held += [torch.full((words,), _GARBAGE, dtype=torch.int32, device=place.device) for _ in range(60)]
    place.synchronize()
    return held


@contextmanager
def _others_between(place: Place) -> Iterator[Between]:
    """Yield a function that evaluates batches of more sizes than are cached, and then overwrites freed memory."""
    held: list[torch.Tensor] = []

    def between(trainer: Trainer, step: int) -> None:
        if step in _BETWEEN:
            _evaluate(place, trainer, _SIZES)
            held.extend(_fill_freed(place, trainer))

    with patch.object(launches, "_MOST", _MOST):
        yield between


def _check_sizes(place: Place, known: bool, **embedding: Any) -> None:
    """Evaluations of many sizes between captured steps change no bit of the steps."""
    config = graph_config(place, embedding.pop("backend"), "rowwise_adagrad", known)
    config = replace(config, embedding=replace(config.embedding, **embedding))
    if "nodes" in embedding:  # where dense gradients are summed by a collective
        config = replace(config, train=replace(config.train, dense_reduce="collective"))
    expected, expected_rows = _run(place, config, _nothing)
    with _others_between(place) as between:
        losses, rows = _run(place, config, between)
    assert losses == expected, f"losses {losses}, not {expected}"
    assert_all_near(rows, expected_rows, 0.0, "rows:")


def _check_reload(place: Place, precision: str) -> None:
    """The same graphs continue from a checkpoint that is loaded after captured steps, to the last bit."""
    config = graph_config(place, "fused", "rowwise_adagrad", known=True)
    trainer = make_trainer(place, replace(config, train=replace(config.train, precision=precision)))  # type: ignore[arg-type]
    train_steps(place, trainer, 0, 12)
    checkpointer = Checkpointer(place.folder / f"{place.name}_checkpoints", keep=1, shape={})
    trainer.gather_dense()
    checkpointer.write(12, extents_to_store(trainer.model, trainer.optimizer))
    expected = train_steps(place, trainer, 12, 20)
    expected_rows = rows_of(trainer)
    assert checkpointer.load(checkpointer.folder / "step_12", trainer.model, trainer.optimizer) == 12
    losses = train_steps(place, trainer, 12, 20)
    assert losses == expected, f"losses {losses}, not {expected}"
    assert_all_near(rows_of(trainer), expected_rows, 0.0, "rows:")
    place.close(trainer)


def _check_device_batches(place: Place) -> None:
    """Batches that the caller's stream makes on the device, late, are not read before."""
    config, samples = graph_config(place, "pgas", "rowwise_adagrad", known=True), place.world_size * SAMPLES
    steps = _BORDERS[-1]
    first = make_trainer(place, config)
    expected = train_steps(place, first, 0, steps)
    place.close(first)
    trainer, made = make_trainer(place, config), deque[Batch]()
    starts = [step * samples + place.rank * SAMPLES for step in range(steps)]
    known = [trainer.train_data.read(start, SAMPLES).to(place.device) for start in starts]
    place.synchronize()
    batches, losses = iter(lambda: made.popleft() if made else None, None), list[torch.Tensor]()
    for step in range(steps):
        for batch in known[step + 2 if step else 0 : step + 3]:  # a step reads one, the first step three
            if place.on_gpu:
                torch.cuda._sleep(2_000_000)
            ids = batch.sparse
            copied = KeyedJaggedTensor(ids.keys(), ids.values().clone(), lengths=ids.lengths().clone())
            made.append(Batch(batch.dense.clone(), copied, batch.labels.clone()))
        trainer.learning_rate.set(step)
        losses.append(trainer.step(batches).detach().clone())
    total = torch.stack(losses)
    dist.all_reduce(total, group=place.group)
    assert (found := (total / place.world_size).tolist()) == expected, f"losses {found}, not {expected}"
    place.close(trainer)


def _check_prefetched_batches(place: Place) -> None:
    """Batches in the memory of a loader's stream, which reuses it, are as they were when slow eager steps read them."""
    config, streams = graph_config(place, "pgas", "rowwise_adagrad", known=True), [None, torch.cuda.Stream()]
    losses = []
    for stream in streams:
        trainer = make_trainer(place, config)
        starts = [(step * place.world_size + place.rank) * SAMPLES for step in range(_BORDERS[-1])]
        known = [trainer.train_data.read(start, SAMPLES).to(place.device) for start in starts]
        place.synchronize()

        def prefetched(batches: list[Batch] = known, stream: Any = stream) -> Iterator[Batch]:
            for batch in batches:
                ids = batch.sparse
                with torch.cuda.stream(stream):
                    values, lengths = ids.values().clone(), ids.lengths().clone()
                    dense, labels = batch.dense.clone(), batch.labels.clone()
                    copied = [Batch(dense, KeyedJaggedTensor(ids.keys(), values, lengths=lengths), labels)]
                del values, lengths, dense, labels
                if stream is not None:
                    torch.cuda.current_stream().wait_stream(stream)
                    copied[0].record_stream(torch.cuda.current_stream())
                yield copied.pop()

        slow = trainer.model.register_forward_pre_hook(lambda *_: torch.cuda._sleep(_LONG_CYCLES))
        taken, batches = list[torch.Tensor](), prefetched()
        with patch.object(CapacityTracker, "are_captured", lambda *_, taken=taken: len(taken) < 2):
            for step in range(_BORDERS[-1]):
                trainer.learning_rate.set(step)
                taken.append(trainer.step(batches).detach().clone())
        slow.remove()
        losses.append(torch.stack(taken).tolist())
        place.close(trainer)
    assert losses[1] == losses[0], f"losses {losses[1]}, not {losses[0]}"


def _check_closed(place: Place) -> None:
    """Graphs are not launched after the windows that they use were freed."""
    trainer = make_trainer(place, graph_config(place, "fused", "rowwise_adagrad", known=True))
    train_steps(place, trainer, 0, 12)
    place.meet()
    for exchange in exchanges(trainer.model):
        exchange.close()
    message = ""
    try:
        train_steps(place, trainer, 12, 13)
    except InputError as error:
        message = str(error)
    assert ("were moved or freed since" in message) == place.on_gpu, message or "a graph was launched"
    place.close(trainer)


def _check_two_models(place: Place) -> None:
    """Two models of one process whose captured steps alternate learn as each does alone."""
    configs = [graph_config(place, "pgas", "rowwise_adagrad", known=True)]
    configs.append(graph_config(place, "fused", "adagrad", known=False))
    alone = [_run(place, config, _nothing) for config in configs]
    trainers = [make_trainer(place, config) for config in configs]
    found = _train(place, trainers, _nothing)
    for trainer, losses, (expected, expected_rows) in zip(trainers, found, alone, strict=True):
        assert losses == expected, f"{trainer.config.embedding.backend}: losses {losses}, not {expected}"
        assert_all_near(rows_of(trainer), expected_rows, 0.0, f"{trainer.config.embedding.backend}:")
    place.close(*trainers)


def _check_garbage(place: Place) -> None:
    """Unreachable windows are not freed during a capture, which would end the process.

    Garbage is collected at the worst moment, unless collection is disabled.
    """

    def begin(order: CommunicationOrder) -> None:
        order.is_captured, order._last = True, None
        if gc.isenabled():
            gc.collect()

    trainer = make_trainer(place, graph_config(place, "pgas", "rowwise_adagrad", known=True))
    thresholds = gc.get_threshold()
    gc.set_threshold(10**9)
    try:
        if place.on_gpu:
            windows = symmetric_memory.empty(1 << 22, dtype=torch.uint8, device=place.device)
            cycle: list[Any] = [windows]
            cycle.append(cycle)
            del windows, cycle
        with patch.object(CommunicationOrder, "begin", begin):
            train_steps(place, trainer, 0, _BORDERS[-1])
    finally:
        gc.set_threshold(*thresholds)
    place.close(trainer)


_WAYS: dict[str, dict[str, Any]] = {
    "pgas": {"backend": "pgas", "known": False},
    "pgas_known": {"backend": "pgas", "known": True},
    **{f"fused_{put}": {"backend": "fused", "put": put, "known": put == "staged"} for put in PUTS},
}


def _across(place: Place, carrier: str) -> None:
    nodes = place.world_size if place.world_size % 2 else 2
    _check_sizes(place, known=True, backend="pgas", nodes=nodes, internode=carrier)


CHECKS = (
    {f"lifetimes_{name}": Check(partial(_check_sizes, **way)) for name, way in _WAYS.items()}
    | every("lifetimes_nodes", _across, carrier=["messages"], timeout_s=200)
    | every("lifetimes_nodes", _across, carrier=["puts"], timeout_s=200, gpu_only=True)
    | every("lifetimes_reload", _check_reload, precision=("fp32", "bf16"))
    | every("lifetimes_closed", _check_closed)
    | every("lifetimes_garbage", _check_garbage)
    | every("lifetimes_two_models", _check_two_models)
    | every("lifetimes_device_batches", _check_device_batches)
    | every("lifetimes_prefetched_batches", _check_prefetched_batches, gpu_only=True)
)
