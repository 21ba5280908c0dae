"""The launch scripts start the Python of the environment beside them, or the active one."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPTS = ["torchrun.sh", "mpirun.sh", "slurm.sbatch"]


def _stub(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize(
    ("beside", "active", "used"), [(True, False, "beside"), (True, True, "active"), (False, False, "active")]
)
def test_which_python_starts(tmp_path: Path, script: str, beside: bool, active: bool, used: str) -> None:
    project = tmp_path / "a project"
    shutil.copytree("launch", project / "launch")
    _stub(tmp_path / "bin/python", 'echo active "$@"')
    for launcher in ("mpirun", "srun"):  # runs what follows its own options
        _stub(tmp_path / "bin" / launcher, 'while [ "${1##*/}" != python ]; do shift; done; exec "$@"')
    if beside:
        _stub(project / ".venv/bin/python", 'echo beside "$@"')
    environ = {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "NPROC": "2"}
    environ |= {"SLURM_SUBMIT_DIR": str(project), "SLURM_CPUS_PER_TASK": "1"} | ({"VIRTUAL_ENV": "x"} if active else {})
    command = ["bash", str(project / "launch" / script), "some.yaml", "--train.steps", "3"]
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=20, check=True)
    assert done.stdout.startswith(f"{used} -m ")
    assert done.stdout.endswith("-m dlrm_overlap train --config some.yaml --train.steps 3\n")
