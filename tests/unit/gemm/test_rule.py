"""Which way `auto` takes, held against the rows of docs/results, and how rows are cut."""

import math
from collections.abc import Iterator

import pytest
import torch

from dlrm_overlap.dense.gemm.problem import Problem, double, halve
from dlrm_overlap.dense.gemm.products import rule
from tests.pages import Row, Run, ms_of, read

WAYS = ("serial", "copies", "tiles", "triggered")


def problem_of(operator: str, rows: int, columns: int, inner: int) -> Problem:
    return Problem(operator, rows, columns, inner, torch.bfloat16, True, "relu")


def measured() -> Iterator[tuple[Problem, int, Run]]:
    """Yield each problem of the committed rows, its ranks, and its rows."""
    for name in ("gemm", "gemm_two", "gemm_few"):
        found: dict[tuple[str, ...], dict[str, Row]] = {}
        for row in read(f"{name}.csv"):
            found.setdefault(tuple(row[each] for each in ("operator", "m", "k", "n")), {})[row["contender"]] = row
        for (operator, m, k, n), run in found.items():
            if operator == "all_gather":  # whose rows copies sent under this name, when others read them
                run["copies"] = run["pushes"]
            ranks = int(run["serial"]["world_size"])
            hidden, features = int(n) // ranks, int(k)
            sizes = (hidden, features) if operator == "all_gather" else (features, hidden)
            yield problem_of(operator, int(m), *sizes), ranks, run


def test_the_way_is_within_four_percent_of_the_fastest_of_all_rows() -> None:
    slower = []
    for problem, ranks, run in measured():
        way, _ = rule(problem, ranks)
        slower.append(ms_of(run[way]) / min(ms_of(run[each]) for each in WAYS if each in run))
    assert len(slower) == 38
    assert max(slower) <= 1.04
    assert math.prod(slower) ** (1 / len(slower)) <= 1.01


@pytest.mark.parametrize(
    ("case", "ranks", "parts"),
    [
        (problem_of("all_gather", 8192, 2048, 4096), 2, 1),  # in 1 part 209 us, in 4 244
        (problem_of("all_gather", 32768, 512, 3456), 2, 4),  # in 4 parts 352 us, in 1 396
        (problem_of("all_gather", 32768, 512, 1024), 2, 2),  # in 2 parts 135 us, in 4 141
        (problem_of("reduce_scatter", 32768, 1024, 512), 2, 2),  # by the tuner of its time copies/2, 146 us
        (problem_of("reduce_scatter", 8192, 4096, 2048), 2, 1),
        (problem_of("reduce_scatter", 32768, 4096, 1024), 4, 4),  # copies/4 638 us, copies/1 739
    ],
)
def test_parts_are_small_where_links_bound(case: Problem, ranks: int, parts: int) -> None:
    assert rule(case, ranks)[1] == parts


def test_parts_are_small_at_one_end() -> None:
    assert double(8192, 4) == [(0, 1024), (1024, 2048), (2048, 4096), (4096, 8192)]
    assert double(19, 3) == [(0, 8), (8, 19)]
    assert halve(8192, 4) == [(0, 4096), (4096, 6144), (6144, 7168), (7168, 8192)]
    assert halve(5, 4) == [(0, 5)]
    assert halve(100, 1) == double(100, 1) == [(0, 100)]
