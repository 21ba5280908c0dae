import re
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode

from dlrm_overlap.comm.device_errors import ExchangeTimeoutError
from dlrm_overlap.embedding.exchange import Exchange
from dlrm_overlap.embedding.options import ExchangeOptions
from tests.agreement import assert_same
from tests.gpu.exchange.place import Place, every
from tests.gpu.exchange.stage_by_hand import Batch, Stage, Table, pool_exactly

TIMEOUT_S = 3.0
_COMPILED_S = 90.0
CULPRIT = 1  # the rank that stalls or dies
GOOD_STEPS = 3  # before that
_BACKENDS = ("nccl", "pgas", "fused")
_SAMPLES = 40


def _ids_outside(place: Place, mode: BoundsCheckMode) -> tuple[Stage, Batch, torch.Tensor, str]:
    """Return a stage, a batch with ids outside the second table of every rank, its output with row 0 for these ids,
    and that table's name.
    """
    tables = [Table(50, 64, owner) for _ in range(2) for owner in range(place.world_size)]
    stage = Stage(place, tables, lr=1.0, bounds_check=mode)
    everyones = stage.fill(integers=True)
    batch = Batch(place, tables, [_SAMPLES] * place.world_size, seed=0, ids=torch.int64)
    for ids in batch.values[place.world_size :]:
        ids[:3] = 0
    expected = pool_exactly(batch, everyones, place.rank)
    for ids in batch.values[place.world_size :]:
        ids[:3] = torch.tensor([50, -1 if place.on_gpu else -2, 1 << 40])  # FBGEMM's -1 stops a CPU in every mode
    return stage, batch, expected, f"t{place.world_size + place.rank}"


def _check_fatal(place: Place, backend: str) -> None:
    stage, batch, expected, name = _ids_outside(place, BoundsCheckMode.FATAL)
    exchange = stage.exchange(ExchangeOptions(backend))
    try:
        with torch.no_grad():
            assert_same(exchange.start(stage.inputs(batch), batch.sizes).wait(), expected, "row 0 taken")
            place.synchronize()  # so that the kernel has recorded it when the next step begins
            exchange.start(stage.inputs(batch), batch.sizes)
    except ValueError as error:
        message = str(error)
    else:
        raise AssertionError("ids outside their table are not reported")
    assert re.search(rf"{name}: .* outside its table of 50 rows", message), message
    place.close(exchange)


def _check_lenient(place: Place, backend: str) -> None:
    """Steps continue, forward and backward, as if the ids were 0."""
    for mode in (BoundsCheckMode.IGNORE, BoundsCheckMode.WARNING):
        stage, batch, expected, _ = _ids_outside(place, mode)
        before = [stage.weight(t).clone() for t in stage.owned[place.rank]]
        exchange = stage.exchange(ExchangeOptions(backend))
        output = exchange.start(stage.inputs(batch), batch.sizes).wait()
        assert_same(output.detach(), expected, f"{mode}")
        output.sum().backward()
        del output
        place.synchronize()
        exchange.check()
        for t, rows in zip(stage.owned[place.rank], before, strict=True):
            ids = batch.values[t].where((batch.values[t] >= 0) & (batch.values[t] < 50), 0)
            step = torch.bincount(ids, minlength=50)[:, None] / place.world_size
            torch.testing.assert_close(stage.weight(t), rows - step, rtol=0, atol=1e-4)
        with torch.no_grad():
            exchange.start(stage.inputs(batch), batch.sizes).wait()
        place.close(exchange)


def _check_lost_peer(
    place: Place, backend: str, dies: bool, train: bool, what: str = "slice", dim: int = 64, **options: Any
) -> None:
    """All ranks except the culprit name the peer for which they waited, in time, whatever error the GPU reports."""
    tables = [Table(50, dim, owner) for owner in range(place.world_size)]
    stage = Stage(place, tables, lr=1.0)
    stage.fill(integers=True)
    batch = Batch(place, tables, [_SAMPLES] * place.world_size, seed=0)
    for wait_s in (_COMPILED_S, TIMEOUT_S):  # kernels are compiled under waits longer than a peer's compilation
        exchange = stage.exchange(ExchangeOptions(backend, wait_timeout_s=wait_s, **options))
        for _ in range(GOOD_STEPS):
            _step(stage, exchange, batch, train)
        place.meet()
        if wait_s != TIMEOUT_S:
            exchange.close()
    stalls_s = 0.0 if dies else 2.5 * TIMEOUT_S
    flag, message = flag_error(place, exchange.check, what, lambda: _step(stage, exchange, batch, train), stalls_s)
    rank, slot, peer, expected, seen = flag
    assert (rank, peer, expected, seen) == (place.rank, CULPRIT, GOOD_STEPS + 1, GOOD_STEPS), message
    assert slot < -(-_SAMPLES // exchange.options.slice_bags), message
    place.leave()


def flag_error(
    place: Place, check: Callable[[], None], what: str, work: Callable[[], object], stalls_s: float = 0.0
) -> tuple[list[int], str]:
    """Return the numbers and the text of the error of a wait in `work` that expires.

    The numbers are the waiting rank, the number of the `what` that it waits for, the rank that is late, and the epochs
    expected and seen. The culprit only sleeps, and ends.

    Args:
        place: this rank.
        check: raises the errors that kernels recorded.
        what: the name of a slot in the error.
        work: waits for up to TIMEOUT_S.
        stalls_s: how long the culprit sleeps.
    """
    if place.rank == CULPRIT:
        time.sleep(stalls_s)
        place.leave()
    message = expired_error(place, check, work)
    wait = rf"rank (\d+) waited {TIMEOUT_S:g} s for {what} (\d+) of rank (\d+)"
    match = re.match(rf"{wait}: expected epoch (\d+), seen (\d+);", message)
    assert match, message
    return list(map(int, match.groups())), message


def expired_error(place: Place, check: Callable[[], None], work: Callable[[], object]) -> str:
    """Return the error of a wait in `work` that expires, and check the time that it took."""
    began = time.monotonic()
    late = threading.Timer(3 * TIMEOUT_S, _log_recorded, [check])  # in case the GPU hangs
    late.start()
    try:
        work()
        place.synchronize()
    except RuntimeError as error:
        message = _recorded_error(check, error)
    else:
        raise AssertionError("no wait expired")
    finally:
        late.cancel()
    elapsed = time.monotonic() - began
    assert 0.9 * TIMEOUT_S < elapsed < 3 * TIMEOUT_S, f"reported after {elapsed:.1f} s: {message}"
    return str(message)


def _log_recorded(check: Callable[[], None]) -> None:
    """Write the errors that kernels recorded to the rank's log; works also if the GPU hangs."""
    try:
        check()
        print("no kernel has recorded anything", flush=True)
    except (ExchangeTimeoutError, ValueError) as recorded:
        print(f"recorded, but the GPU hangs: {recorded}", flush=True)


def _step(stage: Stage, exchange: Exchange, batch: Batch, train: bool) -> None:
    with torch.set_grad_enabled(train):
        output = exchange.start(stage.inputs(batch), batch.sizes).wait()
        if train:
            output.sum().backward()


def _recorded_error(check: Callable[[], None], error: RuntimeError) -> ExchangeTimeoutError:
    """Return the error that the user sees: the recorded one instead of the GPU's, as in `Trainer.step`."""
    if isinstance(error, ExchangeTimeoutError):
        return error
    try:
        check()
    except ExchangeTimeoutError as recorded:
        return recorded
    raise AssertionError("nothing is recorded") from error


CHECKS = every("ids_outside_fatal", _check_fatal, backend=_BACKENDS)
CHECKS |= every("ids_outside_lenient", _check_lenient, backend=_BACKENDS)
_stalls = partial(_check_lost_peer, dies=False, train=False)
_of_four_warps = partial(_stalls, backend="fused", dim=1024)
# Of two ranks, one waits for a group of the culprit's message, and as long for the flag after it.
_between_two = partial(_stalls, backend="pgas", nodes=2, internode="puts", what="(?:group|slice)")
LOST_PEERS = (
    every("peer_stalls_eval", _stalls, backend=_BACKENDS[1:], alone=True)
    | every("peer_dies_eval", partial(_stalls, dies=True), backend=_BACKENDS[1:], alone=True)
    | every("peer_stalls_training", partial(_stalls, train=True), backend=_BACKENDS[1:], alone=True)
    | every("peer_stalls_eval_fused_of_four_warps", _of_four_warps, gpu_only=True, alone=True)
    | every("peer_stalls_nodes_puts", _between_two, gpu_only=True, alone=True)
)
