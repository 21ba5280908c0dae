"""Restarts of a job by its launcher: Slurm's requeue, and torchrun's `--max-restarts`.

A restart repeats the command. With `log.overwrite` or `checkpoint.resume`, it would move aside or leave out what the
job has saved. So a run writes the job that it belongs to, and a restart drops these keys once the job has saved.
"""

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path

from dlrm_overlap.checkpoint.manifest import newest_first
from dlrm_overlap.config import Config
from dlrm_overlap.launching.files import open_file
from dlrm_overlap.observe.result_files import write_atomically

_FILE = "job.txt"
_JOBS = {"SLURM_JOB_ID": "Slurm job", "TORCHELASTIC_RUN_ID": "torchrun"}
_NO_JOB = ("", "none")  # torchrun's id on several nodes, unless --rdzv-id is given
_RESTARTS = ("SLURM_RESTART_COUNT", "TORCHELASTIC_RESTART_COUNT")


def note_job(folder: Path, config: Config, environ: Mapping[str, str] = os.environ) -> None:
    """Write the job, and the number of the newest save in `folder` when the job began to train there."""
    job = _job(environ)
    if job and (_starts_over(config) or _noted(folder)[0] != job):
        write_atomically(folder / _FILE, f"{job}\n{_last_save(folder)}\n")


def continued(config: Config, environ: Mapping[str, str] = os.environ) -> Config:
    """Return `config`, without the keys that start over if this job has already saved in the run's folder."""
    job = _job(environ)
    if not (_starts_over(config) and job):
        return config
    noted, before = _noted(config.folder)
    if noted != job or _last_save(config.folder) <= before:
        return config
    return dataclasses.replace(
        config,
        log=dataclasses.replace(config.log, overwrite=False),
        checkpoint=dataclasses.replace(config.checkpoint, resume="auto"),
    )


def _job(environ: Mapping[str, str]) -> str | None:
    names = (f"{launcher} {environ[name]}" for name, launcher in _JOBS.items() if environ.get(name, "") not in _NO_JOB)
    return next(names, None)


def is_restart(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether the launcher says that it has restarted this rank; torchrun says so where a rank has failed."""
    return any(environ.get(name, "0") not in ("", "0") for name in _RESTARTS)


def _starts_over(config: Config) -> bool:
    return config.log.overwrite or config.checkpoint.resume != "auto"


def _last_save(folder: Path) -> int:
    manifests, _ = newest_first(folder / "checkpoints")
    return max((each.saved for each in manifests.values()), default=0)


def _noted(folder: Path) -> tuple[str, int]:
    try:
        with open_file(folder / _FILE) as file:
            job, saved = file.read().decode().splitlines()
        return job, int(saved)
    except (OSError, ValueError):  # missing or damaged
        return "", 0
