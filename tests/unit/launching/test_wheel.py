"""The wheel and the source archive: what is in them, and that what they install trains."""

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

from tests.conftest import ROOT

_SOURCES = ("README.md", "pyproject.toml", "configs", "data", "dlrm_overlap", "kernels")


def _run(*argv: str | Path, cwd: Path) -> str:
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    result = subprocess.run(argv, capture_output=True, text=True, timeout=240, check=False, cwd=cwd, env=environ)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def _copy_sources(folder: Path) -> None:
    """Copy what a wheel is made of: setuptools leaves folders next to it."""
    for name in _SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, folder)


@pytest.mark.slow
def test_the_wheel_trains_in_an_empty_folder(tmp_path: Path) -> None:
    """In an environment without this checkout; it takes the libraries of the present one, so nothing is downloaded."""
    sources, empty = tmp_path / "sources", tmp_path / "empty"
    sources.mkdir()
    empty.mkdir()
    _copy_sources(sources)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    _run(*pip, "wheel", "-q", "--no-deps", "--no-build-isolation", "--no-index", "-w", "dist", ".", cwd=sources)
    _run(sys.executable, "-c", "from setuptools import build_meta; build_meta.build_sdist('dist')", cwd=sources)
    (wheel,) = (sources / "dist").glob("*.whl")
    (archive,) = (sources / "dist").glob("*.tar.gz")

    with zipfile.ZipFile(wheel) as packed:
        installed = {name for name in packed.namelist() if ".dist-info/" not in name}
    kinds = {".py", ".yaml", ".typed"}
    ours = {
        path.relative_to(ROOT) for room in _SOURCES[2:] for path in (ROOT / room).rglob("*") if path.suffix in kinds
    }
    below = {str(path if path.parts[0] == "dlrm_overlap" else "dlrm_overlap" / path) for path in ours}
    assert installed == below, "each file once, and nothing at the top level"
    with tarfile.open(archive) as packed:
        assert {f"{archive.name.removesuffix('.tar.gz')}/{name}" for name in installed} <= set(packed.getnames())

    venv.create(tmp_path / "venv")
    python = tmp_path / "venv/bin/python"
    _run(*pip, "--python", python, "install", "-q", "--no-deps", "--no-index", wheel, cwd=empty)
    libraries = sysconfig.get_paths(vars={"base": str(tmp_path / "venv"), "platbase": str(tmp_path / "venv")})[
        "purelib"
    ]
    Path(libraries, "present.pth").write_text(sysconfig.get_path("purelib"))
    command = tmp_path / "venv/bin/dlrm-overlap"
    where = _run(python, "-c", "import dlrm_overlap; print(dlrm_overlap.__file__)", cwd=empty)
    assert where.startswith(libraries)
    assert "training can run here" in _run(command, "doctor", cwd=empty)
    options = ["--config", "quickstart", "--train.steps", "20", "--train.device", "cpu"]
    assert "AUROC" in _run(command, "train", *options, "--nproc", "2", cwd=empty)
    assert (empty / "runs/quickstart/auto/summary.json").exists()
