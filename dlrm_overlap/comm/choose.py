"""How should a computation and a communication be issued that do not depend on each other? A choice by their sizes.

    table = read_table()
    choice = choose(Computation("gemm", flop=1.1e12, hbm_bytes=4e8), Communication("all_to_all", 256e6), 4, table)
    choice.strategy, choice.share  # such as dma, None; or partition, 20

Agrawal, Aga, Pati and Islam (ConCCL, ISPASS, the section on resource partitioning) choose by rooflines at a measured
efficiency and by a small table of slowdowns; so does this. Pure Python: it needs neither torch nor a GPU.

**Alone**, a computation takes the longer of its operations and of its bytes at the table's rates, and a latency for
each call. A communication takes a latency, and what leaves a rank over the table's rate of the implementation.

**Together**, under a strategy, the computation takes a times as long while the communication runs, which takes b times
as long while the computation runs; whichever is left goes on at its own speed. Two things may be lost on top: a time,
and a part of one call, since a kernel of the communication may wait until one of the computation ends. The strategies
are those of `dlrm-overlap bench concurrent`, and these four numbers are fitted to what it has measured, for each
strategy, kind of computation (where a product is bound by memory, that is a kind of its own) and communication.

Example: c = 2 ms, m = 1 ms, a = 1.1, b = 1.5. The communication ends after 1.5 ms, when the computation has done
1.5 / 1.1 = 1.36 ms of its work; 0.64 ms are left: 2.14 ms in all, against 3 ms one after the other.

**The choice** goes by the measured cases that are alike. Four numbers cannot say how a product's tiles fall into waves,
so the table also keeps what each strategy lost in each case against the fastest. The weight of a case is exp(-d): d
grows with the squares of the differences in log(c / m), log(m) and log(calls), and where the kinds differ. The
prediction is one case more, of a weight so small that it decides where none of the others is alike. The strategy is
taken of which the mean loss is least. A loss counts up to 20%: how bad a bad strategy is does not matter.
A case that has been measured itself is looked up.
"""

import json
import math
from collections.abc import Container, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from dlrm_overlap.config import InputError

Table = dict[str, Any]

GATHERED = "dma_gathered"
"""an implementation of all-reduce that gathers all buffers and averages them everywhere"""

_OWN_TABLE = Path(__file__).with_name("slowdowns.json")

# Cases that differ in the logarithm by so much, or in a kind, have 1 / e of the weight, or 1 / e to the number.
_ALIKE_RATIO, _ALIKE_SIZE, _ALIKE_CALLS = 0.8, 1.6, 0.7
_OTHER_COMPUTATION, _OTHER_COMMUNICATION = 4.0, 9.0
_PREDICTED = 0.001  # weight of the prediction: less than of a case that tells anything
_SAME = 0.999  # likeness of a case to itself, whose numbers the table rounds
MOST_LOST = 0.2
"""how bad a strategy is that loses more does not matter"""


class Computation(NamedTuple):
    """What a computation does."""

    kind: str
    """gemm | lookup | elementwise"""
    flop: float
    """of products in bf16"""
    hbm_bytes: float
    """read and written, each operand once"""
    calls: int = 1
    """kernels that come one after the other, alike; `flop` and `hbm_bytes` are of all"""


class Communication(NamedTuple):
    """What a communication between all ranks moves."""

    kind: str
    """all_to_all | all_gather | all_reduce"""
    bytes: float
    """of a rank's whole buffer: sent by an all-to-all, received by an all-gather, reduced by an all-reduce"""


class Choice(NamedTuple):
    """How to issue both."""

    strategy: str
    """one of `dlrm-overlap bench concurrent`"""
    share: int | None
    """multiprocessors or thread blocks that the communication is left with, where the strategy has such a number"""
    together_ms: float
    """how long both are predicted to take"""

    @property
    def label(self) -> str:
        """The strategy with its share, as rows of the benchmark name it."""
        return self.strategy if self.share is None else f"{self.strategy}_{self.share}"


def read_table(path: Path | None = None) -> Table:
    """Return the table that `dlrm-overlap bench concurrent --write_table` has written; by default the package's own.

    Raises:
        InputError: if there is none, or it cannot be read.
    """
    path = path or _OWN_TABLE
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise InputError(
            f"table of slowdowns {path}: {error}; write one by dlrm-overlap bench concurrent --write_table {path}"
        ) from None


class Slowdown(NamedTuple):
    """What a computation and a communication lose side by side; see the module."""

    a: float
    """of the computation"""
    b: float
    """of the communication; below 1 where its own multiprocessors suit it better than any"""
    lost_ms: float
    waited: float
    """part of a call"""


def choose(
    computation: Computation,
    communication: Communication,
    world_size: int,
    table: Table,
    available: Container[str] | None = None,
) -> Choice:
    """Return the strategy by which both are predicted to end first.

    Args:
        computation: what it does.
        communication: what it moves.
        world_size: ranks that take part.
        table: from `read_table`.
        available: names of the strategies that there are; all of the table's if None.

    Raises:
        InputError: if the table does not know a kind, or none of the strategies.
    """
    for kind, known in (
        (computation.kind, table["computations"]),
        (communication.kind, table["communications"]),
    ):
        if kind not in known:
            raise InputError(f"{kind}: not in the table of slowdowns; known: {', '.join(known)}")
    key = f"{bound(computation, table)}, {communication.kind}"
    labels = [
        label
        for label, entry in table["strategies"].items()
        if (available is None or entry["strategy"] in available) and key in entry.get("slowdowns", {key: None})
    ]
    if not labels:
        raise InputError(f"strategies: none is available; the table has {', '.join(table['strategies'])}")
    times = {label: predict_ms(computation, communication, world_size, table, label) for label in labels}
    case = Case.of(computation, communication, world_size, table)
    losses = _mean_losses(case, table.get("cases", ()), _relative(times, labels))
    best = min(labels, key=lambda label: (losses[label], times[label]))
    entry = table["strategies"][best]
    return Choice(entry["strategy"], entry["share"], times[best])


class Case(NamedTuple):
    """By what cases are told apart: kinds, and times alone that are predicted from sizes."""

    computation: str
    """as `bound` names it"""
    communication: str
    computation_ms: float
    communication_ms: float
    """of the implementation that is fastest alone"""
    calls: int

    @staticmethod
    def of(computation: Computation, communication: Communication, world_size: int, table: Table) -> "Case":
        """Return the case of these two."""
        implementations = table["communications"][communication.kind]
        return Case(
            bound(computation, table),
            communication.kind,
            computation_ms(computation, table),
            min(communication_ms(communication, world_size, table, name) for name in implementations),
            computation.calls,
        )

    def likeness(self, other: "Case") -> float:
        """Return a weight of up to 1; see the module."""
        size = math.log(self.communication_ms / other.communication_ms)
        ratio = math.log(self.computation_ms / other.computation_ms) - size
        calls = math.log(self.calls / other.calls)
        distance = (ratio / _ALIKE_RATIO) ** 2 + (size / _ALIKE_SIZE) ** 2 + (calls / _ALIKE_CALLS) ** 2
        distance += _OTHER_COMPUTATION * (self.computation != other.computation)
        distance += _OTHER_COMMUNICATION * (self.communication != other.communication)
        return math.exp(-distance)


def _mean_losses(case: Case, known: Sequence[dict[str, Any]], predicted: dict[str, float]) -> dict[str, float]:
    """Return what the strategies lose on average: by prediction, and in the `known` cases by how alike these are.

    Where `case` is among these, they lose what they have lost there.

    Args:
        case: in which to choose.
        known: the table's: each has the fields of a `Case`, and `together_ms`, by label.
        predicted: loss of each strategy, of which a case need not have all.
    """
    labels = list(predicted)
    alike = [(case.likeness(Case(*each["case"])), each["together_ms"]) for each in known]
    same = [each for each in alike if each[0] >= _SAME]
    weights = dict.fromkeys(labels, _PREDICTED)
    if same:  # there the prediction is for strategies alone that were not measured
        weights |= {label: 0.0 for _, times in same for label in times if label in predicted}
    losses = {label: weights[label] * lost for label, lost in predicted.items()}
    for weight, times in same or alike:
        for label, lost in _relative(times, labels).items():
            losses[label] += weight * lost
            weights[label] += weight
    return {label: losses[label] / weights[label] for label in labels}


def _relative(times: dict[str, float], labels: Sequence[str]) -> dict[str, float]:
    """Return by how much each of `labels` that `times` has is longer than the least of them, up to a bound."""
    own = {label: times[label] for label in labels if label in times}
    least = min(own.values(), default=1.0)
    return {label: min(time / least - 1.0, MOST_LOST) for label, time in own.items()}


def predict_ms(
    computation: Computation, communication: Communication, world_size: int, table: Table, label: str
) -> float:
    """Return how long both take under the strategy that the table has as `label`."""
    entry, c = table["strategies"][label], computation_ms(computation, table)
    implementations = table["communications"][communication.kind]
    if entry["implementation"] is None:  # one after the other, by what is fastest
        return c + min(communication_ms(communication, world_size, table, name) for name in implementations)
    m = communication_ms(communication, world_size, table, entry["implementation"])
    slowdown = Slowdown(*entry["slowdowns"][f"{bound(computation, table)}, {communication.kind}"])
    return together_ms(c, m, c / computation.calls, slowdown)


def bound(computation: Computation, table: Table) -> str:
    """Return the kind of a computation, and of products what bounds them."""
    if computation.kind != "gemm":
        return computation.kind
    rates = table["computations"]["gemm"]
    by_memory = computation.hbm_bytes / rates["gb_per_s"] > computation.flop / rates["tflop_per_s"] / 1e3
    return "gemm bound by memory" if by_memory else "gemm"


def computation_ms(computation: Computation, table: Table) -> float:
    """Return how long a computation takes alone."""
    rates = table["computations"][computation.kind]
    memory_ms = computation.hbm_bytes / rates["gb_per_s"] / 1e6
    products_ms = computation.flop / rates["tflop_per_s"] / 1e9 if computation.flop else 0.0
    return max(products_ms, memory_ms) + computation.calls * rates["call_us"] / 1e3


def communication_ms(communication: Communication, world_size: int, table: Table, implementation: str) -> float:
    """Return how long a communication takes alone by an implementation."""
    rates = table["communications"][communication.kind][implementation]
    sent = sent_bytes(communication, world_size, implementation)
    return rates["latency_us"] / 1e3 + sent / rates["gb_per_s"] / 1e6


def sent_bytes(communication: Communication, world_size: int, implementation: str = "") -> float:
    """Return the bytes that leave a rank: an all-reduce sends shares, then their sums, or the whole buffer to all."""
    if implementation == GATHERED:
        return communication.bytes * (world_size - 1)
    sent = communication.bytes * (world_size - 1) / world_size
    return 2 * sent if communication.kind == "all_reduce" else sent


def together_ms(
    computation_ms: float,
    communication_ms: float,
    call_ms: float,
    slowdown: Slowdown | tuple[float, float, float, float],
) -> float:
    """Return how long both take side by side, `call_ms` being the time of one call of the computation."""
    a, b, lost_ms, waited = slowdown
    lost_ms += waited * call_ms
    slow_computation, slow_communication = computation_ms * a, communication_ms * b
    if slow_computation <= slow_communication:
        return slow_computation + communication_ms - slow_computation / b + lost_ms
    return slow_communication + computation_ms - slow_communication / a + lost_ms
