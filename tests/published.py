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
