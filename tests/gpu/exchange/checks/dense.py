"""Dense gradients reduced by stores against the group's all-reduce: eager, captured, under delays; lost peers."""

import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from dlrm_overlap.comm.counters import Counters
from dlrm_overlap.comm.order import CommunicationOrder
from dlrm_overlap.dense.flat import FlatParameters
from dlrm_overlap.dense.flat_steps import FlatSteps, take_steps
from dlrm_overlap.dense.functions import StoreOptions
from dlrm_overlap.dense.gradients import GradientBuckets
from tests.gpu.exchange.checks.faults import CULPRIT, TIMEOUT_S, flag_error
from tests.gpu.exchange.checks.stress import capture, dawdle
from tests.gpu.exchange.place import Place, every

SHAPES = {"wide": (1000, 1301), "scale": (), "narrow": (3, 7), "bias": (100_003,), "last": (500, 700)}
_BUCKETS = {"one": 1 << 30, "several": 1 << 20}  # bytes of a bucket, at least
_EAGER, _REPLAYED = 50, 1000  # steps
_ROUNDING = {torch.float32: 1e-6, torch.bfloat16: 1e-2}  # of a mean, relative to its greatest term


class Capturable:
    """Steps `take` that signal and wait, and count in `counters`."""

    counters: Sequence[Counters]

    def __init__(self, place: Place) -> None:
        self.place, self.order = place, CommunicationOrder()

    def take(self) -> None:
        raise NotImplementedError

    def capture(self) -> Callable[[], None]:
        """Capture a step, and return a function that replays it."""
        values = [counter.value for each in self.counters for counter in each.each]

        def take_counted() -> None:
            for each in self.counters:
                each.advance()
            self.order.begin()
            self.take()
            self.order.end()

        launch = capture(self.place, take_counted)
        assert [counter.value for each in self.counters for counter in each.each] == [value + 1 for value in values]
        arguments = self.arguments
        pending = [True]  # the capture has counted its first replay

        def replay() -> None:
            if not pending[0]:
                for each in self.counters:
                    each.count_step()
            assert self.arguments == arguments
            pending[0] = False
            launch()

        return replay

    @property
    def arguments(self) -> list[list[int]]:
        return [[counter.argument for counter in each.each] for each in self.counters]

    def follow_eager_steps(self, arguments: list[list[int]]) -> None:
        """Set the words for a replay after eager steps; `arguments` are those of the capture."""
        for each, captured in zip(self.counters, arguments, strict=True):
            each.set_arguments(captured)


class _Steps(Capturable):
    """Steps that reduce random gradients, and compare each with the group's all-reduce."""

    def __init__(self, place: Place, dtype: torch.dtype, stores: StoreOptions, bucket_bytes: int) -> None:
        super().__init__(place)
        self.dtype = dtype
        parameters = {name: nn.Parameter(torch.zeros(s, device=place.device)) for name, s in SHAPES.items()}
        self.flat = FlatParameters(parameters)
        self.steps = FlatSteps(self.flat, torch.optim.SGD(parameters.values(), lr=1.0))
        self.buckets = GradientBuckets(self.flat, place.group, dtype, bucket_bytes, self.order, stores)
        self.counters = self.buckets.counters
        self.flat.show_gradients()
        self.source = torch.zeros_like(self.flat.gradients.tensor)
        self.used = torch.zeros_like(self.source)
        for position in self.flat.positions.values():
            position.of(self.used).fill_(1)
        self.bad = torch.zeros((), dtype=torch.int64, device=place.device)
        self._generator = place.generator(place.rank + 1)

    def take(self) -> None:
        """Take a step, and overwrite the gradient with NaN after it."""
        for name, position in self.flat.positions.items():
            self.flat.gradients.views[name].copy_(position.of(self.source))
            self.buckets.complete(name)
        take_steps([self.steps], self.buckets.finish_in_ranges())
        for view in self.flat.gradients.views.values():
            view.fill_(torch.nan)

    def step(self, take: Callable[[], Any]) -> None:
        """Take a step by `take`, and count the weights that did not decrease by the mean; no wait for the device."""
        self.source.normal_(generator=self._generator).pow_(3).mul_(self.used)
        weights = self.flat.weights.tensor
        weights.zero_()  # so that they are minus the mean after the step
        take()
        sent = self.source.to(self.dtype).float()
        mean, greatest = sent / self.place.world_size, sent.abs()
        dist.all_reduce(mean, group=self.place.group)
        dist.all_reduce(greatest, dist.ReduceOp.MAX, group=self.place.group)
        self.bad += (~((weights + mean).abs() <= _ROUNDING[self.dtype] * greatest)).sum()

    def check(self, what: str) -> None:
        """Check that no step was wrong on this rank, and that all ranks have the same bits."""
        self.buckets.check()
        assert int(self.bad) == 0, f"{what}: {int(self.bad)} elements are not the mean"
        least, greatest = self.flat.weights.tensor.clone(), self.flat.weights.tensor.clone()
        dist.all_reduce(least, dist.ReduceOp.MIN, group=self.place.group)
        dist.all_reduce(greatest, dist.ReduceOp.MAX, group=self.place.group)
        assert torch.equal(least, greatest), f"{what}: the ranks differ"


def check_late_steps(place: Place, steps: Any, eager: int, replayed: int) -> None:
    """Check steps on ranks that are late by chance: `eager` ones, then `replayed` ones, with eager ones between."""
    chance = random.Random(place.rank)

    def run(count: int, take: Callable[[], Any]) -> None:
        for _ in range(count):
            dawdle(place, chance)
            steps.step(take)

    run(eager, steps.take)
    steps.check("eager")
    replay = steps.capture()
    arguments = steps.arguments
    run(place.steps(replayed // 2), replay)
    steps.check("replayed")
    run(7, steps.take)
    steps.follow_eager_steps(arguments)
    run(place.steps(replayed // 2), replay)
    steps.check("replayed after eager steps")


def _check_mean(place: Place, dtype: torch.dtype, bucket: str) -> None:
    stores = StoreOptions(programs=8, piece_elements=300_000, wait_timeout_s=60.0)
    steps = _Steps(place, dtype, stores, _BUCKETS[bucket])
    check_late_steps(place, steps, _EAGER, _REPLAYED)
    place.close(steps.buckets)
    assert all(parameter.grad is steps.flat.gradients.views[name] for name, parameter in steps.flat.parameters.items())


def _check_lost_peer(place: Place, captured: bool) -> None:
    """All ranks except the culprit name the rank for which they waited, in time."""
    steps = _Steps(place, torch.float32, StoreOptions(wait_timeout_s=TIMEOUT_S), _BUCKETS["one"])
    for _ in range(3):
        steps.step(steps.take)
    take = steps.capture() if captured else steps.take
    steps.step(take)
    place.meet()
    flag, message = flag_error(place, steps.buckets.check, "dense gradients' flag", take, 3 * TIMEOUT_S)
    assert flag == [place.rank, 0, CULPRIT, 5, 4], message
    place.leave()


_TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_CAPTURED = {"eager": False, "captured": True}
CHECKS = every("dense", _check_mean, dtype=_TYPES, bucket=list(_BUCKETS), gpu_only=True)
LOST = every("dense_peer_stalls", _check_lost_peer, captured=_CAPTURED, gpu_only=True, alone=True)
