import json
from pathlib import Path

import pytest
import torch

from tests.agreement import LOSS_TOLERANCE
from tests.conftest import assert_losses_agree, read_metrics, run_cli, train_quickstart

pytestmark = pytest.mark.gpu
# At the quickstart's rates a cross network's losses reach 15, and differ by 1% in runs that differ by rounding.
DCN = ["--model.arch", "dcn", "--train.lr", "0.002", "--embedding.lr", "0.01"]
FIFTY_STEPS = ["--train.device", "cuda", "--train.steps", "50", "--train.global_batch_size", "1024"]


NPROC = min(2, torch.cuda.device_count())


def _train(folder: Path, name: str, optimizer: str, *options: str, nproc: int = NPROC) -> Path:
    rate = {"sgd": "20.0", "adagrad": "0.05"}[optimizer]
    tables = ["--embedding.optimizer", optimizer, "--embedding.lr", rate]
    return train_quickstart(folder, name, nproc, *FIFTY_STEPS, *tables, *options)


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad"])
def test_losses_agree_for_any_number_of_gpus(tmp_path: Path, optimizer: str) -> None:
    reference = _train(tmp_path, "1", optimizer, nproc=1)
    for nproc in (2, 4):
        if nproc <= torch.cuda.device_count():
            run = _train(tmp_path, str(nproc), optimizer, nproc=nproc)
            assert_losses_agree(run, reference, LOSS_TOLERANCE[optimizer])


@pytest.mark.parametrize(("optimizer", "model"), [("sgd", []), ("adagrad", DCN)])
def test_graphs_change_nothing(tmp_path: Path, optimizer: str, model: list[str]) -> None:
    eager = _train(tmp_path, "eager", optimizer, *model)
    graphed = _train(tmp_path, "graphed", optimizer, *model, "--train.graph_dense", "true")
    assert_losses_agree(graphed, eager, LOSS_TOLERANCE[optimizer])
    assert read_metrics(graphed, "eval/auroc")[50] > 0.6


@pytest.mark.parametrize("graphed", ["false", "true"])
def test_compiling_changes_nothing_but_rounding(tmp_path: Path, graphed: str) -> None:
    eager = _train(tmp_path, "eager", "adagrad", *DCN)
    options = ["--train.compile_dense", "true", "--train.graph_dense", graphed]
    compiled = _train(tmp_path, "compiled", "adagrad", *DCN, *options)
    assert_losses_agree(compiled, eager, LOSS_TOLERANCE["adagrad"])
    assert read_metrics(compiled, "eval/auroc")[50] > 0.6


@pytest.mark.parametrize("precision", ["tf32", "bf16"])
def test_low_precision_learns_the_same(tmp_path: Path, precision: str) -> None:
    full = _train(tmp_path, "fp32", "adagrad", nproc=1)
    low = _train(tmp_path, precision, "adagrad", "--train.precision", precision, nproc=1)
    assert read_metrics(low, "eval/auroc")[50] == pytest.approx(read_metrics(full, "eval/auroc")[50], abs=0.01)


def test_a_row_wise_plan_has_the_losses_of_whole_tables(tmp_path: Path) -> None:
    table_wise = _train(tmp_path, "table_wise", "sgd")
    row_wise = _train(tmp_path, "row_wise", "sgd", "--embedding.plan", "row_wise")
    assert_losses_agree(row_wise, table_wise, LOSS_TOLERANCE["sgd"])


@pytest.mark.parametrize("asynchronous", ["false", "true"])
@pytest.mark.parametrize("backend", ["torchrec", "pgas"])
def test_a_run_resumes_from_a_checkpoint(tmp_path: Path, backend: str, asynchronous: str) -> None:
    options = ["--checkpoint.every", "25", "--checkpoint.keep", "3", "--checkpoint.asynchronous", asynchronous]
    options += ["--embedding.backend", backend]
    whole = _train(tmp_path, "whole", "adagrad", *options)
    start = ["--checkpoint.resume", str(whole / "checkpoints" / "step_25")]
    again = _train(tmp_path, "again", "adagrad", *start, "--embedding.backend", backend)
    losses, expected = read_metrics(again, "train/loss"), read_metrics(whole, "train/loss")
    for step in range(26, 51):
        assert losses[step] == pytest.approx(expected[step], rel=LOSS_TOLERANCE["adagrad"])


@pytest.mark.parametrize("backend", ["torchrec", "fused"])
def test_evaluating_a_checkpoint_gives_what_its_run_logged(tmp_path: Path, backend: str) -> None:
    options = ["--embedding.backend", backend, "--train.precision", "bf16", "--checkpoint.every", "50"]
    run = _train(tmp_path, "run", "adagrad", *options)
    output = tmp_path / "eval.json"
    result = run_cli("eval", "--checkpoint", str(run), "--nproc", str(NPROC), "--output", str(output))
    assert result.returncode == 0, result.stderr
    found = json.loads(output.read_text())
    for key in ("loss", "auroc", "ne", "accuracy"):
        assert found[key] == pytest.approx(read_metrics(run, f"eval/{key}")[50], rel=1e-6), key


@pytest.mark.parametrize("nproc", sorted({1, NPROC}))
def test_the_default_backend_is_pgas_on_gpus_of_one_node(tmp_path: Path, nproc: int) -> None:
    run = _train(tmp_path, "auto", "adagrad", "--embedding.backend", "auto", nproc=nproc)
    assert json.loads((run / "summary.json").read_text())["backend"] == "pgas"
