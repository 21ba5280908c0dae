"""Saves beside training, in a world of one: what they hold, and what becomes of those that fail."""

import math
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dlrm_overlap.checkpoint.checkpoint import Checkpointer
from dlrm_overlap.checkpoint.saving import NotFiniteError, Saves
from dlrm_overlap.checkpoint.storage.extents import Extent
from dlrm_overlap.checkpoint.storage.load import find_faults
from dlrm_overlap.checkpoint.storage.manifest import read_manifest
from dlrm_overlap.checkpoint.storage.snapshot import Reader, Snapshot
from dlrm_overlap.comm.record import ExchangeTimeoutError
from dlrm_overlap.config import InputError
from tests.conftest import file_limit
from tests.distributed.workers import make_trainer, quickstart
from tests.unit.run.test_trainer import SMALL, checkpoints

pytestmark = [pytest.mark.usefixtures("world_of_one"), pytest.mark.filterwarnings("ignore::FutureWarning")]
BESIDE = ["--checkpoint.asynchronous", "true", "--checkpoint.keep", "9"]


def _fit(folder: Path, *options: str) -> dict[str, Any]:
    return make_trainer(quickstart(folder, "run", *SMALL, *options)).fit()


def _extent(name: str, tensor: torch.Tensor) -> Extent:
    shape = tuple(tensor.shape)
    return Extent(name, shape, (0,) * len(shape), shape, tensor)


def test_a_save_holds_the_state_behind_its_step_though_steps_follow_before_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    every = ["--checkpoint.every", "2"]
    _fit(tmp_path / "stops", *every)
    trainer = make_trainer(quickstart(tmp_path / "beside", "run", *SMALL, *BESIDE, *every, "--train.steps", "5"))
    write = Checkpointer.write

    def late(self: Checkpointer, step: int, *others: Any) -> Path:
        while trainer.progress.step < min(step + 2, 5):
            time.sleep(0.001)
        return write(self, step, *others)

    monkeypatch.setattr(Checkpointer, "write", late)
    trainer.fit()
    for name in ("step_2", "step_4"):
        stops, beside = (tmp_path / folder / "run/checkpoints" / name for folder in ("stops", "beside"))
        assert find_faults(beside, read_manifest(beside)) == []
        found, expected = (read_manifest(each).about["trained_metrics"] for each in (beside, stops))
        assert found == expected
        assert (beside / "rank_0.safetensors").read_bytes() == (stops / "rank_0.safetensors").read_bytes()


def test_a_save_is_refused_for_the_loss_behind_it_and_says_so(tmp_path: Path) -> None:
    """Step 1's weights and state are finite, and give step 2 a loss that is not, which no log line has shown yet."""
    options = ["--train.optimizer", "adagrad", "--train.lr", "1e30", "--train.steps", "4", "--log.every", "4"]
    with pytest.raises(NotFiniteError, match="step 1: the loss of the step behind it is nan and must be finite"):
        _fit(tmp_path, *options, *BESIDE, "--checkpoint.every", "1")
    assert checkpoints(tmp_path) == []


def test_a_save_behind_which_kernels_have_recorded_a_fault_is_not_kept(tmp_path: Path) -> None:
    options = [*BESIDE, "--checkpoint.every", "1", "--log.every", "4"]
    trainer = make_trainer(quickstart(tmp_path, "run", *SMALL, *options))

    def recorded() -> None:
        raise RuntimeError("rank 0 waited for rank 1")

    trainer.saves._check = recorded
    with pytest.raises(RuntimeError, match="rank 0 waited for rank 1"):
        trainer.fit()
    assert checkpoints(tmp_path) == [], "nor is one of the steps between"


@pytest.mark.slow
def test_a_save_that_finds_no_room_ends_the_run_by_name(tmp_path: Path) -> None:
    options = [*BESIDE, "--checkpoint.every", "1"]
    _fit(tmp_path, *options, "--train.steps", "2")
    with file_limit(100_000), pytest.raises(InputError, match=r"step_3 cannot be written \(File too large"):
        _fit(tmp_path, *options, "--train.steps", "6")
    assert checkpoints(tmp_path) == ["step_1", "step_2"]


def test_a_save_is_given_no_more_time_once_a_wait_for_a_peer_has_expired(tmp_path: Path) -> None:
    trainer = make_trainer(quickstart(tmp_path, "run", *SMALL, "--embedding.wait_timeout_s", "7"))
    given: list[float] = []
    trainer.saves._thread = SimpleNamespace(join=given.append, is_alive=lambda: False)  # type: ignore[assignment]
    expired = ExchangeTimeoutError((0, 1, 0, 5, 4), 7.0)
    for error in (expired, InputError("on all ranks"), RuntimeError("a peer's connection")):
        trainer.saves.close(error)
    assert given == [0.0, 7.0, 10.0]


@pytest.mark.slow
def test_a_failed_save_is_raised_at_the_next_log_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not only at the next save, which may be hours away."""
    failing = property(lambda self: self._thread is not None and (self._thread.join() or True) and bool(self._error))
    monkeypatch.setattr(Saves, "failed", failing)  # waits, so that the step is certain
    trainer = make_trainer(
        quickstart(tmp_path, "run", *SMALL, *BESIDE, "--checkpoint.every", "2", "--train.steps", "9")
    )
    monkeypatch.setattr(
        trainer.checkpointer, "write", lambda *_, **__: (_ for _ in ()).throw(InputError("step_2: full"))
    )
    with pytest.raises(InputError, match="step_2: full"):
        trainer.fit()
    assert trainer.progress.step < 9


@pytest.mark.parametrize(
    ("name", "value", "fault"),
    [
        ("model.t.weight", math.nan, "a weight is nan or infinite"),
        ("optimizer.state.t.weight.sum", -math.inf, "an optimizer's state is nan or infinite"),
        ("model.t.weight", 3e38, ""),
    ],
)
def test_a_copy_is_apart_and_is_looked_through_for_what_is_not_finite(name: str, value: float, fault: str) -> None:
    source = torch.full((3, 2), 1.5)
    source[1, 1] = value
    snapshot = Snapshot(torch.device("cpu"), torch.device("cpu"))
    (copy,) = snapshot.reserve([_extent(name, source)])
    snapshot.take()
    before = source.clone()
    source.zero_()
    reader = Reader(torch.device("cpu"))
    torch.testing.assert_close(reader.to_cpu(name, copy.tensor.view(-1)), before.view(-1), equal_nan=True)
    assert (reader.fault, reader.read_bytes) == (fault, 24)
    reader.begin()
    assert (reader.fault, reader.read_bytes) == ("", 0)
