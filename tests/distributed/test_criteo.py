"""Criteo's real rows, from text to an evaluated model."""

import os
from pathlib import Path

import pytest

from tests.conftest import read_metrics, run_cli

FOLDER = os.environ.get("DLRM_OVERLAP_SAMPLE_DATA")
pytestmark = pytest.mark.skipif(
    FOLDER is None, reason="set DLRM_OVERLAP_SAMPLE_DATA to the folder of criteo_kaggle_1999.tsv"
)


def test_prepare_and_train_on_the_kaggle_sample(tmp_path: Path) -> None:
    assert FOLDER is not None
    prepared = run_cli("prepare", "criteo", str(Path(FOLDER) / "criteo_kaggle_1999.tsv"), str(tmp_path / "days"))
    assert prepared.returncode == 0, prepared.stderr
    assert "1999 samples" in prepared.stdout
    trained = run_cli(
        *["train", "--config", "configs/criteo_kaggle.yaml", "--data.path", str(tmp_path / "days"), "--nproc", "2"],
        *["--train.device", "cpu", "--log.dir", str(tmp_path / "runs")],
    )
    assert trained.returncode == 0, trained.stderr
    (auroc,) = read_metrics(tmp_path / "runs" / "auto", "eval/auroc").values()
    assert auroc >= 0.66  # on the last quarter, held out; one epoch of the other three
