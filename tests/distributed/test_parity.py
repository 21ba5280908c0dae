"""With the same global batch, a run does not depend on how many ranks share it."""

from pathlib import Path

import pytest

from tests.agreement import LOSS_TOLERANCE
from tests.conftest import assert_losses_agree, read_metrics
from tests.distributed.workers import quickstart, ran_on_ranks, run_ranks, train

pytestmark = pytest.mark.slow

LEARNING_RATE = {"adagrad": "0.05", "sgd": "20.0"}
COMMON = ["--train.global_batch_size", "1024", "--train.steps", "50", "--data.eval_samples", "1000"]


def _train_with_all_optimizers(folder: Path) -> None:
    for optimizer, rate in LEARNING_RATE.items():
        train(quickstart(folder, optimizer, *COMMON, "--embedding.optimizer", optimizer, "--embedding.lr", rate))


reference = ran_on_ranks(1, _train_with_all_optimizers)


@pytest.mark.parametrize("ranks", [2, 4])
def test_losses_agree(reference: Path, tmp_path: Path, ranks: int) -> None:
    run_ranks(_train_with_all_optimizers, ranks, tmp_path)
    for optimizer in LEARNING_RATE:
        assert_losses_agree(tmp_path / optimizer, reference / optimizer, LOSS_TOLERANCE[optimizer])
        losses = read_metrics(reference / optimizer, "train/loss")
        assert len(losses) == 50
        assert losses[50] < 0.9 * losses[1], "a run that learns nothing agrees with anything"
