"""The columns of rows that say what was measured."""

from pathlib import Path

from dlrm_overlap.bench.harness.workload import describe_work
from dlrm_overlap.cli import main
from tests.conftest import configuration


def test_rows_of_prepared_samples_name_the_tables_of_the_files(tmp_path: Path) -> None:
    packed, small = str(tmp_path / "packed"), ["--samples", "64", "--data.eval_samples", "8", "--data.workers", "0"]
    assert main(["prepare", "samples", packed, "--config", "quickstart", *small]) == 0
    files = ["--data.kind", "prepared", "--data.path", packed, "--train.steps", "1", "--data.tables.max_rows", "1000"]
    found = describe_work(configuration(*files), 1)
    assert (found["tables"], found["rows"]) == (8, str([1000] * 4 + [500, 500, 100, 20]))
    assert (found["multi_hot"], found["zipf_alpha"]) == (None, None), "keys of synthetic samples"
    found = describe_work(configuration("--config", "quickstart", "--data.tables.max_rows", "1000"), 1)
    assert (found["tables"], found["rows"]) == (8, str([1000] * 4 + [500, 500, 100, 20]))
    assert (found["multi_hot"], found["zipf_alpha"]) == ("[4, '0..6', 1, 1, 2, 1, 1, 1]", "1.05")
