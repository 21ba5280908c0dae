"""`bench concurrent`: how much of a communication can an independent computation hide, by each way to issue the two?

The study of Agrawal, Aga, Pati and Islam (ConCCL, ISPASS) on the GPUs at hand. A case is a computation of one or more
calls beside a communication between all ranks. Each is timed alone, the communication by every implementation, and
both are timed together under every strategy, all in turns, on GPUs as CUDA graphs. The result of every implementation
is checked before anything is timed. With c and m, the least times alone,

    speedup = (c + m) / time together, ideal = (c + m) / max(c, m), fraction of ideal = (speedup - 1) / (ideal - 1).

A case is G-long if c is above 115% of m, C-long if m is above 115% of c, else GC-equal. The number of calls is what
brings c closest to 0.4, .. 2.5 times m, as measured at the start, so that all classes have cases.

Contenders: `harness.issuer.STRATEGIES`. A row is a case under a strategy.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from dlrm_overlap.bench.harness.communications import (
    KINDS,
    Communication,
    Payload,
    PeerMemory,
    by_collective,
    by_stores,
    limited_group,
    wrong,
)
from dlrm_overlap.bench.harness.computations import make_computations
from dlrm_overlap.bench.harness.issuer import LIMITED, Issuer
from dlrm_overlap.bench.harness.timing import Timing, Turns, capture, counted
from dlrm_overlap.bench.report.concurrent import summarise
from dlrm_overlap.bench.report.rows import print_table, report
from dlrm_overlap.bench.request import ConcurrentRequest
from dlrm_overlap.train.ranks import Ranks

# Ratio of computation to communication that is aimed at -> MB of the communications, which the computations share out.
_SIZES: dict[str, dict[float, tuple[float, ...]]] = {
    "cuda": {
        0.4: (64, 256, 512),
        0.7: (64, 128, 512),
        0.95: (32, 128, 512),
        1.05: (16, 64, 256),
        1.6: (2, 8, 128),
        2.5: (4, 32, 128),
    },
    "cpu": {1.0: (0.25,)},
}
_LONGEST = {"gemm_8192": 512.0}  # computations that take so long that nothing smaller is as long
_FEWEST, _TRIALS = 3, 5
_LONG = 1.15  # G-long and C-long, by P3's definition
_SHOWN = ("computation", "calls", "communication", "megabytes", "class", "strategy", "together_ms", "fraction_of_ideal")
_STEP = 1024  # a rank's part of a buffer is a multiple of so many elements


class Case(NamedTuple):
    """A computation and a communication."""

    computation: str
    kind: str
    megabytes: float
    """of the communication's whole buffer"""
    ratio: float
    """of their times that is aimed at"""


def make_cases(computations: Sequence[str], device_type: str) -> list[Case]:
    """Return the cases, those of one communication one after the other, and small communications first.

    Args:
        computations: their names.
        device_type: cpu or cuda.
    """
    found = [
        Case(name, kind, _LONGEST.get(name, sizes[(i + j) % len(sizes)]), ratio)
        for i, name in enumerate(computations)
        for j, kind in enumerate(KINDS)
        for ratio, sizes in _SIZES[device_type].items()
    ]
    return sorted(found, key=lambda case: (case.megabytes, case.kind))


def classify(computation_ms: float, communication_ms: float) -> str:
    """Return the class of a case by its times alone: G-long, C-long or GC-equal."""
    if computation_ms > _LONG * communication_ms:
        return "G-long"
    return "C-long" if communication_ms > _LONG * computation_ms else "GC-equal"


def fraction_of_ideal(computation_ms: float, communication_ms: float, together_ms: float) -> dict[str, float]:
    """Return ideal, speedup over one after the other, and (speedup - 1) / (ideal - 1), the fraction of ideal.

    Example: 3 ms and 1 ms alone, 3.5 ms together: ideal 4 / 3, speedup 4 / 3.5, fraction (8/7 - 1) / (1/3) = 3 / 7.
    """
    both = computation_ms + communication_ms
    ideal, speedup = both / max(computation_ms, communication_ms), both / together_ms
    return {"ideal": ideal, "speedup": speedup, "fraction_of_ideal": (speedup - 1) / (ideal - 1)}


def run(request: ConcurrentRequest, ranks: Ranks) -> int:
    """Measure the figure, append its rows, those of a communication at a time, and print their summary on rank 0.

    All ranks call this.

    Returns:
        The exit code: 1 if a communication's result is wrong, which then has no rows.
    """
    study = _Study(request, ranks.connect(), ranks.device)
    rows: list[dict[str, Any]] = []
    wrong_somewhere = False
    with study.issuer.stream():
        for cases in counted("communications", study.by_payload()):
            found, faults = study.measure(cases)
            rows, wrong_somewhere = rows + found, wrong_somewhere or bool(faults)
            if ranks.world.rank == 0:
                report(found, faults, request.output, _SHOWN)
        study.memory.close()
    if ranks.world.rank == 0 and rows:
        lines = summarise(rows)
        print("fraction of the ideal speedup")
        print_table(lines, list(lines[0]))
    return int(wrong_somewhere)


class _Study:
    """The contenders of all cases, made once, and the measurement of the cases of one communication."""

    def __init__(self, request: ConcurrentRequest, group: dist.ProcessGroup, device: torch.device) -> None:
        self._request, self._group, self._device = request, group, device
        self._computations = make_computations(device)
        self._cases = make_cases(list(self._computations), device.type)
        self._groups = {"collective": group}
        if device.type == "cuda":
            self._groups["limited"] = limited_group(LIMITED)
        most = max(case.megabytes for case in self._cases)
        self.issuer, self.memory = Issuer(group, device), PeerMemory(group, device, max(1 << 20, round(most * 25e4)))
        self._turns = Turns(group, device)
        with self.issuer.stream():
            timed = self._turns.time([self._repeated(name, _FEWEST) for name in self._computations], _TRIALS)
        self._call_ms = {name: each.median_ms / _FEWEST for name, each in zip(self._computations, timed, strict=True)}

    def by_payload(self) -> list[list[Case]]:
        """Return the cases of one communication after the other."""
        return [list(cases) for _, cases in groupby(self._cases, lambda case: (case.kind, case.megabytes))]

    def _repeated(self, computation: str, calls: int) -> Callable[[], None]:
        def compute() -> None:
            for _ in range(calls):
                self._computations[computation].call()

        return compute

    def _communications(self, payload: Payload) -> dict[str, Communication]:
        made = {name: by_collective(payload, group) for name, group in self._groups.items()}
        if payload.kind != "all_reduce":
            return made | {way: self.memory.call(payload, way) for way in ("stores", "dma")}
        if self._device.type == "cuda":
            made["stores"] = by_stores(payload)
        return made | {"dma_averaged": self.memory.call(payload, "dma")}

    @torch.no_grad()
    def _time(self, pieces: Sequence[Callable[[], object]], repetitions: int) -> list[Timing]:
        return self._turns.time([capture(piece, self._device) for piece in pieces], repetitions)

    def measure(self, cases: Sequence[Case]) -> tuple[list[dict[str, Any]], list[str]]:
        """Return the rows of `cases`, which have one communication, and no fault, or faults."""
        kind, megabytes = cases[0].kind, cases[0].megabytes
        part = max(_STEP, round(megabytes * 1e6 / 4 / self._group.size()) // _STEP * _STEP)
        made = self._communications(Payload(kind, part, self._group, self._device))
        captured = {name: (each, capture(each.run, self._device)) for name, each in made.items()}
        faults = [
            f"{kind} of {megabytes:g} MB by {name}: a rank's result is wrong; no time is reported"
            for name in wrong(captured)
        ]
        rows: list[dict[str, Any]] = []
        if not faults:
            alone = self._turns.time([call for _, call in captured.values()], _TRIALS)
            least_ms, fastest = min((time.median_ms, name) for name, time in zip(made, alone, strict=True))
            pairs = [
                (each.computation, round(each.ratio * least_ms / self._call_ms[each.computation])) for each in cases
            ]
            for name, calls in dict.fromkeys(pairs):
                rows += self._case(name, max(1, calls), megabytes, made, fastest)
        dist.barrier(self._group)
        for each in made.values():
            each.close()
        return rows, faults

    def _case(
        self, computation: str, calls: int, megabytes: float, made: dict[str, Communication], fastest: str
    ) -> list[dict[str, Any]]:
        """Return a row for each strategy."""
        compute, payload, repetitions = (
            self._repeated(computation, calls),
            made["collective"].payload,
            self._request.repetitions,
        )
        used = {each: each.implementation or fastest for each in self.issuer.strategies}
        used = {each: name for each, name in used.items() if name in made}
        pieces: list[Callable[[], object]] = [compute, *(each.run for each in made.values())]
        pieces += [partial(self.issuer.issue, each, compute, made[name]) for each, name in used.items()]
        computed, *timed = self._time(pieces, repetitions)
        alone_ms = {name: each.median_ms for name, each in zip(made, timed, strict=False)}
        best = min(alone_ms, key=lambda name: alone_ms[name])
        times = computed.median_ms, alone_ms[best]
        shared = {
            "kind": self._request.kind,
            "world_size": payload.world_size,
            "computation": computation,
            "calls": calls,
            "hbm_bytes": self._computations[computation].hbm_bytes * calls,
            "communication": payload.kind,
            "megabytes": megabytes,
            "link_bytes": payload.link_bytes,
            "class": classify(*times),
            "computation_ms": times[0],
            "communication_ms": times[1],
            "fastest_alone": best,
        }
        return [
            shared
            | {"strategy": strategy.name, "implementation": name, "together_ms": time.median_ms}
            | asdict(time)
            | fraction_of_ideal(*times, time.median_ms)
            for (strategy, name), time in zip(used.items(), timed[len(made) :], strict=True)
        ]
