"""Step times, each of the slowest rank. Contenders take turns, so that a drift of the machine slows them all alike."""

import itertools
import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from rich.logging import RichHandler
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from dlrm_overlap.bench.harness.contenders import Contender
from dlrm_overlap.bench.harness.turns import greatest
from dlrm_overlap.bench.harness.workload import Workload
from dlrm_overlap.observe.metrics import StepTimer, quantile

log = logging.getLogger("dlrm_overlap")

T = TypeVar("T")

_LINE_EVERY_S = 10.0
_ROUNDS = 4  # contenders take turns
_WARMUP_STEPS = 5


def gather(values: list[float], device: torch.device, group: dist.ProcessGroup) -> list[list[float]]:
    """Return the `values` of every rank of `group`, in the order of the ranks. They all call this."""
    mine = torch.tensor(values, dtype=torch.float64, device=device)
    all_values = mine.new_empty(group.size(), mine.numel())
    dist.all_gather(list(all_values.unbind()), mine, group=group)
    return all_values.tolist()


def fraction_of_ideal(computation_ms: float, communication_ms: float, together_ms: float) -> dict[str, float]:
    """Return ideal, speedup over one after the other, and (speedup - 1) / (ideal - 1), the fraction of ideal.

    Example: 3 ms and 1 ms alone, 3.5 ms together: ideal 4 / 3, speedup 4 / 3.5, fraction (8/7 - 1) / (1/3) = 3 / 7.
    """
    both = computation_ms + communication_ms
    ideal, speedup = both / max(computation_ms, communication_ms), both / together_ms
    return {"ideal": ideal, "speedup": speedup, "fraction_of_ideal": (speedup - 1) / (ideal - 1)}


def counted(noun: str, items: Sequence[T]) -> Iterator[T]:
    """Yield `items`; on rank 0 a terminal shows how many are done and how much time is left.

    This thread draws the bar anew after each item, so nothing of it runs beside a measurement.

    Args:
        noun: names the items in the plural, such as "shapes".
        items: measured one after the other, each taking about as long.
    """
    # The terminal of the log keeps its lines and the bar apart.
    console = next((each.console for each in log.handlers if isinstance(each, RichHandler)), None)
    if console is None or (dist.is_initialized() and dist.get_rank()):
        yield from items
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, auto_refresh=False) as bar:
        yield from bar.track(items, description=noun)


def capture(piece: Callable[[], object], device: torch.device) -> Callable[[], object]:
    """Run `piece` once, capture it, and return the function that launches the graph; on a CPU return `piece`.

    All work of the piece begins and ends on the current stream, which may not be the default one. It runs before the
    capture, since a first call may load kernels and ask the other ranks. Where pieces wait for other ranks, all ranks
    call this alike.

    Raises:
        RuntimeError: if the piece cannot be captured.
    """
    if device.type != "cuda":
        return piece
    piece()
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    # By hand, for torch.cuda.graph collects garbage each time, which takes longer than all the rest.
    graph.capture_begin(capture_error_mode="thread_local")
    try:
        piece()
    except BaseException:
        with suppress(RuntimeError):  # of the capture, which the error has spoilt
            graph.capture_end()
        raise
    graph.capture_end()
    return graph.replay


@dataclass(frozen=True)
class Timing:
    """The times of a contender's steps, taken back to back, in ms; each is the maximum over the ranks."""

    mean_ms: float
    p10_ms: float
    median_ms: float
    p90_ms: float
    p95_ms: float
    host_ms: float
    """median time for the CPU to issue a step"""
    steps: int
    """how many were timed"""

    @staticmethod
    def of(
        on_device: list[float], on_host: list[float], device: torch.device, group: dist.ProcessGroup | None = None
    ) -> "Timing":
        """Return the timing of this rank's times. All ranks of the group call this; without a group all ranks do."""
        quantiles = [quantile(on_device, q) for q in (0.1, 0.5, 0.9, 0.95)]
        mine = [sum(on_device) / len(on_device), *quantiles, quantile(on_host, 0.5)]
        return Timing(*greatest(mine, device, group), steps=len(on_device))


Turn = Callable[[int], tuple[list[float], list[float]]]
"""takes a number of steps; returns this rank's time of each, and the CPU's time of issuing each, in ms"""


def take_turns(
    turns: Sequence[Turn],
    steps: int,
    device: torch.device,
    group: dist.ProcessGroup | None = None,
    shown: bool = True,
) -> list[Timing]:
    """Time at least `steps` steps of each contender, in rounds in which they take turns. All ranks call this.

    Args:
        turns: one for each contender; it has as many steps in every round.
        steps: the fewest of each.
        device: of this rank.
        group: the ranks; None for all.
        shown: whether rank 0 shows how many turns are left.
    """
    per_round = math.ceil(steps / _ROUNDS)
    step_ms: list[list[float]] = [[] for _ in turns]
    host_ms: list[list[float]] = [[] for _ in turns]
    rounds = list(enumerate(turns)) * _ROUNDS
    for i, turn in counted("turns of contenders", rounds) if shown else rounds:
        on_device, on_host = turn(per_round)
        step_ms[i] += on_device
        host_ms[i] += on_host
    return [Timing.of(*both, device, group) for both in zip(step_ms, host_ms, strict=True)]


@torch.no_grad()
def time_contenders(
    contenders: Sequence[Contender], batches: Sequence[Any], workload: Workload, steps: int, shown: bool = True
) -> list[Timing]:
    """Time at least `steps` steps of each contender on `batches` in turn, see `take_turns`. All ranks call this."""

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
    return take_turns(turns, steps, workload.device, workload.group, shown)


@torch.no_grad()
def time_parts(
    step: Callable[..., object], parts: int, batches: Sequence[Any], workload: Workload, steps: int
) -> list[float]:
    """Return the median of each of `parts` parts of a step in ms, on the rank where it is the longest.

    All ranks call this. `step` takes a batch, and a function to call between two parts.
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
