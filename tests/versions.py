"""Tests the other versions of the libraries and of Python that are supported, on the CPU: `make test-versions`.

Each has a virtual environment, `.venv-..`, which the next run uses again: one for each row of `STACKS` but the newest,
which `make test` runs, and one for the newest row under each other Python that this machine has. The last one is new
each time, for the wheel that the source distribution gives. Arguments are options for pip, such as an index. At the end
a table names what failed; the exit code is then 1.
"""

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from dlrm_overlap.launching.supported_versions import PYTHONS, STACKS, Stack

ROOT = Path(__file__).parents[1]
_NEWER_TRITON = "3.9.0"  # newer than the newest row's; in the .venv of `make test`
_TESTS = ("tests/distributed", "tests/unit/embedding", "tests/unit/graphs", "tests/kernels")
_PYTEST = ("-m", "pytest", "-n", "2", "--dist", "loadfile", "--no-loadscope-reorder", "-m", "not slow and not gpu")
_QUICKSTART = (
    "-m", "dlrm_overlap", "compare", "--config", "quickstart", "--backends", "torchrec", "pgas", "fused", "--nproc", "2"
)  # fmt: skip


def main(pip_options: Sequence[str]) -> int:
    works: dict[str, Callable[[], None]] = {}
    for stack in STACKS[:-1]:
        release = stack.torch.rpartition(".")[0]
        works[f"torch {release}"] = partial(_test, f".venv-{release}", sys.executable, stack, pip_options)
    for release in PYTHONS:
        name = "python" + ".".join(map(str, release))
        if release != sys.version_info[:2]:
            works[name] = partial(_test, f".venv-{name}", name, STACKS[-1], pip_options)
    works[f"triton {_NEWER_TRITON}"] = partial(_test_triton, pip_options)
    works["wheel"] = partial(_test_wheel, pip_options)

    results: list[str] = []
    failed = False
    for name, work in works.items():
        print(f"\n{name}", flush=True)
        start, result = time.monotonic(), "passed"
        if name.startswith("python") and not _runs(name):
            result = f"skipped, since there is no {name} on PATH"
        else:
            try:
                work()
            except subprocess.CalledProcessError as error:
                failed, result = True, f"failed: {shlex.join(error.cmd)}"
        results.append(f"{name:14}{time.monotonic() - start:5.0f} s  {result}")
    print("", *results, sep="\n")
    return int(failed)


def _test(folder: str, interpreter: str, stack: Stack, pip_options: Sequence[str]) -> None:
    """Install a row into a virtual environment, and run the tests and the quickstart there."""
    python = str(ROOT / folder / "bin/python")
    _call(interpreter, "-m", "venv", folder)
    _call(python, "-m", "pip", "install", "-q", "--no-warn-conflicts", *pip_options, "-e", f".[{_extra(stack)},dev]")
    _call(python, "-m", "pip", "install", "-q", "--no-deps", f"torchrec=={stack.torchrec}")
    _call(python, *_PYTEST, *_TESTS)
    with tempfile.TemporaryDirectory() as runs:
        _call(python, *_QUICKSTART, "--log.dir", runs)


def _test_triton(pip_options: Sequence[str]) -> None:
    """Run the kernels under the interpreter of a newer triton, which a folder on the path puts before the installed."""
    folder = ROOT / f".venv-triton-{_NEWER_TRITON}"
    if not folder.exists():
        pip = ("-m", "pip", "install", "-q", "--no-deps", "--target", str(folder))
        _call(sys.executable, *pip, *pip_options, f"triton=={_NEWER_TRITON}")
    _call(sys.executable, *_PYTEST, "tests/kernels", PYTHONPATH=str(folder))


def _test_wheel(pip_options: Sequence[str]) -> None:
    """Make a wheel of the source distribution, install it into an empty environment, and train in another folder."""
    with tempfile.TemporaryDirectory() as folder:
        built, python = Path(folder, "dist"), str(Path(folder, "venv/bin/python"))
        make = "import logging, sys; logging.disable()"
        make += "; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])"
        _call(sys.executable, "-c", make, str(built))
        (source,) = built.glob("*.tar.gz")
        _call(sys.executable, "-m", "venv", str(Path(folder, "venv")))
        _call(python, "-m", "pip", "wheel", "-q", "--no-deps", *pip_options, "-w", str(built), str(source))
        (wheel,) = built.glob("*.whl")
        newest = STACKS[-1]
        _call(python, "-m", "pip", "install", "-q", "--no-warn-conflicts", *pip_options, f"{wheel}[{_extra(newest)}]")
        _call(python, "-m", "pip", "install", "-q", "--no-deps", *pip_options, f"torchrec=={newest.torchrec}")
        _call(python, *_QUICKSTART, cwd=folder)


def _extra(stack: Stack) -> str:
    return "cpu-" + stack.torch.rpartition(".")[0].replace(".", "-")


def _call(*argv: str, cwd: str | Path = ROOT, **environ: str) -> None:
    """Run a command without GPUs, in the checkout or in another folder."""
    subprocess.run(argv, check=True, cwd=cwd, env=os.environ | {"CUDA_VISIBLE_DEVICES": ""} | environ)


def _runs(name: str) -> bool:
    """Return whether a command is a Python: pyenv has commands for versions that are not selected."""
    return bool(shutil.which(name)) and not subprocess.run([name, "--version"], capture_output=True).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
