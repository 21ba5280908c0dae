"""The launch scripts: which Python they start, and what Slurm's does when it is asked to end."""

import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from tests.conftest import wait_until

SCRIPTS = ["torchrun.sh", "mpirun.sh", "slurm.sbatch"]


def _stub(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("installed", [True, False])
def test_ranks_find_the_package_and_nothing_in_the_working_folder(tmp_path: Path, script: str, installed: bool) -> None:
    project = tmp_path / "a project"
    shutil.copytree("launch", project / "launch")
    find = f'if [ "$1" = -c ]; then exit {int(not installed)}; fi; env'
    _stub(tmp_path / "bin/python", find)
    for launcher in ("mpirun", "srun"):  # whose own options come first
        _stub(tmp_path / "bin" / launcher, 'while [ "$1" != env ] && [ "$1" != python ]; do shift; done; exec "$@"')
    environ = {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "NPROC": "2", "PYTHONPATH": "/theirs"}
    environ |= {"SLURM_SUBMIT_DIR": str(project), "SLURM_CPUS_PER_TASK": "1"}
    command = ["bash", str(project / "launch" / script), "some.yaml"]
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=20, check=True)
    lines = done.stdout.splitlines()
    assert "PYTHONSAFEPATH=1" in lines
    assert f"PYTHONPATH={'' if installed else f'{project}:'}/theirs" in lines


@pytest.mark.parametrize(
    ("number", "rank_code", "code", "requeued"),
    [(signal.SIGUSR1, 75, 75, True), (signal.SIGUSR1, 1, 1, False), (signal.SIGTERM, 75, 75, False)],
)
def test_slurm_job_that_saved_before_its_limit_is_requeued(
    tmp_path: Path, number: signal.Signals, rank_code: int, code: int, requeued: bool
) -> None:
    # An srun that passes signals on, as Slurm's does, to a rank that takes a moment to save.
    _stub(tmp_path / "srun", f"trap 'sleep 0.2; exit {rank_code}' USR1 TERM; touch up; while true; do sleep 0.05; done")
    _stub(tmp_path / "scontrol", 'echo "$@" > requeued')
    environ = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_CPUS_PER_TASK": "1", "SLURM_JOB_ID": "77"}
    job = subprocess.Popen(["bash", Path("launch/slurm.sbatch").resolve(), "some.yaml"], cwd=tmp_path, env=environ)
    wait_until((tmp_path / "up").exists, 10, "the job is not up")
    job.send_signal(number)
    assert job.wait(10) == code
    assert (tmp_path / "requeued").exists() == requeued
    if requeued:
        assert (tmp_path / "requeued").read_text() == "requeue 77\n"
