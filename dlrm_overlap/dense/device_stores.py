"""Dense gradients by stores between GPUs: what `stores` does, by kernels."""

import torch

from dlrm_overlap.comm.arena import Arena
from dlrm_overlap.comm.record import ExchangeTimeoutError, Record
from dlrm_overlap.dense.shares import Piece
from dlrm_overlap.dense.stores import AWAITED, StoreReduction
from dlrm_overlap.kernels.dense.all_reduce import ShareFlags, average_share, send_shares
from dlrm_overlap.kernels.dense.arguments import LINE
from dlrm_overlap.kernels.flags import Flags, raise_flags, wait_flags


class DeviceStores(StoreReduction):
    """Between GPUs, by kernels; a wait that lasts too long is recorded and stops the GPU, see `kernels.flags`."""

    def _prepare(self, arena: Arena) -> None:
        device, clock = self._flat.device, self._epochs.each[0].word
        self._record = Record(device)
        local, addresses = arena.local("flags"), arena.addresses("flags")
        timeout = int(self._options.wait_timeout_s * 1e9)
        counted = torch.zeros(1, dtype=torch.int32, device=device)
        self._share_flags = ShareFlags(addresses, local.shape[1], counted, clock)
        self._flags: list[Flags] = []
        for slot in range(local.shape[1]):
            counts = torch.full((self._world_size,), slot + 1, dtype=torch.int32, device=device)
            self._flags.append(Flags(addresses, clock, local, counts, timeout, self._record.status))
        self._arrived = [torch.cuda.Event() for _ in range(local.shape[1])]
        self._addresses = {piece: self._tables(arena, piece) for pieces in self._pieces for piece in pieces}

    def _tables(self, arena: Arena, piece: Piece) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return [W] int64 each: where the parts of this rank's share are, where its mean goes, and where rows land."""
        line, first, ranks = LINE * self._dtype.itemsize, piece.first(self._rank), range(self._world_size)
        targets = [arena.view("gradients", rank).data_ptr() + first * line for rank in ranks]
        landings = [arena.view("staging", rank).data_ptr() + piece.staging * line for rank in ranks]
        rows = [landings[self._rank] + rank * piece.share * line for rank in ranks]
        if self._dtype == torch.float32:  # this rank's own part need not be copied
            rows[self._rank] = targets[self._rank]
        sources = rows if self._options.push else targets
        padded = [[*each, 0] for each in (sources, targets, landings)]  # tables begin at multiples of 16 bytes
        width = self._world_size + self._world_size % 2
        table = torch.tensor([each[:width] for each in padded], dtype=torch.int64, device=self._flat.device)
        return tuple(table[:, : self._world_size])  # type: ignore[return-value]

    @property
    def _argument(self) -> int:
        return self._epochs.each[0].argument

    def _raise(self, slot: int) -> None:
        raise_flags(self._flags[0], self._rank, slot, self._argument)

    def _send(self, piece: Piece, slot: int) -> None:
        send_shares(
            self._gradients,
            self._addresses[piece][2],
            self._dtype,
            piece.begin,
            piece.end - piece.begin,
            piece.share,
            own=self._dtype != torch.float32,
            flags=self._share_flags,
            rank=self._rank,
            slot=slot,
            epoch=self._argument,
            programs=self._options.programs,
        )

    def _average(self, piece: Piece, slot: int) -> None:
        sources, targets, _ = self._addresses[piece]
        average_share(
            sources,
            targets,
            self._dtype,
            piece.lines(self._rank),
            self._share_flags,
            self._rank,
            slot,
            self._argument,
            self._options.programs,
        )
        self._arrived[slot].record(torch.cuda.current_stream(self._flat.device))

    def _wait(self, slot: int) -> None:
        wait_flags(self._flags[slot], self._rank, self._argument)

    def _await_arrival(self, slot: int) -> None:
        torch.cuda.current_stream(self._flat.device).wait_event(self._arrived[slot])
        self._wait(slot)

    def check(self) -> None:
        """Raise what a wait has recorded.

        Raises:
            ExchangeTimeoutError: if it has expired.
        """
        if self._arena is not None and not self._record.empty and (expired := self._record.expired()):
            raise ExchangeTimeoutError(expired, self._options.wait_timeout_s, AWAITED)

    def close(self) -> None:
        """As the others; raises what has been recorded where a kernel has stopped the GPU."""
        try:
            if self._arena is not None and self._flat.device.type == "cuda":
                torch.cuda.synchronize(self._flat.device)
        except RuntimeError:
            self.check()
            raise
        super().close()
