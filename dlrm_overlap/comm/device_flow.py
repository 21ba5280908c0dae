"""Transfers between GPUs: by copy engines, or by a kernel of stores. See `comm.collectives` for the protocol."""

from typing import NamedTuple

import torch

from dlrm_overlap.comm.arena import Arena
from dlrm_overlap.comm.copy_engine import CopyEngine
from dlrm_overlap.comm.flows import AWAITED, MOST_PIECES, PIECE_BYTES, Averaging, Flow, Transfer, share_flag
from dlrm_overlap.comm.record import Record
from dlrm_overlap.kernels.average_rows import average_rows
from dlrm_overlap.kernels.flags import Flags, meet, wait_flags
from dlrm_overlap.kernels.peer_copy import PROGRAMS, RowFlags, Rows, load_store_rows, store_rows

_PRIORITY = -2  # a kernel of stores does not wait for other work that is ready


class _Shares(NamedTuple):
    """The flags of one piece of rows that are averaged."""

    flags: Flags
    at_peers: list[torch.Tensor]
    """this rank's own at each rank"""


class DeviceFlow(Flow):
    """Between GPUs; a wait that lasts too long is recorded and stops the GPU, see `kernels.flags`."""

    def __init__(self, arena: Arena, timeout_s: float) -> None:
        super().__init__(arena, timeout_s)
        device, ranks = arena.device, self._world_size
        self.programs = PROGRAMS
        """of a kernel of stores"""
        self._word = torch.zeros(2, dtype=torch.int64, device=device)[:1]  # the epoch
        self._record = Record(device)
        self._free = self._flags("free", [1] * ranks)
        # A rank's own row has no flag: its stream is joined.
        peers = [int(rank != self._rank) for rank in range(ranks)]
        self._arrived, self._gathered = self._flags("arrived", peers), self._flags("gathered", peers)
        names = [share_flag(piece) for piece in range(MOST_PIECES)]
        self._shares = [_Shares(self._flags(name, peers), self._at_peers(name)) for name in names]
        self._averaged = [torch.cuda.Event() for _ in names]
        self._targets = arena.addresses("memory")
        counted = torch.zeros(1, dtype=torch.int32, device=device)
        self._row_flags = RowFlags(self._arrived.addresses, counted, self._word)
        self._flag_at, self._gathered_at = self._at_peers("arrived"), self._at_peers("gathered")
        self._engine, self._beside = CopyEngine(device), CopyEngine(device, _PRIORITY)
        self._last: torch.cuda.Stream | None = None

    def _at_peers(self, name: str) -> list[torch.Tensor]:
        """Return this rank's flag of a region, [1] int64, at each rank."""
        return [self._arena.view(name, rank)[self._rank] for rank in range(self._world_size)]

    def _flags(self, name: str, counts: list[int]) -> Flags:
        return Flags(
            addresses=self._arena.addresses(name),
            clock=self._word,
            local=self._arena.local(name),
            counts=torch.tensor(counts, dtype=torch.int32, device=self._arena.device),
            timeout=int(self._timeout_s * 1e9),
            status=self._record.status,
        )

    def _rows(self, transfer: Transfer) -> Rows:
        return Rows(
            transfer.source, transfer.stride, transfer.row_bytes, self._targets, transfer.offset, not transfer.in_place
        )

    def prepare(self, transfer: Transfer) -> None:
        """Load the kernel of stores, which a later call of the kind may take though this one does not."""
        load_store_rows(self._rows(transfer), self._row_flags, self._rank)

    def begin(self, transfer: Transfer) -> None:
        """Meet the peers on the current stream, and send the rows beside it."""
        self._join_last()
        meet(self._free, self._rank)
        self._beside.follow()
        if transfer.way == "stores":
            with torch.cuda.stream(self._beside.stream):
                store_rows(self._rows(transfer), self._row_flags, self._rank, self.programs)
            return
        self._engine.follow()
        self._copy(self._engine, transfer, self._flag_at)
        if not transfer.in_place:
            self._beside.copy(self._target(transfer, self._rank), transfer.row(self._rank))

    def _copy(self, engine: CopyEngine, transfer: Transfer, flags: list[torch.Tensor] | None) -> None:
        """Let `engine` copy the rows to the peers, and after each the epoch to `flags` of the peer, if there are."""
        for peer in self._peers:
            engine.copy(self._target(transfer, peer), transfer.row(peer))
            if flags is not None:
                engine.write_flag(flags[peer], self._word)

    def wait(self, transfer: Transfer) -> None:
        """Join the streams of this rank's rows, and await the flags after those of the peers."""
        self._beside.join()
        if transfer.way == "dma":
            self._engine.join()
        wait_flags(self._arrived, self._rank, 0)
        self._last = torch.cuda.current_stream(self._arena.device)

    def begin_average(self, averaging: Averaging) -> None:
        """Meet the peers on the current stream; beside it, copies, kernels that await and average, and copies.

        Long rows go in pieces, so that means of one travel while another is averaged:

            copies  | rows of piece 0, of piece 1, .. | mean of piece 0, of piece 1, ..
            kernels |                 | average 0     | average 1

        A kernel comes after this rank's own copies of its piece, when those of the peers are about through: it awaits
        them, and multiprocessors wait with it. The means of a peer have one flag, after the last piece.
        """
        self._join_last()
        meet(self._free, self._rank)
        copies, kernels = self._engine, self._beside
        for each in (copies, kernels):
            each.follow()
        count = min(MOST_PIECES, max(1, averaging.scatter.row_bytes // PIECE_BYTES))
        pieces = averaging.pieces(self._world_size, count)
        for piece, shares, averaged in zip(pieces, self._shares, self._averaged, strict=False):
            self._copy(copies, piece.scatter, shares.at_peers)
            own, mean = (each.view(piece.dtype) for each in (piece.scatter.row(self._rank), piece.gather.source))
            with torch.cuda.stream(kernels.stream):
                copies.join()
                average_rows(self._rows_of(piece), own, mean, shares.flags, self._rank)
                averaged.record()
        for piece, averaged in zip(pieces, self._averaged, strict=False):
            copies.stream.wait_event(averaged)
            self._copy(copies, piece.gather, self._gathered_at if piece is pieces[-1] else None)

    def wait_average(self, averaging: Averaging) -> None:
        """Join both streams, and await the flags after the means of the peers."""
        self._beside.join()
        self._engine.join()
        wait_flags(self._gathered, self._rank, 0)
        self._last = torch.cuda.current_stream(self._arena.device)

    def _join_last(self) -> None:
        """Come after the wait of the call before, if that was on another stream; captures are the caller's."""
        current = torch.cuda.current_stream(self._arena.device)
        if self._last is not None and self._last != current and not torch.cuda.is_current_stream_capturing():
            current.wait_stream(self._last)

    def check(self) -> None:
        """Raise the error of a wait that has expired.

        Raises:
            ExchangeTimeoutError: if it has expired.
        """
        self._record.raise_expired(self._timeout_s, AWAITED)
