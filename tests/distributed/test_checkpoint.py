"""A run that stops and goes on is the run that did not stop."""

import json
import shutil
from pathlib import Path

import pytest

from dlrm_overlap.checkpoint.tools import verify
from tests.agreement import EVAL_TOLERANCE, LOSS_TOLERANCE
from tests.conftest import read_metrics, run_cli, run_quickstart, train_quickstart

SAVING = ["--checkpoint.every", "10", "--checkpoint.keep", "2", "--data.eval_samples", "2000"]
SAVING += ["--train.global_batch_size", "512", "--train.warmup_steps", "20"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 30 steps that saved every 10."""
    return train_quickstart(tmp_path_factory.mktemp("whole"), "run", 2, *SAVING, "--train.steps", "30")


def _assert_losses_continue(run: Path, whole: Path, rtol: float) -> None:
    losses, expected = read_metrics(run, "train/loss"), read_metrics(whole, "train/loss")
    for step in range(21, 31):
        assert losses[step] == pytest.approx(expected[step], rel=rtol, abs=0), step


def _assert_continues(run: Path, whole: Path, rtol: float) -> None:
    _assert_losses_continue(run, whole, rtol)
    auroc, expected = (read_metrics(each, "eval/auroc")[30] for each in (run, whole))
    assert auroc == pytest.approx(expected, rel=EVAL_TOLERANCE)


def test_keeps_the_newest(whole: Path) -> None:
    assert sorted(path.name for path in (whole / "checkpoints").iterdir()) == ["step_20", "step_30"]


@pytest.mark.slow
def test_goes_on_from_the_newest_that_is_whole(whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole, tmp_path / "run")
    newest = tmp_path / "run" / "checkpoints" / "step_30"
    file = newest / "__1_0.distcp"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 64
    file.write_bytes(content)
    (tmp_path / "run" / "summary.json").unlink()
    result = run_quickstart(tmp_path, "run", 2, *SAVING, "--train.steps", "30")
    assert result.returncode == 0, result.stderr
    (warning,) = [line for line in result.stderr.splitlines() if "damaged" in line]
    assert f"{file} is damaged: the checksum of bytes " in warning
    assert "step_20, the newest complete one" in warning
    run = tmp_path / "run"
    assert list(read_metrics(run, "train/loss")) == list(range(1, 31)), "no step missing, none twice"
    _assert_continues(run, whole, 0.0)
    assert verify(newest) == []
    assert (run / "checkpoints" / "step_20").exists(), "what it came from, since keep is 2"


@pytest.mark.slow
def test_evaluated_on_its_own_it_gives_what_the_run_logged(whole: Path, tmp_path: Path) -> None:
    logged = {key: read_metrics(whole, f"eval/{key}")[30] for key in ("loss", "auroc", "ne", "accuracy")}
    for options, tolerance in (([], 0.0), (["--embedding.backend", "fused", "--train.global_batch_size", "200"], 1e-5)):
        output = tmp_path / "new" / "eval.json"
        result = run_cli("eval", "--checkpoint", str(whole), "--nproc", "2", "--output", str(output), *options)
        assert result.returncode == 0, result.stderr
        found = json.loads(output.read_text())
        assert {key: found[key] for key in logged} == pytest.approx(logged, rel=tolerance, abs=0)
        assert (found["step"], found["samples"], found["world_size"]) == (30, 2000, 2)
        assert result.stdout.startswith(f"step 30: AUROC {logged['auroc']:.4f}, NE {logged['ne']:.4f}, ")


@pytest.mark.slow
def test_goes_on_with_another_number_of_ranks(whole: Path, tmp_path: Path) -> None:
    start = ["--checkpoint.resume", str(whole / "checkpoints" / "step_20")]
    run = train_quickstart(tmp_path, "run", 4, *SAVING, *start, "--train.steps", "30")
    _assert_continues(run, whole, LOSS_TOLERANCE["adagrad"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("optimizer", "plan", "other_plan", "tolerance"),
    [("rowwise_adagrad", "column_wise", "column_wise", 1e-2), ("sgd", "table_wise", "auto", LOSS_TOLERANCE["sgd"])],
)
def test_goes_on_with_tables_cut_in_another_way(
    tmp_path: Path, optimizer: str, plan: str, other_plan: str, tolerance: float
) -> None:
    """Row-wise Adagrad keeps a number for each row of a shard: a shard made of others has their mean."""
    options = [*SAVING, "--embedding.optimizer", optimizer, "--train.steps", "30"]
    whole = train_quickstart(tmp_path, "whole", 2, *options, "--embedding.plan", plan)
    start = ["--checkpoint.resume", str(whole / "checkpoints" / "step_20")]
    there = ["--embedding.plan", other_plan, "--embedding.backend", "pgas"]
    _assert_losses_continue(train_quickstart(tmp_path, "run", 4, *options, *start, *there), whole, tolerance)


@pytest.mark.slow
def test_goes_on_from_a_checkpoint_that_was_saved_during_training(whole: Path, tmp_path: Path) -> None:
    options = [*SAVING, "--checkpoint.asynchronous", "true", "--train.steps", "30"]
    first = train_quickstart(tmp_path, "first", 2, *options)
    assert read_metrics(first, "train/loss") == read_metrics(whole, "train/loss")
    start = ["--checkpoint.resume", str(first / "checkpoints/step_20")]
    _assert_continues(train_quickstart(tmp_path, "run", 2, *options, *start), whole, 0.0)


@pytest.mark.slow
def test_states_of_optimizers_are_kept(tmp_path: Path) -> None:
    options = [*SAVING, "--embedding.optimizer", "adagrad", "--train.optimizer", "adam", "--train.lr", "0.01"]
    whole = train_quickstart(tmp_path, "whole", 1, *options, "--train.steps", "30")
    start = ["--checkpoint.resume", str(whole / "checkpoints" / "step_20")]
    _assert_continues(train_quickstart(tmp_path, "again", 1, *options, *start, "--train.steps", "30"), whole, 0.0)
