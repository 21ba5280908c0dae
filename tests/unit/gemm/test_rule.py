"""The way that `auto` takes against the rows of docs/results, and how rows are cut."""

import math
from collections.abc import Iterator

import pytest

from dlrm_overlap.dense.gemm.layer import cut
from dlrm_overlap.dense.gemm.products import rule
from tests.calibration import Row
from tests.simulated_pages import read

WAYS = ("serial", "copies", "tiles", "triggered")


def measured() -> Iterator[tuple[tuple[bool, int, int, int, int], dict[str, Row]]]:
    """Yield the arguments of `rule` for each problem of the committed rows, and its rows by contender."""
    for name in ("four_h200/gemm", "two_h200/gemm_two", "two_h200/gemm_few"):
        found: dict[tuple[str, ...], dict[str, Row]] = {}
        for row in read(f"{name}.csv"):
            found.setdefault(tuple(row[each] for each in ("operator", "m", "k", "n")), {})[row["contender"]] = row
        for (operator, m, k, n), run in found.items():
            ranks = int(run["serial"]["world_size"])
            hidden, features = int(n) // ranks, int(k)
            sizes = (hidden, features) if operator == "all_gather" else (features, hidden)
            yield (operator == "all_gather", int(m), *sizes, ranks), run


def test_the_way_is_within_four_percent_of_the_fastest_in_every_row() -> None:
    slower = []
    for problem, run in measured():
        way, _ = rule(*problem)
        slower.append(float(run[way]["median_ms"]) / min(float(run[each]["median_ms"]) for each in WAYS if each in run))
    assert len(slower) == 38
    assert max(slower) <= 1.04
    assert math.prod(slower) ** (1 / len(slower)) <= 1.01


@pytest.mark.parametrize(
    ("problem", "parts"),
    [
        ((True, 8192, 2048, 4096, 2), 1),  # in 1 part 209 us, in 4 244
        ((True, 32768, 512, 3456, 2), 4),  # in 4 parts 352 us, in 1 396
        ((False, 8192, 4096, 2048, 2), 1),
        ((False, 32768, 4096, 1024, 4), 4),  # in 4 parts 638 us, in 1 739
    ],
)
def test_parts_are_small_where_the_links_are_the_limit(problem: tuple[bool, int, int, int, int], parts: int) -> None:
    assert rule(*problem)[1] == parts


def test_rows_are_cut_into_parts_that_are_small_at_one_end() -> None:
    assert cut(8192, 4, small_first=True) == [(0, 1024), (1024, 2048), (2048, 4096), (4096, 8192)]
    assert cut(8192, 4) == [(0, 4096), (4096, 6144), (6144, 7168), (7168, 8192)]
    assert cut(19, 4) == [(0, 16), (16, 19)]
    assert cut(19, 4, small_first=True) == [(0, 8), (8, 16), (16, 19)]
    assert cut(100, 1) == [(0, 100)]
    assert cut(0, 4) == []
