"""The launch scripts: which Python they start, and what they do when they are asked to end."""

import os
import shutil
import signal
import subprocess
import sys
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
    for launcher in ("mpirun", "srun"):  # their own options come first
        _stub(tmp_path / "bin" / launcher, 'while [ "$1" != env ] && [ "$1" != python ]; do shift; done; exec "$@"')
    environ = {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "NPROC": "2", "PYTHONPATH": "/theirs"}
    environ |= {"SLURM_SUBMIT_DIR": str(project), "SLURM_CPUS_PER_TASK": "1"}
    command = ["bash", str(project / "launch" / script), "some.yaml"]
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=20, check=True)
    lines = done.stdout.splitlines()
    assert "PYTHONSAFEPATH=1" in lines
    assert f"PYTHONPATH={'' if installed else f'{project}:'}/theirs" in lines


@pytest.mark.parametrize("script", ["torchrun.sh", "mpirun.sh"])
@pytest.mark.parametrize("number", ["0", "gpu", "2.5", "08"])
def test_a_number_of_processes_that_is_none_is_refused_in_one_line(script: str, number: str) -> None:
    environ = os.environ | {"NPROC": number}
    done = subprocess.run(
        ["bash", f"launch/{script}", "some.yaml"], env=environ, capture_output=True, text=True, timeout=60, check=False
    )
    told = f"NPROC: {number} is not a number of processes; give one from 1 on, or unset it\n"
    assert (done.returncode, done.stderr) == (2, told)


@pytest.mark.parametrize("number", ["0", "two", "1:4"])
def test_a_number_of_nodes_that_is_none_is_refused_in_one_line(number: str) -> None:
    command = ["bash", "launch/torchrun.sh", "some.yaml"]
    environ = os.environ | {"NNODES": number, "NPROC": "1"}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60, check=False)
    told = f"NNODES: {number} is not a number of nodes; give one from 1 on, or unset it\n"
    assert (done.returncode, done.stderr) == (2, told)


ASKED_RANK = """
import os, signal
from pathlib import Path

def save(number, frame):
    Path("saved").touch()
    os._exit(75)

signal.signal(signal.SIGUSR1, save)
Path("up").touch()
signal.alarm(60)
signal.pause()
"""


def test_torchrun_passes_sigusr1_on(tmp_path: Path) -> None:
    """By itself it would end, and leave the ranks training."""
    (tmp_path / "dlrm_overlap").mkdir()
    (tmp_path / "dlrm_overlap/__init__.py").touch()
    (tmp_path / "dlrm_overlap/__main__.py").write_text(ASKED_RANK)
    environ = os.environ | {"PYTHONPATH": str(tmp_path), "NPROC": "1", "VIRTUAL_ENV": sys.prefix}
    environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    agent = subprocess.Popen(["bash", Path("launch/torchrun.sh").resolve(), "some.yaml"], cwd=tmp_path, env=environ)
    try:
        wait_until((tmp_path / "up").exists, 60, "the rank is not up")
        agent.send_signal(signal.SIGUSR1)
        assert agent.wait(30) == 1
        assert (tmp_path / "saved").exists()
    finally:
        agent.kill()


SAVES = "trap 'sleep 0.2; exit {}' USR1; trap 'exit 137' TERM; touch up; while true; do sleep 0.05; done"
STARTS = "touch up; while true; do sleep 0.05; done"  # and would be ended by a signal


@pytest.mark.parametrize(
    ("number", "ranks", "code", "requeued"),
    [
        (signal.SIGUSR1, SAVES.format(75), 75, True),
        (signal.SIGUSR1, SAVES.format(1), 1, False),
        (signal.SIGUSR1, SAVES.format(4), 4, False),  # asked, but nothing may be saved
        (signal.SIGTERM, SAVES.format(75), 75, False),
        (signal.SIGUSR1, STARTS, 138, True),
        (signal.SIGTERM, STARTS, 138, False),
    ],
)
def test_slurm_job_that_saved_before_its_limit_is_requeued(
    tmp_path: Path, number: signal.Signals, ranks: str, code: int, requeued: bool
) -> None:
    # As Slurm's srun, it passes SIGUSR1 on to a rank, which takes a moment to save, and kills it on SIGTERM.
    _stub(tmp_path / "srun", ranks)
    assert _ask(tmp_path, number) == (code, "requeue 77\n" if requeued else "")


@pytest.mark.parametrize(("number", "code", "requeued"), [(signal.SIGUSR1, 75, True), (signal.SIGTERM, 143, False)])
def test_slurm_job_that_is_asked_before_its_ranks_start_starts_none(
    tmp_path: Path, number: signal.Signals, code: int, requeued: bool
) -> None:
    _stub(tmp_path / "python", "touch up; sleep 0.5")  # the script asks it for the package
    _stub(tmp_path / "srun", "touch started")
    assert _ask(tmp_path, number) == (code, "requeue 77\n" if requeued else "")
    assert not (tmp_path / "started").exists()


def test_slurm_job_that_slurm_does_not_requeue_keeps_the_code_of_its_ranks(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    _stub(tmp_path / "srun", SAVES.format(75))
    assert _ask(tmp_path, signal.SIGUSR1, scontrol="exit 1") == (75, "")
    assert "slurm.sbatch: job 77 is not queued again; submit the same command to resume\n" in capfd.readouterr().err


def _ask(folder: Path, number: signal.Signals, scontrol: str = 'echo "$@" > requeued') -> tuple[int, str]:
    """Send `number` to the script once the file `up` is there; return its exit code, and what it told Slurm."""
    _stub(folder / "scontrol", scontrol)
    environ = {"PATH": f"{folder}:{os.environ['PATH']}", "SLURM_CPUS_PER_TASK": "1", "SLURM_JOB_ID": "77"}
    job = subprocess.Popen(["bash", Path("launch/slurm.sbatch").resolve(), "some.yaml"], cwd=folder, env=environ)
    wait_until((folder / "up").exists, 10, "the job is not up")
    job.send_signal(number)
    code, told = job.wait(10), folder / "requeued"
    return code, told.read_text() if told.exists() else ""
