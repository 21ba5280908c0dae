"""Times of steps and of short pieces of work, each of the slowest rank. Contenders take turns.

There are two ways. `time_contenders` and `take_turns` time steps back to back, as the CPU issues them. `time_alone`
times pieces that begin together on all ranks and whose kernels have been issued before they begin, so the time is the
GPU's alone.
"""

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

ROUNDS = 4  # contenders take turns, so that a drift of the machine slows them all alike
_WARMUP_STEPS = 5
_CYCLES_PER_MS = 2_000_000  # of the fastest clocks there are; slower ones make gates longer
_WARMUP_RUNS = 2
_LONGEST_GATE_MS = 10.0
_MARGIN = 1.3
_COLLECTIVE_MS = 0.15  # for the host to issue one


def greatest(values: list[float], device: torch.device) -> list[float]:
    """Return the maximum of each of `values` over all ranks, which all call this."""
    most = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return most.tolist()


def capture(piece: Callable[[], object], device: torch.device) -> Callable[[], object]:
    """Run `piece` once, capture it, and return the function that launches the graph.

    All work of the piece begins and ends on the current stream, which may not be the default one. It runs before the
    capture, since a first call may load kernels and ask the other ranks.
    """
    piece()
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    # By hand, for torch.cuda.graph collects garbage each time, which takes longer than all the rest.
    graph.capture_begin(capture_error_mode="thread_local")
    piece()
    graph.capture_end()
    return graph.replay


@dataclass(frozen=True)
class Timing:
    """Times of a contender's steps, or of a piece of work, in ms; each is the maximum over the ranks."""

    mean_ms: float
    p10_ms: float
    median_ms: float
    p90_ms: float
    host_ms: float
    """median time for the CPU to issue a step"""
    steps: int
    """how many were timed"""

    @staticmethod
    def of(on_device: list[float], on_host: list[float], device: torch.device) -> "Timing":
        """Return the timing of this rank's times. All ranks call this."""
        quantiles = [quantile(on_device, q) for q in (0.1, 0.5, 0.9)]
        mine = [sum(on_device) / len(on_device), *quantiles, quantile(on_host, 0.5)]
        return Timing(*greatest(mine, device), steps=len(on_device))


def take_turns(
    turns: Sequence[Callable[[int], tuple[list[float], list[float]]]], steps: int, device: torch.device
) -> list[Timing]:
    """Time at least `steps` steps of each contender, in rounds in which they take turns. All ranks call this.

    A turn takes a number of steps and returns `time_steps` of them.
    """
    per_round = math.ceil(steps / ROUNDS)
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
    """Return this rank's times of `steps` steps, and the CPU's times of issuing them, in ms.

    `mark` is called before the first of these steps and after each.
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
    """Time at least `steps` steps of each contender on `batches` in turn, see `take_turns`. All ranks call this."""

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
    """Return the median of each of `parts` parts of a step in ms, on the rank where it is the longest.

    All ranks call this, once the step has been taken before. `step` takes a batch, and a function to call between two
    parts.
    """
    timer = StepTimer(workload.device)
    dist.barrier()
    timer.mark()
    for batch in itertools.islice(itertools.cycle(batches), _WARMUP_STEPS + steps):
        step(batch, timer.mark)
        timer.mark()
    times = timer.take_ms()[_WARMUP_STEPS * parts :]
    return greatest([quantile(times[part::parts], 0.5) for part in range(parts)], workload.device)


@torch.no_grad()
def time_alone(pieces: Sequence[Callable[[], object]], repetitions: int, device: torch.device) -> list[Timing]:
    """Time each of `pieces`, which all begin and end on the current stream. All ranks call this.

    On a GPU each piece waits at a gate (`_begin_together`) for longer than the host takes to issue the piece. So the
    time is the GPU's alone, as in a step that is captured or whose host is ahead. On a CPU it is the host's, from a
    barrier on.

    Each round takes the pieces in another order, drawn alike on all ranks: one of two pieces that ran the same kernels
    took 18 us where the other took 16, by the piece before it alone.
    """
    issued_ms = [0.0] * len(pieces)
    for _ in range(_WARMUP_RUNS):
        for i, piece in enumerate(pieces):
            _begin_together(device, lead_ms=0.0)
            if device.type == "cuda":
                torch.cuda.synchronize(device)  # so that the host's time is that of an idle device
            began = time.perf_counter()
            piece()
            issued_ms[i] = (time.perf_counter() - began) * 1e3
    issued_ms = greatest(issued_ms, device)
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
            taken.append(timer.take_ms()[-1])  # before it is the pause since its last turn
    return [Timing.of(taken, [issued], device) for taken, issued in zip(taken_ms, issued_ms, strict=True)]


def _begin_together(device: torch.device, lead_ms: float) -> None:
    """Make the next work on the current stream begin together with the other ranks'. They all call this.

    On a GPU the stream first runs a kernel that does nothing for `lead_ms`, in which the host issues the work after
    the gate, and then a collective of one number. The collective comes last, since the kernel counts cycles, and GPUs'
    clocks differ: after a collective and then 3 ms of that kernel, one of two H200s waited 12 us for the other within
    the timed work. On a CPU the host waits for the other ranks.
    """
    number = torch.zeros(1, device=device)  # before the kernel, so that filling it takes none of its time
    if device.type == "cuda":
        torch.cuda._sleep(int(lead_ms * _CYCLES_PER_MS))
    dist.all_reduce(number)
