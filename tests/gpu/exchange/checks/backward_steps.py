"""Updates of rows over many steps: the same bits however ranks are delayed; silent peers; memory."""

import contextlib
import random
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any
from unittest.mock import patch

import torch

from dlrm_overlap.comm.arena import HostArena
from dlrm_overlap.embedding import gradient_layout
from dlrm_overlap.embedding.exchange import Exchange
from dlrm_overlap.embedding.options import ExchangeOptions
from tests.agreement import assert_all_near, assert_same
from tests.gpu.exchange.checks.backward import Training, tables_of_all_kinds, uneven_batches
from tests.gpu.exchange.checks.faults import CULPRIT, GOOD_STEPS, TIMEOUT_S, flag_error
from tests.gpu.exchange.checks.stress import dawdle
from tests.gpu.exchange.checks.windows import used_bytes
from tests.gpu.exchange.place import Check, Place, every
from tests.gpu.exchange.stage_by_hand import Batch, Stage, Table

_OPTIONS = ExchangeOptions(wait_timeout_s=20.0)
_PART_BYTES = 1 << 12  # so small that small windows have the greatest number of parts


def _pause(training: Training, chance: random.Random) -> None:
    """Sometimes delay the streams of a step, or the host."""
    backward: Any = training.exchange._parts and training.exchange._parts.backward
    for name in ("", "_push_stream", "_sort_stream", "_update_stream"):
        dawdle(training.place, chance, getattr(backward, name, None))


def _assert_same_rows(actual: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor], what: str) -> None:
    for name, rows in expected.items():
        assert rows.isfinite().all(), name
    assert_all_near(actual, expected, 0.0, f"{what}:")


def _check_deterministic(place: Place) -> None:
    """Three runs with the same start and other delays end in the same bits."""
    tables = tables_of_all_kinds(range(place.world_size))
    batches = uneven_batches(place, tables)
    ends = []
    for run in range(3):
        training = Training(place, tables, "adagrad", _OPTIONS)
        pause = partial(_pause, training, random.Random(100 * run + place.rank))
        for step in range(10):
            training.step(batches[step % len(batches)], step, feedback=True, pause=pause)
        ends.append(training.rows())
        training.close()
    for run in (1, 2):
        _assert_same_rows(ends[run], ends[0], f"run {run}")


def _poison(exchange: Exchange) -> None:
    """Fill the window of the last update with NaN, so that a read before a peer's store shows.

    A peer stores there again two exchanges later, after it has this rank's flags of the next exchange. These follow
    all work that is on the main stream now. A peer that has the flags of the last exchange may already store to the
    other window.
    """
    backward: Any = exchange._open().backward
    backward.windows.local.fill_(torch.nan)


def _stress(place: Place, disturbed: bool, options: ExchangeOptions) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the sum of each evaluation's output, and the rows and states at the end."""
    owners = range(place.world_size)
    kinds = ((300, 64, torch.float32), (5, 12, torch.float32), (50, 64, torch.float16))
    tables = [Table(rows, dim, owner, dtype) for rows, dim, dtype in kinds for owner in owners]
    agreed, own = random.Random(0), random.Random(1 + place.rank)
    sizes = [[agreed.choice((0, 1, 3, 64, 150, 333)) for _ in owners] for _ in range(8)]
    sizes.append([0 for _ in owners])
    batches = [Batch(place, tables, each, seed) for seed, each in enumerate(sizes)]
    training = Training(place, tables, "rowwise_adagrad", options)
    pause: Callable[[], None] = partial(_pause, training, own) if disturbed else lambda: None
    steps = place.steps(300) if place.on_gpu else 100
    sums = torch.zeros(steps, dtype=torch.float64, device=place.device)
    for step in range(steps):
        batch, kind = agreed.choice(batches), agreed.random()
        if kind < 0.6:
            training.step(batch, step, feedback=True, pause=pause)
        elif kind < 0.9:
            with torch.no_grad():
                sums[step] = training.look_up(batch, pause).double().sum()
        else:
            training.look_up(batch, pause)  # and no backward follows
        if disturbed:
            _poison(training.exchange)
    rows = training.rows()
    training.close()
    return sums, rows


def _check_stress(place: Place, options: ExchangeOptions) -> None:
    """Steps that train, evaluate or have no backward end in the bits of an undisturbed run."""
    (sums, rows), (expected_sums, expected_rows) = (_stress(place, late, options) for late in (True, False))
    assert_same(sums, expected_sums, "sums of evaluations")
    assert sums.count_nonzero() > len(sums) // 10
    _assert_same_rows(rows, expected_rows, "disturbed")


def _cpu_flags_signaled_by(signal_by: Callable[[Callable[[], None], int], None]) -> Any:
    """Return a context in which `signal_by` gets each signal of a gradient's part by this CPU rank, and the part."""
    signal_flag = HostArena.signal_flag
    return patch.object(HostArena, "signal_flag", lambda *args: signal_by(partial(signal_flag, *args), args[3]))


def _parts_far_apart(place: Place, chance: random.Random) -> Any:
    """Return a context in which time passes between the parts of a gradient."""
    if place.on_gpu:
        from dlrm_overlap.embedding.backends import push  # needs Triton, which a CPU does not

        return patch.object(push, "_REMOTE_PROGRAMS", 0.5)  # one program on two ranks

    def slowly(signal_flag: Callable[[], None], _: int) -> None:
        signal_flag()
        dawdle(place, chance)

    return _cpu_flags_signaled_by(slowly)


def _first_parts_alone(place: Place, exchange: Exchange, parts: int) -> Any:
    """Return a context in which only the first `parts` parts are signaled."""
    if place.on_gpu:
        backward: Any = exchange._open().backward
        backward.own.flags.done[parts:] = -1  # a program that never finishes
        return contextlib.nullcontext()
    return _cpu_flags_signaled_by(lambda signal_flag, part: signal_flag() if part < parts else None)


def _check_parts(place: Place) -> None:
    """Gradients in more parts than a rank has tables, with delays between, end in the bits of those in one part.

    The last rank has no tables.
    """
    chance = random.Random(place.rank)
    tables: list[Table] = []
    for owner in range(place.world_size - 1):
        tables += [Table(100, 64, owner), Table(60, 12, owner), Table(60, 12, owner, rows_of=len(tables) + 1)]
        tables += [Table(100, 64, owner, mean=True), Table(40, 128, owner, hot=True)]
    batches = [Batch(place, tables, [205 + rank for rank in range(place.world_size)], seed) for seed in range(8)]
    ends = []
    for parts in (1, 8):
        training = Training(place, tables, "adagrad", _OPTIONS)
        with (
            patch.multiple(gradient_layout, _PART_BYTES=_PART_BYTES, _MAX_PARTS=parts),
            _parts_far_apart(place, chance),
        ):
            for seed, batch in enumerate(batches):
                training.step(batch, seed, pause=partial(_pause, training, chance))
                _poison(training.exchange)
        backward: Any = training.exchange._open().backward
        assert backward.windows.arena.local(backward.windows.flags).shape == (place.world_size, parts)
        ends.append(training.rows())
        training.close()
    _assert_same_rows(ends[1], ends[0], "8 parts")


def _check_again(place: Place) -> None:
    """A second backward of a step, with `retain_graph`, prepares its ids again."""
    tables = tables_of_all_kinds(range(place.world_size))
    (batch, *_) = uneven_batches(place, tables)
    ends = []
    for retained in (True, False):
        training = Training(place, tables, "adagrad", _OPTIONS)
        shape = batch.sizes[place.rank], training.stage.columns[-1]
        gradient = torch.randn(shape, generator=place.generator(place.rank), device=place.device)
        if retained:
            output = training.look_up(batch)
            output.backward(gradient, retain_graph=True)
            output.backward(-2 * gradient)
        else:
            for factor in (1, -2):
                training.look_up(batch).backward(factor * gradient)
        ends.append(training.rows())
        training.close()
    _assert_same_rows(ends[0], ends[1], "two backwards of one step, and of two")


def _check_memory(place: Place) -> None:
    """Gradient windows are freed by `close`, and when they are replaced for a larger batch."""
    tables = [Table(100, dim, owner) for dim in (64, 12) for owner in range(place.world_size)]
    stage = Stage(place, tables)
    stage.fill(integers=True)
    window_bytes = 1 << (28 if place.on_gpu else 23)
    samples = window_bytes // (4 * stage.columns[-1])
    batches = [Batch(place, tables, [size] * place.world_size, seed=0) for size in (samples // 2, samples)]
    windows = 4 * (place.ranks_per_gpu if place.on_gpu else place.world_size)  # a CPU rank maps its peers', too
    before = 0
    for cycle in range(3):
        if cycle == 1:  # the first has loaded kernels
            before = used_bytes(place)
            place.meet()
        exchange = stage.exchange(ExchangeOptions())
        for batch in batches:
            exchange.start(stage.inputs(batch), batch.sizes).wait().sum().backward()
        place.meet()
        used = (used_bytes(place) - before) / window_bytes
        assert cycle == 0 or windows - 0.5 < used < windows + 0.5, f"{used:.1f} windows in use instead of {windows}"
        place.close(exchange)
        del exchange
        place.meet()
    lost = used_bytes(place) - before
    assert lost < window_bytes // 4, f"{lost} bytes are lost after 2 exchanges of 4 windows of {window_bytes} bytes"
    place.meet()


def _check_silent_peer(place: Place, parts_sent: int) -> None:
    """A rank whose wait for a part of a peer's gradient expires names the peer, in time, whatever the GPU reports."""
    tables = [Table(50, 64, owner) for _ in range(3) for owner in range(place.world_size)]
    stage = Stage(place, tables, lr=1.0)
    stage.fill(integers=True)
    batch = Batch(place, tables, [40] * place.world_size, seed=0)
    exchange = stage.exchange(ExchangeOptions(wait_timeout_s=TIMEOUT_S))
    with patch.object(gradient_layout, "_PART_BYTES", _PART_BYTES):
        for _ in range(GOOD_STEPS):
            exchange.start(stage.inputs(batch), batch.sizes).wait().sum().backward()
    place.meet()
    output = exchange.start(stage.inputs(batch), batch.sizes).wait()
    if place.rank == CULPRIT:
        place.synchronize()
        if parts_sent:
            with _first_parts_alone(place, exchange, parts_sent), contextlib.suppress(RuntimeError):
                output.sum().backward()
                place.synchronize()  # it waits for its own other parts, too
    flag, message = flag_error(place, exchange.check, "part", lambda: output.sum().backward())
    assert flag == [place.rank, parts_sent, CULPRIT, GOOD_STEPS + 1, GOOD_STEPS], message
    place.leave()


CHECKS = {
    "update_deterministic": Check(_check_deterministic, timeout_s=180),
    "update_stress": Check(partial(_check_stress, options=_OPTIONS)),
    "update_parts": Check(_check_parts),
    "update_memory": Check(_check_memory),
    "update_again": Check(_check_again),
}
LOST_PEERS = every("update_peer", _check_silent_peer, parts_sent={"dies": 0, "stops_after_a_part": 1}, alone=True)
