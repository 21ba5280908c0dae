"""The cores and memory that this process may use, and how many ranks fit in them. Loads no torch."""

import math
import os
from collections.abc import Iterator
from pathlib import Path

import psutil

from dlrm_overlap.config import InputError

_RANKS_PER_CORE = 4
_ALWAYS_FIT = 8  # ranks, on any number of cores: a node with eight GPUs may give a job one core
_RANK_BYTES = 500_000_000  # resident memory of a rank that has loaded its libraries and has no data yet


def check_processes(nproc: int) -> None:
    """Check that this node has room for `nproc` ranks: 4 per core, or 8 on fewer than two cores, of 0.5 GB each.

    Raises:
        InputError: if it does not.
    """
    cores, memory_bytes = available_cores(), available_memory_bytes()
    most = min(max(_ALWAYS_FIT, _RANKS_PER_CORE * cores), max(1, memory_bytes // _RANK_BYTES))
    if nproc > most:
        raise InputError(
            f"--nproc: {nproc} processes, but {cores} cores and {memory_bytes / 1e9:.1f} GB of free memory have room "
            f"for {most} ({_RANKS_PER_CORE} per core, {_RANK_BYTES / 1e9:g} GB each); start one per GPU, or one per "
            f"core of a CPU"
        )


def available_cores(root: Path = Path("/")) -> int:
    """Return the number of cores that this process may use: its affinity mask, and the CPU quota of its cgroups."""
    cores = float(len(os.sched_getaffinity(0)))
    for folder in _cgroups("cpu", root):
        limit, _, period = _read(folder / "cpu.max").partition(" ")
        limit = limit or _read(folder / "cpu.cfs_quota_us")
        period = period or _read(folder / "cpu.cfs_period_us")
        if limit.isdigit() and period.isdigit():  # "max" in version 2 and -1 in version 1 mean no limit
            cores = min(cores, int(limit) / int(period))
    return math.ceil(cores)


def available_memory_bytes(root: Path = Path("/")) -> int:
    """Return the memory that is free on this node, or the limit of this process's cgroups if that is lower."""
    free = psutil.virtual_memory().available
    for folder in _cgroups("memory", root):
        limit = _read(folder / "memory.max") or _read(folder / "memory.limit_in_bytes")
        if limit.isdigit():
            free = min(free, int(limit))
    return free


def _cgroups(controller: str, root: Path) -> Iterator[Path]:
    """Yield the folders of this process's cgroups, of version 2 and of version 1, and of all cgroups above them."""
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        # Version 1 mounts each controller in a folder of its own. In a container, the path may be that of the node,
        # which does not exist here; the mount itself then is the container's cgroup.
        mount = root / "sys/fs/cgroup" / (controller if controllers else "")
        folder = mount / path.lstrip("/")
        yield from (each for each in (folder, *folder.parents) if each.is_relative_to(mount))


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
