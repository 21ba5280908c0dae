import importlib
import importlib.util
import logging
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import dlrm_overlap
from dlrm_overlap.comm import network
from dlrm_overlap.config import InputError
from dlrm_overlap.launching import doctor

# What nvidia-smi prints for two linked pairs of GPUs
TOPOLOGY = """\
\x1b[4mGPU0\tGPU1\tGPU2\tGPU3\tCPU Affinity\tNUMA Affinity\x1b[0m
GPU0\t X \tNV12\tSYS\tSYS\t0-31\t0
GPU1\tNV12\t X \tSYS\tSYS\t0-31\t0
GPU2\tSYS\tSYS\t X \tNV12\t32-63\t1
GPU3\tSYS\tSYS\tNV12\t X \t32-63\t1

Legend:

  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes
"""


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Pretend that these packages, of those doctor asks for, are installed, in these versions; None: not installed."""

    def install(cuda: str | None = None, **versions: str | None) -> None:
        named = {name.replace("_", "-"): version for name, version in versions.items()}
        real = doctor._version
        monkeypatch.setattr(doctor, "_version", lambda name: named[name] if name in named else real(name))
        monkeypatch.setattr(torch.version, "cuda", cuda)
        if named.get("torch"):
            monkeypatch.setattr(torch, "__version__", named["torch"])

    return install


@pytest.mark.parametrize(
    ("cuda", "versions", "message"),
    [
        (None, {"torch": None}, "torch: not installed; pip install 'torch==2.13.*'"),
        (None, {"torch": "2.9.1"}, "torch: 2.9.1 is older than 2.11; pip install 'torch==2.13.*'"),
        (
            None,
            {"torch": "2.13.0+cpu", "fbgemm_gpu_cpu": "1.6.0"},
            "FBGEMM: fbgemm-gpu-cpu 1.6.0 does not match torch 2.13.0+cpu; pip install 'fbgemm-gpu-cpu==1.8.*'",
        ),
        (
            "13.0",
            {"torch": "2.11.0+cu130", "fbgemm_gpu": "1.8.0", "fbgemm_gpu_cpu": None},
            "FBGEMM: fbgemm-gpu 1.8.0 does not match torch 2.11.0+cu130; pip install 'fbgemm-gpu==1.6.*'",
        ),
        (
            None,  # one lies over the other: both must match
            {"torch": "2.13.0+cpu", "fbgemm_gpu": "1.7.0", "fbgemm_gpu_cpu": "1.8.0"},
            "FBGEMM: fbgemm-gpu 1.7.0 does not match torch 2.13.0+cpu; pip install 'fbgemm-gpu-cpu==1.8.*'",
        ),
        (
            None,
            {"torch": "2.12.1", "fbgemm_gpu_cpu": "1.7.0", "torchrec": "1.8.0"},
            "TorchRec: 1.8.0 does not match torch 2.12.1; pip install --no-deps 'torchrec==1.7.*'",
        ),
        (
            None,
            {"torch": "2.13.0", "fbgemm_gpu_cpu": "1.8.0", "torchrec": "1.8.0", "tqdm": None, "iopath": None},
            "TorchRec: 1.8.0 needs tqdm; pip install tqdm",
        ),
    ],
)
def test_check_stack_names_what_does_not_match(
    installed: Callable[..., None], cuda: str | None, versions: dict[str, str | None], message: str
) -> None:
    installed(cuda, **versions)
    with pytest.raises(InputError) as error:
        doctor.check_stack()
    assert str(error.value) == message


@pytest.mark.parametrize(
    ("torch_version", "release"),
    [("2.11.0+cu130", "1.6.1"), ("2.12.1+cpu", "1.7.0"), ("2.13.0", "1.8.0"), ("2.14.0", "1.9.0")],
)
def test_check_stack_takes_what_matches(installed: Callable[..., None], torch_version: str, release: str) -> None:
    installed(torch=torch_version, fbgemm_gpu=None, fbgemm_gpu_cpu=release, torchrec=release)
    doctor.check_stack()


@pytest.mark.parametrize(("module", "name"), [("fbgemm_gpu", "FBGEMM"), ("torchrec", "TorchRec")])
def test_check_stack_where_one_is_missing(
    installed: Callable[..., None], monkeypatch: pytest.MonkeyPatch, module: str, name: str
) -> None:
    installed(torchrec=None)
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda asked: None if asked == module else real(asked))
    with pytest.raises(InputError, match=f"{name}: not installed; pip install "):
        doctor.check_stack()


def test_check_stack_where_fbgemm_does_not_load(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> None:
        raise OSError("libcudart.so.13: cannot open shared object file\nand a page of other words")

    monkeypatch.setattr(importlib, "import_module", fail)
    with pytest.raises(InputError) as error:
        doctor.check_stack()
    assert "does not load (OSError: libcudart.so.13: cannot open shared object file); pip uninstall" in str(error.value)
    assert "\n" not in str(error.value)
    assert logging.getLogger().isEnabledFor(logging.ERROR)


def test_a_cpu_build_of_fbgemm_does_not_serve_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(
        torch._C, "_dispatch_has_kernel_for_dispatch_key", lambda name, key: (name, key) == (doctor._OPERATOR, "CPU")
    )
    with pytest.raises(InputError, match="FBGEMM: has no CUDA operators"):
        doctor.check_stack()


def test_fbgemm_on_the_path_alone_tells_its_own_version(installed: Callable[..., None]) -> None:
    import fbgemm_gpu

    installed(fbgemm_gpu=None, fbgemm_gpu_cpu=None)
    assert doctor._fbgemm_versions() == {"fbgemm_gpu": fbgemm_gpu.__version__}
    doctor.check_stack()


def test_environment_tells_versions_and_only_what_there_is(
    installed: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    installed(torchrec="1.8.0", triton=None)
    names = ["NVIDIA A", "NVIDIA A", "NVIDIA B"]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: names[index])
    found = doctor.environment()
    assert found["torch"] == torch.__version__
    assert found["torchrec"] == "1.8.0"
    assert found["gpu"] == "2 x NVIDIA A, 1 x NVIDIA B"
    assert not {"triton", "cuda", "nccl"} & set(found)
    assert all(isinstance(value, str) and value for value in found.values())


def test_commit_is_that_of_the_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "__file__", str(tmp_path / "dlrm_overlap" / "launching" / "doctor.py"))
    assert doctor._commit() is None

    def git(*arguments: str) -> str:
        user = ("-c", "user.name=a", "-c", "user.email=a@b")
        command = ["git", "-C", str(tmp_path), *user, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    git("init")
    (tmp_path / "file").write_text("1")
    git("add", "file")
    git("commit", "-m", "first")
    git("tag", "-a", "v1", "-m", "v1")
    commit = git("rev-parse", "--short=12", "HEAD")
    assert doctor._commit() == commit
    (tmp_path / "file").write_text("2")
    assert doctor._commit() == f"{commit}-dirty"


def test_doctor_passes_a_working_stack(installed: Callable[..., None], capsys: pytest.CaptureFixture[str]) -> None:
    installed(mpi4py=None)
    assert doctor.run_doctor() == 0
    out = capsys.readouterr().out
    assert f"ok       torch: {torch.__version__}" in out
    assert "operators load" in out
    assert "missing  mpi4py: not installed, for mpirun only (optional)\n           cure: pip install mpi4py\n" in out
    assert out.endswith("\ntraining can run here\n")


@pytest.mark.parametrize("missing", ["torch", "numpy", "tensorboard"])
def test_doctor_fails_what_is_needed(
    installed: Callable[..., None], capsys: pytest.CaptureFixture[str], missing: str
) -> None:
    installed(**{missing: None}, mpi4py=None)
    assert doctor.run_doctor() == 1
    out = capsys.readouterr().out
    assert f"missing  {missing}: not installed\n           cure: pip install " in out
    assert out.endswith(f"\ntraining cannot run here yet: {missing}\n")


class FakeGPUs:
    """Four GPUs, of which only the pairs in `linked` reach each other."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, linked: Callable[[int, int], bool]) -> None:
        known = {"name": "NVIDIA X", "total_memory": 80 << 30, "major": 9, "minor": 0}
        properties = [SimpleNamespace(uuid=f"GPU-{index}", **known) for index in range(4)]
        monkeypatch.setattr(torch.version, "cuda", "13.0")
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
        monkeypatch.setattr(torch.cuda, "get_device_properties", properties.__getitem__)
        monkeypatch.setattr(torch.cuda, "can_device_access_peer", linked)
        monkeypatch.setattr(doctor, "_output", lambda *command: TOPOLOGY if command[0] == "nvidia-smi" else "")


def test_doctor_shows_gpus_and_links(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeGPUs(monkeypatch, linked=lambda a, b: True)
    *gpus, links = doctor._gpus()
    assert [gpu.name for gpu in gpus] == ["GPU 0", "GPU 1", "GPU 2", "GPU 3"]
    assert gpus[0].detail == "NVIDIA X, 80 GiB, compute capability 9.0"
    assert (links.status, links.detail) == ("ok", "peer access between all GPUs, NV12 SYS")
    assert doctor._symmetric_memory().status == "ok"
    assert doctor._reach().status == "ok"
    monkeypatch.setattr(network, "_library", lambda name: None)
    assert doctor._reach().detail.startswith(
        "GPUs 0-3 by stores, all others and other machines by messages of NCCL (NVSHMEM's libnvshmem_host.so.3 is"
    )
    monkeypatch.setattr(network, "_library", Path)
    assert doctor._reach().detail.endswith("messages of NCCL, or puts from kernels (NVSHMEM is there)")


def test_doctor_shows_gpus_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeGPUs(monkeypatch, linked=lambda a, b: {a, b} != {0, 3})
    links = list(doctor._gpus())[-1]
    assert (links.status, links.detail) == ("wrong", "no peer access between GPUs 0-3, 3-0, NV12 SYS")
    assert not links.needed
    assert doctor._symmetric_memory().status == "wrong"
    assert doctor._reach().status == "wrong"
    assert "GPUs 0-2 | 3 by stores" in doctor._reach().detail


def test_doctor_without_a_gpu_on_a_cuda_build(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    (finding,) = doctor._gpus()
    assert (finding.status, finding.needed) == ("missing", False)


@pytest.mark.parametrize(("free", "status"), [(64 << 20, "wrong"), (8 << 30, "ok")])
def test_doctor_measures_shared_memory(monkeypatch: pytest.MonkeyPatch, free: int, status: str) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: SimpleNamespace(total=8 << 30, free=free))
    assert doctor._symmetric_memory().status == status


@pytest.mark.parametrize(
    ("library", "mpirun", "status", "detail"),
    [
        ("Open MPI v5.0.1, package: x\n", "/bin/mpirun", "ok", "4.1, Open MPI v5.0.1, /bin/mpirun"),
        ("", "/bin/mpirun", "missing", "4.1, but no MPI library loads, for mpirun only"),
        ("MPICH Version: 4.2\nmore", None, "missing", "4.1, but no mpirun on PATH, for mpirun only"),
    ],
)
def test_doctor_looks_for_mpi(
    installed: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    library: str,
    mpirun: str | None,
    status: str,
    detail: str,
) -> None:
    installed(mpi4py="4.1")
    monkeypatch.setattr(doctor, "_output", lambda *command: library)
    monkeypatch.setattr(doctor.shutil, "which", lambda name: mpirun)
    finding = doctor._mpi()
    assert (finding.status, finding.detail) == (status, detail)


def test_importing_doctor_and_launcher_does_not_import_torch() -> None:
    program = "import sys; from dlrm_overlap.launching import doctor, launcher; sys.exit('torch' in sys.modules)"
    root = Path(dlrm_overlap.__file__).parents[1]
    assert subprocess.run([sys.executable, "-c", program], cwd=root, check=False).returncode == 0
