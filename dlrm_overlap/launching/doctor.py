"""A report on what training needs on this machine, and how to get what is missing."""

import os
import platform
import shutil
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from dlrm_overlap.config import InputError
from dlrm_overlap.launching import supported_versions
from dlrm_overlap.launching.environment import output_of

if TYPE_CHECKING:
    from dlrm_overlap.comm.fabric import Domain
    from dlrm_overlap.comm.reach import Location

_MIN_SHM_BYTES = 1 << 30


class Finding(NamedTuple):
    name: str
    detail: str
    cure: str = ""
    """how to get what is missing; empty if nothing is wrong"""
    needed: bool = False


def run_doctor() -> int:
    """Print the report, and return 0 if training can run here, else 1."""
    broken = []
    for finding in _findings():
        print(f"{'wrong' if finding.cure else 'ok':6} {finding.name}: {finding.detail}")
        if finding.cure:
            print(f"{'':6}   {'cure' if finding.needed else 'optional'}: {finding.cure}")
        broken += [finding.name] * bool(finding.needed and finding.cure)
    print(f"\ntraining cannot run here yet: {', '.join(broken)}" if broken else "\ntraining can run here")
    return 1 if broken else 0


def _findings() -> Iterator[Finding]:
    oldest, *_, newest = [".".join(map(str, release)) for release in supported_versions.PYTHONS]
    cure = "" if sys.version_info[:2] in supported_versions.PYTHONS else f"use Python {oldest} to {newest}"
    yield Finding("Python", platform.python_version(), cure, needed=True)
    try:
        supported_versions.check_stack()
    except InputError as error:
        fault, _, cure = str(error).partition("; ")
        yield Finding("libraries", fault, cure, needed=True)
    else:
        yield _libraries()
        yield from _gpus()
        yield _shared_memory()
    yield _mpi()


def _libraries() -> Finding:
    found, stack = supported_versions.versions(), supported_versions.row()
    detail = ", ".join(f"{name} {version or 'missing'}" for name, version in found.items())
    build = supported_versions.build()
    if stack is None:
        newest = supported_versions.STACKS[-1].torch
        cure = supported_versions.install_command(build)
        return Finding("libraries", f"{detail}: torch is newer than {newest}, the newest tested one", cure)
    tested = stack._asdict()
    if others := [name for name, version in found.items() if (version or "").partition("+")[0] != tested[name]]:
        cure = supported_versions.install_command(build, stack)
        return Finding("libraries", f"{detail}: {', '.join(others)} not tested with this torch", cure)
    release = stack.torch.rpartition(".")[0]
    on_gpus = ", ".join(f"torch {each.torch}" for each in supported_versions.STACKS if each.ran_on_gpus)
    where = "CPUs and GPUs" if stack.ran_on_gpus else f"CPUs only (on GPUs: {on_gpus})"
    return Finding("libraries", f"{detail}: the row of torch {release}, tested on {where}")


def _gpus() -> Iterator[Finding]:
    import torch

    from dlrm_overlap.comm.network import missing_puts
    from dlrm_overlap.comm.reach import location_of, nodes_of

    if not torch.cuda.is_available():
        yield _no_gpus(torch.version.cuda is not None)
        return
    devices = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    for device in devices:
        about = torch.cuda.get_device_properties(device)
        memory = f"{about.total_memory / 2**30:.0f} GiB"
        yield Finding(f"GPU {device.index}", f"{about.name}, {memory}, compute capability {about.major}.{about.minor}")
    locations = [location_of(device) for device in devices]
    nodes, why = nodes_of(locations)
    groups = " | ".join(f"{node[0]}-{node[-1]}" if len(node) > 1 else str(node[0]) for node in nodes)
    missing = missing_puts()
    others = "NCCL messages" + (f" ({missing})" if missing else ", or kernels' puts (NVSHMEM is installed)")
    detail = f"GPUs {groups} by stores ({why}), all others and other machines by {others}"
    cure = (
        "some have no peer access (nvidia-smi topo -p2p r shows why), and messages are slower" if len(nodes) > 1 else ""
    )
    yield from _domains(locations)
    yield Finding("reach", detail, cure)
    yield _compiler()


def _no_gpus(torch_has_cuda: bool) -> Finding:
    is_listed = "GPU " in output_of("nvidia-smi", "-L")
    if is_listed and not torch_has_cuda:
        # pip keeps torch 2.14.1+cpu if it is asked for 2.14.1.
        cure = f"pip uninstall -y torch && {supported_versions.install_command('cuda', supported_versions.row())}"
        return Finding("GPUs", "nvidia-smi lists some, but this torch has no CUDA, training runs on the CPU", cure)
    cure = "check nvidia-smi, the driver, CUDA_VISIBLE_DEVICES, docker run --gpus all"
    detail = f"none{' that torch sees, but nvidia-smi lists some' * is_listed}, training runs on the CPU"
    return Finding("GPUs", detail, cure if is_listed or supported_versions.build() == "cuda" else "")


def _domains(locations: "Sequence[Location]") -> Iterator[Finding]:
    """Report NVLink domains, which may span machines, by the locations of this machine's GPUs."""
    together: dict[tuple[Domain | None, str], list[str]] = {}
    for index, location in enumerate(locations):
        together.setdefault((location.domain, location.fault), []).append(str(index))
    for (domain, fault), gpus in together.items():
        where = f"GPU {', '.join(gpus)}"
        if domain is not None:
            detail = f"{where} in cluster {domain.cluster}, clique {domain.clique}, reach its GPUs on other machines by"
            yield Finding("NVLink domain", f"{detail} stores if IMEX connects the machines (nvidia-imex-ctl -N)")
        elif fault:
            cure = (
                "if the domain spans machines, as in a GB200 NVL72: pip install nvidia-ml-py; nvidia-smi -q shows the "
                "state of each GPU's fabric; nvidia-imex must run on each machine"
            )
            yield Finding("NVLink domain", f"{where}: {fault}", cure)


def _compiler() -> Finding:
    """Find the compiler and headers that Triton needs."""
    names = [os.environ["CC"].split()[0]] if os.environ.get("CC", "").strip() else ["gcc", "clang"]
    compiler = next(filter(None, map(shutil.which, names)), None)
    # The same scheme as Triton's: Debian's default names a folder under /usr/local, which has no headers.
    header = Path(sysconfig.get_path("include", "posix_prefix")) / "Python.h"
    if compiler and header.exists():
        return Finding("C compiler", f"{compiler}, with Python's headers")
    cure = "apt-get install gcc libc6-dev python3-dev, or the like; Triton needs them for pgas, fused and nccl"
    return Finding("C compiler", f"no {header if compiler else ' or '.join(names)}", cure)


def _shared_memory() -> Finding:
    shared = Path("/dev/shm")
    free_bytes = shutil.disk_usage(shared).free if shared.is_dir() else 0
    cure = "in a container: docker run --shm-size 8g" if free_bytes < _MIN_SHM_BYTES else ""
    return Finding("shared memory", f"{shared} {free_bytes / 2**30:.1f} GiB free", cure)


def _mpi() -> Finding:
    """Load MPI in a separate process, which a broken one aborts."""
    if (version := supported_versions.version_of("mpi4py")) is None:
        return Finding("mpi4py", "not installed, for mpirun only", "pip install mpi4py")
    probe = "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI; print(MPI.Get_library_version())"
    library = output_of(sys.executable, "-c", probe).strip("\0 \n").partition("\n")[0].strip()
    if not library or not (mpirun := shutil.which("mpirun")):
        missing = "no mpirun on PATH" if library else "no MPI library loads"
        return Finding("mpi4py", f"{version}, but {missing}, for mpirun only", "apt-get install openmpi-bin")
    return Finding("mpi4py", f"{version}, {library.split(',')[0]}, {mpirun}")
