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

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from dlrm_overlap.bench.concurrent_strategies import SHARES, Strategy, all_strategies
from dlrm_overlap.bench.harness.communications import KINDS, Implementations, Payload, make_groups, open_peer_memory
from dlrm_overlap.bench.harness.computations import Computation, keep_capturable, make_computations
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
    *("stores", "dma", "dma_averaged", "dma_gathered"),
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
            found, wrong = study.payload(cases)
            rows += found
            faults += wrong
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
    """The contenders of all pairs, made once, and the measurement of the pairs of one communication."""

    def __init__(self, request: ConcurrentRequest, group: dist.ProcessGroup, device: torch.device) -> None:
        self._request, self._group, self._device = request, group, device
        strategies = [each for each in all_strategies() if each.name not in request.without]
        self._issuer = Issuer(strategies, group, device, request.captured)
        self._computations = make_computations(device)
        if request.captured:
            with self.stream():
                self._computations = keep_capturable(self._computations, group, device)
        self._groups = make_groups(group, device, SHARES)
        self._cases = make_cases(list(self._computations), device.type)
        most = max(case.megabytes for case in self._cases)
        self._memory = open_peer_memory(group, device, max(1 << 20, round(most * 1e6 / 4)))
        self._turns = Turns(group, device)
        with self.stream():
            self._call_ms = self._time_calls()

    def stream(self) -> AbstractContextManager[object]:
        """Return a context in which the current stream is the one that is timed."""
        return self._issuer.stream()

    def _time_calls(self) -> dict[str, float]:
        """Return about how long a call of each computation takes."""
        calls = [_repeated(each, _FEWEST) for each in self._computations.values()]
        timed = self._turns.time(calls, _TRIALS)
        return {name: each.median_ms / _FEWEST for name, each in zip(self._computations, timed, strict=True)}

    def by_payload(self) -> list[list[Case]]:
        """Return the cases of one communication after the other."""
        return [list(cases) for _, cases in groupby(self._cases, lambda case: (case.kind, case.megabytes))]

    def payload(self, cases: Sequence[Case]) -> tuple[list[dict[str, Any]], list[str]]:
        """Return the rows of `cases`, which have one communication, and no fault, or faults."""
        payload = Payload(cases[0].kind, cases[0].megabytes, self._group, self._device)
        implementations = Implementations(payload, self._groups, self._memory, self._request.captured)
        implementations.leave_out(
            set(self._request.without) - {each.implementation for each in self._issuer.strategies}
        )
        wrong, names = implementations.wrong(), list(implementations.by_name)
        anywhere = greatest([float(name in wrong) for name in names], self._device, self._group)
        faults = [
            f"{payload.kind} of {payload.megabytes:g} MB by {name}: a rank's result is wrong; no time is reported"
            for name, bad in zip(names, anywhere, strict=True)
            if bad
        ]
        rows: list[dict[str, Any]] = []
        if not faults:
            strategies = self._issuer.possible(implementations.by_name, self._group)
            pieces = [each.run for each in implementations.by_name.values()]
            alone = self._time(pieces, _TRIALS)
            fastest = min(zip(alone, names, strict=True))[1]
            least_ms = min(alone).median_ms
            measured: set[tuple[str, int]] = set()
            for case in cases:
                calls = max(1, round(case.ratio * least_ms / self._call_ms[case.computation]))
                if (case.computation, calls) not in measured:
                    measured.add((case.computation, calls))
                    computation = self._computations[case.computation]
                    rows += self._case(computation, calls, implementations, strategies, fastest)
        dist.barrier(self._group)
        implementations.close()
        return rows, faults

    @torch.no_grad()
    def _time(self, pieces: Sequence[Callable[[], object]], repetitions: int) -> list[Timed]:
        """Time pieces in turns, each captured where that is asked for."""
        if self._request.captured:
            pieces = [capture(piece, self._device) for piece in pieces]
        return self._turns.time(pieces, repetitions)

    def _case(
        self,
        computation: Computation,
        calls: int,
        implementations: Implementations,
        strategies: Sequence[Strategy],
        fastest: str,
    ) -> list[dict[str, Any]]:
        """Return a row for each strategy."""
        compute, by_name = _repeated(computation, calls), implementations.by_name
        used = [strategy.implementation or fastest for strategy in strategies]
        pieces: list[Callable[[], object]] = [compute]
        pieces += [each.run for each in by_name.values()]
        pieces += [
            partial(self._issuer.issue, strategy, compute, by_name[name])
            for strategy, name in zip(strategies, used, strict=True)
        ]
        timed = self._time(pieces, self._request.repetitions)
        alone = dict(zip(by_name, timed[1:], strict=False))
        best = min(alone, key=lambda name: alone[name].median_ms)
        shared = {
            **_describe(computation, calls, implementations.payload),
            "captured": self._request.captured and self._device.type == "cuda",
            "class": classify(timed[0].median_ms, alone[best].median_ms),
            "computation_ms": timed[0].median_ms,
            "communication_ms": alone[best].median_ms,
            "fastest_alone": best,
            **{f"{name}_alone_ms": alone[name].median_ms if name in alone else None for name in IMPLEMENTATIONS},
        }
        together = timed[1 + len(by_name) :]
        return [
            {"kind": self._request.kind} | shared | self._outcome(strategy, name, shared, each)
            for strategy, name, each in zip(strategies, used, together, strict=True)
        ]

    def _outcome(self, strategy: Strategy, implementation: str, shared: dict[str, Any], timed: Timed) -> dict[str, Any]:
        """Return the columns of one strategy."""
        times = shared["computation_ms"], shared["communication_ms"], timed.median_ms
        return {
            "strategy": strategy.label,
            "implementation": implementation,
            "communication_sms": self._issuer.sms(strategy),
            "repetitions": self._request.repetitions,
            "together_ms": timed.median_ms,
            "p10_ms": timed.p10_ms,
            "p90_ms": timed.p90_ms,
            "host_ms": timed.host_ms,
            **fraction_of_ideal(*times),
        }

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
