"""Records by which kernels report to the host: in page-locked memory, which the host polls without waiting."""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

_KINDS, _RECORD_WORDS = 4, 8
_EXPIRED, _BAD_ID, _OVERFLOW, _BAD_ARRIVAL = 1, 2, 3, 4  # the kinds of `primitives.record`


class ExchangeTimeoutError(RuntimeError):
    """A peer did not raise its flag in time: it died, stalls, or runs another program."""

    def __init__(self, missing: Sequence[int], timeout_s: float, what: str = "slice") -> None:
        """Take (waiting rank, peer, slot, expected epoch, seen epoch) of the missing flag, and a noun for the slot."""
        rank, peer, slot, expected, seen = missing
        super().__init__(
            f"rank {rank} waited {timeout_s:g} s for {what} {slot} of rank {peer}: expected epoch {expected}, seen "
            f"{seen}; see that rank's log, or raise wait_timeout_s, in a configuration embedding.wait_timeout_s, if it "
            f"is only slow"
        )


class DeviceErrorRecord:
    """One record of each kind that kernels write, such as of a wait that expired, or of an id outside its table.

    A kernel writes a kind's record once, the first time, see `primitives.record`.
    """

    def __init__(self, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        words = torch.zeros(_KINDS, _RECORD_WORDS, dtype=torch.int64, device="cpu", pin_memory=on_gpu)
        self._words = words.numpy()  # a read costs nothing, and the array keeps the memory alive
        self._first = memoryview(self._words).cast("B").cast("q")  # type: ignore[arg-type]
        self.status = torch.tensor([words.data_ptr(), *[0] * _KINDS], device=device)
        """[1 + kinds] int64 on the device, an argument of kernels: the records' address and a lock for each kind"""

    @property
    def empty(self) -> bool:
        """Whether no kernel has recorded anything."""
        first = self._first  # asked each step: this takes a tenth of the time of numpy's any()
        return first[0] == first[8] == first[16] == first[24] == 0

    def expired(self) -> list[int] | None:
        """Return [waiting rank, peer, slot, expected epoch, seen epoch] of a wait that expired, or None."""
        return self._read(_EXPIRED, 5)

    def raise_expired(self, timeout_s: float, what: str = "slice") -> None:
        """Raise the error of a wait that has expired, if one has; never waits for the device.

        Args:
            timeout_s: of the waits.
            what: a slot of their flags is.

        Raises:
            ExchangeTimeoutError: if a wait has expired.
        """
        if not self.empty and (expired := self.expired()):
            raise ExchangeTimeoutError(expired, timeout_s, what)

    def bad_id(self) -> list[int] | None:
        """Return [feature of its input, sample, rows of its table] of an id outside its table, or None."""
        return self._read(_BAD_ID, 3)

    def overflow(self) -> list[int] | None:
        """Return [rank, feature, its ids, how many there may be] of a batch that is not as it must be, or None."""
        return self._read(_OVERFLOW, 4)

    def bad_arrival(self) -> list[int] | None:
        """Return [shard, rank it came from, place there, id, rows of the table] of an id outside its table, or None."""
        return self._read(_BAD_ARRIVAL, 5)

    def _read(self, kind: int, count: int) -> list[int] | None:
        words = self._words[kind - 1]
        return words[1 : 1 + count].tolist() if words[0] else None


def settle(group: dist.ProcessGroup, device: torch.device, check: Callable[[], None]) -> None:
    """Wait until no rank of `group`, which all call this, has anything under way: memory may be given back then.

    Args:
        group: ranks that write to each other's memory.
        device: of this rank.
        check: raises the errors that kernels have recorded.

    Raises:
        ExchangeTimeoutError: by `check`, in place of the CUDA error that a wait which has expired leaves behind.
    """
    try:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    except RuntimeError:
        check()
        raise
    dist.barrier(group)  # a peer may still write to this rank's flags
