"""Where peers store pooled embeddings: two windows that take turns, their ready flags and epochs."""

import gc
from collections.abc import Mapping

import torch
import torch.distributed as dist

from dlrm_overlap.comm.arena import Region, open_arena

WINDOWS = ("window0", "window1")


class WindowHeldError(RuntimeError):
    """A forward came while the pooled embeddings of the one before were still in use."""


class OutputWindows:
    """The windows [b, D_total] of every rank, and [W, slots] ready flags, row w raised by rank w.

    Step e = 1, 2, 3, .. uses window e mod 2. A rank that has seen every peer's flags of step e - 1 may write step e to
    the peers: there, all that read window e - 2 came before step e - 1 on the stream. That holds if no rank begins a
    step while the output of an earlier one is in use, which `begin` checks; a peer's flag comes even where it had
    nothing to send.
    """

    def __init__(
        self,
        samples: int,
        columns: int,
        dtype: torch.dtype,
        slots: int,
        group: dist.ProcessGroup,
        device: torch.device,
        beside: Mapping[str, Region] | None = None,
    ) -> None:
        """Make them for up to `samples` samples a rank, and other regions beside them; a collective over `group`."""
        window = Region((samples, columns), dtype)
        regions = (
            dict.fromkeys(WINDOWS, window) | {"ready": Region((group.size(), slots), torch.int64)} | dict(beside or {})
        )
        self.arena = open_arena(regions, group, device)
        self._loans = [self.arena.loan(name) for name in WINDOWS]
        self.epoch = 0

    @property
    def name(self) -> str:
        """Name of the current step's window in the arena."""
        return WINDOWS[self.epoch % 2]

    def begin(self) -> int:
        """Begin a step and return its epoch.

        Raises:
            WindowHeldError: if the output of the step before is still in use.
        """
        if self._held():
            gc.collect()  # a cycle may be all that holds it
            if self._held():
                raise WindowHeldError(
                    "pooled embeddings: a forward began while the output of the one before is in use, and peers would "
                    "overwrite it; give the sharder copy_output=True, or run its backward or drop it first"
                )
        self.epoch += 1
        return self.epoch

    def _held(self) -> bool:
        first, second = self._loans
        return first.held or second.held

    def lend(self, samples: int) -> torch.Tensor:
        """Return the first `samples` rows of the current window, in use until the last that holds them lets go."""
        return self._loans[self.epoch % 2].lend(samples)

    def close(self) -> None:
        """Give the memory back."""
        self._loans = []
        self.arena.close()
