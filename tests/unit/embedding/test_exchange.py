"""An exchange in a world of one: who holds a window, and ids outside their table."""

import weakref
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import DEFAULT, Mock, patch

import pytest
import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dlrm_overlap.backends import EXCHANGED
from dlrm_overlap.comm.order import CommunicationOrder
from dlrm_overlap.embedding.backends.base import Forward
from dlrm_overlap.embedding.backends.cpu import ids_in_bags
from dlrm_overlap.embedding.exchange import RunningStep
from dlrm_overlap.embedding.options import ExchangeOptions, StepCounters
from dlrm_overlap.embedding.steps import BatchSizes, Step
from dlrm_overlap.embedding.windows import BufferInUseError
from dlrm_overlap.kernels import launches, reference
from dlrm_overlap.kernels.launches import Launch, launches_of
from dlrm_overlap.train.graphs import captured
from dlrm_overlap.train.graphs.captured import GraphPair
from dlrm_overlap.train.model import JoinInPlace, concatenated
from tests.agreement import WEIGHT_TOLERANCE, assert_near, assert_same
from tests.conftest import refuses
from tests.distributed.interpreted import interpreted_forward, interpreted_parts, without_streams
from tests.distributed.tiny_stage import LEARNING_RATE, ROWS, Stage
from tests.kernels.emulation import interpreted
from tests.unit.embedding.shards import make_shard

ALONE = [([8, 4], [4])]
every_window = pytest.mark.parametrize("backend", ["pgas", "fused"])


@every_window
def test_a_second_forward_is_refused_while_the_output_is_held(world_of_one: dist.ProcessGroup, backend: str) -> None:
    stage = Stage(ALONE, rank=0)
    exchange = stage.exchange(world_of_one, backend)
    inputs, expected = stage.inputs(0, (5,))
    pooled = exchange.start(inputs, (5,)).wait().detach()
    for _ in range(2):
        with pytest.raises(BufferInUseError, match="give the sharder copy_output=True, or run its backward or drop it"):
            exchange.start(inputs, (5,))
    assert_same(pooled, expected, "what is held")
    kept = pooled.clone()
    del pooled
    inputs, following = stage.inputs(1, (5,))
    assert_same(exchange.start(inputs, (5,)).wait().detach(), following, "the step after")
    assert_same(kept, expected, "a clone")
    exchange.close()


@every_window
def test_backward_and_evaluation_let_go(world_of_one: dist.ProcessGroup, backend: str) -> None:
    stage = Stage(ALONE, rank=0)
    exchange = stage.exchange(world_of_one, backend)
    factor = torch.ones(stage.layout.total_dim, requires_grad=True)
    for number in range(6):
        inputs, expected = stage.inputs(number, (5,))
        with torch.set_grad_enabled(number % 3 != 2):
            product = exchange.start(inputs, (5,)).wait() * factor  # whose backward needs the pooled embeddings
        if number % 3 == 0:
            with pytest.raises(BufferInUseError):
                exchange.start(inputs, (5,))
        if product.requires_grad:
            product.backward(torch.zeros_like(product))  # changes no row
        assert_same(product.detach(), expected, f"step {number}")
    exchange.close()


def test_a_cast_from_the_wires_type_lets_go(world_of_one: dist.ProcessGroup) -> None:
    stage = Stage(ALONE, rank=0)
    exchange = stage.exchange(world_of_one, "pgas", wire_dtype=torch.bfloat16)
    outputs = []
    for number in range(3):
        inputs, expected = stage.inputs(number, (5,))
        outputs.append((exchange.start(inputs, (5,)).wait(), expected))
    for pooled, expected in outputs:
        assert_same(pooled.detach(), expected.bfloat16().float(), "pooled embeddings")
    exchange.close()


@pytest.mark.parametrize(("backend", "backward"), [("pgas", "push"), ("fused", "collective")])
def test_what_is_joined_in_place_trains_as_what_is_cast(
    world_of_one: dist.ProcessGroup, backend: str, backward: str
) -> None:
    """Bit for bit; and the window is in use until the backward of what it was joined to has ended."""
    dim, bf16 = 4, torch.bfloat16
    stages = [Stage(ALONE, rank=0) for _ in range(2)]
    in_place = {"wire_dtype": bf16, "output_dtype": bf16, "leading_columns": dim}
    ours, cast = (
        stage.exchange(world_of_one, backend, backward=backward, **more)
        for stage, more in zip(stages, (in_place, {}), strict=True)
    )
    generator = torch.Generator().manual_seed(0)
    factors = torch.randn(dim + stages[0].layout.total_dim, 3, generator=generator).to(bf16)
    for number in range(6):
        inputs, _ = stages[0].inputs(number, (5,))
        dense = torch.randn(5, dim, generator=generator).to(bf16)
        found = []
        for exchange in (ours, cast):
            bottom = dense.clone().requires_grad_()
            with torch.set_grad_enabled(number != 3):
                pooled = exchange.start(inputs, (5,)).wait()
                if exchange is ours:
                    assert pooled.dtype == bf16
                    joined = JoinInPlace.apply(bottom, pooled)
                    assert joined.data_ptr() + 2 * dim == pooled.data_ptr(), "nothing was copied"
                else:
                    joined = concatenated(bottom, pooled)
                output = (joined @ factors).tanh() * joined[:, :1]
            del pooled
            if exchange is ours and number == 1:
                with pytest.raises(BufferInUseError):
                    exchange.start(inputs, (5,))
            if output.requires_grad:
                output.float().sum().backward()
            found.append((joined.detach().clone(), output.detach(), bottom.grad))
            del joined
        for name, mine, expected in zip(("embeddings", "output"), *found, strict=False):
            assert_same(mine, expected, f"step {number}, {name}")
        if number != 3:
            assert_same(found[0][2], found[1][2], f"step {number}, gradient of what is in front")
    for shard in stages[0].shards:
        rows, expected = (stage.tables.weight(shard) for stage in stages)
        assert (expected != stages[0].weights[shard.name]).any()
        assert_same(rows, expected, shard.name)
    ours.close()
    cast.close()


def test_a_copy_of_half_a_window_has_no_room_in_front(world_of_one: dist.ProcessGroup) -> None:
    stage, half = Stage(ALONE, rank=0), {"wire_dtype": torch.float16, "output_dtype": torch.float16}
    exchange = stage.exchange(world_of_one, "pgas", leading_columns=8, **half)
    begun = [stage.inputs(number, (5,)) for number in range(2)]
    awaitables = [exchange.start(inputs, (5,)) for inputs, _ in begun]
    for awaitable, (_, expected), room in zip(awaitables, begun, (0, 8), strict=True):
        pooled = awaitable.wait().detach()
        assert pooled.stride() == (room + stage.layout.total_dim, 1), "the first was set aside"
        assert_same(pooled, expected.half(), "pooled embeddings")
    del pooled
    exchange.close()


@pytest.mark.parametrize("copy_output", [False, True])
@pytest.mark.parametrize("backend", EXCHANGED)
def test_lookups_that_overlap(world_of_one: dist.ProcessGroup, backend: str, copy_output: bool) -> None:
    stage = Stage(ALONE, rank=0)
    exchange = stage.exchange(world_of_one, backend, copy_output=copy_output)
    begun = [stage.inputs(number, (5,)) for number in range(3)]
    awaitables = [exchange.start(inputs, (5,)) for inputs, _ in begun]
    for number in (1, 0, 2):
        assert_same(awaitables[number].wait().detach(), begun[number][1], f"lookup {number}")
    with pytest.raises(RuntimeError, match="asked for a second time"):
        awaitables[1].wait()
    exchange.close()


def test_a_gradient_is_held_until_the_update(world_of_one: dist.ProcessGroup) -> None:
    stage = Stage(ALONE, rank=0)
    exchange = stage.exchange(world_of_one, "pgas")
    running = RunningStep(Step(stage.inputs(0, (5,))[0], BatchSizes.of((5,))))
    exchange.start_forward(running)
    exchange.expect_gradient(running)
    gradient = torch.zeros_like(exchange.finish_forward(running))
    exchange.start_backward(running, gradient)
    assert running.gradient is gradient, "else autograd may add to it in place, where another stream still reads it"
    exchange.finish_backward(running)
    assert running.gradient is None
    exchange.close()


def test_a_step_that_fails_is_the_last(world_of_one: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage(ALONE, rank=0)
    exchange = stage.exchange(world_of_one, "pgas")
    inputs, _ = stage.inputs(0, (5,))
    exchange.start(inputs, (5,)).wait()
    with monkeypatch.context() as patch:
        patch.setattr(reference, "pool", lambda *_: (_ for _ in ()).throw(MemoryError("no room")))
        with pytest.raises(MemoryError):
            exchange.start(inputs, (5,))
    for _ in range(2):  # peers may wait for that step, and would take the next one's data for its
        with pytest.raises(RuntimeError, match=r"start_forward has failed \(MemoryError: no room\) on this rank"):
            exchange.start(inputs, (5,))
    exchange.close()


def _with_a_bad_id(mode: BoundsCheckMode, bad: int = ROWS) -> tuple[Stage, list[KeyedJaggedTensor], torch.Tensor]:
    """Return a stage whose second feature has an id outside its table, and what taking row 0 for it gives."""
    stage = Stage(ALONE, 0, mode)
    inputs, expected = stage.inputs(0, (5,))
    ids = inputs[0]
    bag = 5 + int(ids.lengths()[5:10].nonzero()[0])
    ids.values()[int(ids.offsets()[bag])] = 0
    shard = stage.shards[1]
    begin, end = int(ids.offsets()[5]), int(ids.offsets()[10])
    column = stage.layout.column(shard)
    pooled = reference.pool(stage.weights[shard.name], ids.lengths()[5:10], ids.values()[begin:end])
    expected[:, column : column + shard.dim] = pooled
    ids.values()[int(ids.offsets()[bag])] = bad
    return stage, inputs, expected


@pytest.mark.parametrize("backend", EXCHANGED)
def test_an_id_outside_its_table(
    world_of_one: dist.ProcessGroup, caplog: pytest.LogCaptureFixture, backend: str
) -> None:
    stage, inputs, _ = _with_a_bad_id(BoundsCheckMode.FATAL)
    with pytest.raises(ValueError, match="rank0_1: id 20 is outside its table of 20 rows"):
        stage.exchange(world_of_one, backend).start(inputs, (5,))
    for mode in (BoundsCheckMode.WARNING, BoundsCheckMode.IGNORE):
        stage, inputs, expected = _with_a_bad_id(mode)
        pooled = stage.exchange(world_of_one, backend).start(inputs, (5,)).wait()
        assert_same(pooled.detach(), expected, mode.name)
        assert inputs[0].values().max() < ROWS, "the backward reads the ids once more"
        said = ["rank0_1: id 20 is outside its table of 20 rows; map ids into 0 .. 19 where they are read; row 0 was"]
        assert [message[: len(said[0])] for message in caplog.messages] == said, "under WARNING, and never again"


@pytest.mark.parametrize("backend", EXCHANGED)
@pytest.mark.parametrize("mode", [BoundsCheckMode.WARNING, BoundsCheckMode.NONE])
def test_the_id_minus_one_stops_a_cpu_as_it_does_fbgemms(
    world_of_one: dist.ProcessGroup, backend: str, mode: BoundsCheckMode
) -> None:
    stage, inputs, _ = _with_a_bad_id(mode, bad=-1)
    ids, (lookup,) = inputs[0], stage.tables.lookups[:1]
    with pytest.raises(RuntimeError, match="out of bounds"):
        lookup(ids.values()[: int(ids.offsets()[10])].clone(), ids.offsets()[:11])
    with pytest.raises(ValueError, match="rank0_1: id -1 is outside its table of 20 rows"):
        stage.exchange(world_of_one, backend).start(inputs, (5,))


@interpreted
@pytest.mark.parametrize("backend", EXCHANGED)
def test_an_id_outside_its_table_on_the_gpus_way(
    world_of_one: dist.ProcessGroup, caplog: pytest.LogCaptureFixture, backend: str
) -> None:
    def run(mode: BoundsCheckMode) -> None:
        stage, inputs, expected = _with_a_bad_id(mode)
        options = ExchangeOptions(backend=backend, slice_bags=4, wait_timeout_s=1e-4)
        forward = interpreted_forward(stage, world_of_one, options, samples=5)
        step = Step(inputs, BatchSizes.of((5,)))
        assert_same(forward.finish(forward.start(step)), expected, mode.name)
        assert inputs[0].values().max() < ROWS
        for _ in range(2):
            forward.check()

    with pytest.raises(
        ValueError, match=r"sample \d of the global batch: rank0_1: an id is outside its table of 20 rows"
    ):
        run(BoundsCheckMode.FATAL)
    run(BoundsCheckMode.IGNORE)
    assert not caplog.messages
    run(BoundsCheckMode.WARNING)
    assert len(caplog.messages) == 1, "once"
    assert "row 0 was taken" in caplog.messages[0]


def test_close_tells_what_kernels_have_recorded_and_gives_the_windows_back(
    world_of_one: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = Stage(ALONE, rank=0)
    exchange = stage.exchange(world_of_one, "pgas")
    exchange.start(stage.inputs(0, (5,))[0], (5,)).wait()
    forward, closed = exchange._open().forward, []

    def check() -> None:
        raise ValueError("an id of the last step is outside its table")

    monkeypatch.setattr(forward, "check", check)
    monkeypatch.setattr(forward, "close", lambda: closed.append(True))
    with pytest.raises(ValueError, match="of the last step"):
        exchange.close()
    assert closed
    exchange.close()  # which has nothing left to do


@pytest.mark.parametrize("copy_output", [False, True])
@pytest.mark.parametrize("backend", EXCHANGED)
def test_inference_mode_between_training_steps(
    world_of_one: dist.ProcessGroup, backend: str, copy_output: bool
) -> None:
    stage = Stage(ALONE, rank=0)
    exchange = stage.exchange(world_of_one, backend, copy_output=copy_output)
    for number in range(4):
        inputs, expected = stage.inputs(number, (5,))
        with torch.inference_mode(number % 2 == 1):
            pooled = exchange.start(inputs, (5,)).wait()
            assert_same(pooled.detach(), expected, f"step {number}")
            pooled.mul_(0.0)
        if number % 2 == 0:
            pooled.sum().backward()
        del pooled
    exchange.close()


@pytest.mark.parametrize("backend", EXCHANGED)
def test_windows_grow_between_a_forward_and_its_backward(world_of_one: dist.ProcessGroup, backend: str) -> None:
    stage = Stage(ALONE, rank=0)
    exchange = stage.exchange(world_of_one, backend, copy_output=True)
    before = {shard.name: stage.tables.weight(shard).clone() for shard in stage.shards}
    begun = [stage.inputs(number, (samples,))[0] for number, samples in enumerate((3, 7))]
    outputs = [exchange.start(inputs, (samples,)).wait() for inputs, samples in zip(begun, (3, 7), strict=True)]
    sum(output.sum() for output in outputs).backward()  # type: ignore[union-attr]
    for shard in (shard for shard in stage.shards if not shard.mean):
        ids = torch.cat([inputs[0][shard.name].values() for inputs in begun])
        expected = before[shard.name] - LEARNING_RATE * torch.bincount(ids, minlength=ROWS)[:, None]
        assert_near(stage.tables.weight(shard), expected, WEIGHT_TOLERANCE["fp32"], shard.name)
    exchange.close()


def test_forwards_read_rows_again_and_are_counted_by_kind(world_of_one: dist.ProcessGroup) -> None:
    """Steps decide on stochastic rounding, and FBGEMM's count of all forwards on Adam's bias correction."""
    stage = Stage(ALONE, rank=0)
    exchange = stage.exchange(world_of_one, "pgas", copy_output=True)
    with patch.object(stage.tables, "read_again") as reads, patch.object(stage.tables, "count_evaluation") as counts:
        counts.return_value = False
        found = []
        for number, is_evaluation in enumerate((False, True, False, False, True)):
            with torch.set_grad_enabled(not is_evaluation):
                exchange.start(stage.inputs(number, (3,))[0], (3,)).wait()
            found.append((reads.call_count, counts.call_count, exchange.counters.steps.value))
    assert found == [(1, 0, 1), (2, 1, 1), (3, 1, 2), (4, 1, 3), (5, 2, 3)]
    exchange.close()


def test_a_backward_that_begins_before_the_last_one_has_ended_loses_no_gradient(
    world_of_one: dist.ProcessGroup,
) -> None:
    stage = Stage(ALONE, rank=0)
    exchange = stage.exchange(world_of_one, "pgas")
    with torch.no_grad():
        exchange.start(stage.inputs(2, (3,))[0], (3,)).wait()  # opens the windows
    before = {shard.name: stage.tables.weight(shard).clone() for shard in stage.shards}
    begun, push = [stage.inputs(number, (3,))[0] for number in range(2)], exchange._open().backward
    pending = [push.note_forward(Step(inputs, BatchSizes.of((3,))), number) for number, inputs in enumerate(begun)]
    states = [push.start(each, torch.ones(3, stage.layout.total_dim)) for each in pending]
    for state in states:
        push.finish(state)
    for shard in (shard for shard in stage.shards if not shard.mean):
        ids = torch.cat([inputs[0][shard.name].values() for inputs in begun])
        expected = before[shard.name] - LEARNING_RATE * torch.bincount(ids, minlength=ROWS)[:, None]
        assert_near(stage.tables.weight(shard), expected, WEIGHT_TOLERANCE["fp32"], shard.name)
    exchange.close()


@interpreted
@every_window
def test_prepared_launches_serve_their_sizes_types_and_rows_alone(
    world_of_one: dist.ProcessGroup, backend: str
) -> None:
    stage = Stage([([4], [])], rank=0)
    options = ExchangeOptions(backend=backend, slice_bags=2, wait_timeout_s=20.0)
    forward = interpreted_forward(stage, world_of_one, options, samples=3)
    for number, (samples, dtype) in enumerate([(2, torch.int64), (3, torch.int64), (2, torch.int32), (2, torch.int64)]):
        _assert_pooled(stage, forward, number, samples, dtype, factor=1)
    lookup: Any = stage.tables.lookups[0]
    before = lookup.weights_host.detach()
    lookup.weights_host = torch.nn.Parameter(2 * before)  # as where rows are moved
    before.fill_(torch.nan)
    _assert_pooled(stage, forward, 4, 2, torch.int64, factor=2)
    forward.close()


@interpreted
@pytest.mark.parametrize("optimizer", [EmbOptimType.EXACT_SGD, EmbOptimType.EXACT_ADAGRAD])
def test_prepared_launches_of_the_backward_serve_their_sizes_types_and_rows_alone(
    world_of_one: dist.ProcessGroup, optimizer: EmbOptimType
) -> None:
    """Also where learning rates, gradients and ids are others in each step, and those before are gone."""
    stage, known = (Stage([([4], [8])], rank=0, optimizer=optimizer) for _ in range(2))
    exchange = known.exchange(world_of_one, "pgas", backward="push")
    options = ExchangeOptions(backward="push", wait_timeout_s=20.0)
    with without_streams():
        push: Any = interpreted_parts(stage, world_of_one, options, samples=3).backward
        steps = [(2, torch.int64, torch.float32), (3, torch.int64, torch.float32), (2, torch.int32, torch.float32)]
        steps += [(3, torch.int64, torch.bfloat16), (3, torch.int64, torch.float32), (3, torch.int64, torch.float32)]
        for number, (samples, ids, dtype) in enumerate(steps):
            for lookup in (*stage.tables.lookups, *known.tables.lookups):
                lookup.set_learning_rate(0.5 + number)
            if number == 4:
                _move(stage, "momentum1")
            if number == 5:
                _move(stage, "weights", "momentum1")
            gradient = torch.randn(samples, stage.layout.total_dim, generator=torch.Generator().manual_seed(number))
            gradient = gradient.to(dtype)
            (given,), _ = stage.inputs(number, (samples,))
            exchange.start([given], (samples,)).wait().backward(gradient.to(torch.float32, copy=True))
            given = KeyedJaggedTensor(given.keys(), given.values().to(ids), lengths=given.lengths().to(ids))
            step = Step([given], BatchSizes.of((samples,)))
            pending = push.note_forward(step)
            push.finish(push.start(pending, gradient))
            for shard in stage.shards:
                rows, expected = (each.tables.weight(shard) for each in (stage, known))
                assert_near(rows, expected, WEIGHT_TOLERANCE["fp32"], f"{shard.name}, step {number}")
            gone = weakref.ref(gradient)
            del gradient, step, pending
            assert gone() is None, "a launch holds the gradient"
        assert len(launches_of(push.own)) == 4, "one window for 2 samples, both for 3, and one of these for bfloat16"
        push.close()
    exchange.close()


def _move(stage: Stage, *moved: str) -> None:
    """Move rows, their states or both elsewhere, and spoil them where they were."""
    for lookup in stage.tables.lookups:
        for name in moved:
            before = getattr(lookup, f"{name}_host")
            there = torch.nn.Parameter(before.detach().clone(), before.requires_grad)
            before.detach().fill_(torch.nan if before.is_floating_point() else 0)
            for place in ("host", "dev"):
                setattr(lookup, f"{name}_{place}", there)


@interpreted
@every_window
def test_what_a_captured_step_reads_stays_however_many_sizes_follow(
    world_of_one: dist.ProcessGroup, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launches, "_MOST", 2)
    stage = Stage([([4], [])], rank=0)
    options = ExchangeOptions(backend=backend, put="staged", slice_bags=2, wait_timeout_s=20.0)
    forward: Any = interpreted_forward(stage, world_of_one, options, samples=4)
    made: list[weakref.ref[Any]] = []
    launched = Launch.__call__

    def launch(self: Launch, *changed: Any, **how: Any) -> None:
        made.append(weakref.ref(self))
        launched(self, *changed, **how)

    with without_streams(), monkeypatch.context() as capture:
        capture.setattr(Launch, "__call__", launch)
        capture.setattr(launches, "is_initialized", lambda: True)
        capture.setattr(launches, "is_current_stream_capturing", lambda: True)
        _assert_pooled(stage, forward, 0, 3, torch.int64, factor=1)
    with without_streams():
        read = weakref.ref(forward.lookup.first_samples(BatchSizes.of((3,)), forward.reached))
        for number, samples in enumerate((1, 2, 4, 1, 2, 4), 1):  # 4 need more memory
            _assert_pooled(stage, forward, number, samples, torch.int64, factor=1)
    gone = "a graph would read memory that has been given away"
    assert read() is not None, gone
    assert made, "nothing was launched"
    assert all(each() is not None for each in made), gone
    forward.close()


@interpreted
@every_window
def test_a_capture_copies_nothing_to_the_device_however_many_sizes_came_before(
    world_of_one: dist.ProcessGroup, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launches, "_MOST", 2)
    stage = Stage([([4], [])], rank=0)
    forward: Any = interpreted_forward(stage, world_of_one, ExchangeOptions(backend=backend), samples=4)
    with without_streams():
        _assert_pooled(stage, forward, 0, 3, torch.int64, factor=1)
        copied = forward.lookup.first_samples(BatchSizes.of((3,)), forward.reached)
        for number, samples in enumerate((1, 2, 4), 1):
            _assert_pooled(stage, forward, number, samples, torch.int64, factor=1)
    assert forward.lookup.first_samples(BatchSizes.of((3,)), forward.reached) is copied, "a capture cannot copy"


def _assert_pooled(stage: Stage, forward: Forward, number: int, samples: int, dtype: torch.dtype, factor: int) -> None:
    """Take a step of other ids, and compare with `factor` times what the rows give that the stage was made with."""
    (ids,), expected = stage.inputs(number, (samples,))
    given = KeyedJaggedTensor(ids.keys(), ids.values().to(dtype), lengths=ids.lengths().to(dtype))
    step = Step([given], BatchSizes.of((samples,)))
    assert_same(forward.finish(forward.start(step), copy=True), factor * expected, f"step {number}")


@pytest.mark.parametrize("mean", [False, True])
def test_the_factor_of_a_row_is_its_ids_weight_over_the_ids_of_a_mean(mean: bool) -> None:
    """FBGEMM on a CPU does not divide the gradients of weighted means, so no run there is compared with it."""
    shard = replace(make_shard("f", 0, 4, feature=1), mean=mean)
    weights, lengths = torch.tensor([7.0, 2.0, -1.0, 0.5, 3.0]), torch.tensor([1, 0, 3, 1])
    ids = KeyedJaggedTensor(["e", "f"], torch.tensor([9, 1, 2, 3, 4]), weights, lengths=lengths)
    counts = torch.tensor([3.0, 3.0, 3.0, 1.0]) if mean else torch.ones(4)
    for weighted, expected in ((True, weights[1:] / counts), (False, 1 / counts)):
        values, sample, factors = ids_in_bags(ids, shard, 2, weighted)
        assert (values.tolist(), sample.tolist()) == ([1, 2, 3, 4], [0, 0, 0, 1])
        assert torch.equal(factors, expected[:, None])


@interpreted
def test_gradients_of_weights_are_kept_until_they_are_read(world_of_one: dist.ProcessGroup) -> None:
    """They are made on another stream, where the next step's sort could take their memory."""
    stage = Stage([([4], [])], rank=0)
    (ids,), pooled = stage.inputs(0, (3,))
    weights = torch.ones(ids.values().numel(), requires_grad=True)
    given = KeyedJaggedTensor(ids.keys(), ids.values().int(), weights, lengths=ids.lengths().int())
    recorded = list[torch.Tensor]()
    with without_streams(), patch.object(torch.Tensor, "record_stream", lambda tensor, _: recorded.append(tensor)):
        push = interpreted_parts(stage, world_of_one, ExchangeOptions(), samples=3).backward
        pending = push.note_forward(Step([given], BatchSizes.of((3,))), trains_weights=True)
        (gradient,) = push.finish(push.start(pending, torch.ones_like(pooled)))
    rows = stage.weights[stage.shards[0].name]  # before the update
    assert_near(gradient, rows[ids.values()].sum(1), WEIGHT_TOLERANCE["fp32"], "gradient of weights")
    assert any(each is gradient for each in recorded), "the allocator does not know which stream reads it"


class _Stream:
    """A stream that is captured or not, as CUDA has it: a capture includes the streams that wait for it."""

    is_captured = False

    def wait_stream(self, other: "_Stream") -> None:
        assert other.is_captured or not self.is_captured, "a captured stream waits for work outside of the capture"
        self.is_captured |= other.is_captured


def test_a_lookup_is_captured_after_a_forward_on_another_stream(world_of_one: dist.ProcessGroup) -> None:
    """A program may call the model on the default stream, between steps that are captured on another one."""
    stage, main, users, lookups = Stage(ALONE, rank=0), _Stream(), _Stream(), _Stream()
    exchange, order = stage.exchange(world_of_one, "pgas", copy_output=True), CommunicationOrder()
    inputs, expected = stage.inputs(0, (5,))
    exchange.start(inputs, (5,)).wait()
    forward: Any = exchange._open().forward
    current = [users]
    forward._on_gpu, forward._current = True, lambda: current[0]
    exchange.start(inputs, (5,)).wait()

    class Captured:
        def __init__(self, step: Any, *_: Any) -> None:
            main.is_captured = True
            self.launch = step

    def step() -> torch.Tensor:
        current[0] = lookups
        awaitable = exchange.start(inputs, (5,))
        assert lookups.is_captured
        current[0] = main
        return awaitable.wait()

    current[0] = main
    pair = GraphPair([SimpleNamespace(exchange=exchange)], [], order, torch.device("cpu"))  # type: ignore[list-item]
    with patch.object(captured, "CapturedStep", Captured):
        assert_same(pair.capture(0, step, main).detach(), expected, "pooled embeddings")  # type: ignore[arg-type]
    exchange.close()


def test_a_failed_capture_is_final(world_of_one: dist.ProcessGroup) -> None:
    """The host has counted epochs that the device has not, so a later step would use the window that peers read."""
    stage, order = Stage(ALONE, rank=0), CommunicationOrder()
    exchange, (inputs, _) = stage.exchange(world_of_one, "pgas"), stage.inputs(0, (5,))
    pair = GraphPair([SimpleNamespace(exchange=exchange)], [], order, torch.device("cpu"))  # type: ignore[list-item]
    failing: Any = Mock(side_effect=ArithmeticError("of the model"))
    stream: Any = None
    with patch.object(captured, "CapturedStep", failing), pytest.raises(ArithmeticError):
        pair.capture(0, lambda: None, stream)
    with pytest.raises(RuntimeError, match=r"the capture of a step has failed \(ArithmeticError: of the model\)"):
        exchange.start(inputs, (5,))
    exchange.close()


def test_a_capture_without_a_backward_is_refused() -> None:
    """A collection under `torch.no_grad` takes no epoch of the backward, which each replay would count."""
    counters = StepCounters(torch.device("cpu"))

    def step() -> None:
        for counter in (counters.forward, counters.ids):
            counter.value += 1

    on_gpu = patch.multiple(torch.cuda, CUDAGraph=DEFAULT, graph=DEFAULT)
    stream: Any = None
    with on_gpu, refuses("not called once a step, with a part in the loss"):
        captured.CapturedStep(step, CommunicationOrder(), [counters], None, stream)
