import importlib
import logging
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from dlrm_overlap.launching import supported_versions
from tests.conftest import read_table, refuses

CPU = "pip install torch==2.13.0 fbgemm-gpu-cpu==1.8.0 triton==3.7.1 && pip install --no-deps torchrec==1.8.0"
OLDER = {"torch": "2.13.0+cpu", "fbgemm_gpu_cpu": "1.6.0"}
NEWER = {"torch": "2.13.1", "fbgemm_gpu_cpu": "1.8.0", "torchrec": "1.9.2"}
BOTH = {"torch": "2.11.0+cu130", "fbgemm_gpu": "1.6.0", "fbgemm_gpu_cpu": "1.8.0"}  # in the same files: both must match
CUDA = "pip install torch==2.11.0 fbgemm-gpu==1.6.0 triton==3.6.0 && pip install --no-deps torchrec==1.6.1"


@pytest.mark.parametrize(
    ("cuda", "versions", "message"),
    [
        (None, {"torch": None}, f"torch: not installed; for GPUs {CUDA}, for a CPU {CPU}"),
        (None, {"torch": "2.9.1"}, f"torch: 2.9.1 is too old; {CPU}"),
        (
            None,
            {"torch": "2.13.0+cpu", "fbgemm_gpu_cpu": "1.6.0"},
            f"fbgemm-gpu-cpu: 1.6.0 does not match torch 2.13.0+cpu; {CPU}",
        ),
        ("13.0", BOTH, f"fbgemm-gpu-cpu: 1.8.0 does not match torch 2.11.0+cu130; {CUDA}"),
        (None, NEWER, f"torchrec: 1.9.2 does not match torch 2.13.1; {CPU}"),
    ],
)
def test_check_stack_names_what_does_not_match(
    installed: Callable[..., None], cuda: str | None, versions: dict[str, str | None], message: str
) -> None:
    installed(cuda, **versions)
    with refuses(f"^{re.escape(message)}$"):
        supported_versions.check_stack()


@pytest.mark.parametrize(
    ("torch_version", "release"),
    [("2.11.0+cu130", "1.6.1"), ("2.12.1+cpu", "1.7.0"), ("2.13.0", "1.8.0"), ("2.14.0", "1.9.0")],
)
def test_check_stack_takes_what_matches(installed: Callable[..., None], torch_version: str, release: str) -> None:
    installed(torch=torch_version, fbgemm_gpu=None, fbgemm_gpu_cpu=release, torchrec=release)
    supported_versions.check_stack()


def test_the_extras_and_the_pages_have_the_versions_of_the_table() -> None:
    extras = tomllib.loads(Path("pyproject.toml").read_text())["project"]["optional-dependencies"]
    rows: dict[str, list[str]] = dict(zip(("cuda", "cpu"), read_table("docs/torchrec.md", "  | extra |"), strict=True))
    for build, versions in supported_versions.STACKS.items():
        names = ("torch", supported_versions.FBGEMM_NAMES[build], "torchrec", "triton")
        pins = [f"{name}=={version}" for name, version in zip(names, versions, strict=True)]
        found = [line.partition(";")[0] for line in extras[build]]
        assert set(pins) - set(found) == ({pins[2]} if build == "cpu" else set())
        assert [cell.strip("`") for cell in rows[build]] == [f"[{build}]", *pins]
    pinned = {pin for build in rows for pin in " ".join(rows[build]).replace("`", "").split() if "==" in pin}
    for page in ("Makefile", "pyproject.toml", "README.md", "docs/torchrec.md"):
        named = re.findall(r"\b(?:torch|torchrec|fbgemm-gpu|fbgemm-gpu-cpu|triton)==[\d.]*\d", Path(page).read_text())
        assert set(named) <= pinned, page


def test_an_import_without_torchrec_names_the_command() -> None:
    program = (
        "import importlib.util as u, importlib.metadata as m; "
        "u.find_spec = lambda name, real=u.find_spec: None if name == 'torchrec' else real(name); "
        "m.version = lambda name, real=m.version: real('torchrec-is-absent' if name == 'torchrec' else name); "
        "from dlrm_overlap import BatchCapacity"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert "InputError: torchrec: not installed; pip install torch==" in result.stderr


def test_check_stack_where_fbgemm_does_not_load(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> None:
        cause = OSError("libcudart.so.13: cannot open shared object file\nand a page of other words")
        raise OSError("Could not load this library: fbgemm_gpu_py.so") from cause

    monkeypatch.setattr(importlib, "import_module", fail)
    with refuses(r"^FBGEMM does not load \(OSError: libcudart.so.13: cannot open shared object file\); pip uninstall"):
        supported_versions.check_stack()
    assert logging.getLogger().isEnabledFor(logging.ERROR)


def test_a_cpu_build_of_fbgemm_does_not_serve_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(
        torch._C,
        "_dispatch_has_kernel_for_dispatch_key",
        lambda name, key: (name, key) == (supported_versions._OPERATOR, "CPU"),
    )
    with refuses("FBGEMM has no CUDA operators"):
        supported_versions.check_stack()
