from typing import Any

import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dlrm_overlap.backends import EXCHANGED
from dlrm_overlap.embedding.options import ExchangeOptions
from tests.agreement import WEIGHT_TOLERANCE, assert_near, assert_same
from tests.distributed.usages import COUNTING, ON_GPUS_ALONE, USAGES, compare, evaluate_in_pipeline
from tests.gpu.exchange.place import Place, every
from tests.gpu.exchange.stage_by_hand import Batch, Stage, Table, pool_exactly

_DELAY_CYCLES = 2_000_000  # about a millisecond
_STEPS = 40


@torch.no_grad()
def _check_two_streams(place: Place, backend: str, copy_output: bool) -> None:
    """Lookups on one stream, whose outputs another stream waits for and reads slowly: nothing is overwritten before."""
    tables = [Table(100, dim, owner) for dim in (64, 12) for owner in range(place.world_size)]
    stage = Stage(place, tables)
    everyones = stage.fill(integers=True)
    batches = [Batch(place, tables, [65] * place.world_size, seed) for seed in range(3)]
    inputs = [stage.inputs(batch) for batch in batches]
    expected = [pool_exactly(batch, everyones, place.rank) for batch in batches]
    exchange = stage.exchange(ExchangeOptions(backend, copy_output=copy_output, wait_timeout_s=20.0))
    lookups, readers = torch.cuda.Stream(place.device), torch.cuda.Stream(place.device)
    place.meet()
    errors = []
    for step in range(_STEPS):
        which = step % len(batches)
        with torch.cuda.stream(lookups):
            if step % 5 == place.rank:
                torch.cuda._sleep(_DELAY_CYCLES)
            awaitable = exchange.start(inputs[which], batches[which].sizes)
        with torch.cuda.stream(readers):
            pooled = awaitable.wait()
            if step % place.world_size == place.rank:
                torch.cuda._sleep(_DELAY_CYCLES)
            errors.append((pooled - expected[which]).abs().max())
            del pooled, awaitable
    place.synchronize()
    wrong = [step for step, error in enumerate(errors) if error.item() != 0]
    assert not wrong, f"steps {wrong} of {_STEPS} read the output of another step"
    place.close(exchange)


def _check_shared_gradient(place: Place) -> None:
    """What autograd adds to the pooled embeddings' gradient before it has been pushed changes no row."""
    tables = [Table(100, 64, owner) for owner in range(place.world_size)]
    rows: dict[str, list[torch.Tensor]] = {}
    for backward in ("collective", "push"):
        stage = Stage(place, tables, lr=0.5)
        stage.fill(integers=False)
        batch = Batch(place, tables, [512] * place.world_size, seed=0)
        exchange: Any = stage.exchange(ExchangeOptions(backward=backward, wait_timeout_s=20.0))
        inputs = stage.inputs(batch)
        dense = torch.randn(512, stage.columns[-1], device=place.device, generator=place.generator(1))
        for _ in range(3):
            weight = dense.clone().requires_grad_()
            hidden = weight * 1.0
            awaitable = exchange.start(inputs, batch.sizes)
            between = (hidden * 50.0 * dense).sum()  # whose gradient is added after the push has begun
            loss = ((hidden + awaitable.wait()) * dense).sum() + between
            if backward == "push":
                with torch.cuda.stream(exchange._open().backward._push_stream):
                    torch.cuda._sleep(5 * _DELAY_CYCLES)
            loss.backward()
            del awaitable, loss
        place.synchronize()
        rows[backward] = [stage.weight(t).clone() for t in stage.owned[place.rank]]
        place.close(exchange)
    for t, (actual, expected) in enumerate(zip(rows["push"], rows["collective"], strict=True)):
        assert_near(actual, expected, 10 * WEIGHT_TOLERANCE["fp32"], f"rows of table {t}")


def _check_weights_gradients(place: Place) -> None:
    """Gradients of ids' weights stay until they are read, also if a later backward sorts its ids meanwhile."""
    tables = [Table(100, 64, owner) for owner in range(place.world_size)]
    batches = [Batch(place, tables, [512] * place.world_size, seed) for seed in range(3)]
    found: dict[str, list[torch.Tensor]] = {}
    for backward in ("collective", "push"):
        stage = Stage(place, tables)
        stage.fill(integers=False)
        exchange = stage.exchange(ExchangeOptions(backward=backward, copy_output=True, wait_timeout_s=20.0))
        weights, losses = list[torch.Tensor](), list[torch.Tensor]()
        for seed, batch in enumerate(batches):
            (ids,) = stage.inputs(batch)
            weight = torch.rand(ids.values().shape, device=place.device, generator=place.generator(seed))
            weights.append(weight.requires_grad_())
            factors = weight * 1.0
            factors.register_hook(lambda _: torch.cuda._sleep(5 * _DELAY_CYCLES))
            given = KeyedJaggedTensor(ids.keys(), ids.values(), factors, lengths=ids.lengths())
            losses.append(exchange.start([given], batch.sizes).wait().square().sum())
        del factors, given
        for loss in losses:
            loss.backward()
        place.synchronize()
        found[backward] = [weight.grad for weight in weights if weight.grad is not None]
        place.close(exchange)
    for number, (actual, expected) in enumerate(zip(found["push"], found["collective"], strict=True)):
        assert_near(actual, expected, 10 * WEIGHT_TOLERANCE["fp32"], f"gradient of the weights of step {number}")


@torch.no_grad()
def _check_capture(place: Place, backend: str) -> None:
    """A forward within a graph's capture is refused, and the exchange continues."""
    tables = [Table(100, 64, owner) for owner in range(place.world_size)]
    stage = Stage(place, tables)
    everyones = stage.fill(integers=True)
    batch = Batch(place, tables, [65] * place.world_size, seed=0)
    exchange, inputs = stage.exchange(ExchangeOptions(backend)), stage.inputs(batch)
    exchange.start(inputs, batch.sizes).wait()
    place.meet()
    message = ""
    try:
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            exchange.start(inputs, batch.sizes)
    except RuntimeError as error:
        message = str(error)
    assert "within a CUDA graph's capture" in message, message
    assert_same(exchange.start(inputs, batch.sizes).wait(), pool_exactly(batch, everyones, place.rank), "after it")
    place.close(exchange)


def _check_usage(place: Place, usage: str, optimizer: str) -> None:
    # Tracing takes long, and does not depend on the backend.
    backends = ["fused"] if usage == "compiled" else EXCHANGED
    compare(usage, optimizer, [{"backend": backend} for backend in backends], place.group, place.device)


def _check_pipeline(place: Place, pipeline: str, copy_output: bool) -> None:
    """TorchRec's pipelines that look up on another stream evaluate as with TorchRec's modules."""
    options = [{"backend": backend, "copy_output": copy_output} for backend in EXCHANGED]
    evaluate_in_pipeline(pipeline, options, place.group, place.device)


_COPIES = {"lends": False, "copies": True}
_WITH_COUNTERS = [name for name in COUNTING if name not in ON_GPUS_ALONE]
_PIPELINES = ("EvalPipelineFusedSparseDist", "TrainPipelineFusedSparseDist")
CHECKS = (
    every("two_streams", _check_two_streams, backend=EXCHANGED, copy_output=_COPIES, gpu_only=True)
    | every("shared_gradient_while_pushed", _check_shared_gradient, gpu_only=True)
    | every("weights_gradients_while_sorted", _check_weights_gradients, gpu_only=True)
    | every("capture", _check_capture, backend=("pgas", "fused"), gpu_only=True)
    # Only an optimizer with a state shows a row that is updated twice or too late; SGD shows a wrong scale.
    | every("usage", _check_usage, usage=list(USAGES), optimizer=["rowwise_adagrad"], timeout_s=150.0)
    | every("usage", _check_usage, usage=("accumulation", "shared_gradient", "frozen_tables"), optimizer=["sgd"])
    | every("usage", _check_usage, usage=["accumulation"], optimizer=_WITH_COUNTERS)
    | every("usage", _check_usage, usage=["accumulation"], optimizer=ON_GPUS_ALONE, gpu_only=True)
    | every("usage", _check_usage, usage=("evaluation_between", "weights_unasked"), optimizer=_WITH_COUNTERS[:1])
    | every("usage", _check_usage, usage=("evaluation_between", "weights_unasked"), optimizer=["adam"], gpu_only=True)
    | every("pipeline", _check_pipeline, pipeline=_PIPELINES, copy_output=_COPIES, gpu_only=True)
)
