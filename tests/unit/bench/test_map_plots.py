"""Maps of the speedup say in numbers, words and pictures what their rows say."""

from typing import Any

import pytest

from dlrm_overlap.bench.report.map_plots import MAPS
from dlrm_overlap.bench.report.measured import Measured
from dlrm_overlap.bench.report.plots import PLOTS

BASELINE_MS = {(1, 32): 1.0, (8, 32): 1.0, (1, 64): 1.0, (8, 64): 2.0}
OURS_MS = {(1, 32): 1.0, (8, 32): 0.5, (1, 64): 0.8, (8, 64): 0.8}


def _rows(kind: str = "sweep", **changes: str) -> list[dict[str, str]]:
    rows = []
    for (x, y), base in BASELINE_MS.items():
        axes: dict[str, Any] = (
            {"pooling_factor": x, "dim": y, "global_batch": 128}
            if kind == "sweep"
            else {"tables_per_rank": x, "global_batch": y}
        )
        for name, is_baseline, ms in (
            ("baseline", True, base * 3),
            ("nccl_chunked_2", True, base),
            ("pgas", False, OURS_MS[x, y]),
            ("fused", False, OURS_MS[x, y] * 2),
        ):
            row = axes | {"contender": name, "is_baseline": is_baseline, "median_ms": ms, "gpu_ms": 2.0, "host_ms": 0.5}
            rows.append({key: str(value) for key, value in row.items()} | changes)
    return rows


@pytest.mark.parametrize("kind", ["sweep", "grid"])
def test_the_fastest_of_ours_is_held_against_the_strongest_baseline(kind: str) -> None:
    table = PLOTS[kind].table(Measured(kind, kind, _rows(kind)))
    head, lines = list(table[0]), [list(line.values()) for line in table]
    assert head[:-6] == (
        ["global batch", "dim", "pooling factor"] if kind == "sweep" else ["global batch", "tables a GPU"]
    )
    assert [line[-4:-3] for line in lines] == [["1.00x"], ["2.00x"], ["1.25x"], ["2.50x"]]
    assert lines[1][-6:-4] == ["0.500 (pgas)", "1.00 (nccl_chunked_2)"]
    assert all(line[-1] == "1.00x" for line in lines), "by the GPU's time they are alike"


def test_words_say_where_it_pays() -> None:
    words = MAPS["sweep"].words(Measured("sweep", "sweep", _rows()))
    assert "5% or more faster than the strongest baseline on 3 of 4 shapes" in words[0]
    assert "1.00x to 2.50x" in words[0]
    assert "host" not in words[0].partition(":")[2]
    assert "on 0 of 4 shapes" in words[1]
    slow_host = MAPS["sweep"].words(Measured("sweep", "sweep", _rows(host_ms="5")))
    assert slow_host[0].endswith("On 4 of them the baseline takes as long as its host takes to issue it.")


def test_the_picture_has_a_number_a_cell_in_brackets_where_the_host_decides() -> None:
    figure = PLOTS["sweep"].draw(Measured("sweep", "sweep", _rows(host_ms="1"))).figure
    texts = [[text.get_text() for text in axes.texts] for axes in figure.axes]
    assert texts == [["(1.00)", "(2.00)", "(1.25)", "2.50"], ["1.00"] * 4]
    hatched = [[patch.get_hatch() is not None for patch in axes.patches] for axes in figure.axes]
    assert hatched == [[True, False, False, False], [True] * 4]


def test_of_the_stages_baselines_in_chunks_the_fastest_is_drawn_and_the_table_has_all() -> None:
    shape = {"world_size": "2", "tables": "4", "rows": "1000", "dim": "16", "multi_hot": "1", "global_batch": "64"}
    times = {"baseline": 4.0, "nccl_chunked_2": 2.5, "nccl_chunked_4": 3.0, "pgas": 2.0}
    rows = [
        shape | {"contender": name, "median_ms": str(ms), "speedup": str(4 / ms), "limit_ms": "1"}
        for name, ms in times.items()
    ]
    measured = Measured("stage", "stage", rows)
    (table,) = PLOTS["stage"].table(measured)
    head, line = list(table), list(table.values())
    assert head[-4:] == ["baseline, ms", "nccl_chunked_2, ms", "nccl_chunked_4, ms", "pgas, ms"]
    assert line[1:3] == ["2.00x (pgas)", "1.25x (nccl_chunked_2)"]
    (axes,) = PLOTS["stage"].draw(measured).figure.axes
    assert [text.get_text() for text in axes.texts] == ["1.00", "0.62", "0.50"]
