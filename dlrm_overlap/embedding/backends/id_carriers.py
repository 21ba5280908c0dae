"""What brings published windows of ids to other hosts, on GPUs: puts of kernels, or a call of the group's backend."""

from abc import ABC, abstractmethod

import torch

from dlrm_overlap.embedding.backends.carriers import Carrier
from dlrm_overlap.embedding.backends.message_heap import MessageHeap
from dlrm_overlap.embedding.backends.messages import send_window
from dlrm_overlap.embedding.options import ExchangeContext
from dlrm_overlap.embedding.protocol.crossing import Message, Messages, arriving_windows
from dlrm_overlap.embedding.protocol.windows import WindowPair

_ROW_WORDS = 256  # a window has no rows of its own, but puts count in rows


class IdCarrier(Carrier, ABC):
    """What brings this rank's published window to the other hosts, and theirs here."""

    @abstractmethod
    def bring(self) -> None:
        """Send the current window and receive, on the current stream; then `published_window` has all of them."""


class IdsByCollective(IdCarrier):
    """Brings all windows in one call of the group's backend."""

    def __init__(self, context: ExchangeContext, windows: WindowPair) -> None:
        self._group, self._windows = context.group, windows

    def bring(self) -> None:
        """Send this rank's window to each other host, and receive theirs, in one call."""
        send_window(self._windows, self._group)


class IdsByPuts(IdCarrier):
    """Windows put by kernels, and copied out of the heap to where the ranks of this host read them."""

    def __init__(self, context: ExchangeContext, windows: WindowPair) -> None:
        reach, self._windows = windows.arena.reach, windows
        rows = -(-windows.local.numel() // _ROW_WORDS)

        def message(peer: int) -> Message:
            return Message(peer, reach.host_of(peer), 0, rows, _ROW_WORDS)

        other_hosts = [host for host in reach.hosts if host != reach.here]
        self._messages = Messages(
            sent=[message(reach.relay(reach.rank, host)) for host in other_hosts],
            received=[message(source) for source in reach.sources],
        )
        self._heap = MessageHeap(context, windows, 1, [(rows, _ROW_WORDS)], torch.int32, staged_once=True)

    def bring(self) -> None:
        """Stage the window once, put it to each host, and take what comes, source by source."""
        heap, window, (sent, received) = self._heap, self._windows.local.flatten(), self._messages
        words, parity = window.numel(), heap.parity
        heap.staged(0, sent[0], parity).flatten()[:words].copy_(window)
        for number, message in enumerate(sent):
            heap.put(number, message, message.rows)
        arriving = arriving_windows(self._windows.arena, self._windows.name)
        for slot, message in enumerate(received):
            heap.await_run(slot, message, message.rows)
            here = arriving[slot * words : (slot + 1) * words]
            here.copy_(heap.arrived(slot, message, parity).flatten()[:words])

    def skip(self, status: torch.Tensor) -> bool:
        """Take an epoch in which a put brings its signal and no ids; see `Carrier.skip`."""
        self._heap.skip(self._messages, status)
        return True

    def check(self) -> None:
        """Raise what a wait for a part has recorded."""
        self._heap.check()

    def close(self) -> None:
        """Give the heap back."""
        self._heap.close()
