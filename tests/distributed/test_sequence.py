"""A model with histories on 2 processes: backends agree, a run goes on from a checkpoint, which evaluates the same."""

from pathlib import Path

import pytest

from dlrm_overlap.config import Config
from dlrm_overlap.embedding.unpooled import UnpooledIdSender
from dlrm_overlap.train.evaluation import evaluate
from dlrm_overlap.train.explain import explain
from tests.agreement import LOSS_TOLERANCE
from tests.conftest import assert_losses_agree, configuration, read_metrics
from tests.distributed.workers import make_trainer, ran_on_ranks, ranks_here, train

STEPS = 12


def _config(folder: Path, name: str, *options: str) -> Config:
    argv = ["--config", "configs/sequence.yaml", "--train.device", "cpu", "--train.steps", str(STEPS)]
    argv += ["--embedding.backend", "torchrec"]
    argv += ["--train.batch_size", "64", "--train.eval_every", "0", "--data.eval_samples", "1000"]
    argv += ["--log.dir", str(folder), "--log.name", name, "--log.every", "1", "--log.tensorboard", "false"]
    return configuration(*argv, *options)


def _work(folder: Path) -> None:
    whole = train(_config(folder, "torchrec", "--checkpoint.every", "6", "--checkpoint.keep", "3"))
    checkpoints = whole / "checkpoints"
    for backend in ("pgas", "fused"):
        options = "--embedding.backend", backend, "--train.pipeline", "graph", "--checkpoint.last", "false"
        train(_config(folder, backend, *options))
    nodes = ["--embedding.backend", "pgas", "--embedding.nodes", "2", "--train.pipeline", "graph"]
    trainer = make_trainer(_config(folder, "two_nodes", *nodes, "--checkpoint.last", "false"))
    assert all(table.exchanged for table in explain(trainer.model).tables)
    trainer.fit()
    senders = (getattr(module, "sender", None) for module in trainer.model.modules())
    (unpooled,) = [each for each in senders if isinstance(each, UnpooledIdSender)]
    slots = unpooled._blocks.slots * sum(unpooled._blocks.counts)
    assert slots < unpooled.capacity.ids["t_02"] / 8, "windows are for the distinct ids that the first batch has shown"
    trainer.close()
    start = ["--checkpoint.resume", str(checkpoints / "step_6"), "--checkpoint.last", "false"]
    train(_config(folder, "goes_on", *start))
    train(_config(folder, "goes_on_cut", *start, "--embedding.backend", "pgas", "--embedding.plan", "table_wise"))
    found = evaluate(ranks_here(_config(folder, "eval")), checkpoints / f"step_{STEPS}")
    assert found["auroc"] == read_metrics(whole, "eval/auroc")[STEPS]


runs = ran_on_ranks(2, _work)


@pytest.mark.parametrize("name", ["pgas", "fused", "two_nodes"])
def test_backends_agree(runs: Path, name: str) -> None:
    assert_losses_agree(runs / name, runs / "torchrec", LOSS_TOLERANCE["adagrad"])


@pytest.mark.parametrize(("name", "tolerance"), [("goes_on", 0.0), ("goes_on_cut", LOSS_TOLERANCE["adagrad"])])
def test_goes_on_after_a_checkpoint(runs: Path, name: str, tolerance: float) -> None:
    losses, whole = (read_metrics(runs / each, "train/loss") for each in (name, "torchrec"))
    assert list(losses) == list(range(7, STEPS + 1))
    assert losses == pytest.approx({step: whole[step] for step in losses}, rel=tolerance, abs=0)
