"""What a run resumes from, and what it refuses, by the files of its folder alone."""

import errno
import os
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from dlrm_overlap.checkpoint.checkpoint import (
    Checkpointer,
    check_resume_fits,
    checkpoint_shape,
    samples_of,
    trained_with,
)
from dlrm_overlap.checkpoint.manifest import MANIFEST, Manifest, newest_checkpoint, read_manifest, write_manifest
from dlrm_overlap.checkpoint.pieces import Piece
from dlrm_overlap.checkpoint.tools import verify
from dlrm_overlap.config import Config, flatten
from dlrm_overlap.launching import files as files_module
from dlrm_overlap.observe.run_log import check_folder
from tests.conftest import configuration, refuses

pytestmark = pytest.mark.usefixtures("world_of_one")
ROWS = [10, 20]


def _config(*options: str) -> Config:
    return configuration("--config", "configs/quickstart.yaml", *options)


def _run(folder: Path, *options: str) -> Config:
    return _config("--log.dir", str(folder), "--log.name", "run", *options)


def _checkpointer(folder: Path, config: Config, world_size: int) -> Checkpointer:
    settings = trained_with(config, config.train.samples_per_rank(world_size) * world_size)
    return Checkpointer(folder, 2, checkpoint_shape(config, ROWS, config.data.dense_features), settings)


def _describe(checkpoint: Path, manifest: Manifest) -> None:
    checkpoint.mkdir(parents=True, exist_ok=True)
    write_manifest(checkpoint, manifest)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """The manifest of a checkpoint of the quickstart on two ranks."""
    checkpointer = _checkpointer(tmp_path, _config(), 2)
    _describe(tmp_path / "step_2", Manifest(2, checkpointer.shape, checkpointer.settings))
    return tmp_path / "step_2"


def _find(checkpoint: Path, *options: str, world_size: int = 2, changed: bool = False) -> Path | None:
    return _checkpointer(checkpoint.parent, _config(*options), world_size).resume("auto", changed, _path_of)


def _path_of(path: Path, _: Manifest) -> Path:
    return path


CHANGES = {
    "--train.batch_size 256": "train.global_batch_size 1024, now 512",
    "--train.seed 1": "train.seed 0, now 1",
    "--data.seed 1": "data.seed 0, now 1",
    "--data.eval_samples 9": "data.eval_samples 20000, now 9",
    "--data.tables.zipf_alpha 1.5": "data.tables.zipf_alpha 1.05, now 1.5",
    "--data.tables.multi_hot 3": "data.tables.multi_hot [4, '0..6', 1, 1, 2, 1, 1, 1], now 3",
    "--data.tables.rows [9,9,9,9,9,9,9,8]": "tables.rows [2000, 2000, 1000, 1000, 500, 500, 100, 20], now [9, 9, ",
    "--data.tables.ids any --data.tables.drift 9 --embedding.id_tables.rows 9": "tables.ids rows, now any",
}


def test_another_model_is_refused_with_all_that_differs(checkpoint: Path) -> None:
    other = "--model.dim 8 --model.bottom_mlp [8] --train.optimizer adam --embedding.weight_dtype fp16"
    config = _config(*other.split(), "--checkpoint.resume", str(checkpoint))
    with refuses() as error:
        check_resume_fits(config, [10, 21], 13, 1024)
    for difference in (
        "model.dim 16, this run has 8",
        "model.bottom_mlp [64, 16], this run has [8]",
        "rows [10, 20], this run has [10, 21]",
        "optimizers ['rowwise_adagrad', 'adagrad'], this run has ['rowwise_adagrad', 'adam']",
        "weight_dtype fp32, this run has fp16",
    ):
        assert difference in str(error.value)
    with refuses("global_batch_size 1024, now 7"):
        check_resume_fits(_config("--checkpoint.resume", str(checkpoint)), ROWS, 13, 7)
    check_resume_fits(_config("--checkpoint.resume", str(checkpoint)), ROWS, 13, 1024)


def test_all_that_differs_is_reported(checkpoint: Path, caplog: pytest.LogCaptureFixture) -> None:
    options = " ".join(CHANGES).split()
    with refuses() as error:
        _find(checkpoint, *options)
    assert all(change in str(error.value) for change in CHANGES.values())
    assert "; restore these values, accept the change with --checkpoint.allow_config_mismatch true" in str(error.value)
    with caplog.at_level("INFO", "dlrm_overlap"):
        assert _find(checkpoint, *options, changed=True) == checkpoint
    (line,) = caplog.messages
    assert all(change in line for change in CHANGES.values())


def test_every_key_that_decides_the_samples_is_compared() -> None:
    config, keys = _config(), {"train.global_batch_size", "train.seed"}
    free = {"data.workers", "data.prefetch", "data.eval_window"}
    in_rows = {"data.tables.count", "data.tables.hashed_rows"}
    every = flatten(config.as_dict()["data"], "data.").keys()
    assert trained_with(config, 1024).keys() - keys == every - free - in_rows


def test_samples_of_files_are_named_with_the_part_that_is_taken() -> None:
    """A part of the same files, such as other held-out samples, differs; synthetic samples have no fingerprint."""
    parts: Any = [SimpleNamespace(num_samples=n, fingerprint=lambda: "1000 samples, 5b9d4c0be1f2") for n in (750, 250)]
    endless: Any = SimpleNamespace(num_samples=None, fingerprint=lambda: "")
    assert samples_of(*parts) == {
        "training samples": "750 of 1000 samples, 5b9d4c0be1f2",
        "held-out samples": "250 of 1000 samples, 5b9d4c0be1f2",
    }
    assert samples_of(endless, endless) == {}


def test_settings_that_an_earlier_version_did_not_store_are_not_compared(checkpoint: Path) -> None:
    manifest = read_manifest(checkpoint)
    del manifest.settings["data.tables.rows"]
    manifest.settings["data.eval_fraction"] = 0.25  # which was the default
    _describe(checkpoint, manifest)
    assert _find(checkpoint, "--data.tables.rows", "900") == checkpoint


def test_a_resumed_run_may_change_what_does_not_decide_its_samples_or_model(checkpoint: Path) -> None:
    free = "--embedding.backend pgas --embedding.plan table_wise --embedding.lr 1 --train.lr 1 --train.steps 9"
    free += " --train.warmup_steps 5 --train.eval_every 3 --train.precision bf16 --train.pipeline graph"
    free += " --log.name x --log.every 2 --checkpoint.every 1 --data.workers 1 --data.prefetch 1"
    free += " --model.top_parallel tensor"
    assert _find(checkpoint, *free.split()) == checkpoint


@pytest.mark.parametrize("options", ["--train.batch_size 1024", "--train.batch_size 9 --train.global_batch_size 1024"])
def test_another_number_of_ranks_shares_the_global_batch(checkpoint: Path, options: str) -> None:
    assert _find(checkpoint, *options.split(), world_size=1) == checkpoint
    with refuses("global_batch_size 1024, now 512"):
        _find(checkpoint, world_size=1)


@pytest.mark.parametrize("resume", ["auto", "never", "elsewhere/step_2"])
def test_an_earlier_runs_results_are_not_written_over(tmp_path: Path, resume: str) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "summary.json").write_text("{}")
    with refuses(r"log\.name: .*run has .* move them aside with --log\.overwrite true, or"):
        check_folder(_run(tmp_path, "--checkpoint.resume", resume))


@pytest.mark.parametrize("logged", ["", '{"step": 1}\n'])
def test_a_run_that_ended_before_its_first_checkpoint_may_be_started_again(tmp_path: Path, logged: str) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text(logged)
    (tmp_path / "run" / "config.yaml").write_text("train: {}")
    check_folder(_run(tmp_path))


def test_a_run_resumes_from_its_own_checkpoints_alone(tmp_path: Path) -> None:
    older, newest = (tmp_path / "run" / "checkpoints" / name for name in ("step_9", "step_10"))
    for path in (older, newest):
        path.mkdir(parents=True)
    (tmp_path / "run" / "summary.json").write_text("{}")
    for resume in ("never", "elsewhere/step_2"):
        with refuses(rf"resume: {resume}, but {newest} is an earlier run's"):
            check_folder(_run(tmp_path, "--checkpoint.resume", resume))
    for resume in ("auto", str(newest), str(older), f"{older}/../step_10"):
        check_folder(_run(tmp_path, "--checkpoint.resume", resume))
    check_folder(_run(tmp_path, "--checkpoint.resume", str(older), "--log.name", "another"))
    slow, link = tmp_path / "slow_disk", tmp_path / "link"
    newest.rename(slow)
    newest.symlink_to(slow)
    link.symlink_to(older)
    for resume in (str(slow), str(link), str(older)):
        check_folder(_run(tmp_path, "--checkpoint.resume", resume))
    with refuses("is an earlier run's"):
        check_folder(_run(tmp_path, "--checkpoint.resume", str(tmp_path / "gone")))


def test_checkpoints_on_a_disk_that_is_not_mounted_do_not_let_a_run_start_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run, disk = tmp_path / "run" / "checkpoints", tmp_path / "disk"
    for step in (1, 2):
        Checkpointer(disk, 2, {}).write(step, [])
    run.mkdir(parents=True)
    (run / "step_1").symlink_to(disk / "step_1")
    (run / "step_2").symlink_to(tmp_path / "unmounted" / "step_2")
    check_folder(_run(tmp_path, "--checkpoint.resume", str(run / "step_1")))
    assert newest_checkpoint(run) == run / "step_2"
    with caplog.at_level("WARNING", "dlrm_overlap"):
        assert Checkpointer(run, 2, {}).resume("auto", False, _path_of) == run / "step_1"
    assert caplog.messages[-1].startswith(f"checkpoint.resume: {run}/step_2/{MANIFEST} cannot be read (No such file")
    shutil.rmtree(run)
    run.symlink_to(tmp_path / "unmounted")
    with refuses(rf"checkpoint: {run} is there, but cannot be read \(No such file or directory\); mount "):
        check_folder(_run(tmp_path))


def test_a_folder_of_checkpoints_that_may_not_be_listed_is_not_taken_for_an_empty_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run" / "checkpoints"
    Checkpointer(run, 2, {}).write(1, [])
    monkeypatch.setattr(os, "listdir", Mock(side_effect=PermissionError(errno.EACCES, "Permission denied")))
    monkeypatch.setattr(os, "scandir", os.listdir)
    with refuses(rf"checkpoint: {run} is there, but cannot be read \(Permission denied\); "):
        newest_checkpoint(run)


def test_the_last_saves_are_kept_and_the_last_one_is_resumed_from(tmp_path: Path) -> None:
    """Also where a run resumed from an earlier checkpoint; what cannot be read is removed first."""

    def save(*steps: int) -> list[str]:
        for step in steps:
            Checkpointer(tmp_path, 2, {}).write(step, [])
        return sorted(path.name for path in tmp_path.iterdir())

    assert save(10, 20, 30) == ["step_20", "step_30"]
    assert save(25) == ["step_25", "step_30"]
    assert newest_checkpoint(tmp_path) == tmp_path / "step_25"
    (tmp_path / "step_40").mkdir()  # its manifest is gone
    assert save(30) == ["step_25", "step_30"], "instead of the older one"
    assert newest_checkpoint(tmp_path) == tmp_path / "step_30"


def _names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


def test_a_checkpoint_that_was_moved_and_linked_back_loses_only_its_link(tmp_path: Path) -> None:
    folder, archive = tmp_path / "checkpoints", tmp_path / "archive"
    archive.mkdir()
    for step in (1, 2, 2, 3, 4):
        path = Checkpointer(folder, 2, {}).write(step, [])
        if step < 3:
            target = archive / f"{path.name}_{len(_names(archive))}"
            path.rename(target)
            path.symlink_to(target)
    assert _names(folder) == ["step_3", "step_4"]
    assert _names(archive) == ["step_1_0", "step_2_1", "step_2_2"]
    assert all(verify(archive / name) == [] for name in _names(archive))


def test_whatever_has_the_name_of_a_save_is_replaced_by_it(tmp_path: Path) -> None:
    folder, mine = tmp_path / "checkpoints", tmp_path / "mine"
    mine.mkdir()
    (mine / "notes").touch()
    folder.mkdir()
    (folder / ".partial_removed_step_1").touch()
    (folder / ".partial_x").symlink_to(mine)
    (folder / ".partial_gone").symlink_to(tmp_path / "gone")
    (folder / ".partial_step_1").symlink_to(mine)
    os.mkfifo(folder / ".partial_pipe")
    (folder / "step_1").touch()
    (folder / "step_2").symlink_to(tmp_path / "gone")
    for step in (1, 2):
        assert verify(Checkpointer(folder, 2, {}).write(step, [])) == []
    (folder / ".partial_step_3").touch()
    Checkpointer(folder, 2, {}).write(3, [])
    assert _names(folder) == ["step_2", "step_3"]
    assert _names(mine) == ["notes"]


def test_what_cannot_be_removed_does_not_keep_a_save_from_being_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as a file that a reader has open on NFS; also if an earlier folder of the step was not removed either."""
    left = [tmp_path / ".partial_removed_step_3_0", tmp_path / "step_3"]
    for folder in left:
        folder.mkdir()
        (folder / ".nfs1").touch()
    discard = Mock(side_effect=OSError(errno.ENOTEMPTY, "Directory not empty"))
    monkeypatch.setattr(files_module, "discard", discard)
    Checkpointer(tmp_path, 2, {}).write(3, [])
    removed = tmp_path / ".partial_removed_step_3_1"
    assert [call.args for call in discard.call_args_list] == [(left[0],), (removed,)]
    assert (removed / ".nfs1").exists()
    assert newest_checkpoint(tmp_path) == tmp_path / "step_3"


def test_the_newest_that_is_whole_is_found(checkpoint: Path, caplog: pytest.LogCaptureFixture) -> None:
    manifest, newer = read_manifest(checkpoint), checkpoint.with_name("step_4")
    files = {"__0_0.distcp": [Piece(7, "0" * 32)]}
    _describe(newer, replace(manifest, step=4, saved=1, files=files))
    _describe(checkpoint.with_name("step_6"), manifest)
    (checkpoint.with_name("step_6") / MANIFEST).write_text("{")
    with caplog.at_level("WARNING", "dlrm_overlap"):
        assert _find(checkpoint) == checkpoint
    (text,) = caplog.messages
    assert f"{checkpoint.with_name('step_6') / MANIFEST} is damaged" in text
    assert text.endswith(f"resuming from {checkpoint}, the newest complete one")
    with refuses(rf"resume: {newer}/__0_0.distcp cannot be read \(No such file"):
        _checkpointer(checkpoint.parent, _config(), 2).resume(str(newer), False, _path_of)
    _describe(checkpoint, replace(manifest, files=files))
    with refuses("no earlier checkpoint is complete; name another checkpoint, or start over"):
        _find(checkpoint)
    _describe(newer, replace(manifest, format=2))
    with refuses(f"{newer}/{MANIFEST} has format 2, but this version reads 5"):
        _checkpointer(checkpoint.parent, _config(), 2).resume(str(newer), False, _path_of)
