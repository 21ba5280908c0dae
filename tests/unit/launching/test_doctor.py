import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import dlrm_overlap
from dlrm_overlap.comm import network
from dlrm_overlap.comm.fabric import Domain
from dlrm_overlap.comm.reach import Location
from dlrm_overlap.launching import doctor

NEWEST = {"torch": "2.14.1+cpu", "fbgemm_gpu": None, "fbgemm_gpu_cpu": "1.9.0", "torchrec": "1.9.2", "triton": "3.8.0"}
ON_GPUS = {"torch": "2.11.0", "fbgemm_gpu_cpu": "1.6.0", "torchrec": "1.6.1", "triton": "3.6.0"}


@pytest.mark.parametrize(
    ("versions", "code", "told"),
    [
        (
            {},
            0,
            "ok     libraries: torch 2.14.1+cpu, fbgemm 1.9.0, torchrec 1.9.2, triton 3.8.0: the row of torch 2.14, "
            "tested on CPUs only (on GPUs: torch 2.11.0)\n",
        ),
        (
            ON_GPUS,
            0,
            "ok     libraries: torch 2.11.0, fbgemm 1.6.0, torchrec 1.6.1, triton 3.6.0: the row of torch 2.11, tested "
            "on CPUs and GPUs\n",
        ),
        (
            ON_GPUS | {"triton": None},
            0,
            "wrong  libraries: torch 2.11.0, fbgemm 1.6.0, torchrec 1.6.1, triton missing: triton not tested with this "
            "torch\n"
            "         optional: pip install torch==2.11.0 fbgemm-gpu-cpu==1.6.0 triton==3.6.0 pyre-extensions "
            "tensordict && pip install --no-deps torchrec==1.6.1\n",
        ),
        (
            {"torch": "2.15.0"},
            0,
            "wrong  libraries: torch 2.15.0, fbgemm 1.9.0, torchrec 1.9.2, triton 3.8.0: torch is newer than 2.14.1, "
            "the newest tested one\n"
            "         optional: pip install torch==2.14.1 fbgemm-gpu-cpu==1.9.0 triton==3.8.0 pyre-extensions "
            "tensordict && pip install --no-deps torchrec==1.9.2\n",
        ),
        ({"torchrec": None}, 1, "wrong  libraries: torchrec: not installed\n         cure: pip install torch==2.14.1"),
    ],
)
def test_doctor(
    installed: Callable[..., None],
    capsys: pytest.CaptureFixture[str],
    versions: dict[str, str | None],
    code: int,
    told: str,
) -> None:
    installed(**NEWEST | versions, mpi4py=None)
    assert doctor.run_doctor() == code
    out = capsys.readouterr().out
    assert told in out
    assert "wrong  mpi4py: not installed, for mpirun only\n         optional: pip install mpi4py\n" in out
    assert out.endswith("\ntraining cannot run here yet: libraries\n" if code else "\ntraining can run here\n")


@pytest.mark.parametrize(
    ("listed", "cuda", "detail", "cure"),
    [
        ("", None, "none, training runs on the CPU", ""),
        ("", "13.0", "none, training runs on the CPU", "check nvidia-smi"),
        (
            "GPU 0: NVIDIA X",
            None,
            "nvidia-smi lists some, but this torch has no CUDA, training runs on the CPU",
            "pip uninstall -y torch && pip uninstall -y fbgemm-gpu fbgemm-gpu-cpu && "
            "pip install torch==2.14.1 fbgemm-gpu==1.9.0",
        ),
        (
            "GPU 0: NVIDIA X",
            "13.0",
            "none that torch sees, but nvidia-smi lists some, training runs on the CPU",
            "check nvidia-smi",
        ),
    ],
)
def test_doctor_names_gpus_that_torch_does_not_use(
    installed: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    listed: str,
    cuda: str | None,
    detail: str,
    cure: str,
) -> None:
    fbgemm = {"fbgemm_gpu": "1.9.0", "fbgemm_gpu_cpu": None} if cuda else {}
    installed(cuda, **NEWEST | fbgemm)
    monkeypatch.setattr(doctor, "output_of", lambda *command: listed * (command == ("nvidia-smi", "-L")))
    (found,) = doctor._gpus()
    assert found.detail == detail
    assert found.cure.startswith(cure)
    assert bool(found.cure) == bool(cure)


@pytest.mark.parametrize("apart", [False, True])
def test_doctor_shows_gpus_and_which_reach_each_other(monkeypatch: pytest.MonkeyPatch, apart: bool) -> None:
    known = {"name": "NVIDIA X", "total_memory": 80 << 30, "major": 9, "minor": 0}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    properties = [SimpleNamespace(uuid=f"GPU-{index}", **known) for index in range(4)]
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: properties[getattr(device, "index", device)]
    )
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: not apart or {a, b} != {0, 3})
    monkeypatch.setattr(network, "_library", lambda name: None if apart else Path(name))
    *gpus, reach, _ = doctor._gpus()
    assert [gpu.name for gpu in gpus] == ["GPU 0", "GPU 1", "GPU 2", "GPU 3"]
    assert gpus[0].detail == "NVIDIA X, 80 GiB, compute capability 9.0"
    found = (
        "GPUs 0-2 | 3 by stores (1 machine: GPUs have no access to each other), all others"
        if apart
        else "GPUs 0-3 by stores (1 machine), all others"
    )
    others = (
        "NCCL messages (NVSHMEM's libnvshmem_host.so.3 is"
        if apart
        else "NCCL messages, or kernels' puts (NVSHMEM is installed)"
    )
    assert reach.detail.startswith(found)
    assert others in reach.detail
    assert bool(reach.cure) == apart


def test_doctor_shows_nvlink_domains() -> None:
    places = [Location("m", str(gpu), frozenset("0123"), Domain("ab12", 3)) for gpu in range(3)]
    places.append(Location("m", "3", frozenset("0123"), None, "its NVLink fabric is in progress"))
    domain, apart = doctor._domains(places)
    assert domain.detail.startswith("GPU 0, 1, 2 in cluster ab12, clique 3, reach its GPUs on other machines by stores")
    assert not domain.cure
    assert apart.detail == "GPU 3: its NVLink fabric is in progress"
    assert "pip install nvidia-ml-py" in apart.cure
    assert not list(doctor._domains([Location("m", "0", frozenset("0"))])), "nothing to say"


def test_importing_doctor_and_launcher_does_not_import_torch() -> None:
    program = "import sys; from dlrm_overlap.launching import doctor, launcher; sys.exit('torch' in sys.modules)"
    root = Path(dlrm_overlap.__file__).parents[1]
    assert subprocess.run([sys.executable, "-c", program], cwd=root, check=False).returncode == 0
