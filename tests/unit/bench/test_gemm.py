"""What the figure of products with communication inside makes of its times."""

import csv
from pathlib import Path
from typing import Any, cast

import pytest

from dlrm_overlap.bench.figures.gemm import compare, crossovers
from dlrm_overlap.bench.harness.turns import Timed
from dlrm_overlap.bench.registry import FIGURES
from dlrm_overlap.bench.report.measured import read_measured
from dlrm_overlap.bench.report.plots import PLOTS
from dlrm_overlap.bench.request import GemmRequest
from dlrm_overlap.config import InputError

COLUMNS = {"operator": "all_gather", "m": 4096, "k": 64, "n": 128}
MEDIANS = {"serial": 5.0, "copies": 4.0, "cublas": 3.0, "triton": 3.2, "collective": 2.5, "own": 2.0}


def _timed(medians: dict[str, float]) -> dict[str, Timed]:
    return {name: Timed(ms, ms, ms, 0.1) for name, ms in medians.items()}


def test_what_is_left_of_the_communication_is_that_behind_the_product() -> None:
    serial, copies = compare(COLUMNS, _timed(MEDIANS), link_bytes=700_000_000, link_gb_per_s=200.0)
    assert (serial["ect_ms"], serial["overlap_efficiency"], serial["speedup"]) == (2.0, 0.0, 1.0)
    assert (copies["ect_ms"], copies["overlap_efficiency"], copies["speedup"]) == (1.0, 0.5, 1.25)
    assert (copies["floor_ms"], copies["of_floor"]) == (3.5, 0.875), "700 MB at 200 GB/s take longer than the product"
    assert (copies["communication_ms"], copies["triton_of_cublas"]) == (2.0, 3.0 / 3.2)
    (row, _) = compare(COLUMNS, _timed(MEDIANS | {"triton": 2.5}), link_bytes=0, link_gb_per_s=200.0)
    assert (row["floor_ms"], row["ect_ms"]) == (2.5, 2.5), "the best product counts, whoever computes it"


def test_a_crossover_is_where_a_way_is_never_slower_again() -> None:
    speedups = {("copies", 1024): 1.1, ("copies", 2048): 0.9, ("copies", 4096): 1.0, ("copies", 8192): 1.2}
    speedups |= {("tiles", 1024): 1.5, ("tiles", 8192): 0.99, ("serial", 1024): 1.0}
    rows = [COLUMNS | {"contender": name, "m": m, "speedup": value} for (name, m), value in speedups.items()]
    copies, tiles = crossovers(rows)
    assert copies == "all_gather, K 64, N 128: copies is at least as fast as serial from M 4096 on"
    assert tiles.endswith("tiles is at least as fast as serial not at M 8192, the greatest")


def test_the_plot_and_the_table_have_every_contender(tmp_path: Path) -> None:
    rows = [
        {"kind": "gemm", **COLUMNS, "operator": operator} | row
        for operator in ("all_gather", "reduce_scatter")
        for row in compare({}, _timed(MEDIANS), 700_000_000, 200.0)
    ]
    with (tmp_path / "gemm.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    measured = read_measured(tmp_path / "gemm.csv")
    first, _ = PLOTS["gemm"].table(measured)
    assert list(first)[-2:] == ["serial, ms", "copies, ms"]
    numbers = ["4096", "64", "128", "3.00", "3.20", "2.00", "3.50", "5.00", "4.00"]
    assert list(first.values()) == ["all_gather", *numbers]
    (axes,) = PLOTS["gemm"].draw(measured).figure.axes
    assert [text.get_text() for text in axes.texts] == ["1.00", "1.00", "0.80", "0.80"]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"contenders": ("torch",)}, "serial is left out"),
        ({"contenders": ("serial", "fast")}, "--contenders fast"),
        ({"operators": ("all_to_all",)}, "--operators all_to_all"),
        ({"shapes": ("4096x4096",)}, "--shapes 4096x4096: not M x K x N"),
        ({"shapes": ("4096x64x66",)}, "4 ranks do not divide M and N"),
        ({"contenders": ("serial", "chunks")}, "--contenders chunks"),
    ],
)
def test_mistakes_are_told_before_anything_runs(options: dict[str, Any], told: str) -> None:
    assert FIGURES["gemm"].request is GemmRequest
    with pytest.raises(InputError, match=told):
        GemmRequest("gemm", Path("unused.csv"), **options).check_ranks(cast(Any, None), 4, "cpu")
