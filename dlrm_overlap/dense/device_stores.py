"""Dense gradients by stores between GPUs: `dense.reduction` by kernels."""

import torch

from dlrm_overlap.comm.arena import Arena
from dlrm_overlap.comm.record import Record
from dlrm_overlap.dense.reduction import AWAITED, Piece, StoreReduction
from dlrm_overlap.kernels.dense.all_reduce import average_share
from dlrm_overlap.kernels.dense.arguments import LINE
from dlrm_overlap.kernels.flags import Flags, raise_flags, wait_flags


class DeviceStores(StoreReduction):
    """Between GPUs, by kernels; a wait that lasts too long is recorded and stops the GPU, see `kernels.flags`."""

    def _prepare(self, arena: Arena) -> None:
        device, clock = self._flat.device, self._epochs.each[0].word
        self._record = Record(device)
        local, addresses = arena.local("flags"), arena.addresses("flags")
        timeout = int(self._options.wait_timeout_s * 1e9)
        self._counted = torch.zeros(1, dtype=torch.int32, device=device)
        self._flags: list[Flags] = []
        for slot in range(local.shape[1]):
            counts = torch.full((self._world_size,), slot + 1, dtype=torch.int32, device=device)
            self._flags.append(Flags(addresses, clock, local, counts, timeout, self._record.status))
        self._arrived = [torch.cuda.Event() for _ in range(local.shape[1])]
        self._shares = {piece: self._addresses(arena, piece) for _, pieces in self._cut for piece in pieces}

    def _addresses(self, arena: Arena, piece: Piece) -> torch.Tensor:
        """Return [W] int64: where this rank's share of the piece is at each rank."""
        begin = piece.first(self._rank) * LINE * self._dtype.itemsize
        addresses = [arena.view("gradients", rank).data_ptr() + begin for rank in range(self._world_size)]
        return torch.tensor(addresses, dtype=torch.int64, device=self._flat.device)

    @property
    def _argument(self) -> int:
        return self._epochs.each[0].argument

    def _raise(self, slot: int) -> None:
        raise_flags(self._flags[0], self._rank, slot, self._argument)

    def _average(self, piece: Piece) -> None:
        average_share(
            self._shares[piece],
            self._dtype,
            piece.lines(self._rank),
            self._flags[0],
            self._counted,
            self._rank,
            piece.slot,
            self._argument,
            self._options.programs,
        )
        self._arrived[piece.slot].record(torch.cuda.current_stream(self._flat.device))

    def _wait(self, slot: int) -> None:
        wait_flags(self._flags[slot], self._rank, self._argument)

    def _await_arrival(self, slot: int) -> None:
        torch.cuda.current_stream(self._flat.device).wait_event(self._arrived[slot])
        self._wait(slot)

    def check(self) -> None:
        """Raise the error of a wait that has expired.

        Raises:
            ExchangeTimeoutError: if it has expired.
        """
        if self._arena is not None:
            self._record.raise_expired(self._options.wait_timeout_s, AWAITED)

    def close(self) -> None:
        """As the others; raises the recorded error where a kernel has stopped the GPU."""
        try:
            if self._arena is not None and self._flat.device.type == "cuda":
                torch.cuda.synchronize(self._flat.device)
        except RuntimeError:
            self.check()
            raise
        super().close()
