"""The ranks of a machine agree on numbers whatever other processes of that machine do to them."""

import contextlib
import itertools
import multiprocessing
import os
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dlrm_overlap.comm import max_reduce
from dlrm_overlap.comm.max_reduce import AsyncMaxReduce
from tests.distributed.workers import run_ranks

_RANKS, _SIZES, _NOBODY = 3, (1, 7, 170, 511), 65534
_HEAD_START_S = 1.0


def _files_of(pid: str) -> list[str]:
    """Return the open files of a process, such as `socket:[123]`, if this user may list them."""
    with contextlib.suppress(OSError):
        return [os.readlink(file) for file in Path(f"/proc/{pid}/fd").iterdir()]
    return []


def _names_of(pid: str) -> list[str]:
    """Return the names of a process's Unix sockets, which every user may list."""
    files = _files_of(pid)
    lines = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    return [line[7].replace("@", "\0", 1) for line in lines if len(line) > 7 and f"socket:[{line[6]}]" in files]


def _disturb(user: int, pids: Path, found: Any) -> None:
    """Look for a way into the processes with these ids as `user`, and count the ways found."""
    held = []
    for size in itertools.cycle([0, 1, 4, 8, 100, 4096]):
        ranks = pids.read_text().split() if pids.exists() else []
        names = [name for pid in ranks for name in _names_of(pid)]  # by root, to disturb these processes alone
        os.seteuid(user)
        for name, family in itertools.product(names, (socket.SOCK_SEQPACKET, socket.SOCK_STREAM)):
            peer = socket.socket(socket.AF_UNIX, family)
            with contextlib.suppress(OSError):
                peer.connect(name)
                found.value += 1
                if size:
                    peer.send(os.urandom(size))
            held.append(peer)  # so that it stays connected, and silent
        if user:
            found.value += sum(len(_files_of(pid)) for pid in ranks)
        os.seteuid(0)
        time.sleep(0.01)


def _agree(folder: Path) -> None:
    with (folder / "pids").open("a") as file:
        file.write(f"{os.getpid()}\n")
    gathered: Callable[..., Any] = max_reduce.gathered

    def late(*given: Any) -> Any:
        time.sleep(_HEAD_START_S)  # for strangers to be there before the peers
        return gathered(*given)

    max_reduce.gathered = late
    group = dist.group.WORLD
    assert isinstance(group, dist.ProcessGroup)
    ranks = AsyncMaxReduce(group)
    for step, size in itertools.product(range(20), _SIZES):
        numbers = torch.full((size,), 100 * step + group.rank())
        ranks.begin(numbers).wait(timedelta(seconds=5))
        assert numbers.tolist() == [100 * step + group.size() - 1] * size
    assert ranks._pipes is not None


@pytest.mark.parametrize("user", [0, _NOBODY], ids=["same user", "another user"])
def test_ranks_agree_while_strangers_look_for_a_way_in(user: int, tmp_path: Path) -> None:
    if os.getuid():
        pytest.skip("another user's processes need root")
    tmp_path.chmod(0o755)
    context = multiprocessing.get_context("fork")
    found = context.Value("i", 0)
    stranger = context.Process(target=_disturb, args=(user, tmp_path / "pids", found))
    stranger.start()
    try:
        run_ranks(_agree, _RANKS, tmp_path, timeout_s=60)
        assert stranger.is_alive()
    finally:
        stranger.kill()
        stranger.join()
    assert found.value == 0, "a stranger has got at a rank"
