"""The rows of `docs/results`, for the tests of the pages that show them."""

from collections.abc import Iterable, Mapping
from pathlib import Path

from dlrm_overlap.bench.report.map_plots import MAPS
from dlrm_overlap.bench.report.measured import runs
from tests.conftest import read_rows

Row = Mapping[str, str]
Run = Mapping[str, Row]
"""contender -> its row"""


def read(name: str) -> list[dict[str, str]]:
    return read_rows(Path(f"docs/results/{name}.csv"))


def runs_of(name: str) -> list[Run]:
    return [*runs(read(name))]


def ms_of(row: Row) -> float:
    return float(row["median_ms"])


def over(run: Run, theirs: str, ours: str = "pgas") -> float:
    """Return how many times as fast `ours` is as `theirs`."""
    return ms_of(run[theirs]) / ms_of(run[ours])


def column(rows: Iterable[Row], name: str, scale: float = 1) -> list[float]:
    return [scale * float(row[name]) for row in rows]


def gpu_speedups(name: str) -> tuple[list[float], list[float]]:
    """Return the fastest of ours over the baseline at once, and over the strongest, by the GPU's time, by shape."""
    rows = read(name)
    strongest = MAPS[name].cells(rows, "gpu_ms")
    at_once = MAPS[name].cells([row for row in rows if "chunked" not in row["contender"]], "gpu_ms")
    return [cell.speedup for cell in at_once.values()], [cell.speedup for cell in strongest.values()]


def gemm_runs(name: str) -> dict[tuple[str, ...], Run]:
    """Return (operator, m, k, n) -> contender -> its row."""
    found: dict[tuple[str, ...], dict[str, Row]] = {}
    for row in read(name):
        found.setdefault(tuple(row[each] for each in ("operator", "m", "k", "n")), {})[row["contender"]] = row
    return {**found}


def one_by_one(row: Row) -> float:
    """Return the ms of collective and product, each timed alone."""
    return float(row["gemm_ms"]) + float(row["collective_ms"])


def serially(run: Run) -> float:
    """Return the ms of `serial`, or of collective and product each timed alone if less.

    `serial` came first in every round of older rows, and a rank then waited for the others within it.
    """
    return min(ms_of(run["serial"]), one_by_one(run["auto"]))


def slowdown_of_few_rows() -> list[float]:
    """Return how many times as long as `serial` the best of ours takes with few rows, by shape."""
    runs = [run for (_, m, _, n), run in gemm_runs("gemm_few").items() if int(m) <= 512 and n == "8192"]
    return [1 / max(over(run, "serial", name) for name in ("copies", "pushes", "tiles") if name in run) for run in runs]
