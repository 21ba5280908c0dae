"""Arenas and exchanges across processes: what peers see, in what order, and what happens when one is silent."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import nn

from dlrm_overlap.backends import EXCHANGED
from dlrm_overlap.comm.arena import HostArena, Region, open_arena
from dlrm_overlap.comm.device_errors import ExchangeTimeoutError
from dlrm_overlap.config import InputError
from dlrm_overlap.embedding import gradient_layout
from dlrm_overlap.embedding.exchange import RunningStep
from dlrm_overlap.embedding.options import ExchangeOptions
from dlrm_overlap.embedding.steps import BatchSizes, Step
from dlrm_overlap.kernels.compiled import INTERPRETED
from tests.agreement import WEIGHT_TOLERANCE, assert_all_near, assert_near, assert_same
from tests.distributed.interpreted import interpreted_forward, interpreted_parts, without_streams
from tests.distributed.models import world
from tests.distributed.tiny_stage import CPU, LEARNING_RATE, Stage
from tests.distributed.workers import cases_on_ranks, run_ranks

OWNERS = [([8, 4], [4]), ([], []), ([8], [])]  # rank 1 holds no tables
# The windows grow once.
BATCH_SIZES = [(3, 2, 4), (3, 2, 4), (1, 1, 1), (9, 2, 5), (0, 0, 0), (2, 7, 1), (2, 7, 1)]


def _open(**regions: Region) -> HostArena:
    arena = open_arena(regions, world(), CPU)
    assert isinstance(arena, HostArena)
    return arena


def check_peers_see_each_others_stores(rank: int, world_size: int) -> None:
    arena = _open(odd=Region((3,), torch.float16), window=Region((world_size, 4), torch.int32))
    for peer in range(world_size):
        arena.view("window", peer)[rank] = 10 * rank + peer
    dist.barrier()
    expected = torch.tensor([[10 * peer + rank] * 4 for peer in range(world_size)], dtype=torch.int32)
    assert_same(arena.local("window"), expected, "window")
    assert not arena.local("odd").any()
    addresses = arena.addresses("window").tolist()
    assert addresses == [arena.view("window", peer).data_ptr() for peer in range(world_size)]
    assert len(set(addresses)) == world_size


def check_what_was_stored_before_a_flag_is_there_after_the_wait(rank: int, world_size: int) -> None:
    arena = _open(window=Region((4096,), torch.int64), ready=Region((world_size, 1), torch.int64))
    previous, following = (rank - 1) % world_size, (rank + 1) % world_size
    counts = torch.tensor([int(peer == previous) for peer in range(world_size)])
    for epoch in range(1, 100):  # a token goes from rank to rank, first to rank 1
        if rank > 0 or epoch > 1:
            token = epoch if rank else epoch - 1
            arena.wait("ready", counts, token, timeout_s=20)
            assert (arena.local("window") == token).all(), f"rank {rank}, epoch {epoch}"
        arena.view("window", following).fill_(epoch)
        arena.signal_flag("ready", following, slot=0, epoch=epoch)


def check_what_one_rank_cannot_make_is_told_on_all(rank: int, world_size: int) -> None:
    def fail(*_: int) -> None:
        raise OSError(28, "No space left on device")

    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(os, "posix_fallocate", fail)
        told = r"no room for .* \(No space left" + (r".*\(rank 1\)" if rank != 1 else "")
        with pytest.raises(InputError, match=told):
            _open(window=Region((1000,), torch.int64))
    assert _open(window=Region((1,), torch.int64)).local("window").tolist() == [0]


def check_outputs_of_batches_that_change(rank: int, world_size: int) -> None:
    stage = Stage(OWNERS, rank)
    for backend in EXCHANGED:
        exchange = stage.exchange(world(), backend)
        for number, sizes in enumerate(BATCH_SIZES):
            inputs, expected = stage.inputs(number, sizes)
            with torch.set_grad_enabled(number % 2 == 0):
                pooled = exchange.start(inputs, sizes).wait()
            assert_same(pooled.detach(), expected, f"{backend}, step {number}")
            del pooled
        exchange.close()


def check_what_nobody_waits_for_does_not_break_the_next_step(rank: int, world_size: int) -> None:
    stage = Stage(OWNERS, rank)
    for backend in EXCHANGED:
        exchange = stage.exchange(world(), backend)
        for number, sizes in enumerate(BATCH_SIZES):
            inputs, expected = stage.inputs(number, sizes)
            awaitable = exchange.start(inputs, sizes)
            if rank == 1 or number == 3:
                pooled = awaitable.wait().detach()
                time.sleep(0.05)  # ranks that do not wait may not overtake this one
                assert_same(pooled, expected, f"{backend}, step {number}")
                del pooled
            del awaitable
        exchange.close()


def check_a_slow_reader_is_not_overtaken(rank: int, world_size: int) -> None:
    # Without a backward only the exchange keeps the others from running ahead.
    stage, sizes = Stage(OWNERS, rank), (4, 4, 4)
    for backend in EXCHANGED:
        exchange = stage.exchange(world(), backend)
        for number in range(6):
            inputs, expected = stage.inputs(number, sizes)
            with torch.no_grad():
                pooled = exchange.start(inputs, sizes).wait()
            if rank == 1:
                time.sleep(0.1)
            assert_same(pooled, expected, f"{backend}, step {number}")
            del pooled
        exchange.close()
        dist.barrier()


def check_a_slow_update_is_not_overtaken(rank: int, world_size: int) -> None:
    # Without a forward only the gradients' flags keep the others from running ahead.
    stage, sizes = Stage(OWNERS, rank), (4, 4, 4)
    exchange = stage.exchange(world(), "pgas")
    running = RunningStep(Step(stage.inputs(0, sizes)[0], BatchSizes.of(sizes)))
    exchange.start_forward(running)
    exchange.expect_gradient(running)
    exchange.finish_forward(running)
    for number in range(6):
        exchange.start_backward(running, torch.full((4, stage.layout.total_dim), float(number)))
        if rank == 2:
            time.sleep(0.1)
        exchange.finish_backward(running)
    for shard in stage.layout.by_owner[rank]:
        ids, weight = running.step.inputs[0][shard.name], stage.weights[shard.name].clone().requires_grad_()
        bags = ids.values(), weight, ids.offsets()[:-1]
        nn.functional.embedding_bag(*bags, mode="mean" if shard.mean else "sum").sum().backward()
        assert weight.grad is not None
        expected = weight.detach() - LEARNING_RATE / world_size * sum(range(6)) * weight.grad
        assert_near(stage.tables.weight(shard), expected, WEIGHT_TOLERANCE["fp32"], shard.name)
    exchange.close()


def check_a_rank_that_does_not_step_is_named(rank: int, world_size: int) -> None:
    stage, sizes = Stage(OWNERS, rank), (4, 4, 4)
    for backend in ("pgas", "fused"):
        exchange = stage.exchange(world(), backend, wait_timeout_s=1.0)
        inputs, expected = stage.inputs(0, sizes)
        assert_same(exchange.start(inputs, sizes).wait().detach(), expected, backend)
        dist.barrier()
        if rank != 2:
            awaitable = exchange.start(inputs, sizes)
            with pytest.raises(ExchangeTimeoutError, match=r"of rank 2: expected epoch 2, seen 1;"):
                awaitable.wait()
        dist.barrier()


def check_the_gpus_forward_under_the_interpreter(rank: int, world_size: int) -> None:
    stage = Stage(OWNERS, rank)
    half: dict[str, Any] = {"wire_dtype": torch.float16, "output_dtype": torch.float16, "leading_columns": 8}
    staged: dict[str, Any] = {"put": "staged", **half}
    for backend, more in (("nccl", half), ("pgas", {}), ("pgas", half), ("fused", {}), ("fused", staged)):
        options = ExchangeOptions(backend=backend, slice_bags=4, wait_timeout_s=1e-4, **more)
        forward = interpreted_forward(stage, world(), options, samples=9)
        for number, sizes in enumerate(BATCH_SIZES[1:6]):
            inputs, expected = stage.inputs(number, sizes)
            step = Step(inputs, BatchSizes.of(sizes))
            pooled = forward.finish(forward.start(step))
            forward.check()
            if rank == 1:
                time.sleep(0.05)  # nobody may overtake it
            assert_same(pooled, expected.to(options.output_dtype), f"{options}, step {number}")
            del pooled
        for state in getattr(forward, "_states", {}).values():
            assert (state.staging.numel() > 0) == (options.put == "staged"), "memory to stage in, only if it is used"
        forward.close()


def check_the_gpus_forward_names_a_silent_peer_under_the_interpreter(rank: int, world_size: int) -> None:
    stage, sizes = Stage(OWNERS, rank), (4, 4, 4)
    for backend in ("pgas", "fused"):
        options = ExchangeOptions(backend=backend, slice_bags=4, wait_timeout_s=1e-8)
        forward = interpreted_forward(stage, world(), options, samples=4)
        if rank != 2:
            step = Step(stage.inputs(0, sizes)[0], BatchSizes.of(sizes))
            forward.finish(forward.start(step))
            with pytest.raises(ExchangeTimeoutError, match=f"rank {rank} waited .* of rank [0-2]: expected epoch 1,"):
                forward.check()
        dist.barrier()


def check_the_gpus_backward_under_the_interpreter(rank: int, world_size: int) -> None:
    sgd, adagrad, rowwise = EmbOptimType.EXACT_SGD, EmbOptimType.EXACT_ADAGRAD, EmbOptimType.EXACT_ROWWISE_ADAGRAD
    half: dict[str, Any] = {"wire_dtype": torch.float16, "output_dtype": torch.float16}
    cases = [(sgd, False, {}), *((each, False, more) for more in ({}, half) for each in (adagrad, rowwise))]
    # Within a capture a rank waits for each part before it pushes the next one.
    for optimizer, captured, more in [*cases, (adagrad, True, {})]:
        stage, expected = (Stage(OWNERS, rank, optimizer=optimizer) for _ in range(2))
        for each in (stage, expected):
            each.tables.mark_updates(torch.device("cpu"))
        marks, wanted_marks = stage.tables.marks, expected.tables.marks
        assert marks is not None
        assert wanted_marks is not None
        exchange = expected.exchange(world(), "pgas", **more)
        generator = torch.Generator().manual_seed(rank)
        with without_streams(), patch.object(gradient_layout, "_PART_BYTES", 64):
            options = ExchangeOptions(backward="push", wait_timeout_s=1e-4, **more)
            gpu = interpreted_parts(stage, world(), options, samples=9)
            push: Any = gpu.backward
            assert push.gradients.parts > 1
            if captured:
                push.order.begin()
            for number, sizes in enumerate(BATCH_SIZES[1:6]):
                marks.clear()
                wanted_marks.clear()
                inputs, _ = stage.inputs(number, sizes)
                # Some columns of a wider tensor, whose rows begin at multiples of 16 bytes or do not.
                columns = 8 + stage.layout.total_dim + (-stage.layout.total_dim % 8) * (number % 2)
                gradient = torch.randn(sizes[rank], columns, generator=generator).to(options.output_dtype)
                gradient = gradient[:, 8 : 8 + stage.layout.total_dim]
                exchange.start(inputs, sizes).wait().backward(gradient)
                step = Step(inputs, BatchSizes.of(sizes))
                pending = push.note_forward(step)
                push.follow_rules(captured)
                if number == 1:
                    pending = push.prepare(pending)
                with patch.object(push, "push", wraps=push.push) as pushed:
                    state = push.start(pending, gradient)
                parts = push.gradients.parts
                expected_calls = [(part, part + 1) for part in range(parts)] if captured else [(0, parts)]
                assert [call.args[2:] for call in pushed.call_args_list] == expected_calls
                if rank == 1:
                    time.sleep(0.05)  # nobody may overtake it
                push.finish(state)
                push.check()
                assert torch.equal(marks.words, wanted_marks.words), "marked rows"
            gpu.close()
        exchange.close()
        wanted = expected.rows_and_states()
        what = f"{optimizer}{', captured' * captured}{', half precision' * bool(more)}:"
        assert_all_near(stage.rows_and_states(), wanted, WEIGHT_TOLERANCE["fp32"], what)


def check_the_gpus_backward_names_a_silent_peer_under_the_interpreter(rank: int, world_size: int) -> None:
    stage, sizes = Stage(OWNERS, rank), (4, 4, 4)
    with without_streams():
        push = interpreted_parts(stage, world(), ExchangeOptions(wait_timeout_s=1e-8), samples=4).backward
        if rank != 2:
            step = Step(stage.inputs(0, sizes)[0], BatchSizes.of(sizes))
            pending = push.note_forward(step)
            push.start(pending, torch.ones(4, stage.layout.total_dim))
            told = f"rank {rank} waited .* for part 0 of rank [0-2]: expected epoch 1,"
            with pytest.raises(ExchangeTimeoutError, match=told):
                push.start(pending, torch.ones(4, stage.layout.total_dim))
        dist.barrier()


CHECKS: dict[str, Callable[[int, int], None]] = {
    name: function for name, function in list(globals().items()) if name.startswith("check_")
}
_OF_KERNELS = [name for name in CHECKS if "interpreter" in name] if INTERPRETED else []
_OF_PROTOCOL = [name for name in CHECKS if "interpreter" not in name]


def _run_check(name: str) -> None:
    CHECKS[name](dist.get_rank(), dist.get_world_size())


ended = cases_on_ranks(len(OWNERS), _run_check, _OF_PROTOCOL)
kernels_ended = cases_on_ranks(len(OWNERS), _run_check, _OF_KERNELS)


@pytest.mark.slow
@pytest.mark.parametrize("name", _OF_PROTOCOL)
def test_three_ranks(ended: Callable[[str], None], name: str) -> None:
    ended(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", _OF_KERNELS)
def test_kernels_of_three_ranks(kernels_ended: Callable[[str], None], name: str) -> None:
    kernels_ended(name)


def _lose_a_rank(folder: Path) -> None:
    stage, sizes = Stage([([8], []), ([4], [])], dist.get_rank()), (3, 3)
    exchanges = {backend: stage.exchange(world(), backend, wait_timeout_s=1.0) for backend in ("pgas", "fused")}
    inputs, _ = stage.inputs(0, sizes)
    pooled = {backend: exchange.start(inputs, sizes).wait() for backend, exchange in exchanges.items()}
    dist.barrier()
    if dist.get_rank() == 1:
        os._exit(0)
    for backend, exchange in exchanges.items():
        began = time.monotonic()
        told = r"rank 0 waited 1 s for part 0 of rank 1: expected epoch 1, seen 0;"
        with pytest.raises(ExchangeTimeoutError, match=told):
            pooled.pop(backend).sum().backward()
        told = r"finish_backward has failed \(ExchangeTimeoutError: .* of rank 1: .* start again"
        with pytest.raises(RuntimeError, match=told):
            exchange.start(inputs, sizes)
        assert time.monotonic() - began < 10
        (folder / backend).touch()
    os._exit(0)  # the group is broken


@pytest.mark.slow
def test_a_rank_that_died_is_named(tmp_path: Path) -> None:
    run_ranks(_lose_a_rank, 2, tmp_path)
    assert (tmp_path / "pgas").exists()
    assert (tmp_path / "fused").exists()
