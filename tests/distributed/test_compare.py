"""`compare` trains one backend after the other in the same processes, and each as if it were alone."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest

from dlrm_overlap.launching.lifetime import DISAGREEMENT
from tests.conftest import ROOT, read_metrics, run_cli, train_quickstart, wait_until

BACKENDS = ["torchrec", "pgas", "fused"]
WANTED = {"train/loss", "speed/step_ms_p50", "speed/samples_per_s"}
SHORT = ["--train.steps", "20", "--train.eval_every", "0", "--data.eval_samples", "1000"]
COMPARE = ["compare", "--config", "configs/quickstart.yaml", "--train.device", "cpu", "--log.every", "1", *SHORT]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A comparison by 2 processes, in a folder with an earlier one and its first run."""
    folder = tmp_path_factory.mktemp("compare")
    (folder / "torchrec").mkdir()
    for file in ("comparison.json", "torchrec/events.out.tfevents.1.earlier", "torchrec/summary.json"):
        (folder / file).write_text("an earlier one's")
    (folder / "torchrec" / "metrics.jsonl").write_text('{"step": 21, "train/loss": 0.5}\n')
    result = run_cli(*COMPARE, "--backends", *BACKENDS, "--noise_runs", "1", "--nproc", "2", "--log.dir", str(folder))
    assert result.returncode == 0, result.stderr
    (folder / "stdout").write_text(result.stdout)
    (folder / "stderr").write_text(result.stderr)
    return folder


def test_an_earlier_comparisons_runs_are_moved_aside_and_the_log_says_so(folder: Path) -> None:
    assert "torchrec are now in" in (folder / "stderr").read_text()
    assert (folder / "torchrec" / "earlier_1" / "summary.json").exists()
    assert not (folder / "torchrec" / "events.out.tfevents.1.earlier").exists()
    assert not list(folder.glob("*/checkpoints"))


def test_every_backend_agrees_with_the_reference(folder: Path) -> None:
    comparison = json.loads((folder / "comparison.json").read_text())
    assert list(comparison["backends"]) == BACKENDS
    assert comparison["agree"] is True
    assert (comparison["world_size"], comparison["global_batch_size"], comparison["device"]) == (2, 1024, "cpu")
    for backend, result in comparison["backends"].items():
        assert result["max_relative_difference"] <= comparison["rtol"], backend
        summary = json.loads((folder / backend / "summary.json").read_text())
        assert summary["backend"] == backend
        assert result["step_ms_p50"] == summary["step_ms_p50"] > 0
        reference_ms = comparison["backends"]["torchrec"]["step_ms_p50"]
        assert result["speedup"] == pytest.approx(reference_ms / summary["step_ms_p50"])
        assert list(read_metrics(folder / backend, "train/loss")) == list(range(1, 21))
        assert list((folder / backend).glob("events.out.tfevents.*"))
        assert (folder / backend / "config.yaml").is_file()


def test_the_reference_is_trained_again_and_on_cpus_differs_from_itself_by_nothing(folder: Path) -> None:
    assert json.loads((folder / "comparison.json").read_text())["noise"] == [0.0]
    again = read_metrics(folder / "torchrec_again", "train/loss")
    assert again == read_metrics(folder / "torchrec", "train/loss")
    assert list((folder / "torchrec_again").glob("events.out.tfevents.*"))


def test_table_and_where_to_look(folder: Path) -> None:
    lines = (folder / "stdout").read_text().splitlines()
    named = ["backend", *BACKENDS, "On", "result:", "TensorBoard:"]
    assert [line.split()[0] for line in lines] == named
    assert max(map(len, lines[:5])) <= 120
    assert lines[4].endswith("only speedups on GPUs are meaningful.")
    assert lines[-1].endswith(f"--logdir {folder}")


@pytest.fixture
def board(folder: Path) -> Iterator[str]:
    """The address of a TensorBoard that has read the whole comparison."""
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", str(folder), "--port", "0", "--load_fast", "false"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        found = (re.search(r"http://\S+", line) for line in process.stderr)
        address = next((match.group() for match in found if match), None)
        assert address, "TensorBoard has ended without an address"
        wait_until(lambda: _has_all(_tags(address)), 60, lambda: _tags(address), 0.2)
        yield address
        process.kill()


def _has_all(tags: dict[str, dict[str, Any]]) -> bool:
    return all(tags.get(backend, {}).keys() >= WANTED for backend in BACKENDS)


def _tags(board: str) -> dict[str, dict[str, Any]]:
    with urlopen(f"{board}data/plugin/scalars/tags", timeout=60) as answer:
        return json.loads(answer.read())


@pytest.mark.slow
def test_tensorboard_serves_the_curves_of_every_run(board: str, folder: Path) -> None:
    for backend in BACKENDS:
        with urlopen(f"{board}data/plugin/scalars/scalars?run={backend}&tag=train/loss", timeout=60) as answer:
            found = {step: loss for _, step, loss in json.loads(answer.read())}
        assert found == pytest.approx(read_metrics(folder / backend, "train/loss"))


@pytest.mark.slow
def test_runs_are_those_of_train(folder: Path, tmp_path: Path) -> None:
    """Of three: what the earlier two left in the process would show in the last."""
    alone = train_quickstart(tmp_path, "alone", 2, "--embedding.backend", BACKENDS[-1], *SHORT)
    assert read_metrics(folder / BACKENDS[-1], "train/loss") == read_metrics(alone, "train/loss")
    assert read_metrics(folder / BACKENDS[-1], "eval/auroc") == read_metrics(alone, "eval/auroc")


@pytest.mark.slow
def test_another_seed_is_found_and_gets_no_speedup(tmp_path: Path) -> None:
    """The second backend starts from other weights, as if it were broken."""
    script = f"""
import dataclasses
from dlrm_overlap import cli
from dlrm_overlap.train import compare

def wrong_weights(*args, make=compare.run_configs):
    configs = make(*args)
    wrong = configs["pgas"]
    return configs | {{"pgas": dataclasses.replace(wrong, train=dataclasses.replace(wrong.train, seed=1))}}

compare.run_configs = wrong_weights
raise SystemExit(cli.main({[*COMPARE, "--backends", "torchrec", "pgas", "--log.dir", str(tmp_path)]!r}))
"""
    command, environ = [sys.executable, "-c", script], os.environ | {"OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, check=False)
    assert result.returncode == DISAGREEMENT, result.stderr
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("dlrm-overlap:")]
    assert line.startswith("dlrm-overlap: pgas against torchrec: step 1: loss ")
    assert line.endswith("tolerance 0.0001")
    _, _, row, *_ = result.stdout.splitlines()
    assert row.split()[0] == "pgas"
    assert row.split()[-2:] == ["-", "DISAGREE"]
    comparison = json.loads((tmp_path / "comparison.json").read_text())
    assert comparison["backends"]["pgas"]["speedup"] is None
    assert comparison["agree"] is False
