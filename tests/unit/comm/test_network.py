"""How messages go between hosts: what is asked for, what there is, and what is told."""

import pytest
import torch

from dlrm_overlap.comm import network
from dlrm_overlap.comm.network import _Nvshmem
from dlrm_overlap.comm.reach import Reach
from dlrm_overlap.config import InputError

CUDA = torch.device("cuda", 0)
TWO_HOSTS = Reach(0, (range(1), range(1, 2)))


class Group:
    """A group of one rank, which needs no peer to agree with."""

    def size(self) -> int:
        return 1

    def rank(self) -> int:
        return 0


def _choose(wanted: str, reach: Reach = TWO_HOSTS, device: torch.device = CUDA) -> tuple[bool, str]:
    return network.choose_puts(wanted, reach, Group(), device)  # type: ignore[arg-type]


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


def test_all_ranks_take_the_same_kept_block_in_whatever_order_they_kept_them() -> None:
    """A rank's blocks lie in its heap in the order of all ranks' heaps, wherever the heap begins."""
    taken = []
    for heap, order in ((1 << 20, (256, 512, 768)), (1 << 30, (512, 768, 256))):
        nvshmem = _Nvshmem.__new__(_Nvshmem)  # without the library
        nvshmem._free = {}
        for place in order:
            nvshmem.keep(64, heap + place)
        taken.append([nvshmem.allocate(64) - heap for _ in order])
    assert taken == [[256, 512, 768]] * 2
