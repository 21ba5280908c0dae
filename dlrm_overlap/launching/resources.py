"""The cores and memory that this process may use. Imports no torch."""

import errno
import math
import os
from collections.abc import Iterator
from pathlib import Path

import psutil

from dlrm_overlap.config import InputError, in_one_line

_RANKS_PER_CORE = 4
_ALWAYS_FIT = 8  # ranks allowed on any number of cores, as a job on eight GPUs may get one core
_RANK_BYTES = 500_000_000  # resident memory of a rank that has imported its libraries


def check_processes(nproc: int) -> None:
    """Raise an `InputError` unless this machine has room for `nproc` ranks.

    A rank needs 0.5 GB of memory. Up to 4 ranks per core are allowed, and 8 ranks on a machine with fewer than 2 cores.
    """
    cores, memory_bytes = available_cores(), available_memory_bytes()
    max_ranks = min(max(_ALWAYS_FIT, _RANKS_PER_CORE * cores), max(1, memory_bytes // _RANK_BYTES))
    if nproc > max_ranks:
        raise InputError(
            f"--nproc: {nproc} processes, but {cores} cores and {memory_bytes / 1e9:.1f} GB of free memory have room "
            f"for {max_ranks} ({_RANKS_PER_CORE} per core, {_RANK_BYTES / 1e9:g} GB each); start one per GPU, or one "
            f"per core of a CPU"
        )


def exhausted_memory(error: BaseException) -> str | None:
    """Return "GPU" or "machine" if `error` says that its memory is exhausted, else None."""
    if type(error).__name__ == "OutOfMemoryError":  # torch's; it may not be loaded
        return "GPU"
    if isinstance(error, MemoryError) or "DefaultCPUAllocator: " in in_one_line(error):
        return "machine"
    return None


def lacks_threads(error: BaseException) -> bool:
    """Return whether `error` says that this user or container may start no more threads and processes."""
    said = in_one_line(error)
    return "can't start new thread" in said or os.strerror(errno.EAGAIN) in said  # by Python; by fork and gloo


def available_cores(root: Path = Path("/")) -> int:
    """Return the number of cores that the affinity mask and cgroups let this process use."""
    cores = float(len(os.sched_getaffinity(0)))
    for folder in _cgroups("cpu", root):
        limit, _, period = read_text(folder / "cpu.max").partition(" ")
        limit = limit or read_text(folder / "cpu.cfs_quota_us")
        period = period or read_text(folder / "cpu.cfs_period_us")
        if limit.isdigit() and period.isdigit():  # no limit is "max" in version 2, -1 in version 1
            cores = min(cores, int(limit) / int(period))
    return math.ceil(cores)


def available_memory_bytes(root: Path = Path("/")) -> int:
    """Return the free memory of this machine and of the cgroups of this process, including page cache."""
    free = psutil.virtual_memory().available
    for folder in _cgroups("memory", root):
        limit = read_text(folder / "memory.max") or read_text(folder / "memory.limit_in_bytes")
        if limit.isdigit():
            free = min(free, int(limit) - _used_bytes(folder))
    return max(0, free)


def _used_bytes(cgroup: Path) -> int:
    used = read_text(cgroup / "memory.current") or read_text(cgroup / "memory.usage_in_bytes")
    parts = dict(line.split() for line in read_text(cgroup / "memory.stat").splitlines())
    # In version 1 only "total" includes the cgroups below this one, as the usage does.
    cache = sum(int(parts.get(f"total_{kind}", parts.get(kind, 0))) for kind in ("active_file", "inactive_file"))
    return max(0, int(used or 0) - cache)


def _cgroups(controller: str, root: Path) -> Iterator[Path]:
    for line in read_text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        # Version 1 has a folder per controller. In a container the path may be the machine's, which does not exist
        # here; then the mount itself is the container's cgroup.
        mount = root / "sys/fs/cgroup" / (controller if controllers else "")
        folder = mount / path.lstrip("/")
        yield from (each for each in (folder, *folder.parents) if each.is_relative_to(mount))


def read_text(path: Path) -> str:
    """Return a file's stripped text, empty if it cannot be read."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""
