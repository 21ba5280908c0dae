"""One order for all that a captured step does between ranks."""

from typing import Any

import torch


class CommunicationOrder:
    """Issues what raises or awaits a peer's flag, collectives included, one after the other while a step is captured.

    A CUDA graph does not promise that its branches run side by side. If each rank could take its waits in an order of
    its own, rank 0 might wait for rank 1's ids in front of the lookup that rank 1 waits for in front of those ids. With
    one order, that of the capture, which is the same on every rank, the rank that is furthest behind never waits for
    one that waits for it. Whatever else a branch does is not ordered by this.

    Example:
        with order:
            wait_flags(flags, rank, epoch)
    """

    def __init__(self) -> None:
        self.active = False
        """whether a step is being captured"""
        self._last: torch.Event | None = None

    def begin(self) -> None:
        """Begin the order of a step that is captured from now on."""
        self.active, self._last = True, None

    def end(self) -> None:
        """End it: what is issued from now on is as its streams order it."""
        self.active, self._last = False, None

    def __enter__(self) -> None:
        if self.active and self._last is not None:
            torch.cuda.current_stream().wait_event(self._last)

    def __exit__(self, *_: Any) -> None:
        if self.active:
            self._last = torch.cuda.current_stream().record_event()
