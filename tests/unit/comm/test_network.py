"""How messages go between hosts: the key, what there is, and errors."""

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from dlrm_overlap.comm import network
from dlrm_overlap.comm.network import _Nvshmem
from dlrm_overlap.comm.reach import Reach
from dlrm_overlap.config import InputError
from tests.unit.comm.threads import Rank, Threads

CUDA = torch.device("cuda", 0)
TWO_HOSTS = Reach(0, (range(1), range(1, 2)))


class Group:
    """A group of one rank, which needs no peer to agree with."""

    def size(self) -> int:
        return 1

    def rank(self) -> int:
        return 0


def _choose(wanted: str, reach: Reach = TWO_HOSTS, device: torch.device = CUDA) -> tuple[bool, str]:
    return network.agree_on_puts(wanted, reach, Group(), device)  # type: ignore[arg-type]


def test_puts_are_taken_only_where_they_are_wanted_and_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "start_puts", lambda *_: "")
    assert _choose("auto") == (True, "")
    assert _choose("puts") == (True, "")
    assert not _choose("messages")[0]
    assert not _choose("puts", Reach(0, (range(2),)))[0], "one host has nobody to put to"


def test_who_has_no_nvshmem_is_told_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(network, "_library", lambda name: None)
    missing = "NVSHMEM's libnvshmem_host.so.3 is not found"
    puts, why = _choose("auto")
    assert not puts
    assert why.startswith(missing)
    with pytest.raises(InputError, match=rf"^embedding\.between_hosts: puts, but {missing} .*; take auto or messages$"):
        _choose("puts")
    assert _choose("auto", device=torch.device("cpu")) == (False, "CPUs have no kernels that put (rank 0)")


@pytest.mark.parametrize(("fault", "verdict"), [("", ""), ("status 7", "status 7 (rank 0)")])
def test_nvshmem_is_started_once(monkeypatch: pytest.MonkeyPatch, fault: str, verdict: str) -> None:
    starts = []

    def start(unique_id: bytes, rank: int, world_size: int) -> str:
        starts.append((unique_id, rank, world_size))
        return fault

    nvshmem = SimpleNamespace(verdict=None, unique_id=lambda: b"id", start=start, misfit=lambda *_: "")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(dist, "get_global_rank", lambda group, rank: rank)
    monkeypatch.setattr(dist, "broadcast_object_list", lambda *_: None)
    for _ in range(2):
        assert network._start(nvshmem, Group(), CUDA) == verdict  # type: ignore[arg-type]
    assert starts == [(b"id", 0, 1)]


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
