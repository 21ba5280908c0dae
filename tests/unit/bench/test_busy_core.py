"""A rank held to one core beside a busy process, which must not outlive it."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from dlrm_overlap.bench.harness.busy_core import core_of_rank, sharing_core
from tests.conftest import is_alive, wait_until

_DYING_RANK = """
import os, signal
from dlrm_overlap.bench.harness.busy_core import core_of_rank, sharing_core
with sharing_core(core_of_rank(0, 1)) as neighbour:
    print(neighbour, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def _cpu_ticks(process: int) -> int:
    return int(Path(f"/proc/{process}/stat").read_text().rsplit(")")[-1].split()[11])


def test_all_threads_share_the_core_with_a_busy_process_and_get_their_own_back() -> None:
    before, done = os.sched_getaffinity(0), threading.Event()
    thread = threading.Thread(target=done.wait)
    thread.start()
    assert thread.native_id is not None
    core = core_of_rank(0, 1)
    with sharing_core(core) as neighbour:
        for each in (0, thread.native_id, neighbour):
            assert os.sched_getaffinity(each) == {core}
        assert os.getpriority(os.PRIO_PROCESS, neighbour) == os.getpriority(os.PRIO_PROCESS, 0)
        made_meanwhile = threading.Thread(target=done.wait)
        made_meanwhile.start()
        wait_until(lambda: _cpu_ticks(neighbour) >= 10, 20, "the neighbour is not busy")
    assert not is_alive(neighbour)
    assert made_meanwhile.native_id is not None
    for each in (0, thread.native_id, made_meanwhile.native_id):
        assert os.sched_getaffinity(each) == before
    done.set()


def test_a_failed_run_ends_its_neighbour() -> None:
    before = os.sched_getaffinity(0)
    with pytest.raises(RuntimeError, match="a step failed"), sharing_core(core_of_rank(0, 1)) as neighbour:  # noqa: PT012
        assert is_alive(neighbour)
        raise RuntimeError("a step failed")
    assert not is_alive(neighbour)
    assert os.sched_getaffinity(0) == before


def test_a_killed_rank_takes_its_neighbour_along() -> None:
    rank = subprocess.run([sys.executable, "-c", _DYING_RANK], capture_output=True, text=True, timeout=60, check=False)
    assert rank.returncode == -signal.SIGKILL, rank.stderr
    wait_until(lambda: not is_alive(int(rank.stdout)), 20, "the neighbour runs on")


def test_ranks_have_cores_far_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {8, 9, 10, 11, 20, 21, 22, 23})
    assert [core_of_rank(rank, 2) for rank in range(2)] == [8, 20]
    assert [core_of_rank(rank, 8) for rank in range(8)] == [8, 9, 10, 11, 20, 21, 22, 23]
    assert sorted(core_of_rank(rank, 16) for rank in range(16)) == sorted([8, 9, 10, 11, 20, 21, 22, 23] * 2)
