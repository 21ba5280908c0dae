"""A top MLP that is divided over the ranks trains like a replicated one, and resumes from its checkpoint."""

from pathlib import Path

import pytest
import torch.distributed as dist

from tests.agreement import LOSS_TOLERANCE
from tests.conftest import assert_losses_agree, read_metrics
from tests.distributed.workers import quickstart, run_ranks, train

pytestmark = pytest.mark.slow

# Layers 1 and 2 and layers 3 and 4 are pairs, layer 5 has none.
COMMON = ["--model.top_mlp", "[48,20,32,16,8,1]", "--train.global_batch_size", "192", "--data.eval_samples", "300"]
# Adagrad hides a gradient of another size, which SGD shows; its state, which SGD has not, is part of a checkpoint.
ADAGRAD = ["--train.steps", "40", "--checkpoint.every", "20"]
SGD = ["--train.steps", "30", "--train.optimizer", "sgd", "--train.lr", "0.5"]
GRAPH = ["--embedding.backend", "pgas", "--train.pipeline", "graph"]
TENSOR = ["--model.top_parallel", "tensor"]


def _run(folder: Path, name: str, *options: str) -> None:
    train(quickstart(folder, f"{name}_{dist.get_world_size()}", *COMMON, *options))


def _from(folder: Path, run: str, step: int = 20) -> list[str]:
    return ["--train.steps", "30", "--checkpoint.resume", str(folder / run / "checkpoints" / f"step_{step}")]


def _train_on_one(folder: Path) -> None:
    _run(folder, "adagrad", *ADAGRAD, *TENSOR)
    _run(folder, "sgd", *SGD, *TENSOR)


def _train_on_two(folder: Path) -> None:
    _run(folder, "sgd", *SGD, *TENSOR)
    _run(folder, "sgd_graph", *SGD, *TENSOR, *GRAPH)
    _run(folder, "adagrad", *ADAGRAD, *TENSOR, *GRAPH)
    _run(folder, "goes_on", *_from(folder, "adagrad_1"), *TENSOR, "--embedding.backend", "nccl")


def _train_on_four(folder: Path) -> None:
    _run(folder, "adagrad", *ADAGRAD, *TENSOR)
    _run(folder, "goes_on", *_from(folder, "adagrad_2"), *TENSOR, *GRAPH, "--train.flat_dense", "false")


def _go_on_undivided(folder: Path) -> None:
    _run(folder, "whole", *_from(folder, "adagrad_4"), "--checkpoint.every", "5")


def _go_on_divided_again(folder: Path) -> None:
    _run(folder, "goes_on", *_from(folder, "whole_2", 25), *TENSOR)  # 3 ranks divide the first pair alone


def _go_on_alone(folder: Path) -> None:
    _run(folder, "goes_on", *_from(folder, "adagrad_4"))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folders of runs; names end in the number of ranks; the layers of one rank are whole."""
    folder = tmp_path_factory.mktemp("runs")
    works = (_train_on_one, 1), (_train_on_two, 2), (_train_on_four, 4), (_go_on_undivided, 2)
    for work, ranks in (*works, (_go_on_divided_again, 3), (_go_on_alone, 1)):
        run_ranks(work, ranks, folder)
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
def test_goes_on_from_a_checkpoint_of_layers_that_were_divided_otherwise(runs: Path, run: str) -> None:
    losses, expected = read_metrics(runs / run, "train/loss"), read_metrics(runs / "adagrad_1", "train/loss")
    assert min(losses) == (26 if run == "goes_on_3" else 21)
    for step, loss in losses.items():
        assert loss == pytest.approx(expected[step], rel=LOSS_TOLERANCE["adagrad"]), step
