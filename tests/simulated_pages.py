"""The tables and numbers of `docs/simulator.md`, which `tests.pages` writes.

Simulated rows are shown as they are. The simulator's errors come from `tests.calibration`.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path

from tests import calibration
from tests.calibration import Prediction, Row, read_rows

FOLDER = Path("docs/results")
Lines = Iterable[Sequence[str]]
"""rows of cells, the head first"""
PAGE = "docs/simulator.md"


def read(name: str) -> list[dict[str, str]]:
    """Return the rows of a file of `docs/results`."""
    return read_rows(FOLDER / name)


def table_of_errors() -> Lines:
    """Return one line per name of predictions; files of few shapes have one line for all contenders."""
    lines: dict[str, list[Prediction]] = {}
    for name, rows in predictions().items():
        file = name.partition(", ")[0]
        together = re.search(r"held out: (?!sweep|grid)|two GPUs", name)
        lines.setdefault(file if together else name, []).extend(rows)
    yield ["rows", "number", "within 10%", "least and greatest error"]
    for name, rows in lines.items():
        errors = [100 * each.error for each in rows]
        yield [
            name.removeprefix("held out: "),
            str(len(rows)),
            str(within(rows)),
            f"{min(errors):+.0f}%, {max(errors):+.0f}%",
        ]


@cache
def predictions() -> dict[str, list[Prediction]]:
    return calibration.predictions(FOLDER, calibration.calibrate(FOLDER))


def within(rows: Sequence[Prediction]) -> int:
    return sum(abs(each.error) <= 0.1 for each in rows)


def table_of_nodes(name: str) -> Lines:
    """Return MLPerf's step by the number of GPUs, under our plan and under TorchRec's planner's."""
    plan = ["fullest", "`torchrec`", "fused"]
    yield ["GPUs", f"ours: {plan[0]}", *plan[1:], f"TorchRec's: {plan[0]}", *plan[1:], "best over best"]
    rows = read(name)
    for gpus in dict.fromkeys(row["world_size"] for row in rows):
        pairs = [[row for row in rows if (row["world_size"], row["plan"]) == (gpus, p)] for p in ("auto", "torchrec")]
        best = [min(float(pair[which]["ms"]) for pair in pairs) for which in (0, 1)]
        cells = [cell for torchrec, fused in pairs for cell in (_fullest(fused), torchrec["ms"], fused["ms"])]
        yield [gpus, *cells, f"{best[0] / best[1]:.2f}x"]


def _fullest(row: Row) -> str:
    return ", ".join(f"{float(row[f'fullest_{of}']):.3g}" for of in ("memory", "links", "ids"))


def _pairs(name: str) -> Iterator[tuple[Row, Row]]:
    """Return each row of torchrec with the row of fused that differs in nothing else."""
    rows = read(name)
    torchrec, fused = ([row for row in rows if row["backend"] == each] for each in ("torchrec", "fused"))
    return zip(torchrec, fused, strict=True)


def table_of_grid(name: str, down: str, across: str, shown: str = "ms") -> Lines:
    """Return the column `shown` by the values of two others."""
    rows = read(name)
    columns = sorted({float(row[across]) for row in rows})
    yield [f"{shown}, by {down} and {across}", *(f"{each:g}" for each in columns)]
    for value in sorted({float(row[down]) for row in rows}):
        cells = {float(row[across]): row[shown] for row in rows if float(row[down]) == value}
        yield [f"{value:g}", *(cells[each] for each in columns)]


TABLES: dict[str, Callable[..., Lines]] = {"errors": table_of_errors, "nodes": table_of_nodes, "grid": table_of_grid}


def _held_out() -> list[Prediction]:
    """Return the predictions of rows that no rate was fitted to, without those of small and of skewed tables."""
    kept = [name for name in predictions() if re.match("held out: (?!cached|skewed)", name)]
    return [each for name in kept for each in predictions()[name]]


def _aggregated(size: str) -> list[float]:
    return [float(row["ms"]) for row in read("simulated_aggregator.csv") if row["aggregate_bytes"] == size]


def _speedups(nodes: str, nic_gbit_per_s: str) -> list[float]:
    """Return torchrec's time over fused's on each shape of a network."""
    pairs = _pairs("simulated_pays.csv")
    network = [pair for pair in pairs if (pair[0]["nodes"], pair[0]["nic_gbit_per_s"]) == (nodes, nic_gbit_per_s)]
    return [float(torchrec["ms"]) / float(fused["ms"]) for torchrec, fused in network]


NUMBERS: dict[str, Callable[[], list[float]]] = {
    "held_out": lambda: [len(_held_out())],
    "within_10%": lambda: [within(_held_out())],
    "within_10%_share": lambda: [within(_held_out()) / len(_held_out())],
    "puts_one_by_one": lambda: _aggregated("0"),
    "puts_of_64_KB": lambda: _aggregated("65536"),
    "pays_within_node": lambda: [max(_speedups("1", "400.0"))],
    "pays_1600": lambda: [max(_speedups("16", "1600.0"))],
    "pays_400": lambda: [max(_speedups("16", "400.0"))],
    "costs_1600": lambda: [1 / _speedups("16", "1600.0")[0] - 1],
}
"""numbers in the page's sentences"""
