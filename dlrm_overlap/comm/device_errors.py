"""Errors that kernels write to page-locked memory, which the host reads at any time."""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

_KINDS, _RECORD_WORDS = 4, 8
# The kinds of error of `primitives.record`.
_EXPIRED, _BAD_ID, _OVERFLOW, _BAD_ARRIVAL = 1, 2, 3, 4


class ExchangeTimeoutError(RuntimeError):
    """A peer did not signal its flag in time: it has died, is stalled, or runs another program."""

    def __init__(self, missing: Sequence[int], timeout_s: float, what: str = "slice") -> None:
        """`missing` is (waiting rank, peer, slot, expected epoch, seen epoch); the message calls a slot `what`."""
        rank, peer, slot, expected, seen = missing
        super().__init__(
            f"rank {rank} waited {timeout_s:g} s for {what} {slot} of rank {peer}: expected epoch {expected}, seen "
            f"{seen}; see that rank's log, or raise wait_timeout_s, in a configuration embedding.wait_timeout_s, if it "
            f"is only slow"
        )


class DeviceErrorRecord:
    """The first error of each kind that kernels have reported (`primitives.record`)."""

    def __init__(self, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        words = torch.zeros(_KINDS, _RECORD_WORDS, dtype=torch.int64, device="cpu", pin_memory=on_gpu)
        self._words = words.numpy()  # reads are cheap, and the array keeps the memory alive
        self._first = memoryview(self._words).cast("B").cast("q")  # type: ignore[arg-type]
        self.status = torch.tensor([words.data_ptr(), *[0] * _KINDS], device=device)
        """[1 + kinds] int64 on the device, a kernel argument: the records' address, then a lock per kind"""

    @property
    def empty(self) -> bool:
        first = self._first  # read in each step: this takes a tenth of the time of numpy's any()
        return first[0] == first[8] == first[16] == first[24] == 0

    def expired(self) -> list[int] | None:
        """Return [waiting rank, peer, slot, expected epoch, seen epoch] of an expired wait, or None."""
        return self._read(_EXPIRED, 5)

    def raise_expired(self, timeout_s: float, what: str = "slice") -> None:
        """Raise `ExchangeTimeoutError` if a wait on the device has expired, without waiting for the device."""
        if not self.empty and (expired := self.expired()):
            raise ExchangeTimeoutError(expired, timeout_s, what)

    def bad_id(self) -> list[int] | None:
        """Return [feature, sample, number of the table's rows] of an input id outside its table, or None."""
        return self._read(_BAD_ID, 3)

    def overflow(self) -> list[int] | None:
        """Return [rank, feature, number of ids, allowed number] of a batch that exceeds its capacity, or None."""
        return self._read(_OVERFLOW, 4)

    def bad_arrival(self) -> list[int] | None:
        """Return [shard, source rank, position, id, number of the table's rows] of a received id outside its table.

        Return None if there is no such id.
        """
        return self._read(_BAD_ARRIVAL, 5)

    def _read(self, kind: int, count: int) -> list[int] | None:
        words = self._words[kind - 1]
        return words[1 : 1 + count].tolist() if words[0] else None


def settle(group: dist.ProcessGroup, device: torch.device, check: Callable[[], None]) -> None:
    """Wait on the host until no rank has work in flight, so that shared memory can be freed; a collective.

    After a CUDA error, `check` is called first, to raise the error that a kernel has recorded.
    """
    try:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    except RuntimeError:
        check()
        raise
    dist.barrier(group)  # until here a peer may write to this rank's flags
