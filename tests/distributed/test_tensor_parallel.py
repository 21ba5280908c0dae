"""A top MLP that is divided over the ranks trains as a replicated one does, and resumes from its checkpoint."""

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

import pytest

from tests.agreement import LOSS_TOLERANCE
from tests.conftest import assert_losses_agree, read_metrics
from tests.distributed.workers import quickstart, run_ranks, train

pytestmark = pytest.mark.slow

# Layers 1 and 2 and layers 3 and 4 are pairs, layer 5 has none.
COMMON = ["--model.top_mlp", "[48,20,32,16,8,1]", "--train.global_batch_size", "192", "--data.eval_samples", "300"]
# SGD shows a gradient of another size, which Adagrad hides; Adagrad has a state, which is part of a checkpoint.
ADAGRAD = ["--train.steps", "40", "--checkpoint.every", "20"]
SGD = ["--train.steps", "30", "--train.optimizer", "sgd", "--train.lr", "0.5"]
GRAPH = ["--embedding.backend", "pgas", "--train.pipeline", "graph"]
TENSOR = ["--model.top_parallel", "tensor"]


RUNS = [  # name, which ends in the number of ranks; the checkpoint that it starts from; options
    ("adagrad_1", "", [*ADAGRAD, *TENSOR]),
    ("sgd_1", "", [*SGD, *TENSOR]),
    ("sgd_2", "", [*SGD, *TENSOR]),
    ("sgd_graph_2", "", [*SGD, *TENSOR, *GRAPH]),
    ("adagrad_2", "", [*ADAGRAD, *TENSOR, *GRAPH]),
    ("goes_on_2", "adagrad_1/checkpoints/step_20", [*TENSOR, "--embedding.backend", "nccl"]),
    ("adagrad_4", "", [*ADAGRAD, *TENSOR]),
    ("goes_on_4", "adagrad_2/checkpoints/step_20", [*TENSOR, *GRAPH, "--train.flat_dense", "false"]),
    ("whole_2", "adagrad_4/checkpoints/step_20", ["--checkpoint.every", "5"]),
    ("goes_on_3", "whole_2/checkpoints/step_25", TENSOR),  # 3 ranks divide the first pair alone
    ("goes_on_1", "adagrad_4/checkpoints/step_20", []),
]


def _train_some(_: Path, folder: Path, runs: Sequence[tuple[str, str, list[str]]]) -> None:
    for name, start, options in runs:
        resume = ["--train.steps", "30", "--checkpoint.resume", str(folder / start)] if start else []
        train(quickstart(folder, name, *COMMON, *resume, *options))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folders of all runs; the layers of one rank are whole."""
    folder = tmp_path_factory.mktemp("runs")
    for ranks, some in groupby(RUNS, lambda run: int(run[0][-1])):
        run_ranks(_train_some, ranks, tmp_path_factory.mktemp("ranks"), folder, list(some))
    return folder


@pytest.mark.parametrize("run", ["sgd_2", "sgd_graph_2", "adagrad_2", "adagrad_4"])
def test_losses_are_those_of_whole_layers(runs: Path, run: str) -> None:
    optimizer = run.partition("_")[0]
    reference = runs / f"{optimizer}_1"
    assert_losses_agree(runs / run, reference, LOSS_TOLERANCE[optimizer])
    evaluated = read_metrics(reference, "eval/loss")
    assert evaluated
    assert read_metrics(runs / run, "eval/loss") == pytest.approx(evaluated, rel=LOSS_TOLERANCE["sgd"], abs=0)
    losses = read_metrics(reference, "train/loss")
    assert losses[len(losses)] < 0.99 * losses[1], "a run that learns nothing agrees with anything"


@pytest.mark.parametrize("run", ["goes_on_2", "goes_on_4", "whole_2", "goes_on_3", "goes_on_1"])
def test_goes_on_from_a_checkpoint_of_layers_that_were_divided_in_another_way(runs: Path, run: str) -> None:
    losses, expected = read_metrics(runs / run, "train/loss"), read_metrics(runs / "adagrad_1", "train/loss")
    assert min(losses) == (26 if run == "goes_on_3" else 21)
    for step, loss in losses.items():
        assert loss == pytest.approx(expected[step], rel=LOSS_TOLERANCE["adagrad"]), step
