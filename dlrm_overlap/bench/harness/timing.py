"""Times of steps and of short pieces of work."""

import itertools
import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from dlrm_overlap.bench.harness.contenders import Contender
from dlrm_overlap.bench.harness.workload import Workload
from dlrm_overlap.observe.metrics import StepTimer, quantile

ROUNDS = 4  # contenders take turns, so that drift of the machine affects all of them
_WARMUP_STEPS = 5
_CYCLES_PER_MS = 2_000_000  # of the fastest clocks; slower ones make gates longer
_WARMUP_RUNS = 2
_LONGEST_GATE_MS = 10.0
_MARGIN = 1.3
_COLLECTIVE_MS = 0.15  # for the CPU to issue one


def max_over_ranks(values: list[float], device: torch.device) -> list[float]:
    """Return each value's maximum over ranks; a collective."""
    maxima = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(maxima, dist.ReduceOp.MAX)
    return maxima.tolist()


def capture(piece: Callable[[], object], device: torch.device) -> Callable[[], object]:
    """Run `piece`, which may load kernels, capture it, and return its replay; not on the default stream."""
    piece()
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    # Not by torch.cuda.graph, which collects garbage each time and so takes longer than all the rest.
    graph.capture_begin(capture_error_mode="thread_local")
    piece()
    graph.capture_end()
    return graph.replay


@dataclass(frozen=True)
class Timing:
    """Times of steps or of a piece of work, in ms, each the maximum over ranks."""

    mean_ms: float
    p10_ms: float
    median_ms: float
    p90_ms: float
    host_ms: float
    """median time in which the CPU issues a step"""
    steps: int

    @staticmethod
    def of(on_device: list[float], on_host: list[float], device: torch.device) -> "Timing":
        """Return the timing over all ranks; a collective."""
        quantiles = [quantile(on_device, q) for q in (0.1, 0.5, 0.9)]
        mine = [sum(on_device) / len(on_device), *quantiles, quantile(on_host, 0.5)]
        return Timing(*max_over_ranks(mine, device), steps=len(on_device))


def steps_in_turns(steps: int) -> int:
    """Return how many steps of each contender `take_turns` times: `steps`, or the next number that rounds divide."""
    return ROUNDS * math.ceil(steps / ROUNDS)


def take_turns(
    turns: Sequence[Callable[[int], tuple[list[float], list[float]]]], steps: int, device: torch.device
) -> list[Timing]:
    """Time `steps_in_turns` of each contender, in rounds; a collective.

    Each of `turns` takes a number of steps and returns the result of `time_steps`.
    """
    per_round = steps_in_turns(steps) // ROUNDS
    step_ms: list[list[float]] = [[] for _ in turns]
    host_ms: list[list[float]] = [[] for _ in turns]
    for i, turn in list(enumerate(turns)) * ROUNDS:
        on_device, on_host = turn(per_round)
        step_ms[i] += on_device
        host_ms[i] += on_host
    return [Timing.of(*both, device) for both in zip(step_ms, host_ms, strict=True)]


def time_steps(
    step: Callable[[], object], steps: int, device: torch.device, mark: Callable[[], object] = lambda: None
) -> tuple[list[float], list[float]]:
    """Return each step's ms on this rank, and the ms in which the CPU issues it; waits for the last step.

    `mark` is called before the first step and after each step.
    """
    timer, host_ms = StepTimer(device), list[float]()
    timer.mark()
    mark()
    for _ in range(steps):
        began = time.perf_counter()
        step()
        host_ms.append((time.perf_counter() - began) * 1e3)
        timer.mark()
        mark()
    return timer.take_ms(), host_ms


@torch.no_grad()
def time_contenders(
    contenders: Sequence[Contender], batches: Sequence[Any], workload: Workload, steps: int
) -> list[Timing]:
    """Time the contenders by `take_turns`; a collective."""

    def turn(contender: Contender, steps: int) -> tuple[list[float], list[float]]:
        step = contender.cycle(batches)
        dist.barrier()
        for _ in range(_WARMUP_STEPS):
            step()
        return time_steps(step, steps, workload.device)

    return take_turns([partial(turn, each) for each in contenders], steps, workload.device)


@torch.no_grad()
def time_parts(
    step: Callable[..., object], parts: int, batches: Sequence[Any], workload: Workload, steps: int
) -> list[float]:
    """Return the median ms of each part of a step, as the maximum over ranks; a collective.

    `step` takes a batch and a function to call between parts, and has run before.
    """
    timer = StepTimer(workload.device)
    dist.barrier()
    timer.mark()
    for batch in itertools.islice(itertools.cycle(batches), _WARMUP_STEPS + steps):
        step(batch, timer.mark)
        timer.mark()
    times = timer.take_ms()[_WARMUP_STEPS * parts :]
    return max_over_ranks([quantile(times[part::parts], 0.5) for part in range(parts)], workload.device)


@torch.no_grad()
def time_alone(pieces: Sequence[Callable[[], object]], repetitions: int, device: torch.device) -> list[Timing]:
    """Time pieces of work that start on all ranks together; on a GPU, without the time of issuing them. A collective.

    Pieces begin and end on the current stream, and wait at a gate (`_begin_together`) until the CPU has issued them.
    Each round shuffles the pieces in the same way on all ranks, since a piece's time depends on the piece before it.
    """
    issued_ms = [0.0] * len(pieces)
    for _ in range(_WARMUP_RUNS):
        for i, piece in enumerate(pieces):
            _begin_together(device, lead_ms=0.0)
            if device.type == "cuda":
                torch.cuda.synchronize(device)  # the CPU must not wait for a busy GPU
            began = time.perf_counter()
            piece()
            issued_ms[i] = (time.perf_counter() - began) * 1e3
    issued_ms = max_over_ranks(issued_ms, device)
    gate_ms = min(_LONGEST_GATE_MS, _MARGIN * max(issued_ms) + _COLLECTIVE_MS)
    timers = [StepTimer(device) for _ in pieces]
    taken_ms: list[list[float]] = [[] for _ in pieces]
    order = random.Random(0)
    for _ in range(repetitions):
        for i in order.sample(range(len(pieces)), len(pieces)):
            _begin_together(device, gate_ms)
            timers[i].mark()
            pieces[i]()
            timers[i].mark()
        for timer, taken in zip(timers, taken_ms, strict=True):
            taken.append(timer.take_ms()[-1])  # the times before it are pauses between turns
    return [Timing.of(taken, [issued], device) for taken, issued in zip(taken_ms, issued_ms, strict=True)]


def _begin_together(device: torch.device, lead_ms: float) -> None:
    """Let the next work on the current stream start on all ranks together; a collective.

    On a GPU, an idle kernel first runs for `lead_ms`, while the CPU issues the work. The collective comes after it,
    since the kernel counts cycles and clocks differ between ranks.
    """
    number = torch.zeros(1, device=device)  # filled before the idle kernel
    if device.type == "cuda":
        torch.cuda._sleep(int(lead_ms * _CYCLES_PER_MS))
    dist.all_reduce(number)
