"""The node's arena in a world of one: regions, loans, flags, and what is left behind."""

import errno
import gc
import os
import platform
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from dlrm_overlap.comm.arena import HostArena, Region, open_arena
from dlrm_overlap.comm.device_errors import ExchangeTimeoutError
from dlrm_overlap.config import InputError
from tests.conftest import refuses

CPU = torch.device("cpu")
REGIONS = {
    "odd": Region((3, 5), torch.bfloat16),
    "empty": Region((0, 7), torch.float32),
    "window": Region((4, 6), torch.float32),
    "flags": Region((1, 3), torch.int64),
}


@pytest.fixture
def arena(world_of_one: dist.ProcessGroup) -> Iterator[HostArena]:
    arena = open_arena(REGIONS, world_of_one, CPU)
    assert isinstance(arena, HostArena)
    yield arena
    arena.close()


def _mapped() -> set[tuple[str, ...]]:
    """Return the inode and the name of each file in shared memory that this process has mapped."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {tuple(line.split(maxsplit=5)[4:]) for line in lines if "dlrm_overlap_arena" in line}


def test_regions_are_zeros_aligned_and_apart(arena: HostArena) -> None:
    for name, region in REGIONS.items():
        local = arena.local(name)
        assert (tuple(local.shape), local.dtype) == region
        assert local.data_ptr() % 256 == 0, name
        assert not local.any(), name
        assert arena.addresses(name).tolist() == [local.data_ptr()], name
    for i, name in enumerate(REGIONS, start=1):
        arena.local(name).fill_(i)
    for i, name in enumerate(REGIONS, start=1):
        assert (arena.local(name) == i).all(), name


def test_arenas_lie_side_by_side(arena: HostArena, world_of_one: dist.ProcessGroup) -> None:
    other = open_arena(REGIONS, world_of_one, CPU)
    arena.local("window").fill_(1)
    assert not other.local("window").any()
    other.local("window").fill_(2)
    other.close()
    assert (arena.local("window") == 1).all()


def test_no_file_stays_behind(world_of_one: dist.ProcessGroup) -> None:
    before = _mapped()
    arena = open_arena(REGIONS, world_of_one, CPU)
    (file,) = _mapped() - before
    assert file[1].endswith("(deleted)"), "the file has a name"
    arena.close()
    gc.collect()
    assert file not in _mapped()


def test_too_little_shared_memory_is_told(world_of_one: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    reserved: list[str] = []

    def refuse(descriptor: int, offset: int, size: int) -> None:
        reserved.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with refuses(r"768 bytes .*No space left .* smaller train.batch_size"):
        open_arena(REGIONS, world_of_one, CPU)
    assert not Path(reserved[0]).exists()


def test_a_machine_that_stores_in_another_order_is_refused(
    world_of_one: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    with pytest.raises(
        InputError, match=r"store order of x86-64, and this is aarch64; use --embedding.backend torchrec"
    ):
        open_arena(REGIONS, world_of_one, CPU)


def test_a_buffer_is_held_as_long_as_a_tensor_lives(arena: HostArena) -> None:
    buffer = arena.buffer_view("window")
    arena.local("window").copy_(torch.arange(24.0).view(4, 6))
    assert not buffer.held
    lent = buffer.acquire(3)
    assert torch.equal(lent, torch.arange(18.0).view(3, 6)), "the region itself, without a copy"
    arena.local("window")[0, 0] = 99
    assert lent[0, 0] == 99
    view = lent[1:, 2:].t()
    del lent
    assert buffer.held
    copy = view.clone()
    del view
    assert not buffer.held
    assert copy.numel() == 8


def test_a_buffer_is_held_by_a_graph_that_saved_it(arena: HostArena) -> None:
    buffer = arena.buffer_view("window")
    weight = torch.ones(6, requires_grad=True)
    loss = (buffer.acquire(4) * weight).sum()
    assert buffer.held, "the product's backward needs the factor"
    loss.backward()
    assert not buffer.held, "backward frees what the graph saved"
    loss = (buffer.acquire(4) * weight).sum()
    assert buffer.held
    del loss
    assert not buffer.held
    with torch.no_grad():
        product = buffer.acquire(4) * weight
    assert not buffer.held
    assert product.shape == (4, 6)


def test_lent_memory_outlives_the_arena(world_of_one: dist.ProcessGroup) -> None:
    arena = open_arena(REGIONS, world_of_one, CPU)
    lent = arena.buffer_view("window").acquire(4)
    arena.local("window").fill_(3)
    arena.close()
    gc.collect()
    assert (lent == 3).all()


def test_a_wait_is_bounded_and_names_the_flag(arena: HostArena) -> None:
    arena.signal_flag("flags", peer=0, slot=0, epoch=7)
    arena.signal_flag("flags", peer=0, slot=1, epoch=6)
    arena.wait("flags", torch.tensor([1]), epoch=7, timeout_s=0)
    arena.wait("flags", torch.tensor([2]), epoch=6, timeout_s=0)
    arena.wait("flags", torch.tensor([0]), epoch=9, timeout_s=0)
    began = time.monotonic()
    with pytest.raises(ExchangeTimeoutError) as raised:
        arena.wait("flags", torch.tensor([3]), epoch=7, timeout_s=0.2)
    assert 0.2 <= time.monotonic() - began < 10
    assert "rank 0 waited 0.2 s for slice 1 of rank 0: expected epoch 7, seen 6;" in str(raised.value)


def test_memory_is_not_shared_with_ranks_out_of_reach(
    world_of_one: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch's symmetric memory might wait for them forever."""
    monkeypatch.setattr("dlrm_overlap.comm.arena.find_nodes", lambda *_: ((range(1), range(1, 2)), "2 machines"))
    with refuses(
        r"GPUs of these 1 ranks do not reach each other's memory \(2 nodes \(rank 0, rank 1; 2 machines\)\); use"
    ):
        open_arena({"flags": Region((1,), torch.int64)}, world_of_one, torch.device("cuda"))
