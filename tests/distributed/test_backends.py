"""Every backend trains as TorchRec does: the same losses, step by step, on two and four processes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torchrec.distributed import comm_ops
from torchrec.distributed.model_parallel import DistributedModelParallel

from dlrm_overlap.backends import EXCHANGED
from dlrm_overlap.checkpoint.checkpoint import Checkpointer
from tests.agreement import EVAL_TOLERANCE, LOSS_TOLERANCE
from tests.conftest import assert_losses_agree, read_metrics
from tests.distributed.workers import quickstart, ran_on_ranks, train

LEARNING_RATE = {"sgd": "20", "rowwise_adagrad": "0.1"}
COMMON = ["--train.global_batch_size", "256", "--train.steps", "20", "--train.eval_every", "7"]
COMMON += ["--train.warmup_steps", "5", "--data.eval_samples", "500"]  # the last batch goes past the end
COLUMNS = ["--embedding.plan", "column_wise"]
BF16 = ["--embedding.wire_dtype", "bf16"]
SAVING = ["--checkpoint.every", "10"]
RESUMED = [("rowwise_adagrad", "torchrec", "pgas"), ("rowwise_adagrad", "fused", "torchrec")]


def _run(folder: Path, name: str, backend: str, optimizer: str, *options: str) -> None:
    tables = ["--embedding.optimizer", optimizer, "--embedding.lr", LEARNING_RATE[optimizer]]
    train(quickstart(folder, name, *COMMON, "--embedding.backend", backend, *tables, *options))


def _resume(folder: Path, name: str, optimizer: str, writer: str, reader: str) -> None:
    start = folder / f"{optimizer}_{writer}" / "checkpoints" / "step_10"
    _run(folder, name, reader, optimizer, "--checkpoint.resume", str(start))


def _load_without_states(load: Callable[..., int]) -> Callable[..., int]:
    def load_and_forget(self: Checkpointer, path: Path, model: DistributedModelParallel, *others: Any) -> int:
        step = load(self, path, model, *others)
        for states in model.fused_optimizer.state_dict()["state"].values():
            for shard in (shard for state in states.values() for shard in state.local_shards()):
                shard.tensor.zero_()
        return step

    return load_and_forget


def _train_on_two_ranks(folder: Path) -> None:
    for backend in ("torchrec", *EXCHANGED):
        for optimizer in LEARNING_RATE:
            _run(folder, f"{optimizer}_{backend}", backend, optimizer, *SAVING)
    for each in RESUMED:
        _resume(folder, "_then_".join(each), *each)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Checkpointer, "load", _load_without_states(Checkpointer.load))
        _resume(folder, "forgotten", "rowwise_adagrad", "torchrec", "pgas")
    comm_ops.set_gradient_division(False)
    _run(folder, "undivided", "pgas", "sgd")


def _train_variants(folder: Path) -> None:
    _run(folder, "sgd_torchrec", "torchrec", "sgd")
    for backend in ("torchrec", *EXCHANGED):
        _run(folder, f"bf16_{backend}", backend, "sgd", *BF16)
    _run(folder, "graph", "pgas", "sgd", "--train.pipeline", "graph")


def _train_on_four_ranks(folder: Path) -> None:
    for backend in ("torchrec", *EXCHANGED):
        _run(folder, f"columns_{backend}", backend, "sgd", *COLUMNS)


two_ranks, variants = ran_on_ranks(2, _train_on_two_ranks), ran_on_ranks(2, _train_variants)
four_ranks = ran_on_ranks(4, _train_on_four_ranks)


def _assert_agrees(run: Path, reference: Path, rtol: float) -> None:
    assert_losses_agree(run, reference, rtol)
    evals, expected = read_metrics(run, "eval/loss"), read_metrics(reference, "eval/loss")
    assert list(evals) == list(expected) == [7, 14, 20]
    assert evals == pytest.approx(expected, rel=max(rtol, EVAL_TOLERANCE), abs=0)


@pytest.mark.parametrize("backend", EXCHANGED)
@pytest.mark.parametrize("optimizer", LEARNING_RATE)
def test_two_ranks_agree(two_ranks: Path, backend: str, optimizer: str) -> None:
    reference = two_ranks / f"{optimizer}_torchrec"
    _assert_agrees(two_ranks / f"{optimizer}_{backend}", reference, LOSS_TOLERANCE[optimizer])
    losses = read_metrics(reference, "train/loss")
    assert min(losses.values()) < 0.95 * losses[1], "a run that learns nothing agrees with anything"


@pytest.mark.slow
@pytest.mark.parametrize("backend", EXCHANGED)
def test_four_ranks_agree_on_tables_cut_by_columns(four_ranks: Path, backend: str) -> None:
    _assert_agrees(four_ranks / f"columns_{backend}", four_ranks / "columns_torchrec", LOSS_TOLERANCE["sgd"])


@pytest.mark.slow
def test_the_steps_of_the_captured_pipeline_agree(variants: Path) -> None:
    _assert_agrees(variants / "graph", variants / "sgd_torchrec", LOSS_TOLERANCE["sgd"])


def test_a_gradient_that_is_not_divided_is_caught(two_ranks: Path) -> None:
    with pytest.raises(AssertionError, match="relative error"):
        _assert_agrees(two_ranks / "undivided", two_ranks / "sgd_torchrec", LOSS_TOLERANCE["sgd"])


@pytest.mark.slow
@pytest.mark.parametrize("backend", EXCHANGED)
def test_bf16_wire(variants: Path, backend: str) -> None:
    run = variants / f"bf16_{backend}"
    _assert_agrees(run, variants / "bf16_torchrec", LOSS_TOLERANCE["bf16_wire"])
    assert read_metrics(run, "train/loss") != read_metrics(variants / "sgd_torchrec", "train/loss")


def _assert_continues(folder: Path, name: str, optimizer: str) -> None:
    losses = read_metrics(folder / name, "train/loss")
    expected = read_metrics(folder / f"{optimizer}_torchrec", "train/loss")
    after = {step: loss for step, loss in expected.items() if step > 10}
    assert losses == pytest.approx(after, rel=LOSS_TOLERANCE[optimizer], abs=0)


@pytest.mark.parametrize(("optimizer", "writer", "reader"), RESUMED)
def test_checkpoints_interchange(two_ranks: Path, optimizer: str, writer: str, reader: str) -> None:
    _assert_continues(two_ranks, f"{optimizer}_then_{writer}_then_{reader}", optimizer)


def test_a_state_that_does_not_cross_is_caught(two_ranks: Path) -> None:
    with pytest.raises(AssertionError, match="comparison failed"):
        _assert_continues(two_ranks, "forgotten", "rowwise_adagrad")
