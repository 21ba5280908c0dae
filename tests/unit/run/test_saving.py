import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from dlrm_overlap.checkpoint.background import BackgroundWrites
from dlrm_overlap.checkpoint.checkpoint import Checkpointer, extents_to_store
from dlrm_overlap.checkpoint.extents import Extent
from dlrm_overlap.checkpoint.manifest import read_manifest
from dlrm_overlap.checkpoint.saving import Saves
from dlrm_overlap.checkpoint.tools import verify
from dlrm_overlap.config import InputError
from dlrm_overlap.train.trainer import Trainer
from tests.agreement import assert_all_near
from tests.conftest import file_limit, refuses
from tests.distributed.workers import make_trainer, quickstart
from tests.unit.run.test_trainer import SMALL, checkpoints

pytestmark = [pytest.mark.usefixtures("world_of_one"), pytest.mark.filterwarnings("ignore::FutureWarning")]
ASYNC = ["--checkpoint.asynchronous", "true", "--checkpoint.keep", "9"]


def _fit(folder: Path, *options: str) -> dict[str, Any]:
    return make_trainer(quickstart(folder, "run", *SMALL, *options)).fit()


def _loaded(trainer: Trainer, path: Path) -> dict[str, torch.Tensor]:
    trainer.checkpointer.load(path, trainer.model, trainer.optimizer)
    return {extent.name: extent.tensor.clone() for extent in extents_to_store(trainer.model, trainer.optimizer)}


def test_a_save_holds_the_state_after_its_step_though_steps_follow_before_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    every = ["--checkpoint.every", "2"]
    _fit(tmp_path / "stops", *every)
    trainer = make_trainer(quickstart(tmp_path / "async", "run", *SMALL, *ASYNC, *every, "--train.steps", "5"))
    write = Checkpointer.write

    def late(self: Checkpointer, step: int, *others: Any) -> Path:
        metrics = self.about["trained_metrics"]
        # The first is written once the next one has begun, which replaces what is known of the run.
        while trainer.progress.step < step + 1 or (step == 2 and self.about["trained_metrics"] is metrics):
            time.sleep(0.001)
        return write(self, step, *others)

    monkeypatch.setattr(Checkpointer, "write", late)
    trainer.fit()
    for name in ("step_2", "step_4"):
        stops, saved = (tmp_path / folder / "run/checkpoints" / name for folder in ("stops", "async"))
        assert verify(saved) == []
        found, expected = (read_manifest(each).about["trained_metrics"] for each in (saved, stops))
        assert found == expected
        assert_all_near(_loaded(trainer, saved), _loaded(trainer, stops), 0.0, name)


def test_a_copy_keeps_the_shards_of_a_table_apart() -> None:
    """A rank may have several shards of a table, and the next save copies to the same memory."""
    saves = Saves(quickstart(Path(), "run", *SMALL), Mock(), Mock(), Mock(), torch.device("cpu"), Mock(), Mock())
    shards = [Extent(("model", "t"), (3, 8), (0, column), torch.rand(3, 4)) for column in (0, 4)]
    states = [Extent(("optimizer", "t"), (3,), (0,), torch.rand(3), columns=(column, column + 4)) for column in (0, 4)]
    for _ in range(2):
        copies = saves._copy([*shards, *states])
        for copy, source in zip(copies, [*shards, *states], strict=True):
            assert torch.equal(copy.tensor, source.tensor)
            source.tensor.add_(1.0)
            assert not torch.equal(copy.tensor, source.tensor)


def test_a_save_after_which_kernels_have_recorded_a_fault_is_not_kept(tmp_path: Path) -> None:
    options = [*ASYNC, "--checkpoint.every", "1", "--log.every", "4"]
    trainer = make_trainer(quickstart(tmp_path, "run", *SMALL, *options))
    trainer.saves._check = Mock(side_effect=RuntimeError("rank 0 waited for rank 1"))
    with pytest.raises(RuntimeError, match="rank 0 waited for rank 1"):
        trainer.fit()
    assert checkpoints(tmp_path) == []


@pytest.mark.slow
def test_a_save_that_finds_no_room_ends_the_run_by_name(tmp_path: Path) -> None:
    options = [*ASYNC, "--checkpoint.every", "1"]
    _fit(tmp_path, *options, "--train.steps", "2")
    with file_limit(100_000), refuses(r"step_3 cannot be written \(File too large"):
        _fit(tmp_path, *options, "--train.steps", "6")
    assert checkpoints(tmp_path) == ["step_1", "step_2"]


def test_no_room_for_copies_is_reported_before_the_first_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make_trainer(quickstart(tmp_path, "run", *SMALL, *ASYNC, "--checkpoint.every", "1"))
    monkeypatch.setattr("dlrm_overlap.checkpoint.saving.available_memory_bytes", lambda: 1000)
    with refuses(r"asynchronous: copies of the state need \S+ GB of this machine's memory"):
        trainer.fit()
    on_a_gpu = [SimpleNamespace(tensor=SimpleNamespace(nbytes=600, is_cuda=True))]
    monkeypatch.setattr("dlrm_overlap.checkpoint.saving.extents_to_store", lambda *_: on_a_gpu)
    with refuses(r"1\.02e-06 GB"):
        trainer.saves.prepare(local_ranks=1)


@pytest.mark.slow
def test_a_failed_save_is_raised_at_the_next_log_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failing = property(lambda self: self._background is not None and self._background.exception() is not None)
    monkeypatch.setattr(Saves, "failed", failing)  # waits, so that the step is certain
    options = [*ASYNC, "--checkpoint.every", "2", "--train.steps", "9"]
    trainer = make_trainer(quickstart(tmp_path, "run", *SMALL, *options))
    monkeypatch.setattr(trainer.checkpointer, "write", Mock(side_effect=InputError("step_2: full")))
    with refuses("step_2: full"):
        trainer.fit()
    assert trainer.progress.step < 9


class _Given:
    """Notes the threads that free one."""

    def __init__(self, freed: list[threading.Thread]) -> None:
        self._freed = freed

    def __del__(self) -> None:
        self._freed.append(threading.current_thread())


def test_what_a_thread_writes_is_freed_by_the_main_thread_that_waits_for_it() -> None:
    """Pinned memory must not be freed while the main thread may capture the stream that has used it."""
    freed, writes = list[threading.Thread](), BackgroundWrites[None]("write", wait_timeout_s=1.0)
    future = writes._write_in_background(lambda _: None, _Given(freed))
    future.result()
    time.sleep(0.01)
    assert freed == []
    writes.finish()
    assert freed == [threading.main_thread()]
