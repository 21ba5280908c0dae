import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import dlrm_overlap
from dlrm_overlap.comm import network
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
        monkeypatch.setattr(doctor, "output_of", lambda *command: TOPOLOGY if command[0] == "nvidia-smi" else "")


def test_doctor_shows_gpus_and_links(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeGPUs(monkeypatch, linked=lambda a, b: True)
    *gpus, links = doctor._gpus()
    assert [gpu.name for gpu in gpus] == ["GPU 0", "GPU 1", "GPU 2", "GPU 3"]
    assert gpus[0].detail == "NVIDIA X, 80 GiB, compute capability 9.0"
    assert (links.status, links.detail) == ("ok", "peer access between all GPUs, NV12 SYS")
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
    assert doctor._reach().status == "wrong"
    assert "GPUs 0-2 | 3 by stores" in doctor._reach().detail


def test_importing_doctor_and_launcher_does_not_import_torch() -> None:
    program = "import sys; from dlrm_overlap.launching import doctor, launcher; sys.exit('torch' in sys.modules)"
    root = Path(dlrm_overlap.__file__).parents[1]
    assert subprocess.run([sys.executable, "-c", program], cwd=root, check=False).returncode == 0
