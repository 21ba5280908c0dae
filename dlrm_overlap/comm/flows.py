"""How the rows of a collective reach the peers' memory, between two flags: the part that depends on the device."""

from abc import ABC, abstractmethod
from typing import NamedTuple

import torch

from dlrm_overlap.comm.arena import Arena, HostArena, Region
from dlrm_overlap.kernels.schedule import staggered_peers

AWAITED = "collective's flag"
"""names the flag in the error of an expired wait"""

MOST_PIECES = 4
"""of the rows of an all-reduce; each piece has flags of its own"""

PIECE_BYTES = 8 << 20
"""least bytes of a piece of a row: a copy of these takes ten times as long as a kernel's launch"""

_ALIGNMENT_BYTES = 256


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


class Averaging(NamedTuple):
    """The mean over the ranks of rows, of which each rank averages one."""

    scatter: Transfer
    """of the rows to the ranks that average them; a rank's own stays where it is"""
    gather: Transfer
    """of this rank's mean to all, from where it belongs here"""
    shares: int
    """bytes: where in every rank's memory the rows begin that it averages, in the order of the ranks"""
    dtype: torch.dtype
    """of the elements"""

    def pieces(self, world_size: int, count: int) -> list["Averaging"]:
        """Return the same in up to `count` pieces of every row, each of which may be averaged when it is there.

        In `shares` the rows of one piece follow each other, and then come those of the next. All pieces but the last
        have the same multiple of 256 bytes.

        Example: rows of 1000 bytes in 2 pieces: 512 and 488 bytes. With 2 ranks, rank 1's piece 1 begins in the shares
        at byte 2 * 512 + 488.
        """
        scatter, gather, own = self.scatter, self.gather, self.scatter.offset - self.shares
        row_bytes = scatter.row_bytes
        step = max(_ALIGNMENT_BYTES, -(-row_bytes // (count * _ALIGNMENT_BYTES)) * _ALIGNMENT_BYTES)
        found = []
        for begin in range(0, max(1, row_bytes), step):
            size, shares = min(step, row_bytes - begin), self.shares + world_size * begin
            found.append(
                Averaging(
                    scatter._replace(
                        source=scatter.source[begin:], row_bytes=size, offset=shares + own // max(1, row_bytes) * size
                    ),
                    gather._replace(
                        source=gather.source[begin : begin + size], row_bytes=size, offset=gather.offset + begin
                    ),
                    shares,
                    self.dtype,
                )
            )
        return found


def mean_in_order(rows: torch.Tensor) -> torch.Tensor:
    """Return the mean [n] float32 of `rows` [W, n], added up in float32 in their order, as `average_rows` does.

    torch's own sum has four totals from five rows on, so its last bits are others.
    """
    total = torch.zeros(rows.shape[1:], dtype=torch.float32, device=rows.device)
    for row in rows:
        total += row.float()
    return total.mul_(1 / len(rows))


def share_flag(piece: int) -> str:
    """Return the name of the flags of a piece."""
    return f"share {piece}"


def regions(world_size: int, capacity_bytes: int) -> dict[str, Region]:
    """Return the regions of a flow's arena: flags of every rank, [W, 1] int64 each, and the memory of outputs.

    `free`: its outputs may be overwritten. `arrived`: its rows are there. `share P`: piece P of the rows that it sends
    to be averaged is there. `gathered`: its mean is there.
    """
    names = ["free", "arrived", *map(share_flag, range(MOST_PIECES)), "gathered"]
    flags = {name: Region((world_size, 1), torch.int64) for name in names}
    return flags | {"memory": Region((capacity_bytes,), torch.uint8)}


class Flow(ABC):
    """Carries out the transfers of one rank, one after the other. Each is an epoch: 1, 2, 3, .."""

    def __init__(self, arena: Arena, timeout_s: float) -> None:
        """Take an arena of `regions`, and the bound of a wait for a peer."""
        self._arena, self._timeout_s = arena, timeout_s
        self._rank, self._world_size = arena.rank, arena.world_size
        self._peers = staggered_peers(self._rank, self._world_size)
        self._memory = [arena.view("memory", rank) for rank in range(self._world_size)]

    def _target(self, transfer: Transfer, peer: int) -> torch.Tensor:
        """Return [row_bytes] uint8: where this rank's row belongs at `peer`."""
        return self._memory[peer][transfer.offset : transfer.offset + transfer.row_bytes]

    def _rows_of(self, averaging: Averaging) -> torch.Tensor:
        """Return [W, n] of the averaging's type: where the rows arrive that this rank averages."""
        row_bytes = averaging.scatter.row_bytes
        memory = self._memory[self._rank][averaging.shares : averaging.shares + self._world_size * row_bytes]
        return memory.view(averaging.dtype).view(self._world_size, -1)

    @abstractmethod
    def prepare(self, transfer: Transfer) -> None:
        """Load the kernels of a transfer of this kind, before the first of them begins."""

    @abstractmethod
    def begin(self, transfer: Transfer) -> None:
        """Allow the peers to send, wait until they allow it, and send the rows."""

    @abstractmethod
    def wait(self, transfer: Transfer) -> None:
        """Make the current stream wait until the rows of all ranks are here, and those of this rank have been read."""

    @abstractmethod
    def begin_average(self, averaging: Averaging) -> None:
        """As `begin`, for the rows that are averaged and then for their means."""

    @abstractmethod
    def wait_average(self, averaging: Averaging) -> None:
        """Make the current stream wait until the means of all ranks are here, and the rows of this rank are read."""

    @abstractmethod
    def check(self) -> None:
        """Raise the error of a wait that has expired.

        Raises:
            ExchangeTimeoutError: if it has expired.
        """


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
        """Send the rows; they are there when this returns, those of the peers may not be."""
        self._meet()
        self._send(transfer, "arrived")

    def _meet(self) -> None:
        self._epoch += 1
        for peer in range(self._world_size):
            self._host.raise_flag("free", peer, 0, self._epoch)
        self._await("free")

    def _send(self, transfer: Transfer, flag: str) -> None:
        for peer in [*self._peers, self._rank]:
            if peer != self._rank or not transfer.in_place:
                self._target(transfer, peer).copy_(transfer.row(peer))
            self._host.raise_flag(flag, peer, 0, self._epoch)

    def _await(self, flag: str) -> None:
        self._host.wait(flag, self._counts, self._epoch, self._timeout_s, AWAITED)

    def wait(self, transfer: Transfer) -> None:
        """Wait for the rows of all ranks."""
        self._await("arrived")

    def begin_average(self, averaging: Averaging) -> None:
        """Send the rows, wait for those of the peers, average them, and send the mean."""
        self._meet()
        self._send(averaging.scatter, "arrived")
        self._await("arrived")
        rows = self._rows_of(averaging)
        rows[self._rank].copy_(averaging.scatter.row(self._rank).view(averaging.dtype))
        averaging.gather.source.view(averaging.dtype).copy_(mean_in_order(rows))
        self._send(averaging.gather, "gathered")

    def wait_average(self, averaging: Averaging) -> None:
        """Wait for the means of all ranks."""
        self._await("gathered")

    def check(self) -> None:
        """Do nothing: a wait raises its own error."""
