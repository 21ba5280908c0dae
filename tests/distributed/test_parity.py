"""With the same global batch, a run does not depend on how many ranks share it."""

from pathlib import Path

import pytest

from tests.agreement import LOSS_TOLERANCE
from tests.conftest import assert_losses_agree, read_metrics
from tests.distributed.workers import quickstart, run_ranks, train

pytestmark = pytest.mark.slow

LEARNING_RATE = {"adagrad": "0.05", "sgd": "20.0"}
COMMON = ["--train.global_batch_size", "1024", "--train.steps", "50", "--data.eval_samples", "1000"]


def _run(folder: Path, name: str, optimizer: str, *options: str) -> None:
    tables = ["--embedding.optimizer", optimizer, "--embedding.lr", LEARNING_RATE[optimizer]]
    train(quickstart(folder, name, *COMMON, *tables, *options))


def _train_with_all_optimizers(folder: Path) -> None:
    for optimizer in LEARNING_RATE:
        _run(folder, optimizer, optimizer)


def _train_on_two_ranks(folder: Path) -> None:
    _train_with_all_optimizers(folder)
    _run(folder, "columns", "sgd", "--embedding.plan", "column_wise")
    for pipeline in ("torchrec", "graph"):
        _run(folder, f"pgas_{pipeline}", "sgd", "--embedding.backend", "pgas", "--train.pipeline", pipeline)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One rank's runs."""
    folder = tmp_path_factory.mktemp("reference")
    run_ranks(_train_with_all_optimizers, 1, folder)
    return folder


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("two_ranks")
    run_ranks(_train_on_two_ranks, 2, folder)
    return folder


@pytest.mark.parametrize("optimizer", LEARNING_RATE)
def test_losses_agree_on_two_ranks(reference: Path, two_ranks: Path, optimizer: str) -> None:
    assert_losses_agree(two_ranks / optimizer, reference / optimizer, LOSS_TOLERANCE[optimizer])
    losses = read_metrics(reference / optimizer, "train/loss")
    assert len(losses) == 50
    assert losses[50] < 0.9 * losses[1], "a run that learns nothing agrees with anything"


def test_losses_agree_on_four_ranks(reference: Path, tmp_path: Path) -> None:
    run_ranks(_train_with_all_optimizers, 4, tmp_path)
    for optimizer in LEARNING_RATE:
        assert_losses_agree(tmp_path / optimizer, reference / optimizer, LOSS_TOLERANCE[optimizer])


def test_losses_agree_with_tables_cut_by_columns(reference: Path, two_ranks: Path) -> None:
    assert_losses_agree(two_ranks / "columns", reference / "sgd", LOSS_TOLERANCE["sgd"])


def test_the_pipeline_changes_nothing(two_ranks: Path) -> None:
    assert_losses_agree(two_ranks / "pgas_graph", two_ranks / "pgas_torchrec", 0.0)
