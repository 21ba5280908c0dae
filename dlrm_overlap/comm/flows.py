"""How the rows of a collective reach the peers' memory, between two flags: the part that depends on the device."""

from typing import NamedTuple

import torch

from dlrm_overlap.comm.arena import Arena, HostArena, Region
from dlrm_overlap.kernels.schedule import staggered_peers

AWAITED = "collective's flag"
"""names the flag in the error of an expired wait"""


class Transfer(NamedTuple):
    """A row of one rank for every rank, its own included."""

    source: torch.Tensor
    """uint8, contiguous: the rows one after the other, or the one row that goes to all"""
    stride: int
    """bytes between the rows of `source`; 0 if one row goes to all"""
    row_bytes: int
    """of a row"""
    offset: int
    """bytes: where this rank's row begins in the region `memory` of every rank"""
    in_place: bool
    """whether the row that this rank sends to itself is there already"""
    way: str
    """dma | stores"""

    def row(self, peer: int) -> torch.Tensor:
        """Return [row_bytes] uint8: the row for rank `peer`."""
        return self.source[peer * self.stride : peer * self.stride + self.row_bytes]


def regions(world_size: int, capacity_bytes: int) -> dict[str, Region]:
    """Return the regions of a flow's arena: flags of every rank, [W, 1] int64 each, and the memory of outputs.

    `free`: its outputs may be overwritten. `arrived`: its rows are there.
    """
    flags = {name: Region((world_size, 1), torch.int64) for name in ("free", "arrived")}
    return flags | {"memory": Region((capacity_bytes,), torch.uint8)}


class Flow:
    """Carries out the transfers of one rank, one after the other; the part that no device decides."""

    def __init__(self, arena: Arena, timeout_s: float) -> None:
        """Take an arena of `regions`, and the bound of a wait for a peer."""
        self._arena, self._timeout_s = arena, timeout_s
        self._rank, self._world_size = arena.rank, arena.world_size
        self._peers = staggered_peers(self._rank, self._world_size)
        self._memory = [arena.view("memory", rank) for rank in range(self._world_size)]

    def _target(self, transfer: Transfer, peer: int) -> torch.Tensor:
        """Return [row_bytes] uint8: where this rank's row belongs at `peer`."""
        return self._memory[peer][transfer.offset : transfer.offset + transfer.row_bytes]


class HostFlow(Flow):
    """Between processes of one host, on CPUs: plain copies in shared memory, whatever the way."""

    def __init__(self, arena: Arena, timeout_s: float) -> None:
        super().__init__(arena, timeout_s)
        assert isinstance(arena, HostArena)
        self._host, self._epoch = arena, 0
        self._counts = torch.ones(self._world_size, dtype=torch.int32, device="cpu")

    def prepare(self, transfer: Transfer) -> None:
        """There is nothing to load."""

    def begin(self, transfer: Transfer) -> None:
        """Allow the peers to send, wait until they allow it, and send the rows, which are there when this returns."""
        self._epoch += 1
        for peer in range(self._world_size):
            self._host.raise_flag("free", peer, 0, self._epoch)
        self._await("free")
        for peer in [*self._peers, self._rank]:
            if peer != self._rank or not transfer.in_place:
                self._target(transfer, peer).copy_(transfer.row(peer))
            self._host.raise_flag("arrived", peer, 0, self._epoch)

    def _await(self, flag: str) -> None:
        self._host.wait(flag, self._counts, self._epoch, self._timeout_s, AWAITED)

    def wait(self, transfer: Transfer) -> None:
        """Wait for the rows of all ranks."""
        self._await("arrived")

    def check(self) -> None:
        """Do nothing: a wait raises its own error."""
