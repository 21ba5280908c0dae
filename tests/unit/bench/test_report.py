"""Rows are appended as they were measured, and the report's numbers are those of the rows."""

import base64
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from dlrm_overlap.bench.report.measured import Measured, read_measured, runs, shape
from dlrm_overlap.bench.report.page import html_page, make_section, write_report
from dlrm_overlap.bench.report.plots import PLOTS, map_times
from dlrm_overlap.bench.report.rows import append_rows
from dlrm_overlap.cli import main
from dlrm_overlap.config import InputError
from dlrm_overlap.launching.environment import environment
from tests.conftest import read_rows

RESULTS = Path("docs/results")


def test_rows_of_another_kind_are_refused(tmp_path: Path) -> None:
    output = tmp_path / "other.csv"
    output.write_text("a,b\n1,2\n")
    with pytest.raises(InputError, match=r"--output: .*other\.csv has other columns"):
        append_rows(output, [{"steps": 4}])
    assert output.read_text() == "a,b\n1,2\n"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a full device")
def test_a_full_disk_is_told_in_one_line() -> None:
    with pytest.raises(InputError, match=r"--output: /dev/full cannot be written \(No space left on device\)"):
        append_rows(Path("/dev/full"), [{"steps": 4}])


def test_rows_are_appended_with_their_command_and_environment_and_an_empty_file_is_as_good_as_none(
    tmp_path: Path,
) -> None:
    output = tmp_path / "rows.csv"
    output.touch()
    for steps in (4, 5):
        append_rows(output, [{"steps": steps, "median_ms": 0.123456, "limit_ms": None}])
    rows = read_rows(output)
    assert [(row["steps"], row["median_ms"], row["limit_ms"]) for row in rows] == [
        ("4", "0.1235", ""),
        ("5", "0.1235", ""),
    ]
    assert [*rows[0]] == ["steps", "median_ms", "limit_ms", "command", *environment()]
    assert {"python", "torch", "fbgemm", "torchrec", "triton", "cpu"} <= {*rows[0]}


@pytest.mark.parametrize("path", sorted(Path("docs/results").glob("*.csv")), ids=lambda path: path.stem)
def test_published_rows_name_their_hardware_and_versions(path: Path) -> None:
    measured = read_measured(path)
    if path.stem.startswith("simulated"):
        return
    assert all(row[name] for row in measured.rows for name in ("gpu", "torch", "nccl", "triton"))
    ranks = {f"{row['world_size']} x" for row in measured.rows if "world_size" in row}
    assert measured.kind in ("weak", "strong") or all(row["gpu"].startswith(tuple(ranks)) for row in measured.rows)


def test_a_shape_names_its_wire_where_it_is_narrow() -> None:
    row = {"world_size": "2", "tables": "52", "rows": "500000", "dim": "128", "multi_hot": "0..16"}
    row |= {"zipf_alpha": "0.0", "global_batch": "65536"}
    assert shape(row | {"wire_dtype": "fp32"}) == shape(row) == "26 x 0.5M x 128\n65536, 0..16"
    assert shape(row | {"wire_dtype": "bf16"}) == "26 x 0.5M x 128\n65536, 0..16, bf16"


def _stage(**changes: str) -> Measured:
    measured = read_measured(RESULTS / "stage.csv")
    return measured._replace(rows=[{**row, **changes} for row in measured.rows])


def test_a_changed_row_changes_the_page(tmp_path: Path) -> None:
    shutil.copy(RESULTS / "stage.csv", tmp_path / "stage.csv")
    (tmp_path / "notes.csv").write_text("remark\nnone\n")
    assert main(["bench", "report", str(tmp_path)]) == 0
    output = tmp_path / "report"
    first = {path.name: path.read_bytes() for path in output.iterdir()}
    assert set(first) == {"index.html", "stage.svg"}
    assert b"<td>1.894</td>" in first["index.html"]
    write_report(tmp_path, output)
    assert first == {path.name: path.read_bytes() for path in output.iterdir()}, "the same rows give the same files"
    text = (RESULTS / "stage.csv").read_text()
    (row,) = (line for line in text.splitlines() if ",pgas," in line and ",1.894," in line)
    (tmp_path / "stage.csv").write_text(text.replace(row, row.replace(",1.894,", ",77.25,")))
    assert write_report(tmp_path, output) == ["notes"]
    assert all(path.read_bytes() != first[path.name] for path in output.iterdir())
    assert "<td>77.25</td>" in (output / "index.html").read_text()


def test_the_page_is_one_file_and_says_which_hardware_and_commands_measured_it() -> None:
    section = make_section(_stage())
    page = html_page([section])
    assert not re.findall(r"(?:src|href)=\"(?!data:|#)", page)
    assert "<script" not in page
    assert "4 x NVIDIA H200, torch 2.11.0+cu130, nccl 2.28.9" in page
    assert "<code>" not in page, "these rows name no command"
    assert b"<svg" in base64.b64decode(section.picture)
    assert section.picture in page
    rehearsed = html_page([make_section(_stage(gpu="", command="dlrm-overlap bench stage --seed 1"))])
    assert "CPU, a rehearsal and no figure: Intel" in rehearsed
    assert "<code>dlrm-overlap bench stage --seed 1</code>" in rehearsed
    named = _stage()._replace(name='a"><img src=x onerror=alert(1)>')
    assert "<img src=x" not in html_page([make_section(named)])


def test_bars_over_a_contender_are_relative_and_one_that_disagrees_has_none() -> None:
    figure, table = PLOTS["stage"].draw(_stage().rows)
    (axes,) = figure.axes
    assert [text.get_text() for text in axes.texts][:5] == ["1.00"] * 5, "the baseline's own"
    assert "baseline 5.76 ms" in axes.get_xticklabels()[0].get_text()
    assert table["baseline"].iloc[0] == pytest.approx(5.763)
    step = read_measured(RESULTS / "step.csv").rows
    wrong = [{**row, "agrees": str(row["contender"] != "fused_graph")} for row in step]
    names = [PLOTS["step"].draw(each)[0].axes[0].get_legend_handles_labels()[1] for each in (step, wrong)]
    assert set(names[0]) - set(names[1]) == {"fused_graph"}


def test_lines_are_the_rows_of_each_panel() -> None:
    rows = read_measured(RESULTS / "volume.csv").rows
    figure, table = PLOTS["volume"].draw(rows)
    assert len(figure.axes) == len({row["contender"] for row in rows}) == 5
    sent = sum(float(row["gb_per_s"]) for row in rows if row["contender"] == "fused")
    assert table["fused"].sum() == pytest.approx(sent)
    drawn: Any = figure.axes[-1].lines[0].get_ydata()
    assert sum(drawn) == pytest.approx(sent)


def test_a_run_ends_where_a_contender_comes_again() -> None:
    rows = [{"contender": name, "dim": dim} for name, dim in (("a", "8"), ("b", "8"), ("a", "8"), ("b", "16"))]
    assert [list(run) for run in runs(rows)] == [["a", "b"], ["a"], ["b"]]


def test_a_map_holds_the_fastest_of_ours_against_the_strongest_baseline() -> None:
    rows = [
        {key: str(value) for key, value in row.items()}
        for (x, y), ours in {(1, 32): 1.0, (8, 32): 0.5, (1, 64): 0.8, (8, 64): 0.4}.items()
        for name, ms in {"baseline": 3.0, "nccl_chunked_2": 1.0, "pgas": ours, "fused": 2 * ours}.items()
        for row in [
            {
                "pooling_factor": x,
                "dim": y,
                "contender": name,
                "is_baseline": name[0] in "bn",
                "median_ms": ms,
                "gpu_ms": 2,
            }
        ]
    ]
    found = map_times(rows, "median_ms")
    assert found["speedup"].to_dict() == {(1, 32): 1.0, (1, 64): 1.25, (8, 32): 2.0, (8, 64): 2.5}
    assert found.loc[(8, 64)].tolist()[:2] == [0.4, 1.0]
    texts = [[text.get_text() for text in axes.texts] for axes in PLOTS["sweep"].draw(rows)[0].axes]
    assert texts == [["(1.00)"] * 4, ["(1.00)", "2.00", "1.25", "2.50"]]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"gemm\.csv: no rows"),
        ("kind,contender\ngemm\n", r"gemm\.csv: no rows, or not as many cells"),
        ("kind,contender\ngemm,serial\n", r"gemm\.csv: no column or contender 'operator'"),
        (
            "kind,contender,operator,m,k,n,median_ms\ngemm,serial,a,1,1,1,fast\n",
            r"gemm\.csv: Unable to parse string .fast.",
        ),
        ("kind\nother\n", "no CSV file of a figure"),
    ],
)
def test_a_file_that_cannot_be_drawn_is_told_in_a_line(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "gemm.csv").write_text(text)
    with pytest.raises(InputError, match=message):
        write_report(tmp_path, tmp_path / "report")
