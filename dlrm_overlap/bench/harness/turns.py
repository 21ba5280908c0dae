"""How long each of several short pieces of work takes, in turns, from one moment on all ranks and without host time."""

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from dlrm_overlap.bench.harness.timing import greatest
from dlrm_overlap.observe.metrics import quantile

_WARMUP = 2
_CYCLES_PER_MS = 2_000_000  # of the fastest clocks there are; slower ones make gates longer
_LONGEST_GATE_MS = 10.0
_MARGIN = 1.3
_COLLECTIVE_MS = 0.15  # for the host to issue one


class Timed(NamedTuple):
    """Times of a piece of work, in ms, each of the slowest rank."""

    median_ms: float
    p10_ms: float
    p90_ms: float
    host_ms: float
    """for the host to issue it"""


class Turns:
    """Times pieces of work in turns.

    On a GPU each piece waits behind a gate: a kernel that does nothing for longer than the host takes to issue the
    piece, then a collective, by which the ranks begin together. So the time is the GPU's alone, as in a step that is
    captured or whose host is ahead. On a CPU it is the host's, from a barrier on.

    The collective comes last, since that kernel counts cycles, and GPUs' clocks differ. With the collective in front of
    it, one of two H200s waited 12 us for the other within a piece behind 3 ms, and 30 to 40 us within the first piece
    of a round. So each round begins with another piece, too.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        """All ranks of `group` make the same calls."""
        self._group, self._device, self._cuda = group, device, device.type == "cuda"
        self._token = torch.zeros(1, device=device)

    @torch.no_grad()
    def time(self, pieces: Sequence[Callable[[], object]], repetitions: int) -> list[Timed]:
        """Time each of `pieces`, which all begin and end on the current stream, `repetitions` times."""
        host_ms = self._warm_up(pieces)
        gate_ms = min(_LONGEST_GATE_MS, _MARGIN * max(host_ms) + _COLLECTIVE_MS)
        taken_ms: list[list[float]] = [[] for _ in pieces]
        for turn in range(repetitions):
            order = [(turn + i) % len(pieces) for i in range(len(pieces))]
            times = [(i, self._once(pieces[i], gate_ms)) for i in order]
            for i, read in times:
                taken_ms[i].append(read())
        medians, p10, p90 = (
            greatest([quantile(times, q) for times in taken_ms], self._device, self._group) for q in (0.5, 0.1, 0.9)
        )
        return [Timed(*each) for each in zip(medians, p10, p90, host_ms, strict=True)]

    def _warm_up(self, pieces: Sequence[Callable[[], object]]) -> list[float]:
        """Run each piece; return the ms that the host of the slowest rank takes to issue it, the device being idle."""
        host_ms = [0.0] * len(pieces)
        for _ in range(_WARMUP):
            for i, piece in enumerate(pieces):
                dist.all_reduce(self._token, group=self._group)
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
        if self._cuda:
            torch.cuda._sleep(int(gate_ms * _CYCLES_PER_MS))
        dist.all_reduce(self._token, group=self._group)
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
