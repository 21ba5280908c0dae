"""Two ranks and the folder of their run: what one rank finds there ends all."""

import math
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dlrm_overlap.checkpoint import checkpoint
from dlrm_overlap.checkpoint.saving import NotFiniteError
from dlrm_overlap.config import InputError
from dlrm_overlap.data.batch import Batch
from dlrm_overlap.launching.files import hold_folder
from dlrm_overlap.launching.watch import Watch
from dlrm_overlap.observe.run_folder import from_rank_0, hold_run_folder
from dlrm_overlap.train.trainer import Trainer
from tests.conftest import read_metrics, refuses
from tests.distributed.workers import quickstart, run_ranks, train

pytestmark = pytest.mark.slow

SMALL = ["--train.batch_size", "32", "--data.eval_samples", "256", "--train.eval_every", "0", "--data.workers", "0"]


def _fail(error: Exception) -> Any:
    raise error


def _check_what_rank_0_finds(folder: Path) -> None:
    assert from_rank_0(lambda: [dist.get_rank(), None]) == [0, None]
    with refuses("a user's mistake"):
        from_rank_0(lambda: _fail(InputError("a user's mistake")))
    with pytest.raises(RuntimeError, match="a bug") as error:
        from_rank_0(lambda: _fail(KeyError("a bug")) if dist.get_rank() else _fail(RuntimeError("a bug")))
    assert str(error.value).startswith("rank 0 has failed") is (dist.get_rank() == 1)


def _check_a_lock_refuses_all(folder: Path) -> None:
    if dist.get_rank() == 1:  # any process but rank 0 stands for that of another run
        (folder / "locked").mkdir()
        held = hold_folder(folder / "locked", "log.dir")
        held.__enter__()
    dist.barrier()
    with refuses("locked is in use by process"), hold_run_folder(folder / "locked"):
        pass
    dist.barrier()
    if dist.get_rank() == 1:
        held.__exit__(None, None, None)
    dist.barrier()
    with hold_run_folder(folder / "locked"):
        dist.barrier()


def _check_ranks_that_see_other_folders(folder: Path) -> None:
    """Each rank has its own working folder, as if on its own node, and `log.dir` in it."""
    saves = [*SMALL, "--checkpoint.last", "true", "--checkpoint.every", "2", "--train.steps", "4"]
    whole = train(quickstart(folder, "whole", *saves))
    here = folder / f"node_{dist.get_rank()}"
    here.mkdir()
    os.chdir(here)
    for seen in ("nothing", "an older one", "another", "the same"):
        shutil.rmtree("runs", ignore_errors=True)
        if dist.get_rank() == 0 or seen == "the same":
            shutil.copytree(whole, "runs/run")
        elif seen != "nothing":
            name = "step_2" if seen == "an older one" else "step_4"
            shutil.copytree(whole / "checkpoints" / "step_2", f"runs/run/checkpoints/{name}")
        goes_on = quickstart(Path("runs"), "run", *SMALL, "--train.steps", "6")
        if seen == "the same":
            train(goes_on)
            continue
        with refuses(r"rank 1 and rank 0 see different files in \S+step_4"):
            train(goes_on)
    if dist.get_rank() == 0:
        assert list(read_metrics(Path("runs/run"), "train/loss")) == list(range(1, 7))
    # The same checkpoint on each node: to save another, the ranks need one folder.
    before = sorted(Path("runs/run/checkpoints").iterdir())
    with pytest.MonkeyPatch.context() as patch, refuses("rank 1 does not see what rank 0 writes to"):
        patch.setattr(checkpoint, "_SEEN_WITHIN_S", 0.0)
        train(quickstart(Path("runs"), "run", *SMALL, "--train.steps", "8", "--checkpoint.every", "2"))
    assert sorted(Path("runs/run/checkpoints").iterdir()) == before
    os.chdir(folder)


def _check_one_ranks_nan_ends_all(folder: Path) -> None:
    """The loss of rank 1 in step 3 is NaN: the good checkpoint of step 2 stays, and both end with the same error."""
    options = [*SMALL, "--train.steps", "8", "--checkpoint.every", "2", "--checkpoint.keep", "1", "--log.every", "8"]
    take = Trainer.step
    taken = 0

    def broken(self: Trainer, batches: Iterator[Batch]) -> torch.Tensor:
        nonlocal taken
        taken += 1
        loss = take(self, batches)
        return loss * math.nan if taken == 3 and dist.get_rank() == 1 else loss

    said: list[Any] = [None, None]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "step", broken)
        with pytest.raises(NotFiniteError) as error:
            train(quickstart(folder, "nan", *options))
    dist.all_gather_object(said, str(error.value))
    assert said[0] == said[1]
    assert said[0].startswith("step 4: the training loss is nan")
    assert taken == 4
    assert [path.name for path in (folder / "nan" / "checkpoints").iterdir()] == ["step_2"]


def _check_a_removed_folder_ends_all(folder: Path) -> None:
    """Only rank 0 sees the folder; all end at its next log line."""
    take = Trainer.step

    def and_remove(self: Trainer, batches: Iterator[Batch]) -> torch.Tensor:
        if self.progress.step == 3 and dist.get_rank() == 0:
            shutil.rmtree(folder / "removed")
        return take(self, batches)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "step", and_remove)
        with refuses(r"^log\.dir: step 4: .*removed, or metrics\.jsonl in it, was removed"):
            train(quickstart(folder, "removed", *SMALL, "--train.steps", "8", "--log.every", "2"))


def _check_a_rank_that_moves_is_waited_for(folder: Path) -> None:
    """Longer than the timeout that ends a rank that stands still."""
    store = dist.FileStore(str(folder / "watch"), 2)  # pyright: ignore[reportPrivateImportUsage]
    watch = Watch(store, dist.get_rank(), 2, timeout_s=1.0)
    for _ in range(40 * dist.get_rank()):
        watch.progress.tick()
        time.sleep(0.1)
    dist.barrier()
    watch.close()


CHECKS: dict[str, list[Callable[[Path], None]]] = {
    "agree": [_check_what_rank_0_finds, _check_a_lock_refuses_all, _check_a_rank_that_moves_is_waited_for],
    "end": [_check_ranks_that_see_other_folders, _check_one_ranks_nan_ends_all, _check_a_removed_folder_ends_all],
}


def _run(folder: Path, name: str) -> None:
    for check in CHECKS[name]:
        check(folder)
        dist.barrier()


@pytest.mark.parametrize("name", CHECKS)
def test_two_ranks_act_as_one(tmp_path: Path, name: str) -> None:
    run_ranks(_run, 2, tmp_path, name)
