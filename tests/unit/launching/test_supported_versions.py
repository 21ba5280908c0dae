import importlib
import importlib.util
import logging
import os
import re
import signal
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from dlrm_overlap.launching import supported_versions
from tests.conftest import read_table, refuses

UNINSTALL = "pip uninstall -y fbgemm-gpu fbgemm-gpu-cpu && "


def _command(torch: str, fbgemm: str, triton: str, torchrec: str) -> str:
    libraries = f"torch=={torch} {fbgemm} triton=={triton} pyre-extensions tensordict"
    return f"pip install {libraries} && pip install --no-deps torchrec=={torchrec}"


CPU = _command("2.14.1", "fbgemm-gpu-cpu==1.9.0", "3.8.0", "1.9.2")
CPU_2_13 = _command("2.13.0", "fbgemm-gpu-cpu==1.8.0", "3.7.1", "1.8.0")
CPU_2_11 = _command("2.11.0", "fbgemm-gpu-cpu==1.6.0", "3.6.0", "1.6.1")
CUDA = _command("2.14.1", "fbgemm-gpu==1.9.0", "3.8.0", "1.9.2")
CUDA_2_11 = _command("2.11.0", "fbgemm-gpu==1.6.0", "3.6.0", "1.6.1")
OLD = {"torch": "2.9.1", "fbgemm_gpu_cpu": "1.4.0", "torchrec": "1.4.0"}
OTHER_FBGEMM = {"torch": "2.13.0+cpu", "fbgemm_gpu_cpu": "1.6.0", "torchrec": "1.8.0"}
OTHER_TORCHREC = {"torch": "2.13.1", "fbgemm_gpu_cpu": "1.8.0", "torchrec": "1.9.2"}
# Both are in the same folder, so both must match.
BOTH = {"torch": "2.11.0+cu130", "fbgemm_gpu": "1.6.0", "fbgemm_gpu_cpu": "1.8.0", "torchrec": "1.6.1"}


@pytest.mark.parametrize(
    ("cuda", "versions", "message"),
    [
        (None, {"torch": None, "fbgemm_gpu_cpu": None}, f"torch: not installed; for GPUs {CUDA}, for a CPU {CPU}"),
        (None, {"torch": None}, f"torch: not installed; for GPUs {UNINSTALL}{CUDA}, for a CPU {CPU}"),
        (None, OTHER_FBGEMM | {"torchrec": None}, f"torchrec: not installed; {CPU_2_13}"),
        (
            "13.0",
            BOTH | {"fbgemm_gpu": None, "fbgemm_gpu_cpu": None},
            f"FBGEMM: not installed; for GPUs {CUDA_2_11}, for a CPU {CPU_2_11}",
        ),
        (None, OLD, f"torch: 2.9.1 is too old; {CPU}"),
        (None, OTHER_FBGEMM, f"fbgemm-gpu-cpu: 1.6.0 does not match torch 2.13.0+cpu; {CPU_2_13}"),
        ("13.0", BOTH, f"fbgemm-gpu-cpu: 1.8.0 does not match torch 2.11.0+cu130; {UNINSTALL}{CUDA_2_11}"),
        ("13.0", OTHER_TORCHREC, f"torchrec: 1.9.2 does not match torch 2.13.1; {CPU_2_13}"),
    ],
)
def test_check_stack_names_what_is_missing_or_does_not_match(
    installed: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    cuda: str | None,
    versions: dict[str, str | None],
    message: str,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    installed(cuda, **{"fbgemm_gpu": None} | versions)
    with refuses(f"^{re.escape(message)}$"):
        supported_versions.check_stack()


def test_check_stack_names_the_system_that_has_no_fbgemm(
    installed: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    installed(torch="2.14.1", fbgemm_gpu=None, fbgemm_gpu_cpu=None)
    monkeypatch.setattr(sys, "platform", "darwin")
    with refuses("^FBGEMM: not installed; PyPI has no FBGEMM for darwin; use Linux$"):
        supported_versions.check_stack()


def test_a_system_without_posix_signals_is_told_in_one_line() -> None:
    names = [name for name in ("SIGUSR1", "SIGHUP", "pthread_sigmask") if hasattr(signal, name)]
    program = f"import signal\nfor name in {names}: delattr(signal, name)\nfrom dlrm_overlap.__main__ import run; run()"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 2
    assert result.stderr == f"dlrm-overlap: {sys.platform} has no POSIX signals; use Linux, or WSL 2 under Windows\n"


@pytest.mark.parametrize(("name", "module"), [("tensordict", "tensordict"), ("pyre-extensions", "pyre_extensions")])
def test_check_stack_names_what_torchrec_imports(
    installed: Callable[..., None], monkeypatch: pytest.MonkeyPatch, name: str, module: str
) -> None:
    installed(torch="2.14.1", fbgemm_gpu=None, fbgemm_gpu_cpu="1.9.0", torchrec="1.9.2")
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == module else find(name))
    with refuses(f"^{re.escape(f'{name}: not installed, but TorchRec imports it; {CPU}')}$"):
        supported_versions.check_stack()


@pytest.mark.parametrize("stack", supported_versions.STACKS)
def test_check_stack_takes_each_row(
    installed: Callable[..., None], caplog: pytest.LogCaptureFixture, stack: supported_versions.Stack
) -> None:
    for torch_version in (stack.torch, f"{stack.torch[:-1]}7+cu130"):  # any patch release
        installed(torch=torch_version, fbgemm_gpu=None, fbgemm_gpu_cpu=stack.fbgemm, torchrec=stack.torchrec)
        supported_versions.check_stack()
        assert supported_versions.row() == stack
    assert not caplog.records


def test_a_newer_torch_is_a_warning_once_on_rank_0(
    installed: Callable[..., None], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed(torch="2.15.0", fbgemm_gpu=None, fbgemm_gpu_cpu="1.10.0", torchrec="1.10.0")
    for rank, texts in (("1", []), ("0", [f"torch: 2.15.0 is newer than 2.14.1, the newest tested one; {CPU}"])):
        monkeypatch.setenv("RANK", rank)
        supported_versions._warn_once.cache_clear()
        supported_versions.check_stack()
        supported_versions.check_releases()
        assert [record.getMessage() for record in caplog.records] == texts


def test_the_extras_and_the_pages_have_the_rows_of_the_table() -> None:
    project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    table = read_table("docs/torchrec.md", "  | torch |")
    pinned = set()
    for stack, cells in zip(supported_versions.STACKS[::-1], table, strict=True):
        release = stack.torch.rpartition(".")[0].replace(".", "-")
        for build, fbgemm in supported_versions.FBGEMM_NAMES.items():
            pins = {f"torch=={stack.torch}", f"{fbgemm}=={stack.fbgemm}", f"triton=={stack.triton}"}
            pinned |= pins | {f"torchrec=={stack.torchrec}"}
            others = {f"torchrec=={stack.torchrec}", "nvidia-ml-py"}, {"dlrm-overlap[torchrec-needs]"}
            wanted = pins | others[build == "cpu"]
            named = {line.partition(";")[0] for line in extras[f"{build}-{release}"]}
            assert {line for line in named if not line.startswith("numpy")} == wanted
            if stack is supported_versions.STACKS[-1]:
                assert extras[build] == [f"dlrm-overlap[{build}-{release}]"]
        tested = "CPUs, GPUs" if stack.ran_on_gpus else "CPUs"
        assert cells == [*stack[:4], tested, f"`[cuda-{release}]`", f"`[cpu-{release}]`"]
    assert supported_versions.TORCHREC_IMPORTS.keys() <= set(extras["torchrec-needs"])
    pages = ("Makefile", "README.md", "docs/torchrec.md", "CONTRIBUTING.md", "launch/README.md", "Dockerfile")
    for page in pages:
        named = re.findall(r"\b(?:torch|torchrec|fbgemm-gpu|fbgemm-gpu-cpu|triton)==[\d.]*\d", Path(page).read_text())
        assert set(named) <= pinned, page
    newest = supported_versions.STACKS[-1]
    assert f"torchrec=={newest.torchrec}\n" in Path("Makefile").read_text()


def test_the_pythons_are_the_ones_of_pyproject_the_makefile_and_the_pages() -> None:
    (first_major, first), *_, (last_major, last) = supported_versions.PYTHONS
    project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
    assert project["requires-python"] == f">={first_major}.{first},<{last_major}.{last + 1}"
    named = [name.rpartition(" ")[2] for name in project["classifiers"] if "Python :: 3" in name]
    assert named == [".".join(map(str, release)) for release in supported_versions.PYTHONS]
    makefile = Path("Makefile").read_text()
    assert f"not ({first_major}, {first}) <= sys.version_info[:2] <= ({last_major}, {last})" in makefile
    for page in ("Makefile", "README.md", "docs/torchrec.md", "Dockerfile"):
        assert f"{first_major}.{first} to {last_major}.{last}" in Path(page).read_text(), page


@pytest.mark.parametrize(
    ("absent", "fault"),
    [("torchrec", "not installed"), ("tensordict", "not installed, but TorchRec imports it")],
)
def test_an_import_without_torchrec_or_what_it_needs_names_the_command(absent: str, fault: str) -> None:
    program = (
        "import importlib.util as u, importlib.metadata as m; "
        f"u.find_spec = lambda name, real=u.find_spec: None if name == {absent!r} else real(name); "
        f"m.version = lambda name, real=m.version: real('is-absent' if name == {absent!r} else name); "
        "from dlrm_overlap import BatchCapacity"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert f"InputError: {absent}: {fault}; pip install torch==" in result.stderr


def test_doctor_where_torch_does_not_load(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart.so.13: cannot open shared object file')")
    program = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); from dlrm_overlap.cli import main; main(['doctor'])"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    fault = "libraries: torch: does not load (ImportError: libcudart.so.13: cannot open shared object file)\n"
    assert f"wrong  {fault}         cure: for GPUs " in result.stdout, result.stderr
    assert result.stdout.endswith("\ntraining cannot run here yet: libraries\n")
    assert not result.stderr


def test_commands_that_load_torch_before_they_check_it_name_the_cure(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise OSError('libcudart.so.13: cannot open shared object file')")
    commands = ["train --config quickstart --nproc auto", f"prepare samples {tmp_path / 'out'} --config quickstart"]
    program = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r}); from dlrm_overlap.cli import main; "
        f"print([main(command.split()) for command in {commands}])"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert result.stdout == "[2, 2]\n", result.stderr
    fault = "dlrm-overlap: torch: does not load (OSError: libcudart.so.13: cannot open shared object file); for GPUs "
    lines = result.stderr.splitlines()
    assert [line[: len(fault)] for line in lines] == [fault] * 2


@pytest.mark.parametrize(
    ("module", "messages"),
    [
        (
            "pyarrow",
            {
                "ModuleNotFoundError(name='pyarrow')": 'pyarrow: not installed; pip install "dlrm-overlap[data]"',
                "ImportError('pyarrow requires NumPy 2.0 or newer, found 1.26.4')": (
                    "pyarrow: does not load (pyarrow requires NumPy 2.0 or newer, found 1.26.4); "
                    "pip install --upgrade pyarrow numpy"
                ),
            },
        ),
        (
            "fbgemm_gpu",
            {
                "OSError('Could not load this library: fbgemm_gpu/fbgemm_gpu_py.so')": "FBGEMM does not load (OSError: "
                "Could not load this library: fbgemm_gpu/fbgemm_gpu_py.so); pip uninstall"
            },
        ),
    ],
    ids=["pyarrow", "fbgemm_gpu"],
)
def test_prepare_names_the_library_that_does_not_load(tmp_path: Path, module: str, messages: dict[str, str]) -> None:
    (tmp_path / "table.csv").write_text("click,site\n1,a\n")
    (tmp_path / "schema.yaml").write_text("labels: {click: {}}\ncategorical: {site: {rows: 10}}\n")
    command = ["prepare", "table", "table.csv", "days", "--schema", "schema.yaml"]
    program = f"""
import sys
sys.path[:0] = [".", {os.getcwd()!r}]
sys.dont_write_bytecode = True  # the file changes
from dlrm_overlap.cli import main
for raised in {list(messages)}:
    open("{module}.py", "w").write("raise " + raised)
    print(main({command}), flush=True)
"""
    result = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert result.stdout.split() == ["2"] * len(messages), result.stderr
    lines = result.stderr.splitlines()
    assert [line[: len(f"dlrm-overlap: {each}")] for line, each in zip(lines, messages.values(), strict=True)] == [
        f"dlrm-overlap: {each}" for each in messages.values()
    ]


def test_check_stack_where_fbgemm_does_not_load(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> None:
        cause = OSError("libcudart.so.13: cannot open shared object file\nand a page of other words")
        raise OSError("Could not load this library: fbgemm_gpu_py.so") from cause

    monkeypatch.setattr(importlib, "import_module", fail)
    fault = r"^FBGEMM does not load \(OSError: libcudart.so.13: cannot open shared object file\); "
    with refuses(f"{fault}{UNINSTALL}pip install torch"):
        supported_versions.check_stack()
    assert logging.getLogger().isEnabledFor(logging.ERROR)


def test_check_stack_without_a_driver_names_the_build_for_a_cpu(
    installed: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The CUDA build of FBGEMM does not load on a machine without a GPU, however often it is installed."""

    def fail(name: str) -> None:
        raise OSError("libnvidia-ml.so.1: cannot open shared object file: No such file or directory")

    installed("13.0", torch="2.14.1", fbgemm_gpu="1.9.0", fbgemm_gpu_cpu=None, torchrec="1.9.2")
    monkeypatch.setattr(importlib, "import_module", fail)
    driver = r"for GPUs install NVIDIA's driver \(in a container: docker run --gpus all\)"
    with refuses(rf"libnvidia-ml.so.1: .*\); {driver}, for a CPU {re.escape(UNINSTALL + CPU)}$"):
        supported_versions.check_stack()


def test_a_cpu_build_of_fbgemm_does_not_serve_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(
        torch._C,
        "_dispatch_has_kernel_for_dispatch_key",
        lambda name, key: (name, key) == (supported_versions._OPERATOR, "CPU"),
    )
    with refuses("FBGEMM has no CUDA operators"):
        supported_versions.check_stack()
