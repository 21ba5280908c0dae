"""What a trace of the persistent kernel is told as, and drawn."""

from pathlib import Path

import pytest
import torch

from dlrm_overlap.bench.figures.programs import describe_tasks
from dlrm_overlap.bench.report.measured import Measured, number
from dlrm_overlap.bench.report.page import as_text
from dlrm_overlap.bench.report.plots import PLOTS
from dlrm_overlap.cli import main

# Two ranks, four tasks; program 9 takes the first and the last. Columns: program, sm, start, end, put, wait.
TRACE = torch.tensor(
    [
        [9, 1, 5_000, 6_000, 100, 0],
        [4, 0, 5_200, 6_400, 50, 700],
        [7, 2, 5_100, 6_300, 0, 800],
        [9, 1, 6_000, 6_900, 200, 300],
    ]
)


def test_tasks_are_told_by_program_and_in_us_since_the_first() -> None:
    rows = describe_tasks(TRACE, "linear", rank=0, world_size=2, shown=32)
    assert [row["program"] for row in rows] == [0, 0, 1, 2], "the programs 9, 7, 4 in the order of their begin"
    assert [row["destination"] for row in rows] == [0, 1, 1, 0]
    assert [row["local"] for row in rows] == [True, False, False, True]
    first, last, *_ = rows
    assert (first["begin_us"], first["end_us"], first["put_us"], first["wait_us"]) == (0.0, 1.0, 0.1, 0.0)
    assert (last["begin_us"], last["end_us"], last["put_us"], last["wait_us"]) == (1.0, 1.9, 0.2, 0.3)


@pytest.mark.parametrize(
    ("schedule", "destinations"),
    [("linear", [0, 0, 1, 1]), ("remote_first", [0, 0, 1, 1]), ("balanced", [0, 1, 0, 1])],
)
def test_destinations_follow_the_schedule_on_the_last_rank(schedule: str, destinations: list[int]) -> None:
    rows = describe_tasks(TRACE, schedule, rank=1, world_size=2, shown=32)
    by_task = {(row["begin_us"], row["sm"]): row["destination"] for row in rows}
    assert [by_task[(start - 5_000) / 1e3, sm] for _, sm, start, *_ in TRACE.tolist()] == destinations


def test_few_programs_are_shown_from_the_first_to_the_last() -> None:
    rows = describe_tasks(TRACE, "linear", rank=0, world_size=2, shown=2)
    assert [(row["program"], row["sm"]) for row in rows] == [(0, 1), (0, 1), (1, 0)]
    assert len({row["program"] for row in describe_tasks(TRACE, "linear", 0, 2, 1)}) == 1


def test_the_plot_and_its_table_show_the_tasks() -> None:
    rows = [{key: str(value) for key, value in row.items()} for row in describe_tasks(TRACE, "linear", 0, 2, 32)]
    measured = Measured("programs", "programs", rows)
    assert as_text(PLOTS["programs"].table(measured)).to_numpy().tolist() == [
        ["0", "2", "1", "1.6", "0.3", "0.3"],
        ["1", "1", "1", "1.2", "0", "0.8"],
        ["2", "1", "0", "1.15", "0.05", "0.7"],
    ]
    axes = PLOTS["programs"].draw(measured).figure.axes[0]
    drawn = sum(patch.get_width() for patch in axes.patches)  # type: ignore[attr-defined]
    assert drawn == pytest.approx(sum(row["end_us"] - row["begin_us"] + row["wait_us"] for row in _numbers(rows)))


def _numbers(rows: list[dict[str, str]]) -> list[dict[str, float]]:
    return [{name: number(row, name) or 0.0 for name in ("begin_us", "end_us", "wait_us")} for row in rows]


def test_a_cpu_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--config", "configs/bench/tiny.yaml", "--train.device", "cpu", "--output", str(tmp_path / "rows.csv")]
    assert main(["bench", "programs", *options]) == 2
    assert "bench programs: a CPU's kernels have no clock; run it on GPUs" in capsys.readouterr().err
