"""`bench concurrent`: how much of a communication can an independent computation hide, by each way to issue the two?

The study of Agrawal, Aga, Pati and Islam (ConCCL, ISPASS) on the GPUs at hand. A case is a computation of one or more
calls beside a communication between all ranks. Each is timed alone, the communication by every implementation, and
both are timed together under every strategy, all in turns. The result of every implementation is checked before
anything is timed. With c and m, the least times alone,

    speedup = (c + m) / time together, ideal = (c + m) / max(c, m), fraction of ideal = (speedup - 1) / (ideal - 1).

A case is G-long if c is above 115% of m, C-long if m is above 115% of c, else GC-equal. The number of calls is what
brings c closest to 0.4, .. 2.5 times m, as measured at the start, so that all classes have cases.

Contenders: the strategies of `bench.concurrent_strategies`. A row is a case under a strategy.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from dlrm_overlap.bench.concurrent_strategies import SHARES, all_strategies
from dlrm_overlap.bench.harness.communications import (
    KINDS,
    Communication,
    Payload,
    make_communications,
    make_groups,
    open_peer_memory,
    wrong,
)
from dlrm_overlap.bench.harness.computations import Computation, make_computations
from dlrm_overlap.bench.harness.issuer import Issuer
from dlrm_overlap.bench.harness.timing import capture, fraction_of_ideal, in_time
from dlrm_overlap.bench.harness.turns import Timed, Turns, greatest
from dlrm_overlap.bench.report.concurrent import headline, summarise
from dlrm_overlap.bench.report.rows import append_rows, print_faults, print_table
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
IMPLEMENTATIONS = (
    *("collective", *(f"collective_{share}" for share in SHARES)),
    *("stores", "dma", "dma_averaged"),
)


class Case(NamedTuple):
    """A computation and a communication."""

    computation: str
    kind: str
    megabytes: float
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


def run(request: ConcurrentRequest, ranks: Ranks) -> int:
    """Measure the figure, append its rows, those of a communication at a time, and print their summary on rank 0.

    All ranks call this.

    Returns:
        The exit code: 1 if a communication's result is wrong, which then has no rows.
    """
    group, device = ranks.connect(), ranks.device
    study = _Study(request, group, device)
    rows: list[dict[str, Any]] = []
    faults: list[str] = []
    with study.stream():
        for cases in in_time(request.most_seconds, "communications", study.by_payload(), device, group):
            found, bad = study.payload(cases)
            rows += found
            faults += bad
            if ranks.world.rank == 0 and found:
                append_rows(request.output, found)
        study.close()
    if ranks.world.rank == 0:
        print_faults(faults)
        if rows:
            lines = summarise(rows)
            print(headline(rows))
            print_table(lines, list(lines[0]))
            print(f"rows in {request.output}")
    return 1 if faults else 0


class _Study:
    """The contenders of all cases, made once, and the measurement of the cases of one communication."""

    def __init__(self, request: ConcurrentRequest, group: dist.ProcessGroup, device: torch.device) -> None:
        self._request, self._group, self._device = request, group, device
        self._captured = request.captured and device.type == "cuda"
        self._issuer = Issuer([each for each in all_strategies() if each.name not in request.without], group, device)
        self.stream = self._issuer.stream
        self._computations = make_computations(device)
        self._groups = make_groups(group, device, SHARES)
        self._cases = make_cases(list(self._computations), device.type)
        most = max(case.megabytes for case in self._cases)
        self._memory = open_peer_memory(group, device, max(1 << 20, round(most * 1e6 / 4)))
        self._turns = Turns(group, device)
        with self.stream():
            calls = [_repeated(each, _FEWEST) for each in self._computations.values()]
            timed = self._turns.time(calls, _TRIALS)
        self._call_ms = {name: each.median_ms / _FEWEST for name, each in zip(self._computations, timed, strict=True)}

    def by_payload(self) -> list[list[Case]]:
        """Return the cases of one communication after the other."""
        return [list(cases) for _, cases in groupby(self._cases, lambda case: (case.kind, case.megabytes))]

    def payload(self, cases: Sequence[Case]) -> tuple[list[dict[str, Any]], list[str]]:
        """Return the rows of `cases`, which have one communication, and no fault, or faults."""
        payload = Payload(cases[0].kind, cases[0].megabytes, self._group, self._device)
        made = make_communications(payload, self._groups, self._memory, self._captured)
        used = {each.implementation for each in self._issuer.strategies} | {"collective"}
        contenders = {name: each for name, each in made.items() if name in used}
        bad = wrong(contenders, self._captured)
        anywhere = greatest([float(name in bad) for name in contenders], self._device, self._group)
        faults = [
            f"{payload.kind} of {payload.megabytes:g} MB by {name}: a rank's result is wrong; no time is reported"
            for name, is_wrong in zip(contenders, anywhere, strict=True)
            if is_wrong
        ]
        rows: list[dict[str, Any]] = []
        if not faults:
            alone = self._time([each.run for each in contenders.values()], _TRIALS)
            least_ms, fastest = min((time.median_ms, name) for name, time in zip(contenders, alone, strict=True))
            pairs = [
                (case.computation, max(1, round(case.ratio * least_ms / self._call_ms[case.computation])))
                for case in cases
            ]
            for name, calls in dict.fromkeys(pairs):
                rows += self._case(self._computations[name], calls, payload, contenders, fastest)
        dist.barrier(self._group)
        for each in made.values():
            each.close()
        return rows, faults

    @torch.no_grad()
    def _time(self, pieces: Sequence[Callable[[], object]], repetitions: int) -> list[Timed]:
        """Time pieces in turns, each captured where that is asked for."""
        if self._captured:
            pieces = [capture(piece, self._device) for piece in pieces]
        return self._turns.time(pieces, repetitions)

    def _case(
        self,
        computation: Computation,
        calls: int,
        payload: Payload,
        contenders: Mapping[str, Communication],
        fastest: str,
    ) -> list[dict[str, Any]]:
        """Return a row for each strategy."""
        compute = _repeated(computation, calls)
        used = {each: each.implementation or fastest for each in self._issuer.strategies}
        used = {each: name for each, name in used.items() if name in contenders}
        pieces: list[Callable[[], object]] = [compute, *(each.run for each in contenders.values())]
        pieces += [partial(self._issuer.issue, each, compute, contenders[name]) for each, name in used.items()]
        timed = self._time(pieces, self._request.repetitions)
        alone_ms = {name: each.median_ms for name, each in zip(contenders, timed[1:], strict=False)}
        best = min(alone_ms, key=lambda name: alone_ms[name])
        times = timed[0].median_ms, alone_ms[best]
        shared = {
            "kind": self._request.kind,
            **_describe(computation, calls, payload),
            "captured": self._captured,
            "class": classify(*times),
            "computation_ms": times[0],
            "communication_ms": times[1],
            "fastest_alone": best,
            **{f"{name}_alone_ms": alone_ms.get(name) for name in IMPLEMENTATIONS},
        }
        return [
            shared
            | {
                "strategy": strategy.label,
                "implementation": name,
                "communication_sms": self._issuer.sms(strategy),
                "repetitions": self._request.repetitions,
                "together_ms": time.median_ms,
                "p10_ms": time.p10_ms,
                "p90_ms": time.p90_ms,
                "host_ms": time.host_ms,
                **fraction_of_ideal(*times, time.median_ms),
            }
            for (strategy, name), time in zip(used.items(), timed[1 + len(contenders) :], strict=True)
        ]

    def close(self) -> None:
        """Free the memory that peers see. Every rank must be through."""
        if self._memory is not None:
            dist.barrier(self._group)
            self._memory.close()


def _repeated(computation: Computation, calls: int) -> Callable[[], None]:
    def compute() -> None:
        for _ in range(calls):
            computation.call()

    return compute


def _describe(computation: Computation, calls: int, payload: Payload) -> dict[str, Any]:
    return {
        "world_size": payload.world_size,
        "device": payload.device.type,
        "computation": computation.name,
        "computation_kind": computation.kind,
        "shape": computation.shape,
        "calls": calls,
        "flop": computation.flop * calls,
        "hbm_bytes": computation.hbm_bytes * calls,
        "communication": payload.kind,
        "megabytes": payload.megabytes,
        "link_bytes": payload.link_bytes,
    }
