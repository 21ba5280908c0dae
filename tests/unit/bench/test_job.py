"""`bench job`: its row says what was evaluated."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from dlrm_overlap.bench.figures import job
from dlrm_overlap.cli import main
from tests.conftest import configuration, read_rows
from tests.distributed.workers import ranks_here


@pytest.mark.usefixtures("world_of_one")
def test_a_row_of_prepared_samples_counts_those_that_were_held_out(tmp_path: Path) -> None:
    packed, rows = str(tmp_path / "packed"), tmp_path / "job.csv"
    made = ["--samples", "64", "--data.eval_samples", "24"]
    assert main(["prepare", "samples", packed, "--config", "quickstart", *made]) == 0
    files = ["--data.kind", "prepared", "--data.path", packed, "--data.workers", "0", "--log.tensorboard", "false"]
    files += ["--train.steps", "2", "--train.batch_size", "16"]
    ranks = replace(ranks_here(configuration(*files)), values=SimpleNamespace(output=str(rows)))
    assert job.run("job", ranks) == 0
    (row,) = read_rows(rows)
    assert (row["steps"], row["eval_samples"]) == ("2", "24")
