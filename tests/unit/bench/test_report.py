"""Rows are appended as they were measured, and the report's numbers are those of the rows."""

import shutil
from pathlib import Path

import pytest

from dlrm_overlap.bench import report
from dlrm_overlap.bench.report import PLOTS, draw, map_speedups
from dlrm_overlap.bench.rows import Measured, append_rows, read_measured
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


@pytest.mark.parametrize("path", [*RESULTS.glob("*.csv"), *RESULTS.glob("*_h?00/*.csv")], ids=lambda path: path.stem)
def test_published_rows_name_their_hardware_and_versions(path: Path) -> None:
    measured = read_measured(path)
    if path.stem.startswith(("simulated", "row_bytes")):  # computed or counted
        return
    assert all(row[name] for row in measured.rows for name in ("gpu", "torch", "nccl", "triton"))
    if measured.kind not in ("weak", "strong"):
        several = [row for row in measured.rows if row.get("world_size", "1") != "1"]  # one rank may leave GPUs idle
        assert all(row["gpu"].startswith(f"{row['world_size']} x") for row in several)


def _step(**changes: str) -> Measured:
    measured = read_measured(RESULTS / "step.csv")
    return measured._replace(rows=[{**row, **changes} for row in measured.rows])


def test_a_changed_row_changes_the_plot(tmp_path: Path) -> None:
    shutil.copy(RESULTS / "step.csv", tmp_path / "step.csv")
    (tmp_path / "notes.csv").write_text("remark\nnone\n")
    assert main(["bench", "report", str(tmp_path)]) == 0
    (plot,) = (tmp_path / "report").iterdir()
    first = plot.read_bytes()
    assert plot.name == "step.svg"
    assert main(["bench", "report", str(tmp_path)]) == 0
    assert plot.read_bytes() == first, "the same rows give the same file"
    (tmp_path / "step.csv").write_text((RESULTS / "step.csv").read_text().replace(",12.52,", ",77.25,"))
    assert main(["bench", "report", str(tmp_path)]) == 0
    assert plot.read_bytes() != first


def test_a_plot_says_which_hardware_and_command_measured_it() -> None:
    assert b"4 x NVIDIA H200, torch 2.11.0+cu130, nccl 2.28.9" in draw(_step())
    rehearsed = draw(_step(gpu="", command="dlrm-overlap bench step --seed 1"))
    assert b"CPU, a rehearsal and no figure: Intel" in rehearsed
    assert b"dlrm-overlap bench step --seed 1" in rehearsed


def test_a_contender_that_disagrees_has_no_bar() -> None:
    step = _step().rows
    wrong = [{**row, "agrees": str(row["contender"] != "fused_graph")} for row in step]
    names = [{text.get_text() for text in PLOTS["step"](each).axes[0].get_xticklabels()} for each in (step, wrong)]
    assert names[0] - names[1] == {"fused\ngraph"}


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
    assert map_speedups(rows, "median_ms") == {(1, 32): 1.0, (1, 64): 1.25, (8, 32): 2.0, (8, 64): 2.5}
    (axes,) = PLOTS["sweep"](rows).axes
    assert [text.get_text() for text in axes.texts] == ["1"] * 4 + ["1", "1.25", "2", "2.5"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"step\.csv: no rows"),
        ("kind,contender\nstep,torchrec\n", r"step\.csv: KeyError\('floor_ms'\) in a row"),
        ("kind\nother\n", "no CSV file of a figure"),
    ],
)
def test_a_file_that_cannot_be_drawn_is_told_in_a_line(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "step.csv").write_text(text)
    with pytest.raises(InputError, match=message):
        report.run([str(tmp_path)])
