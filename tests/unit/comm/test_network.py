"""How messages go between nodes: the key, what there is, and errors."""

import ctypes
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from dlrm_overlap.comm import network
from dlrm_overlap.comm.network import _Nvshmem, start_puts
from dlrm_overlap.config import InputError
from tests.conftest import refuses
from tests.unit.comm.threads import Rank, Threads

TIMEOUT_S = 0.5


class _Library:
    """Has the calls of `_Nvshmem`; a rank that is to start waits for one that fails, as NVSHMEM does."""

    def __init__(self, start: str) -> None:
        self.start_fault: str | None = None
        self._start = start

    def unique_id(self) -> bytes:
        return b"id"

    def start(self, unique_id: bytes, rank: int, world_size: int) -> str:
        assert (unique_id, world_size) == (b"id", 2)
        if self._start == "raises":
            raise RuntimeError("CUDA error:\n  out of memory")
        if self._start == "waits":
            threading.Event().wait(20)
        return self._start

    def rank_mismatch(self, rank: int, world_size: int) -> str:
        return ""


@pytest.mark.parametrize(
    ("starts", "why"),
    [
        (("", ""), ""),
        (("waits", "no network"), "no network (rank 1)"),
        (("raises", "waits"), "NVSHMEM does not start (CUDA error: out of memory) (rank 0)"),
        (("waits", "waits"), "NVSHMEM has not started within 0.5 s (rank 0)"),
    ],
)
def test_all_ranks_learn_what_keeps_one_from_starting(
    monkeypatch: pytest.MonkeyPatch, starts: tuple[str, str], why: str
) -> None:
    ranks, mine, begin = Threads(2), threading.local(), time.monotonic()
    monkeypatch.setattr(dist, "all_gather_object", ranks.gather)
    monkeypatch.setattr(dist, "get_global_rank", lambda *_: 0)
    monkeypatch.setattr(dist, "broadcast_object_list", lambda values, *_: values.__setitem__(0, b"id"))
    monkeypatch.setattr(network, "missing_puts", lambda: "")
    monkeypatch.setattr(network, "_nvshmem", lambda: mine.library)

    def told(rank: int) -> list[str]:
        mine.library, errors = _Library(starts[rank]), []
        for _ in range(2):  # the second one waits for nobody again
            try:
                start_puts(Rank(rank, 2), torch.device("cuda"), TIMEOUT_S)  # type: ignore[arg-type]
            except InputError as error:
                errors.append(str(error))
        return errors

    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    monkeypatch.setattr(network, "unused_page_locked_memory", nullcontext)
    with ThreadPoolExecutor(2) as threads:
        expected = [f"embedding.internode: puts, but {why}; take messages"] * 2 if why else []
        assert list(threads.map(told, range(2))) == [expected] * 2
    assert time.monotonic() - begin < 5


@pytest.mark.parametrize(("blocks", "free"), [(5000, 2976), (100, 0)])
def test_memory_that_was_used_is_taken_while_nvshmem_starts(
    monkeypatch: pytest.MonkeyPatch, blocks: int, free: int
) -> None:
    """Of `blocks` blocks the 1000th, or last, was used before; `free` are left for NVSHMEM."""
    memory = (ctypes.c_int * blocks)()
    memory[min(1000, blocks) - 1] = 2
    left = [ctypes.addressof(memory) + 4 * number for number in reversed(range(blocks))]

    def allocate(size: int) -> tuple[SimpleNamespace, int]:
        return SimpleNamespace(value=0 if left else 2), left.pop() if left else 0  # 2: cudaErrorMemoryAllocation

    runtime = SimpleNamespace(cudaMallocHost=allocate, cudaFreeHost=left.append)
    for name, module in (("cuda", SimpleNamespace()), ("cuda.bindings", SimpleNamespace(runtime=runtime))):
        monkeypatch.setitem(sys.modules, name, module)  # type: ignore[arg-type]
    with network.unused_page_locked_memory():
        assert len(left) == free
    assert len(left) == blocks


def test_who_has_no_nvshmem_is_told_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(network, "_library", lambda name: None)
    for device, why in (
        ("cuda", r"NVSHMEM's libnvshmem_host.so.3 is not found .*"),
        ("cpu", "CPUs have no kernels .*"),
    ):
        with refuses(rf"^embedding\.internode: puts, but {why}; take messages$"):
            start_puts(Rank(0, 1), torch.device(device), TIMEOUT_S)  # type: ignore[arg-type]


def test_ranks_take_a_kept_block_only_if_all_have_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 has kept blocks 0 and 2, rank 1, whose heap begins elsewhere, 1 and 2."""
    ranks = Threads(2)
    monkeypatch.setattr(dist, "all_gather_object", ranks.gather)

    def taken(rank: int) -> list[int]:
        nvshmem, group, heap = _Nvshmem.__new__(_Nvshmem), Rank(rank, 2), (1 + rank) << 20  # without the library
        blocks = iter(range(heap, heap + 100))

        def malloc(size_bytes: int) -> int:
            ranks.meet()
            return next(blocks)

        nvshmem._calls = SimpleNamespace(nvshmem_malloc=malloc)  # type: ignore[assignment]
        nvshmem._allocated, nvshmem._numbers, nvshmem._free = 0, {}, {}
        made = [nvshmem.allocate(64, group) for _ in range(3)]  # type: ignore[arg-type]
        for number in ((0, 2), (2, 1))[rank]:
            nvshmem.keep(64, made[number])
        return [nvshmem.allocate(64, group) - heap for _ in range(2)]  # type: ignore[arg-type]

    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(taken, range(2))) == [[2, 3]] * 2
