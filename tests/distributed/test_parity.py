"""With the same global batch, a run does not depend on how many ranks share it."""

from pathlib import Path

import pytest

from tests.agreement import LOSS_TOLERANCE
from tests.conftest import assert_losses_agree, read_metrics, train_quickstart

LEARNING_RATE = {"adagrad": "0.05", "sgd": "20.0"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("parity")


def _train(folder: Path, optimizer: str, nproc: int, *options: str) -> Path:
    name = "_".join([optimizer, str(nproc), *options]).replace("--", "")
    if (folder / name).exists():
        return folder / name
    settings = ["--embedding.optimizer", optimizer, "--embedding.lr", LEARNING_RATE[optimizer]]
    settings += ["--train.global_batch_size", "1024", "--train.steps", "50", "--data.eval_samples", "1000"]
    return train_quickstart(folder, name, nproc, *settings, *options)


@pytest.mark.parametrize("optimizer", list(LEARNING_RATE))
@pytest.mark.parametrize("nproc", [2, 4])
def test_losses_agree_for_any_number_of_ranks(folder: Path, optimizer: str, nproc: int) -> None:
    reference = _train(folder, optimizer, 1)
    assert_losses_agree(_train(folder, optimizer, nproc), reference, LOSS_TOLERANCE[optimizer])
    losses = read_metrics(reference, "train/loss")
    assert len(losses) == 50
    assert losses[50] < 0.9 * losses[1], "a run that learns nothing agrees with anything"


def test_losses_agree_with_tables_cut_by_columns(folder: Path) -> None:
    sharded = _train(folder, "sgd", 2, "--embedding.plan", "column_wise")
    assert_losses_agree(sharded, _train(folder, "sgd", 1), LOSS_TOLERANCE["sgd"])


def test_the_pipeline_changes_nothing(folder: Path) -> None:
    plain = _train(folder, "sgd", 2, "--train.pipeline", "none")
    assert_losses_agree(plain, _train(folder, "sgd", 2), 0.0)
