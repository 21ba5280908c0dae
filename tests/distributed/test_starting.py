"""NVSHMEM, in place of which stands a library that fails on one rank: all ranks go on alike, or end alike."""

import time
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from dlrm_overlap.comm import network
from dlrm_overlap.comm.reach import Reach
from dlrm_overlap.config import InputError
from tests.distributed.workers import run_ranks

_TIMEOUT_S = 1.0
_DIED = "NVSHMEM has not started within 1 s on rank 0 and 1 more"


class _Library:
    """Has the calls of `_Nvshmem`; rank 1 fails as the test asks, and rank 0 waits for it, as NVSHMEM does."""

    def __init__(self, fails: str) -> None:
        self.verdict: str | None = None
        self._fails = fails

    def unique_id(self) -> bytes:
        return b"id"

    def start(self, unique_id: bytes, rank: int, world_size: int) -> str:
        assert (unique_id, world_size) == (b"id", 2)
        if self._fails == "":
            return ""
        if rank == 1 and self._fails == "returns":
            return "status 7"
        if rank == 1 and self._fails == "raises":
            raise OSError("no device")
        time.sleep(30)
        return ""

    def misfit(self, rank: int, world_size: int) -> str:
        return ""


def _choose(folder: Path) -> None:
    group, cpu = dist.group.WORLD, torch.device("cpu")
    assert isinstance(group, dist.ProcessGroup)
    reach = Reach(group.rank(), (range(1), range(1, 2)))
    for fails, why in (
        ("", ""),
        ("returns", "status 7 (rank 1)"),
        ("raises", "NVSHMEM does not start (no device) (rank 1)"),
        ("hangs", _DIED),
    ):
        library, begin = _Library(fails), time.monotonic()
        network.start_puts = partial(network._start, library)  # type: ignore[arg-type]
        for _ in range(2):  # the second one asks nobody to wait again
            assert network.agree_on_puts("auto", reach, group, cpu, _TIMEOUT_S) == (not fails, why)
        if fails:
            with pytest.raises(InputError) as refused:
                network.agree_on_puts("puts", reach, group, cpu, _TIMEOUT_S)
            assert str(refused.value) == f"embedding.between_hosts: puts, but {why}; take auto or messages"
        assert time.monotonic() - begin < 15, "the start that hangs has been waited for"


def test_a_start_that_fails_on_one_rank_is_told_on_all(tmp_path: Path) -> None:
    run_ranks(_choose, 2, tmp_path, timeout_s=60)
