"""A report on this machine: what it and this Python have for training, what is missing, and how to get that."""

import importlib.metadata
import importlib.util
import itertools
import logging
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from dlrm_overlap.config import InputError

_FBGEMM_OF_TORCH = {"2.11": "1.6", "2.12": "1.7", "2.13": "1.8"}  # TorchRec counts like FBGEMM
_FBGEMM_NAMES = ("fbgemm-gpu", "fbgemm-gpu-cpu")
_OPERATOR = "fbgemm::permute_2D_sparse_data"  # TorchRec calls it in every input dist
_MIN_SHM_BYTES = 1 << 30


@dataclass(frozen=True)
class Finding:
    """One line of the report. `cure` is the command that mends it or, where there is none, what to do."""

    status: Literal["ok", "missing", "wrong"]
    name: str
    detail: str
    cure: str = ""
    needed: bool = True
    """training cannot run without it"""


def run_doctor() -> int:
    """Print the report. Return 0 if training can run here, 1 if something needed is missing or wrong."""
    findings = list(_findings())
    for finding in findings:
        optional = "" if finding.needed or finding.status == "ok" else " (optional)"
        print(f"{finding.status:8} {finding.name}: {finding.detail}{optional}")
        if finding.cure:
            print(f"{'':8}   cure: {finding.cure}")
    broken = [finding.name for finding in findings if finding.needed and finding.status != "ok"]
    print(f"\ntraining cannot run here yet: {', '.join(broken)}" if broken else "\ntraining can run here")
    return 1 if broken else 0


def check_stack() -> None:
    """Check that FBGEMM and TorchRec match torch, and that FBGEMM's operators load. Takes about a second.

    Raises:
        InputError: naming the first package that does not, and its cure.
    """
    for check in (_torch, _fbgemm, _torchrec):
        finding = check()
        if finding.status != "ok":
            raise InputError(f"{finding.name}: {finding.detail}; {finding.cure}")


def environment() -> dict[str, str]:
    """Return what a result depends on: versions, GPUs, CPU and the checkout's commit, each where it can be found."""
    import torch

    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    found = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "nccl": _nccl(),
        "fbgemm": next(iter(_fbgemm_versions().values()), None),
        "torchrec": _version("torchrec"),
        "triton": _version("triton"),
        "numpy": _version("numpy"),
        "gpu": ", ".join(f"{len(list(same))} x {name}" for name, same in itertools.groupby(gpus)),
        "cpu": _cpu(),
        "commit": _commit(),
    }
    return {name: value for name, value in found.items() if value}


def _findings() -> Iterator[Finding]:
    inside = (3, 11) <= sys.version_info[:2] <= (3, 12)
    yield Finding(
        "ok" if inside else "wrong", "Python", platform.python_version(), "" if inside else "use Python 3.11 or 3.12"
    )
    torch_finding = _torch()
    yield torch_finding
    if torch_finding.status != "missing":  # without torch neither can be judged
        yield _fbgemm()
        yield _torchrec()
    for name, purpose, needed in (
        ("numpy", "", True),
        ("tensorboard", "", True),
        ("triton", ", for the fused kernels", False),
    ):
        yield _package(name, purpose, needed)
    if torch_finding.status == "ok":
        yield from _gpus()
        yield _symmetric_memory()
        yield _reach()
    yield _mpi()


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def _package(name: str, purpose: str, needed: bool) -> Finding:
    if version := _version(name):
        return Finding("ok", name, version)
    return Finding("missing", name, f"not installed{purpose}", f"pip install {name}", needed)


def _torch() -> Finding:
    version = _version("torch")
    supported = f"pip install 'torch=={max(_FBGEMM_OF_TORCH, key=_as_numbers)}.*'"
    if version is None:
        return Finding("missing", "torch", "not installed", supported)
    if _as_numbers(version) < min(map(_as_numbers, _FBGEMM_OF_TORCH)):
        return Finding("wrong", "torch", f"{version} is older than {min(_FBGEMM_OF_TORCH, key=_as_numbers)}", supported)
    import torch

    build = f"CUDA {torch.version.cuda}, NCCL {_nccl()}" if torch.version.cuda else "CPU build"
    return Finding("ok", "torch", f"{torch.__version__}, {build}")


def _as_numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version)[:2]))


def _fbgemm_versions() -> dict[str, str]:
    """Return FBGEMM's distributions and their versions; where it is only on PYTHONPATH, the version that it states."""
    versions = {name: version for name in _FBGEMM_NAMES if (version := _version(name))}
    if not versions and importlib.util.find_spec("fbgemm_gpu") and _load_fbgemm() is None:
        versions["fbgemm_gpu"] = sys.modules["fbgemm_gpu"].__version__
    return versions


def _fbgemm() -> Finding:
    import torch

    wanted = _FBGEMM_OF_TORCH.get(_minor(torch.__version__))
    name = _FBGEMM_NAMES[0 if torch.version.cuda else 1]
    cure = f"pip install '{name}=={wanted}.*'" if wanted else f"pip install {name} of the release for this torch"
    if not importlib.util.find_spec("fbgemm_gpu"):
        return Finding("missing", "FBGEMM", "not installed", cure)
    versions = _fbgemm_versions()
    for found, version in versions.items():
        if wanted and _minor(version) != wanted:
            return Finding("wrong", "FBGEMM", f"{found} {version} does not match torch {torch.__version__}", cure)
    if error := _load_fbgemm():
        return Finding("wrong", "FBGEMM", error, f"pip uninstall -y {' '.join(_FBGEMM_NAMES)}; {cure}")
    return Finding("ok", "FBGEMM", f"{', '.join(map(' '.join, versions.items()))}, operators load")


def _load_fbgemm() -> str | None:
    """Import FBGEMM and return why it cannot be used on this machine's devices, or None."""
    import torch

    level = logging.root.manager.disable
    logging.disable(logging.ERROR)  # it logs a page for what the exception says in a line
    try:
        importlib.import_module("fbgemm_gpu")
    except Exception as error:
        return f"does not load ({type(error).__name__}: {str(error).strip().splitlines()[0]})"
    finally:
        logging.disable(level)
    key = "CUDA" if torch.cuda.is_available() else "CPU"
    try:
        usable = torch._C._dispatch_has_kernel_for_dispatch_key(_OPERATOR, key)
    except RuntimeError:  # no such operator at all
        usable = False
    return None if usable else f"has no {key} operators (a build for other devices, or its libraries did not load)"


def _torchrec() -> Finding:
    import torch

    wanted, version = _FBGEMM_OF_TORCH.get(_minor(torch.__version__)), _version("torchrec")
    # Without its dependencies: among them is the CUDA fbgemm-gpu, which would overwrite fbgemm-gpu-cpu.
    cure = f"pip install --no-deps 'torchrec=={wanted}.*'" if wanted else "pip install --no-deps torchrec"
    if version is None:
        if importlib.util.find_spec("torchrec"):
            return Finding("ok", "TorchRec", "found, without a version")
        return Finding("missing", "TorchRec", "not installed", cure)
    if wanted and _minor(version) != wanted:
        return Finding("wrong", "TorchRec", f"{version} does not match torch {torch.__version__}", cure)
    needs = [line for line in importlib.metadata.requires("torchrec") or [] if "extra ==" not in line]
    names = [re.split(r"[^\w.-]", line, maxsplit=1)[0] for line in needs]
    absent = [name for name in names if not name.startswith("fbgemm") and _version(name) is None]
    if absent:
        return Finding("wrong", "TorchRec", f"{version} needs {', '.join(absent)}", f"pip install {' '.join(absent)}")
    return Finding("ok", "TorchRec", version)


def _nccl() -> str | None:
    import torch
    import torch.distributed
    from torch.cuda import nccl

    if not (torch.version.cuda and torch.distributed.is_nccl_available()):
        return None
    return ".".join(map(str, nccl.version()))


def _gpus() -> Iterator[Finding]:
    import torch

    if not torch.version.cuda:
        yield Finding("ok", "GPUs", "none used, a CPU build of torch")
        return
    if not (count := torch.cuda.device_count() if torch.cuda.is_available() else 0):
        cure = "nvidia-smi must list them: check the driver, CUDA_VISIBLE_DEVICES, docker run --gpus all"
        yield Finding("missing", "GPUs", "none visible, training runs on the CPU", cure, needed=False)
        return
    for index in range(count):
        p = torch.cuda.get_device_properties(index)
        memory = f"{p.total_memory / 2**30:.0f} GiB"
        yield Finding("ok", f"GPU {index}", f"{p.name}, {memory}, compute capability {p.major}.{p.minor}")
    if count > 1:
        apart = _pairs_without_peer_access()
        links = _link_kinds()
        if apart:
            detail = f"no peer access between GPUs {', '.join(f'{a}-{b}' for a, b in apart)}{links}"
            yield Finding("wrong", "links", detail, "nvidia-smi topo -p2p r tells why", needed=False)
        else:
            yield Finding("ok", "links", f"peer access between all GPUs{links}")


def _pairs_without_peer_access() -> list[tuple[int, int]]:
    import torch

    pairs = itertools.permutations(range(torch.cuda.device_count()), 2)
    return [pair for pair in pairs if not torch.cuda.can_device_access_peer(*pair)]


def _link_kinds() -> str:
    """Return the kinds of links that nvidia-smi shows, such as ", NV18" or ", NV12 PHB SYS", or an empty string."""
    rows = [line.split() for line in _output("nvidia-smi", "topo", "-m").splitlines() if line.startswith("GPU")]
    kinds = {kind for row in rows for kind in row[1 : len(rows) + 1]} - {"X"}
    return f", {' '.join(sorted(kinds))}" if kinds else ""


def _symmetric_memory() -> Finding:
    import torch

    if torch.cuda.is_available():
        if _pairs_without_peer_access():
            cure = "GPUs without it exchange messages under pgas and fused, which is slower"
            return Finding("wrong", "symmetric memory", "needs peer access between all GPUs", cure, needed=False)
        from torch.distributed import _symmetric_memory

        return Finding("ok", "symmetric memory", f"{_symmetric_memory.__name__}, all GPUs reach each other")
    shared = Path("/dev/shm")
    if not shared.is_dir():
        return Finding("missing", "shared memory", f"no {shared}", "mount a tmpfs there", needed=False)
    usage = shutil.disk_usage(shared)
    detail = f"{shared} {usage.total / 2**30:.1f} GiB, {usage.free / 2**30:.1f} GiB free"
    if usage.free < _MIN_SHM_BYTES:
        detail += ", little for the windows and the loaders"
        return Finding("wrong", "shared memory", detail, "in a container: docker run --shm-size 8g", needed=False)
    return Finding("ok", "shared memory", detail)


def _reach() -> Finding:
    """Tell which ranks `pgas` and `fused` reach by stores, and how they reach the others."""
    import torch

    from dlrm_overlap.comm.network import missing_puts
    from dlrm_overlap.comm.reach import hosts_of, place_of

    if not torch.cuda.is_available():
        return Finding("ok", "reach", "CPU ranks of one machine by stores, of other machines by messages of gloo")
    hosts, _ = hosts_of([place_of(torch.device("cuda", index)) for index in range(torch.cuda.device_count())])
    together = " | ".join(f"{host[0]}-{host[-1]}" if len(host) > 1 else str(host[0]) for host in hosts)
    missing = missing_puts()
    others = "messages of NCCL" + (f" ({missing})" if missing else ", or puts from kernels (NVSHMEM is there)")
    detail = f"GPUs {together} by stores, all others and other machines by {others}"
    return Finding("ok" if len(hosts) == 1 else "wrong", "reach", detail, needed=False)


def _mpi() -> Finding:
    """Load MPI in a process of its own: it may be loaded only once, and a broken one aborts the process."""
    if (version := _version("mpi4py")) is None:
        return Finding("missing", "mpi4py", "not installed, for mpirun only", "pip install mpi4py", needed=False)
    probe = "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI; print(MPI.Get_library_version())"
    library = _output(sys.executable, "-c", probe).strip("\0 \n").partition("\n")[0].strip()
    mpirun = shutil.which("mpirun")
    if not (library and mpirun):
        detail = f"{version}, but {'no mpirun on PATH' if library else 'no MPI library loads'}, for mpirun only"
        return Finding("missing", "mpi4py", detail, "apt-get install openmpi-bin", needed=False)
    return Finding("ok", "mpi4py", f"{version}, {library.split(',')[0]}, {mpirun}")


def _output(*command: str) -> str:
    """Return what a command prints, or an empty string if there is no such command or it fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def _cpu() -> str:
    try:
        model = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        model = None
    return model[1] if model else platform.machine()


def _commit() -> str | None:
    """Return the checkout's commit, with `-dirty` if files differ from it."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():  # installed: a repository further up would be someone else's
        return None
    describe = ("describe", "--always", "--dirty", "--abbrev=12", "--exclude=*")
    return _output("git", "--no-optional-locks", "-C", str(root), *describe).strip()
