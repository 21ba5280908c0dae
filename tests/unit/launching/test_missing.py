"""A Python without a package that is needed ends the command in a line that says how to get it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT

TRAIN = ["train", "--config", "configs/quickstart.yaml", "--train.device", "cpu", "--train.steps", "1"]
COMMANDS = [("yaml", ["doctor"]), pytest.param("tensorboard", TRAIN, marks=pytest.mark.slow)]


@pytest.mark.parametrize(
    ("package", "command"), [("yaml", ["doctor"]), pytest.param("tensorboard", TRAIN, marks=pytest.mark.slow)]
)
def test_a_package_that_is_not_installed(package: str, command: list[str], tmp_path: Path) -> None:
    absent = f"raise ModuleNotFoundError(\"No module named '{package}'\", name='{package}')"
    (tmp_path / f"{package}.py").write_text(absent)
    environ = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    argv = [sys.executable, "-m", "dlrm_overlap", *command]
    if command[0] == "train":
        argv += ["--log.dir", str(tmp_path / "runs")]
    result = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False, cwd=ROOT, env=environ)
    told = (
        f"dlrm-overlap: {package}: no such module for {sys.executable}; activate the environment that dlrm-overlap was "
        f"installed into, or install it there again\n"
    )
    assert (result.returncode, result.stderr) == (2, told)
