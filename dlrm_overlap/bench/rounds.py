"""How long does each contender take? All meet the same batches, and every drift of the machine."""

import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from dlrm_overlap.bench.contenders import Contender
from dlrm_overlap.bench.timing import StepTimes, greatest, slowest_rank
from dlrm_overlap.bench.workload import Workload
from dlrm_overlap.observe.metrics import StepTimer, quantile

_ROUNDS = 4  # contenders take turns
_WARMUP_STEPS = 5


@dataclass(frozen=True)
class Timing:
    """A contender's steps, back to back."""

    times: StepTimes
    host_ms: float
    """median time for the host to issue a step, the slowest rank's"""
    steps: int


@torch.no_grad()
def time_contenders(
    contenders: Sequence[Contender], batches: Sequence[Any], workload: Workload, steps: int
) -> list[Timing]:
    """Time at least `steps` steps of each contender, in rounds; `batches` take turns."""
    per_round = math.ceil(steps / _ROUNDS)
    step_ms: list[list[float]] = [[] for _ in contenders]
    host_ms: list[list[float]] = [[] for _ in contenders]
    for _ in range(_ROUNDS):
        for i, contender in enumerate(contenders):
            following, timer = _warm_up(contender.step, batches, workload)
            for _ in range(per_round):
                began = time.perf_counter()
                contender.step(next(following))
                host_ms[i].append((time.perf_counter() - began) * 1e3)
                timer.mark()
            step_ms[i] += timer.take_ms()
    device, group = workload.device, workload.group
    host = greatest([quantile(times, 0.5) for times in host_ms], device, group)
    return [
        Timing(slowest_rank(times, device, group), host_time, len(times))
        for times, host_time in zip(step_ms, host, strict=True)
    ]


@torch.no_grad()
def time_parts(
    step: Callable[..., object], parts: int, batches: Sequence[Any], workload: Workload, steps: int
) -> list[float]:
    """Return the medians in ms of the parts of a step, the slowest rank's each.

    Args:
        step: takes a batch, and what to call between two parts.
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
    """Take the first steps of a block together with all ranks; return the batches to go on with and a timer begun."""
    following = itertools.cycle(batches)
    dist.barrier(workload.group)
    for _ in range(_WARMUP_STEPS):
        step(next(following))
    timer = StepTimer(workload.device)
    timer.mark()
    return following, timer
