"""A report on this machine and this Python: which needs of training they meet, and cures for the others."""

import itertools
import os
import platform
import shutil
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from dlrm_overlap.launching import stack
from dlrm_overlap.launching.environment import output_of
from dlrm_overlap.launching.stack import Finding

_MIN_SHM_BYTES = 1 << 30


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


def _findings() -> Iterator[Finding]:
    inside = (3, 11) <= sys.version_info[:2] <= (3, 12)
    cure = "" if inside else "use Python 3.11 or 3.12"
    yield Finding("ok" if inside else "wrong", "Python", platform.python_version(), cure)
    torch_finding = stack.check_torch()
    yield torch_finding
    if torch_finding.status != "missing":  # without torch neither can be judged
        libraries = [stack.check_fbgemm(), stack.check_torchrec()]
        yield from libraries
        if all(finding.status == "ok" for finding in (torch_finding, *libraries)):
            yield stack.check_tried()
    for name in ("numpy", "tensorboard"):
        version = stack.version_of(name)
        cure = "" if version else f"pip install {name}"
        yield Finding("ok" if version else "missing", name, version or "not installed", cure)
    if torch_finding.status == "ok":
        import torch

        yield from _gpus()
        yield _compiler() if torch.cuda.is_available() else _shared_memory()
        yield _reach()
    yield _mpi()


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
        pairs = itertools.permutations(range(count), 2)
        apart = ", ".join(f"{a}-{b}" for a, b in pairs if not torch.cuda.can_device_access_peer(a, b))
        if apart:
            cure = "nvidia-smi topo -p2p r tells why; pgas and fused send messages between them, which is slower"
            yield Finding("wrong", "links", f"no peer access between GPUs {apart}{_link_kinds()}", cure, needed=False)
        else:
            yield Finding("ok", "links", f"peer access between all GPUs{_link_kinds()}")


def _compiler() -> Finding:
    """Look for the compiler and the headers by which Triton builds a kernel's launcher, at the first launch."""
    names = [os.environ["CC"].split()[0]] if os.environ.get("CC", "").strip() else ["gcc", "clang"]
    compiler = next(filter(None, map(shutil.which, names)), None)
    # As Triton looks for it: Debian's own scheme names a folder under /usr/local, where no headers are.
    header = Path(sysconfig.get_path("include", "posix_prefix")) / "Python.h"
    if compiler and header.exists():
        return Finding("ok", "C compiler", f"{compiler}, with Python's headers", needed=False)
    missing = header if compiler else " or ".join(names)
    detail = f"no {missing}, by which Triton builds what launches its kernels"
    cure = "apt-get install gcc libc6-dev python3-dev, or their like; pgas, fused and nccl need them"
    return Finding("missing", "C compiler", detail, cure, needed=False)


def _link_kinds() -> str:
    """Return the kinds of links that nvidia-smi shows, such as ", NV18" or ", NV12 PHB SYS", or an empty string."""
    rows = [line.split() for line in output_of("nvidia-smi", "topo", "-m").splitlines() if line.startswith("GPU")]
    kinds = {kind for row in rows for kind in row[1 : len(rows) + 1]} - {"X"}
    return f", {' '.join(sorted(kinds))}" if kinds else ""


def _shared_memory() -> Finding:
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
    """Find which ranks `pgas` and `fused` reach by stores, and how they reach the others."""
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
    if (version := stack.version_of("mpi4py")) is None:
        return Finding("missing", "mpi4py", "not installed, for mpirun only", "pip install mpi4py", needed=False)
    probe = "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI; print(MPI.Get_library_version())"
    library = output_of(sys.executable, "-c", probe).strip("\0 \n").partition("\n")[0].strip()
    mpirun = shutil.which("mpirun")
    if not (library and mpirun):
        detail = f"{version}, but {'no mpirun on PATH' if library else 'no MPI library loads'}, for mpirun only"
        return Finding("missing", "mpi4py", detail, "apt-get install openmpi-bin", needed=False)
    return Finding("ok", "mpi4py", f"{version}, {library.split(',')[0]}, {mpirun}")
