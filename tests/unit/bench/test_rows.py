from pathlib import Path

import pytest

from dlrm_overlap.bench import rows
from dlrm_overlap.bench.rows import append_rows, check_columns, folder_of_runs
from dlrm_overlap.launching.environment import environment
from tests.conftest import read_rows, refuses

RESULTS = Path("docs/results")


def test_rows_with_a_column_that_the_file_lacks_are_written_to_another(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output, other = tmp_path / "rows.csv", tmp_path / "rows_2.csv"
    output.write_text("a,b\n1,2\n")
    for steps in (4, 5):
        assert append_rows(output, [{"a": 1, "b": 2, "steps": steps}]) == other
        assert "rows.csv has no column steps, command, python" in (told := capsys.readouterr().err)
        assert told.endswith(f"; the rows are in {other}\n")
    assert output.read_text() == "a,b\n1,2\n"
    assert [row["steps"] for row in read_rows(other)] == ["4", "5"]


def test_what_cannot_be_found_out_of_the_environment_stays_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "rows.csv"
    for found in ({"torch": "2.14.1", "driver": "580"}, {"torch": "2.14.1"}):  # nvidia-smi failed
        monkeypatch.setattr(rows, "environment", lambda found=found: found)
        assert append_rows(output, [{"steps": 4}], "bench") == output
    assert [row["driver"] for row in read_rows(output)] == ["580", ""]


def test_a_file_that_rows_will_not_fit_is_refused_before_they_are_measured(tmp_path: Path) -> None:
    output = tmp_path / "rows.csv"
    check_columns(output, "stage", True)
    output.write_text("kind,torch,gpu\nstage,2.14.1,2 x NVIDIA H200\n")
    check_columns(output, "stage", True)
    check_columns(output, "sweep", True)  # its rows have the same columns
    with refuses(r"--output: .*rows\.csv has rows of bench stage, which have other columns; give another file"):
        check_columns(output, "step", True)
    with refuses(r"--output: .*rows\.csv has rows of a machine with GPUs, which have other columns"):
        check_columns(output, "stage", False)


@pytest.mark.parametrize(("file", "folder"), [("job.csv", "job"), ("job.part", "job"), ("job", "job_runs")])
def test_runs_are_next_to_the_file_of_their_rows(file: str, folder: str, tmp_path: Path) -> None:
    assert folder_of_runs(tmp_path / file) == tmp_path / folder


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a full device")
def test_a_full_disk_is_reported_in_one_line() -> None:
    with refuses(r"--output: /dev/full cannot be written \(No space left on device\)"):
        append_rows(Path("/dev/full"), [{"steps": 4}])


def test_rows_are_appended_with_their_command_and_environment(tmp_path: Path) -> None:
    output = tmp_path / "rows.csv"
    output.touch()  # an empty file is as good as none
    for steps in (4, 5):
        append_rows(output, [{"steps": steps, "median_ms": 0.123456, "limit_ms": None}])
    rows = read_rows(output)
    found = [(row["steps"], row["median_ms"], row["limit_ms"]) for row in rows]
    assert found == [("4", "0.1235", ""), ("5", "0.1235", "")]
    assert [*rows[0]] == ["steps", "median_ms", "limit_ms", "command", *environment()]
    assert {"python", "torch", "fbgemm", "torchrec", "triton", "cpu"} <= {*rows[0]}


@pytest.mark.parametrize("path", [*RESULTS.glob("*.csv"), *RESULTS.glob("*_h?00/*.csv")], ids=lambda path: path.stem)
def test_published_rows_name_their_hardware_and_versions(path: Path) -> None:
    if path.stem.startswith(("simulated", "row_bytes", "mlperf_records")):  # computed, counted, published by others
        return
    if path.stem.startswith("timeline_"):  # of the same run as the rows of its step
        assert path.with_stem(path.stem.replace("timeline", "step")).exists()
        return
    rows = read_rows(path)
    hardware = "cpu" if rows[0].get("kind") == "drift" else "gpu"  # of rows that measure no time
    assert all(row[name] for row in rows for name in (hardware, "torch", "nccl", "triton"))
    if rows[0].get("kind") not in ("weak", "strong"):  # of all ranks' GPUs, which fewer of them used
        several = [row for row in rows if row.get("world_size", "1") != "1"]  # one rank may leave GPUs idle
        assert all(row["gpu"].startswith(f"{row['world_size']} x") for row in several)
