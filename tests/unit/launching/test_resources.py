"""How many ranks a machine has room for, by its cores, its memory and the limits of cgroups."""

import os
from pathlib import Path

import psutil
import pytest

from dlrm_overlap.cli import main
from dlrm_overlap.launching import resources
from tests.conftest import refuses


@pytest.mark.parametrize(
    ("cores", "memory_bytes", "most"),
    [(1, 64e9, 8), (2, 64e9, 8), (8, 64e9, 32), (64, 4e9, 8), (2, 1e9, 2), (2, 1e8, 1)],
)
def test_more_processes_than_cores_and_memory_have_room_for_are_refused(
    monkeypatch: pytest.MonkeyPatch, cores: int, memory_bytes: float, most: int
) -> None:
    monkeypatch.setattr(resources, "available_cores", lambda: cores)
    monkeypatch.setattr(resources, "available_memory_bytes", lambda: int(memory_bytes))
    resources.check_processes(most)
    told = rf"--nproc: {most + 1} processes, but {cores} cores and .* have room for {most} "
    with refuses(told):
        resources.check_processes(most + 1)


def test_nothing_is_started_where_there_is_no_room(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    started: list[object] = []
    monkeypatch.setattr("dlrm_overlap.train.ranks.spawn", lambda *asked: started.append(asked) or 0)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    assert main(["train", "--config", "quickstart", "--nproc", "500", "--log.dir", str(tmp_path)]) == 2
    assert not started
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("dlrm-overlap: --nproc: 500 processes, but ")
    assert main(["train", "--config", "quickstart", "--nproc", "4", "--log.dir", str(tmp_path)]) == 0
    assert len(started) == 1


def _lay_out(root: Path, **files: str) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")


VERSION_2 = {
    "proc/self/cgroup": "0::/slice/job",
    "sys/fs/cgroup/slice/job/cpu.max": "max 100000",
    "sys/fs/cgroup/slice/cpu.max": "250000 100000",
    "sys/fs/cgroup/slice/job/memory.max": "4000000000",
    "sys/fs/cgroup/slice/job/memory.current": "3500000000",
    "sys/fs/cgroup/slice/job/memory.stat": "anon 1000000000\nactive_file 2000000000\ninactive_file 500000000",
    "sys/fs/cgroup/slice/memory.max": "max",
}
VERSION_1 = {
    "proc/self/cgroup": "4:memory:/docker/1\n2:cpu,cpuacct:/docker/1\n0::/",
    "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "250000",
    "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
    "sys/fs/cgroup/memory/memory.limit_in_bytes": "4000000000",
    "sys/fs/cgroup/memory/memory.usage_in_bytes": "1500000000",
    "sys/fs/cgroup/memory/memory.stat": "inactive_file 0\ntotal_active_file 0\ntotal_inactive_file 500000000",
}
UNLIMITED = {
    "proc/self/cgroup": "4:memory:/\n2:cpu:/\n0::/",
    "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1",
    "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
    "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712",
}


@pytest.mark.parametrize(
    ("files", "cores", "memory_bytes"),
    [(VERSION_2, 3, 3_000_000_000), (VERSION_1, 3, 3_000_000_000), (UNLIMITED, 6, None), ({}, 6, None)],
    ids=["version 2", "version 1", "unlimited", "none"],
)
def test_limits_of_cgroups_count(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, files: dict[str, str], cores: int, memory_bytes: int | None
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(6)))
    free = psutil.virtual_memory()._replace(available=5_000_000_000)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: free)
    _lay_out(tmp_path, **files)
    assert resources.available_cores(tmp_path) == cores
    assert resources.available_memory_bytes(tmp_path) == (memory_bytes or 5_000_000_000)
