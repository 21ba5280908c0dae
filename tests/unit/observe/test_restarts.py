"""A restarted job drops `log.overwrite` and `checkpoint.resume` only once it has saved in the run's folder itself."""

from pathlib import Path

import pytest

from dlrm_overlap.checkpoint.manifest import Manifest, write_manifest
from dlrm_overlap.observe.restarts import continued, note_job
from tests.conftest import configuration

SLURM, AGAIN = {"SLURM_JOB_ID": "77"}, {"SLURM_RESTART_COUNT": "1"}
TORCHRUN, RESTARTED = {"TORCHELASTIC_RUN_ID": "a1", "TORCHELASTIC_RESTART_COUNT": "0"}, "TORCHELASTIC_RESTART_COUNT"
OVERWRITE = ["--log.overwrite", "true"]


def _save(folder: Path, step: int, saved: int) -> None:
    path = folder / "run" / "checkpoints" / f"step_{step}"
    path.mkdir(parents=True, exist_ok=True)
    write_manifest(path, Manifest(step, {}, saved=saved))


def _drops(folder: Path, environ: dict[str, str], options: list[str]) -> bool:
    config = configuration("--config", "quickstart", "--log.dir", str(folder), "--log.name", "run", *options)
    found = continued(config, environ)
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
    note_job(tmp_path / "run", first)
    assert not _drops(tmp_path, second, options), "it has saved nothing"
    _save(tmp_path, 10, saved=5)  # after it went back
    assert _drops(tmp_path, second, options) == (second != first)
    note_job(tmp_path / "run", second)
    assert _drops(tmp_path, second, options) == (second != first), "a restart that has saved nothing more"
    assert not _drops(tmp_path, second | {"SLURM_JOB_ID": "78"}, options), "another job"


def test_a_job_that_ended_before_it_began_its_run_does_not_take_an_earlier_one(tmp_path: Path) -> None:
    _save(tmp_path, 10, saved=1)
    assert not _drops(tmp_path, SLURM | AGAIN, OVERWRITE)
    (tmp_path / "run" / "job.txt").write_bytes(b"\xff")
    assert not _drops(tmp_path, SLURM | AGAIN, OVERWRITE)


def test_a_command_without_these_keys_stays_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    note_job(tmp_path / "run", SLURM)
    _save(tmp_path, 10, saved=1)
    assert not _drops(tmp_path, SLURM | AGAIN, [])


@pytest.mark.parametrize("environ", [{}, {"TORCHELASTIC_RUN_ID": "none"}])
def test_a_run_that_is_no_job_writes_none(tmp_path: Path, environ: dict[str, str]) -> None:
    note_job(tmp_path, environ)
    assert list(tmp_path.iterdir()) == []
