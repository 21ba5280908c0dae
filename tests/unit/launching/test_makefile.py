"""The environment that the Makefile sets up."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest


@pytest.mark.skipif(not shutil.which("make"), reason="there is no make")
@pytest.mark.parametrize(("before", "clears"), [(None, False), ("cuda", False), ("cpu", True)])
def test_an_environment_with_the_other_builds_is_made_anew(tmp_path: Path, before: str | None, clears: bool) -> None:
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(name, tmp_path)
    if before:
        (tmp_path / ".venv").mkdir()
        ready = tmp_path / ".venv" / f".ready-{before}"
        ready.touch()
        os.utime(ready, (0, 0))  # before pyproject.toml changed
    command = ["make", "-n", "train", "STACK=cuda", "PYTHON=python3"]
    told = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=20, check=True).stdout
    (line,) = [line for line in told.splitlines() if " -m venv " in line]
    assert line.split() == ["python3", "-m", "venv", *["--clear"] * clears, ".venv"]


@pytest.mark.skipif(not shutil.which("make"), reason="there is no make")
@pytest.mark.parametrize(
    ("machine", "stack", "backends"),
    [
        ("x86_64", "cpu", "torchrec pgas fused"),
        ("aarch64", "cpu", "torchrec nccl"),
        ("aarch64", "cuda", "torchrec pgas fused"),
    ],
)
def test_the_first_run_has_the_backends_that_work_on_the_machine(
    tmp_path: Path, machine: str, stack: str, backends: str
) -> None:
    uname = tmp_path / "uname"
    uname.write_text(f"#!/bin/sh\necho {machine}\n")
    uname.chmod(0o755)
    environ = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    command = ["make", "-n", "train", f"STACK={stack}", "PYTHON=python3"]
    told = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=20, check=True).stdout
    assert f" --backends {backends} --nproc auto\n" in told


@pytest.mark.skipif(not shutil.which("make"), reason="there is no make")
@pytest.mark.parametrize("target", ["train", "wheel"])
@pytest.mark.parametrize("python", ["", "./python3.10"])
def test_without_a_supported_python_make_says_so(tmp_path: Path, target: str, python: str) -> None:
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(name, tmp_path)
    (tmp_path / "dist").mkdir()
    (tmp_path / "python3.10").write_text("#!/bin/sh\nexit 1\n")  # to the question whether it is supported
    (tmp_path / "python3.10").chmod(0o755)
    command = ["make", target, "STACK=cpu", f"PYTHON={python}"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=20, check=False)
    assert result.returncode == 2
    assert result.stderr.startswith("make: no Python 3.11 to 3.13 found; install one, or name it: make PYTHON=...\n")
    assert (tmp_path / "dist").exists(), "an earlier wheel stays"
    assert not (tmp_path / ".venv").exists()
