"""A restarted job drops `log.overwrite` and `checkpoint.resume` only once it has saved in the run's folder itself."""

from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from dlrm_overlap.checkpoint.manifest import Manifest, write_manifest
from dlrm_overlap.comm import every_rank
from dlrm_overlap.config import Config
from dlrm_overlap.launching.launcher import World
from dlrm_overlap.observe.restarts import continued, is_restart, note_job
from dlrm_overlap.train.ranks import Ranks
from tests.conftest import configuration

SLURM, AGAIN = {"SLURM_JOB_ID": "77"}, {"SLURM_RESTART_COUNT": "1"}
TORCHRUN, RESTARTED = {"TORCHELASTIC_RUN_ID": "a1", "TORCHELASTIC_RESTART_COUNT": "0"}, "TORCHELASTIC_RESTART_COUNT"
OVERWRITE = ["--log.overwrite", "true"]


def _save(folder: Path, step: int, saved: int) -> None:
    path = folder / "run" / "checkpoints" / f"step_{step}"
    path.mkdir(parents=True, exist_ok=True)
    write_manifest(path, Manifest(step, {}, saved=saved))


def _config(folder: Path, *options: str) -> Config:
    return configuration("--config", "quickstart", "--log.dir", str(folder), "--log.name", "run", *options)


def _begin(folder: Path, environ: dict[str, str], options: list[str]) -> bool:
    """Begin the job's run as `train` does, and return whether it drops the keys."""
    config = _config(folder, *options)
    found = continued(config, environ) if is_restart(environ) else config
    note_job(folder / "run", found, environ)
    if found is config:
        return False
    assert (found.log.overwrite, found.checkpoint.resume) == (False, "auto")
    return True


@pytest.mark.parametrize("options", [OVERWRITE, ["--checkpoint.resume", "never"], ["--checkpoint.resume", "step_5"]])
@pytest.mark.parametrize(
    ("first", "second"), [(SLURM, SLURM | AGAIN), (TORCHRUN, TORCHRUN | {RESTARTED: "1"}), (SLURM, SLURM)]
)
def test_a_restart_goes_on_from_what_its_job_has_saved(
    tmp_path: Path, options: list[str], first: dict[str, str], second: dict[str, str]
) -> None:
    (tmp_path / "run").mkdir()
    _save(tmp_path, 10, saved=4)  # an earlier run's
    assert not _begin(tmp_path, first, options)
    assert not _begin(tmp_path, second, options), "it has saved nothing"
    _save(tmp_path, 10, saved=5)  # after it went back
    for _ in range(2):  # also a restart that has saved nothing more
        assert _begin(tmp_path, second, options) == (second != first)
    assert not _begin(tmp_path, second | {"SLURM_JOB_ID": "78"}, options), "another job"


def test_a_restart_is_one_on_each_machine_of_torchrun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the machine where a rank has failed counts it."""
    monkeypatch.delenv(RESTARTED, raising=False)
    meet = Mock()
    monkeypatch.setattr(Ranks, "meet", meet)
    for others in (False, True):
        monkeypatch.setattr(every_rank, "gathered", lambda own, group, others=others: [own, others])
        for local_size, source in ((1, "torchrun"), (2, "torchrun"), (1, "slurm")):
            world = World(0, 0, 2, local_size, "127.0.0.1", 1, source)
            ranks = Ranks(_config(tmp_path), None, world, torch.device("cpu"))
            assert ranks.are_restarted() == (others and (local_size, source) == (1, "torchrun"))
    assert meet.call_count == 2, "one machine alone, or one launcher for all, needs no other rank"


def test_a_job_that_ended_before_it_began_its_run_does_not_take_an_earlier_one(tmp_path: Path) -> None:
    _save(tmp_path, 10, saved=1)
    config = _config(tmp_path, *OVERWRITE)
    assert continued(config, SLURM | AGAIN) is config
    (tmp_path / "run" / "job.txt").write_bytes(b"\xff")
    assert continued(config, SLURM | AGAIN) is config


def test_a_command_without_these_keys_stays_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    assert not _begin(tmp_path, SLURM, [])
    _save(tmp_path, 10, saved=1)
    assert not _begin(tmp_path, SLURM | AGAIN, [])


@pytest.mark.parametrize("environ", [{}, {"TORCHELASTIC_RUN_ID": "none"}])
def test_a_run_that_is_no_job_writes_none(tmp_path: Path, environ: dict[str, str]) -> None:
    note_job(tmp_path, _config(tmp_path), environ)
    assert list(tmp_path.iterdir()) == []
