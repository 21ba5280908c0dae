"""The benchmarks run, and append comparable rows."""

import csv
from pathlib import Path

import pytest

from tests.conftest import run_cli


@pytest.mark.parametrize("workers", ["0", "1"])
def test_input_appends_a_row(tmp_path: Path, workers: str) -> None:
    output = tmp_path / "rows" / "input.csv"
    argv = ["bench", "input", "--config", "configs/quickstart.yaml", "--nproc", "2", "--train.device", "cpu"]
    argv += ["--steps", "8", "--data.workers", workers, "--data.prefetch", "2", "--output", str(output)]
    result = run_cli(*argv)
    assert result.returncode == 0, result.stderr
    with output.open(newline="") as file:
        (row,) = csv.DictReader(file)
    assert (row["steps"], row["workers"], row["world_size"], row["samples_per_rank"]) == ("8", workers, "2", "512")
    ratio = float(row["loaded_mean_ms"]) / float(row["cached_mean_ms"])
    assert float(row["loaded_to_cached"]) == pytest.approx(ratio, rel=1e-2)
    assert float(row["cached_p10_ms"]) <= float(row["cached_median_ms"]) <= float(row["cached_p90_ms"])


def test_rows_of_another_kind_are_refused(tmp_path: Path) -> None:
    output = tmp_path / "other.csv"
    output.write_text("a,b\n1,2\n")
    argv = ["bench", "input", "--config", "configs/quickstart.yaml", "--train.device", "cpu", "--steps", "4"]
    result = run_cli(*argv, "--output", str(output))
    assert result.returncode == 2
    assert "has other columns" in result.stderr.splitlines()[-1]
    assert output.read_text() == "a,b\n1,2\n"
