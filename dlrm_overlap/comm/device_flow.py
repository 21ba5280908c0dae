"""Transfers between GPUs: by copy engines, or by a kernel of stores. See `comm.collectives` for the protocol."""

import torch

from dlrm_overlap.comm.arena import Arena
from dlrm_overlap.comm.copy_engine import CopyEngine
from dlrm_overlap.comm.flows import AWAITED, Flow, Transfer
from dlrm_overlap.comm.record import Record
from dlrm_overlap.kernels.flags import Flags, meet, wait_flags
from dlrm_overlap.kernels.peer_copy import PROGRAMS, RowFlags, Rows, load_store_rows, store_rows

_PRIORITY = -2  # a kernel of stores does not wait for other work that is ready


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
        self._arrived = self._flags("arrived", [int(rank != self._rank) for rank in range(ranks)])
        self._targets = arena.addresses("memory")
        counted = torch.zeros(1, dtype=torch.int32, device=device)
        self._row_flags = RowFlags(self._arrived.addresses, counted, self._word)
        self._flag_at = [arena.view("arrived", rank)[self._rank] for rank in range(ranks)]
        """of each rank, [1] int64: the flag that this rank raises there"""
        self._engine, self._beside = CopyEngine(device), CopyEngine(device, _PRIORITY)
        self._last: torch.cuda.Stream | None = None

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
        """Meet the peers on the current stream, so that each allows the others to send, and send the rows beside it."""
        self._join_last()
        meet(self._free, self._rank)
        self._beside.follow()
        if transfer.way == "stores":
            with torch.cuda.stream(self._beside.stream):
                store_rows(self._rows(transfer), self._row_flags, self._rank, self.programs)
            return
        self._engine.follow()
        for peer in self._peers:
            self._engine.copy(self._target(transfer, peer), transfer.row(peer))
            self._engine.write_flag(self._flag_at[peer], self._word)
        if not transfer.in_place:
            self._beside.copy(self._target(transfer, self._rank), transfer.row(self._rank))

    def wait(self, transfer: Transfer) -> None:
        """Make the current stream wait until the rows of all ranks are here and those of this rank have been read."""
        self._beside.join()
        if transfer.way == "dma":
            self._engine.join()
        wait_flags(self._arrived, self._rank, 0)
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
