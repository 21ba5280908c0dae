"""Many steps without a pause while ranks are late at random: every output is exact, and unwritten memory is NaN.

All numbers are integers that float32 holds exactly, so sums and updates are exact in any order.
"""

import random
import time
from collections.abc import Callable
from typing import Any

import torch

from dlrm_overlap.embedding.exchange import Exchange
from dlrm_overlap.embedding.options import ExchangeOptions
from tests.gpu.exchange.place import Place, every
from tests.gpu.exchange.stage_by_hand import Batch, Stage, Table

_LEARNING_RATE = 2.0
_POOL = 8  # batches that are used again
_STRETCH = 50  # steps that train, followed by as many that do not


class _Known:
    """A batch, and what every rank knows of it: its ids, all gradients and all updates."""

    def __init__(self, stage: Stage, batch: Batch, seed: int) -> None:
        place = stage.place
        self.batch, self.inputs = batch, stage.inputs(batch)
        self._own = [batch.bags(t, place.rank) for t in range(len(stage.tables))]
        self._all = [batch.bags(t, None) for t in range(len(stage.tables))]
        shape = batch.first_sample[-1], stage.columns[-1]
        # A multiple of the world size, by which gradients are divided.
        gradient = torch.randint(-2, 3, shape, generator=place.generator(seed), device=place.device).float()
        self._gradient = gradient * place.world_size
        first, end = batch.first_sample[place.rank : place.rank + 2]
        self.own_gradient = self._gradient[first:end]
        self._columns = [slice(*pair) for pair in zip(stage.columns[:-1], stage.columns[1:], strict=True)]
        self._pooled, self._version = self.own_gradient.new_empty(0), -1

    def pooled(self, rows: list[torch.Tensor], version: int) -> torch.Tensor:
        """Return this rank's output, which is cached until the tables' version changes."""
        if version != self._version:
            self._version, self._pooled = version, torch.zeros_like(self.own_gradient)
            for table, (bag, ids), columns in zip(rows, self._own, self._columns, strict=True):
                self._pooled[:, columns] = torch.zeros_like(self._pooled[:, columns]).index_add_(0, bag, table[ids])
        return self._pooled

    def update(self, rows: list[torch.Tensor], world_size: int) -> None:
        """Update all tables by all ranks' gradients."""
        step = self._gradient * (-_LEARNING_RATE / world_size)
        for table, (bag, ids), columns in zip(rows, self._all, self._columns, strict=True):
            table.index_add_(0, ids, step[:, columns][bag])


def dawdle(place: Place, chance: random.Random, stream: torch.cuda.Stream | None = None) -> None:
    """Sometimes delay this rank's GPU (on `stream`, by default the current one) or host: up to 1 ms, rarely more."""
    if chance.random() < 0.2:
        longest = 1e-2 if chance.random() < 0.02 else 1e-3
        seconds = longest * chance.random()
        if place.on_gpu and chance.random() < 0.7:
            with torch.cuda.stream(stream):
                torch.cuda._sleep(int(seconds * 1.5e9))  # cycles
        else:
            time.sleep(seconds)


def capture(place: Place, take: Callable[[], None]) -> Callable[[], None]:
    """Capture a step that has been taken before, and return a function that replays it."""
    graph = torch.cuda.CUDAGraph()
    place.synchronize()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream(), capture_error_mode="thread_local"):
        take()
    return graph.replay


def take_late(place: Place, take: Callable[[], None], mode: str, steps: int) -> None:
    """Take steps while ranks are late at random.

    Args:
        place: this rank.
        take: a step that has been taken before.
        mode: eager | captured | mixed: each rank decides at random for each step.
        steps: number of steps, as for `Place.steps`.
    """
    chance = random.Random(place.rank)
    replay = None if mode == "eager" else capture(place, take)
    for _ in range(place.steps(steps)):
        dawdle(place, chance)
        if replay is None or (mode == "mixed" and chance.random() < 0.5):
            take()
        else:
            replay()


def _poison(exchange: Exchange) -> None:
    """Fill the window and the staging buffers of the last step with NaN.

    A peer writes to this window again two steps later, and begins that step only after it has this rank's flags of the
    next step. So until its next launch, which the stream orders after this, only this rank uses the window. A peer that
    has this rank's flags of the last step may already write to the other window.
    """
    forward: Any = exchange._open().forward
    forward.windows.arena.local(forward.windows.name).fill_(torch.nan)
    for state in getattr(forward, "_states", {}).values():
        state.staging.fill_(torch.nan)


def _assert_idle(exchange: Exchange) -> None:
    """Check that the persistent kernel has reset its counters."""
    for state in getattr(exchange._open().forward, "_states", {}).values():
        assert not state.done.any(), "the counts of tasks are not reset"
        assert not state.ticket.any(), "the tickets are not reset"


def stress(place: Place, options: ExchangeOptions) -> None:
    owners = range(place.world_size)
    tables = [Table(rows, dim, owner) for rows, dim in ((300, 64), (50, 12), (5, 64)) for owner in owners]
    stage = Stage(place, tables, lr=_LEARNING_RATE)
    rows = stage.fill(integers=True)
    agreed, own = random.Random(0), random.Random(1 + place.rank)
    known = []
    for i in range(_POOL):
        sizes = [agreed.choice((1, 3, 64, 150, 333)) for _ in owners]
        known.append(_Known(stage, Batch(place, tables, sizes, seed=i), seed=100 + i))
    steps = place.steps(1000) if place.on_gpu else 200
    wrong = torch.zeros(steps, dtype=torch.int64, device=place.device)
    trained = 0
    exchange = stage.exchange(options)
    for step in range(steps):
        this = agreed.choice(known)
        train = step // _STRETCH % 2 == 0 and agreed.random() < 0.6
        expected = this.pooled(rows, trained)
        dawdle(place, own)
        with torch.set_grad_enabled(train):
            awaitable = exchange.start(this.inputs, this.batch.sizes)
            dawdle(place, own)
            output = awaitable.wait()
            wrong[step] = (output != expected).sum()
            if train:
                dawdle(place, own)
                output.backward(this.own_gradient)
                this.update(rows, place.world_size)
                trained += 1
        del awaitable, output
        _poison(exchange)
    place.meet()
    _assert_idle(exchange)
    assert trained > steps // 5
    assert not wrong.any(), f"steps {wrong.nonzero().flatten().tolist()[:20]}: {wrong.count_nonzero()} of {steps} wrong"
    for t in stage.owned[place.rank]:
        assert torch.equal(stage.weight(t), rows[t]), f"rows of table {t} after {trained} updates"
    exchange.close()


def _options(backend: str, schedule: str = "balanced", **options: Any) -> ExchangeOptions:
    return ExchangeOptions(backend, schedule, wait_timeout_s=20.0, **options)


_RUNS = {
    "pgas": _options("pgas"),
    "pgas_linear": _options("pgas", "linear"),
    "fused": _options("fused"),
    "fused_4_bags_1_program": _options("fused", slice_bags=4, programs_per_sm=1),
    "fused_stores": _options("fused", put="staged"),
    "fused_stores_4_bags_1_program": _options("fused", put="staged", slice_bags=4, programs_per_sm=1),
}
_MANY = _options("fused", "remote_first", put="staged", slice_bags=128, programs_per_sm=2)
_RUNS["fused_stores_128_bags_2_programs"] = _MANY
CHECKS = every("stress", stress, options=_RUNS)
