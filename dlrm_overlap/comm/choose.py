"""How should a computation and a communication be issued that do not depend on each other? A choice by their sizes.

    table = read_table()
    choice = choose(Computation(flop=1.1e12, hbm_bytes=4e8), Communication("all_to_all", 256e6), 4, table)
    choice.strategy, choice.share  # such as dma, None; or partition, 12

Agrawal, Aga, Pati and Islam (ConCCL, ISPASS, the section on resource partitioning) choose by rooflines at a measured
efficiency and by a small table of slowdowns; so does this. Pure Python: it needs neither torch nor a GPU.

**Alone**, a computation takes the longer of its operations and of its bytes at the table's rates, and a latency for
each call. A communication takes a latency, and what leaves a rank over the table's rate of the implementation.

**Together**, under a strategy, the computation takes a times as long while the communication runs, which takes b times
as long while the computation runs; whichever is left goes on at its own speed. The strategies come from `dlrm-overlap
bench concurrent`, and a and b are fitted to what it has measured: one pair for each strategy, bound of the computation
(products or memory) and kind of communication.

Example: c = 2 ms, m = 1 ms, a = 1.1, b = 1.5. The communication ends after 1.5 ms, when the computation has done
1.5 / 1.1 = 1.36 ms of its work; 0.64 ms are left: 2.14 ms in all, against 3 ms one after the other.
"""

import json
from collections.abc import Container
from pathlib import Path
from typing import Any, NamedTuple

from dlrm_overlap.config import InputError

Table = dict[str, Any]

_OWN_TABLE = Path(__file__).with_name("slowdowns.json")


class Computation(NamedTuple):
    """What a computation does."""

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
        InputError: if the table does not know the communication, or none of the strategies.
    """
    if communication.kind not in (kinds := table["communications"]):
        raise InputError(f"communication {communication.kind}: not in the table; known: {', '.join(kinds)}")
    found = [
        Choice(entry["strategy"], entry["share"], predict_ms(computation, communication, world_size, table, label))
        for label, entry in table["strategies"].items()
        if available is None or entry["strategy"] in available
    ]
    if not found:
        raise InputError(f"strategies: none is available; the table has {', '.join(table['strategies'])}")
    return min(found, key=lambda choice: choice.together_ms)


def predict_ms(
    computation: Computation, communication: Communication, world_size: int, table: Table, label: str
) -> float:
    """Return how long both take under the strategy that the table has as `label`."""
    entry, c = table["strategies"][label], computation_ms(computation, table)
    implementations = table["communications"][communication.kind]
    if entry["implementation"] is None:  # one after the other, by what is fastest
        return c + min(communication_ms(communication, world_size, table, name) for name in implementations)
    m = communication_ms(communication, world_size, table, entry["implementation"])
    slowdown = entry["slowdowns"][f"{bound(computation, table)} {communication.kind}"]
    return together_ms(c, m, *slowdown)


def bound(computation: Computation, table: Table) -> str:
    """Return what bounds a computation: products or memory."""
    rates = table["computations"]
    products_ms = computation.flop / rates["products"]["tflop_per_s"] / 1e9
    return "products" if products_ms > computation.hbm_bytes / rates["memory"]["gb_per_s"] / 1e6 else "memory"


def computation_ms(computation: Computation, table: Table) -> float:
    """Return how long a computation takes alone."""
    rates = table["computations"]
    products_ms = computation.flop / rates["products"]["tflop_per_s"] / 1e9
    memory_ms = computation.hbm_bytes / rates["memory"]["gb_per_s"] / 1e6
    return max(products_ms, memory_ms) + computation.calls * rates["call_us"] / 1e3


def communication_ms(communication: Communication, world_size: int, table: Table, implementation: str) -> float:
    """Return how long a communication takes alone by an implementation."""
    rates = table["communications"][communication.kind][implementation]
    sent = sent_bytes(communication, world_size)
    return rates["latency_us"] / 1e3 + sent / rates["gb_per_s"] / 1e6


def sent_bytes(communication: Communication, world_size: int) -> float:
    """Return the bytes that leave a rank: an all-reduce sends shares, then their sums."""
    sent = communication.bytes * (world_size - 1) / world_size
    return 2 * sent if communication.kind == "all_reduce" else sent


def together_ms(computation_ms: float, communication_ms: float, a: float, b: float, extra_ms: float = 0.0) -> float:
    """Return how long both take side by side, by the slowdowns a and b of the module, and what is spent in any case."""
    slow_computation, slow_communication = computation_ms * a, communication_ms * b
    if slow_computation <= slow_communication:
        return slow_computation + communication_ms - slow_computation / b + extra_ms
    return slow_communication + computation_ms - slow_communication / a + extra_ms
