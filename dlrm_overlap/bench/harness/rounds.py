"""How long each contender's step takes.

The contenders take turns on the same batches, so that a drift of the machine slows them all alike.
"""

import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from dlrm_overlap.bench.harness.contenders import Contender
from dlrm_overlap.bench.harness.progress import counted
from dlrm_overlap.bench.harness.timing import StepTimes, slowest_rank
from dlrm_overlap.bench.harness.workload import Workload
from dlrm_overlap.comm.turns import greatest
from dlrm_overlap.observe.metrics import StepTimer, quantile

_ROUNDS = 4  # contenders take turns
_WARMUP_STEPS = 5


@dataclass(frozen=True)
class Timing:
    """The time of a contender's steps, taken back to back; all numbers are the maximum over the ranks."""

    times: StepTimes
    p95_ms: float
    host_ms: float
    """median time for the host to issue a step"""
    steps: int
    """how many were timed"""


Turn = Callable[[int], tuple[list[float], list[float]]]
"""takes a number of steps; returns this rank's time of each, and the host's time of issuing each, in ms"""


def take_turns(
    turns: Sequence[Turn],
    steps: int,
    device: torch.device,
    group: dist.ProcessGroup | None = None,
    tell: bool = True,
) -> list[Timing]:
    """Time at least `steps` steps of each contender, in rounds in which they take turns. All ranks call this.

    Args:
        turns: one for each contender; it has as many steps in every round.
        steps: the fewest of each.
        device: of this rank.
        group: the ranks; None for all.
        tell: whether to tell on rank 0 how many turns are left.
    """
    per_round = math.ceil(steps / _ROUNDS)
    step_ms: list[list[float]] = [[] for _ in turns]
    host_ms: list[list[float]] = [[] for _ in turns]
    order = list(enumerate(turns)) * _ROUNDS
    for i, turn in counted("turns of contenders", order) if tell else order:
        on_device, on_host = turn(per_round)
        step_ms[i] += on_device
        host_ms[i] += on_host
    return [
        Timing(
            slowest_rank(on_device, device, group),
            *greatest([quantile(on_device, 0.95), quantile(on_host, 0.5)], device, group),
            steps=len(on_device),
        )
        for on_device, on_host in zip(step_ms, host_ms, strict=True)
    ]


@torch.no_grad()
def time_contenders(
    contenders: Sequence[Contender], batches: Sequence[Any], workload: Workload, steps: int, tell: bool = True
) -> list[Timing]:
    """Time at least `steps` steps of each contender, see `take_turns`. All ranks call this.

    Args:
        contenders: who takes turns.
        batches: what a contender's `step` takes, one after the other and again from the first.
        workload: gives the group and the device.
        steps: the fewest steps to time of each contender.
        tell: whether to tell on rank 0 how many turns are left.
    """

    def turn(contender: Contender, steps: int) -> tuple[list[float], list[float]]:
        host_ms = []
        following, timer = _warm_up(contender.step, batches, workload)
        for _ in range(steps):
            began = time.perf_counter()
            contender.step(next(following))
            host_ms.append((time.perf_counter() - began) * 1e3)
            timer.mark()
        return timer.take_ms(), host_ms

    turns = [partial(turn, contender) for contender in contenders]
    return take_turns(turns, steps, workload.device, workload.group, tell)


@torch.no_grad()
def time_parts(
    step: Callable[..., object], parts: int, batches: Sequence[Any], workload: Workload, steps: int
) -> list[float]:
    """Return the median of each part of a step in ms, on the rank where it is the longest. All ranks call this.

    Args:
        step: runs a step; it takes a batch, and a function to call between two parts.
        parts: how many parts a step has.
        batches: what `step` takes, one after the other and again from the first.
        workload: gives the group and the device.
        steps: how many to time.
    """
    following, timer = _warm_up(step, batches, workload)
    for _ in range(steps):
        step(next(following), timer.mark)
        timer.mark()
    times = timer.take_ms()
    return greatest([quantile(times[part::parts], 0.5) for part in range(parts)], workload.device, workload.group)


def _warm_up(
    step: Callable[..., object], batches: Sequence[Any], workload: Workload
) -> tuple[Iterator[Any], StepTimer]:
    """Take a few steps that all ranks begin together; return the batches that follow, and a timer that has started."""
    following = itertools.cycle(batches)
    dist.barrier(workload.group)
    for _ in range(_WARMUP_STEPS):
        step(next(following))
    timer = StepTimer(workload.device)
    timer.mark()
    return following, timer
