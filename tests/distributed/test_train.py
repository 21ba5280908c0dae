"""A whole run: what it learns, what it writes, how it ends on bad data."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from dlrm_overlap.observe.trace_summary import read_events
from tests.conftest import configuration, read_metrics, run_cli, train_quickstart
from tests.distributed.workers import quickstart, run_ranks, train


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The whole quickstart on 2 processes."""
    return train_quickstart(tmp_path_factory.mktemp("train"), "torchrec", 2, "--train.eval_every", "150")


def test_quickstart_learns(run: Path) -> None:
    auroc = read_metrics(run, "eval/auroc")
    assert list(auroc) == [150, 300]
    assert auroc[300] > 0.80  # the teacher's own is near 0.9, a coin's 0.5
    assert read_metrics(run, "eval/ne")[300] < 0.8


def test_summary_holds_what_was_measured(run: Path) -> None:
    summary = json.loads((run / "summary.json").read_text())
    assert summary["steps"] == 300
    assert summary["eval_auroc"] == read_metrics(run, "eval/auroc")[300]
    assert summary["train_loss"] == read_metrics(run, "train/loss")[300]
    assert 0 < summary["step_ms_p50"] <= summary["step_ms_p95"]
    assert summary["samples_per_s"] > 0
    assert (summary["world_size"], summary["global_batch_size"], summary["backend"]) == (2, 1024, "torchrec")
    assert {"torch", "torchrec", "fbgemm", "python"} <= set(summary["versions"])


def _npy_days(folder: Path, samples: int) -> Path:
    rng = np.random.default_rng(0)
    np.save(folder / "day_0_dense.npy", rng.random((samples, 13), dtype=np.float32))
    np.save(folder / "day_0_sparse.npy", rng.integers(0, 50, (samples, 26), dtype=np.int32))
    np.save(folder / "day_0_labels.npy", rng.integers(0, 2, (samples, 1), dtype=np.int32))
    return folder


def _on_days(folder: Path) -> list[str]:
    options = ["--data.kind", "criteo_npy", "--data.path", str(folder), "--data.tables.rows", "50"]
    return [*options, "--data.workers", "1", "--train.batch_size", "32", "--train.device", "cpu", "--log.every", "1"]


def _train_several(folder: Path, whole: Path) -> None:
    epoch = [*_on_days(folder), "--log.dir", str(folder), "--log.name", "epoch"]
    train(configuration(*epoch))
    resolved = ["--config", str(whole / "config.yaml"), "--log.dir", str(folder), "--log.name", "again"]
    resolved += ["--train.steps", "20", "--train.eval_every", "0"]
    train(configuration(*resolved))
    train(quickstart(folder, "early", "--train.eval_every", "20", "--train.target_auroc", "0.7"))
    traced = ["--train.steps", "8", "--log.trace_first", "3", "--log.trace_steps", "2", "--embedding.backend", "pgas"]
    train(quickstart(folder, "traced", *traced))


@pytest.fixture(scope="module")
def several(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("several")
    run_ranks(_train_several, 2, _npy_days(folder, 1000), run)
    return folder


@pytest.mark.slow
def test_resolved_configuration_gives_the_same_run_again(run: Path, several: Path) -> None:
    resolved = yaml.safe_load((run / "config.yaml").read_text())
    assert resolved["embedding"]["backend"] == "torchrec"
    ours, theirs = read_metrics(several / "again", "train/loss"), read_metrics(run, "train/loss")
    assert ours == {step: loss for step, loss in theirs.items() if step <= 20}


def test_tensorboard_shows_curves_and_texts(run: Path) -> None:
    events = EventAccumulator(str(run))
    events.Reload()
    scalars = set(events.Tags()["scalars"])
    speeds = ("samples_per_s", "step_ms", "step_ms_p10", "step_ms_p50", "step_ms_p90", "input_wait_ms")
    assert {
        "train/loss",
        "eval/auroc",
        "eval/ne",
        "memory/peak_bytes",
        *(f"speed/{each}" for each in speeds),
    } <= scalars
    assert {tag.split("/")[0] for tag in events.Tags()["tensors"]} >= {"plan", "config"}
    losses = {event.step: event.value for event in events.Scalars("train/loss")}
    assert losses == pytest.approx(read_metrics(run, "train/loss"))


def _refusal(*argv: str) -> str:
    """Return the line that two ranks refuse to train the quickstart with."""
    options = ["train", "--config", "configs/quickstart.yaml", "--nproc", "2", "--train.device", "cpu", *argv]
    result = run_cli(*options)
    assert result.returncode == 2, result.stderr
    line, *later = [line for line in result.stderr.splitlines() if line.startswith("dlrm-overlap:")]
    # On a busy machine rank 0 may take longer to end than rank 1 waits before it says the same.
    assert all(each.startswith("dlrm-overlap: rank 1: ") for each in later), later
    assert "Traceback" not in result.stderr
    return line


@pytest.mark.slow
def test_a_second_run_in_the_folder_is_refused(run: Path) -> None:
    before = {path: path.read_bytes() for path in run.iterdir()}
    line = _refusal("--log.dir", str(run.parent), "--log.name", run.name, "--train.steps", "8")
    assert f"log.name: {run} has the results of an earlier run" in line
    assert {path: path.read_bytes() for path in run.iterdir()} == before


@pytest.mark.slow
def test_a_loss_that_is_not_finite_ends_all_ranks_in_one_line(tmp_path: Path) -> None:
    rates = ["--train.lr", "1e30", "--train.optimizer", "sgd", "--embedding.backend", "pgas"]
    line = _refusal("--log.dir", str(tmp_path), *rates, "--checkpoint.every", "2", "--log.every", "1")
    assert "the training loss is nan and must be finite" in line
    assert "lower train.lr 1e+30" in line
    losses = list(read_metrics(tmp_path / "pgas", "train/loss").values())
    assert losses[-1] is None
    assert not list(tmp_path.glob("pgas/checkpoints/*"))


@pytest.mark.slow
def test_early_stop_at_the_target(several: Path) -> None:
    auroc = read_metrics(several / "early", "eval/auroc")
    last = max(auroc)
    assert last < 300
    assert auroc.pop(last) >= 0.7
    assert all(value < 0.7 for value in auroc.values())
    assert json.loads((several / "early" / "summary.json").read_text())["steps"] == last


@pytest.mark.slow
def test_traces_hold_the_steps_asked_for_of_every_rank(run: Path, several: Path) -> None:
    files = sorted((several / "traced" / "traces").iterdir())
    assert [file.name for file in files] == [f"steps_3_4_rank_{rank}.json.gz" for rank in range(2)]
    for file in files:
        names = [event["name"] for event in read_events(file)]
        assert sum(name.startswith("ProfilerStep#") for name in names) == 2
        assert names.count("FinishExchangeBackward") == 2
    assert list(read_metrics(several / "traced", "train/loss")) == list(range(1, 9))
    assert not (run / "traces").exists()


@pytest.mark.slow
def test_a_bad_id_ends_the_run_in_one_line_that_names_it(tmp_path: Path) -> None:
    sparse = np.load(_npy_days(tmp_path, 1000) / "day_0_sparse.npy")
    sparse[555, 7] = 50
    np.save(tmp_path / "day_0_sparse.npy", sparse)
    result = run_cli("train", *_on_days(tmp_path), "--nproc", "2", "--log.dir", str(tmp_path / "runs"))
    assert result.returncode == 2
    # Every rank finds it as it takes the samples' fingerprint, and rank 0 tells it.
    (line,) = [line for line in result.stderr.splitlines() if not re.match(r"[\d:]+ rank \d: ", line)]
    assert line.startswith(f"dlrm-overlap: {tmp_path}/day_0, sample 555: id of table 7 is 50, not from 0 to 49"), line


@pytest.mark.slow
def test_one_epoch_of_a_finite_data_set(several: Path) -> None:
    assert list(read_metrics(several / "epoch", "train/loss")) == list(range(1, 750 // 64 + 1))
