"""How long each of several short pieces of work takes, in turns, from one moment on all ranks and without host time."""

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

_CYCLES_PER_MS = 2_000_000  # of the fastest clocks there are; slower ones make gates longer
_WARMUP = 2
_LONGEST_GATE_MS = 10.0
_MARGIN = 1.3
_COLLECTIVE_MS = 0.15  # for the host to issue one
_QUANTILES = (0.5, 0.1, 0.9)  # of `Timed`, in its order


class Timed(NamedTuple):
    """Times of a piece of work, in ms, each of the slowest rank."""

    median_ms: float
    p10_ms: float
    p90_ms: float
    host_ms: float
    """for the host to issue it"""


class Turns:
    """Times pieces of work in turns.

    On a GPU each piece waits at a gate (`begin_together`) for longer than the host takes to issue the piece. So
    the time is the GPU's alone, as in a step that is captured or whose host is ahead. On a CPU it is the host's, from a
    barrier on.

    Each round begins with another piece: before ranks met at the gate, one of two H200s waited 30 to 40 us for the
    other within the first piece of a round, and 12 us within the others. And no piece always follows the same one
    (`round_of`): two that ran the same kernels took 16 and 18 us, each at its place of a round, and the other way round
    when they had changed places.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        """All ranks of `group` make the same calls."""
        self._group, self._device, self._cuda = group, device, device.type == "cuda"

    @torch.no_grad()
    def time(self, pieces: Sequence[Callable[[], object]], repetitions: int) -> list[Timed]:
        """Time each of `pieces`, which all begin and end on the current stream, `repetitions` times."""
        host_ms = self._warm_up(pieces)
        gate_ms = min(_LONGEST_GATE_MS, _MARGIN * max(host_ms) + _COLLECTIVE_MS)
        taken_ms: list[list[float]] = [[] for _ in pieces]
        for turn in range(repetitions):
            times = [(i, self._once(pieces[i], gate_ms)) for i in round_of(len(pieces), turn)]
            for i, read in times:
                taken_ms[i].append(read())
        table = torch.tensor(taken_ms, dtype=torch.float64)
        quantiles = table.quantile(torch.tensor(_QUANTILES, dtype=table.dtype), dim=1).tolist()
        slowest = [greatest(each, self._device, self._group) for each in quantiles]
        return [Timed(*each) for each in zip(*slowest, host_ms, strict=True)]

    def _warm_up(self, pieces: Sequence[Callable[[], object]]) -> list[float]:
        """Run each piece; return the ms that the host of the slowest rank takes to issue it, the device being idle."""
        host_ms = [0.0] * len(pieces)
        for _ in range(_WARMUP):
            for i, piece in enumerate(pieces):
                begin_together(self._group, self._device, lead_ms=0.0)
                self._synchronise()
                began = time.perf_counter()
                piece()
                host_ms[i] = (time.perf_counter() - began) * 1e3
        self._synchronise()
        return greatest(host_ms, self._device, self._group)

    def _synchronise(self) -> None:
        if self._cuda:
            torch.cuda.synchronize(self._device)

    def _once(self, piece: Callable[[], object], gate_ms: float) -> Callable[[], float]:
        """Run a piece; return a function that waits for it and returns its ms."""
        begin_together(self._group, self._device, gate_ms)
        if not self._cuda:
            began = time.perf_counter()
            piece()
            taken_ms = (time.perf_counter() - began) * 1e3
            return lambda: taken_ms
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        piece()
        end.record()

        def read() -> float:
            end.synchronize()
            return begin.elapsed_time(end)

        return read


def begin_together(group: dist.ProcessGroup, device: torch.device, lead_ms: float) -> None:
    """Make the next work on the current stream begin together with the other ranks'. They all call this.

    On a GPU the stream first runs a kernel that does nothing for `lead_ms`, in which the host issues the work after
    the gate, and then a collective of one number. The collective comes last, since the kernel counts cycles, and GPUs'
    clocks differ: after a collective and then 3 ms of that kernel, one of two H200s waited 12 us for the other within
    the timed work. On a CPU the host waits for the other ranks.

    Args:
        group: the ranks.
        device: of this rank.
        lead_ms: as long as the host takes to issue a collective and the work after it, or longer.
    """
    number = torch.zeros(1, device=device)  # before the kernel, so that filling it takes none of its time
    if device.type == "cuda":
        torch.cuda._sleep(int(lead_ms * _CYCLES_PER_MS))
    dist.all_reduce(number, group=group)


def greatest(values: list[float], device: torch.device, group: dist.ProcessGroup | None = None) -> list[float]:
    """Return the maximum of each of `values` over the ranks of `group`, which all call this."""
    most = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(most, dist.ReduceOp.MAX, group=group)
    return most.tolist()


def round_of(count: int, turn: int) -> list[int]:
    """Return the order of `count` pieces in round `turn`; in so many rounds each is the first once.

    Where `count` is even each follows each other one once in so many rounds, else twice in twice as many. Source:
    E. J. Williams, Experimental designs balanced for the estimation of residual effects of treatments, 1949.

    Example: 4 pieces: 0 1 3 2, 1 2 0 3, 2 3 1 0, 3 0 2 1.
    """
    zigzag = [(i + 1) // 2 if i % 2 else -(i // 2) for i in range(count)]
    forward = turn // count % 2 == 0
    return [(turn + step if forward else turn - step) % count for step in zigzag]
