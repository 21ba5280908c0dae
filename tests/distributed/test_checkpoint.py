"""A run that stops and goes on is the run that did not stop."""

import json
import shutil
from pathlib import Path

import pytest

from tests.agreement import EVAL_TOLERANCE, LOSS_TOLERANCE
from tests.conftest import read_metrics, run_cli, train_quickstart

SAVING = ["--checkpoint.every", "10", "--checkpoint.keep", "2", "--data.eval_samples", "2000"]
SAVING += ["--train.global_batch_size", "512", "--train.warmup_steps", "20"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 30 steps that saved every 10."""
    return train_quickstart(tmp_path_factory.mktemp("whole"), "run", 2, *SAVING, "--train.steps", "30")


def _assert_continues(run: Path, whole: Path, rtol: float) -> None:
    losses, expected = read_metrics(run, "train/loss"), read_metrics(whole, "train/loss")
    for step in range(21, 31):
        assert losses[step] == pytest.approx(expected[step], rel=rtol, abs=0), step
    assert read_metrics(run, "eval/auroc")[30] == pytest.approx(
        read_metrics(whole, "eval/auroc")[30], rel=EVAL_TOLERANCE
    )


def test_keeps_the_newest(whole: Path) -> None:
    assert sorted(path.name for path in (whole / "checkpoints").iterdir()) == ["step_20", "step_30"]


def test_goes_on_where_the_folder_left_off(whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step_30")
    run = train_quickstart(tmp_path, "run", 2, *SAVING, "--train.steps", "30")
    assert list(read_metrics(run, "train/loss")) == list(range(1, 31)), "no step missing, none twice"
    _assert_continues(run, whole, 0.0)


@pytest.mark.slow
@pytest.mark.parametrize("nproc", [1, 4])
def test_goes_on_with_another_number_of_ranks(whole: Path, tmp_path: Path, nproc: int) -> None:
    start = ["--checkpoint.resume", str(whole / "checkpoints" / "step_20")]
    run = train_quickstart(tmp_path, "run", nproc, *SAVING, *start, "--train.steps", "30")
    _assert_continues(run, whole, LOSS_TOLERANCE["adagrad"])


@pytest.mark.slow
def test_a_checkpoint_half_written_is_not_found(whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole, tmp_path / "run")
    (tmp_path / "run" / "checkpoints" / "step_30").rename(tmp_path / "run" / "checkpoints" / ".writing_30")
    run = train_quickstart(tmp_path, "run", 2, *SAVING, "--train.steps", "30")
    _assert_continues(run, whole, 0.0)


@pytest.mark.slow
def test_another_models_checkpoint_is_refused(whole: Path, tmp_path: Path) -> None:
    result = run_cli(
        *["train", "--config", "configs/quickstart.yaml", "--log.dir", str(tmp_path), "--train.optimizer", "adam"],
        *["--checkpoint.resume", str(whole / "checkpoints" / "step_20")],
    )
    assert result.returncode == 2
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("dlrm-overlap:")]
    assert "has optimizers ['rowwise_adagrad', 'adagrad'], this run has ['rowwise_adagrad', 'adam']" in line


@pytest.mark.slow
def test_a_finished_run_is_left_as_it_was(whole: Path) -> None:
    files = [path for path in whole.rglob("*") if path.is_file()]
    before = {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in files}
    argv = ["train", "--config", "configs/quickstart.yaml", "--log.dir", str(whole.parent), "--log.name", "run"]
    result = run_cli(*argv, *SAVING, "--train.steps", "30", "--train.device", "cpu", "--nproc", "2")
    assert result.returncode == 0, result.stderr
    assert "nothing is trained: step 30 was the last, since train.steps is 30" in result.stderr
    summary = json.loads((whole / "summary.json").read_text())
    assert result.stdout.startswith(f"AUROC {summary['eval_auroc']:.4f}, NE {summary['eval_ne']:.4f}, ")
    assert [path for path in whole.rglob("*") if path.is_file()] == files
    assert {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in files} == before


@pytest.mark.slow
@pytest.mark.parametrize(("table", "dense"), [("sgd", "sgd"), ("adagrad", "adam")])
def test_state_of_every_optimizer_is_kept(tmp_path: Path, table: str, dense: str) -> None:
    options = [*SAVING, "--embedding.optimizer", table, "--train.optimizer", dense, "--train.lr", "0.01"]
    whole = train_quickstart(tmp_path, "whole", 1, *options, "--train.steps", "30")
    start = ["--checkpoint.resume", str(whole / "checkpoints" / "step_20")]
    _assert_continues(train_quickstart(tmp_path, "again", 1, *options, *start, "--train.steps", "30"), whole, 0.0)
