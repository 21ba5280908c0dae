"""Messages between nodes by a collective, each way of a step in one call: on GPUs NCCL's grouped sends and receives.

A backend has a carrier for each way: one of these or, for pooled embeddings on GPUs, that of `puts`. All have:

    send        fills the messages on the current stream, and may send some
    receive     sends the rest and receives, on the current stream, which comes after `send`; every rank calls it
    arrived     returns a message, for which the current stream waits
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from dlrm_overlap.embedding.internode import Crossing, Message, Messages, arriving_windows
from dlrm_overlap.embedding.options import ExchangeContext
from dlrm_overlap.embedding.steps import BatchSizes, Step
from dlrm_overlap.embedding.windows import WindowPair
from dlrm_overlap.kernels.launches import StepCache


def send_window(windows: WindowPair, group: dist.ProcessGroup) -> None:
    """Send this rank's current window to the other nodes, and copy theirs to where this node's ranks read them.

    All ranks call this; see `published_window`. On a GPU it is issued on the current stream, on a CPU it is done. The
    messages are in memory of their own, since NCCL may ask for more of memory that it sends from in a CUDA graph than
    windows give.
    """
    reach, window = windows.arena.reach, windows.local.flatten()
    send_sizes, receive_sizes = [0] * group.size(), [0] * group.size()
    for node in reach.others:
        send_sizes[reach.relay(reach.rank, node)] = window.numel()
    for source in reach.sources:
        receive_sizes[source] = window.numel()
    received = window.new_empty(sum(receive_sizes))
    sent = window.repeat(len(reach.others))
    work = dist.all_to_all_single(received, sent, receive_sizes, send_sizes, group, async_op=True)
    assert work is not None
    work.wait()
    arriving_windows(windows.arena, windows.name).copy_(received)


Pack = Callable[[Message, torch.Tensor], None]
"""Fills a message [rows, pitch], on the current stream."""
MessagesOf = Callable[[BatchSizes], Messages]
"""Returns the messages of a step, see `Crossing`."""


class ByCollective:
    """A carrier by a collective.

    The memory of messages is the same in all steps, since captured ones go on using it. Those of a step may be written
    once those of the step before have been sent, and received ones are there until the next exchange begins: the
    caller orders both, on one stream or by waiting.
    """

    def __init__(self, context: ExchangeContext, messages_of: MessagesOf) -> None:
        """Make room for the messages of any step, of which those of the largest batch are the largest."""
        self._group, self._messages_of = context.group, messages_of
        self._sent, self._received = (
            torch.empty(sum(each.elements for each in way), dtype=context.options.wire_dtype, device=context.device)
            for way in messages_of(context.largest_batch)
        )
        """flat; the first elements are in use"""

    def fill(self, step: Step, pack: Pack) -> None:
        """Fill the messages."""
        for message in self._messages_of(step.batch).sent:
            if message.elements:
                pack(message, message.within(self._sent))

    def exchange(self, messages: Messages) -> Any:
        """Start to send and to receive, after all work on the current stream; return the collective's work.

        All ranks of the group call this, each with its messages. Between ranks without a message NCCL sends nothing,
        and gloo an empty one.
        """
        send_sizes, receive_sizes = self._sizes(messages.sent), self._sizes(messages.received)
        sent, received = self._sent[: sum(send_sizes)], self._received[: sum(receive_sizes)]
        return dist.all_to_all_single(received, sent, receive_sizes, send_sizes, self._group, async_op=True)

    def _sizes(self, messages: Sequence[Message]) -> list[int]:
        """Return the elements of each rank's message."""
        sizes = [0] * self._group.size()
        for message in messages:
            sizes[message.peer] = message.elements
        return sizes

    def arrived(self, step: Step, slot: int) -> torch.Tensor:
        """Return a message that `receive` has waited for."""
        return self._messages_of(step.batch).received[slot].within(self._received)


class PackedByCollective(ByCollective):
    """Messages of any kind in one call of the group's backend."""

    _work: Any = None

    def send(self, step: Step, pack: Pack) -> None:
        """Fill the messages, and start to exchange them."""
        self.fill(step, pack)
        self._work = self.exchange(self._messages_of(step.batch))

    def receive(self, step: Step) -> None:
        """Wait until all messages are here, and those of this rank are sent."""
        self._work.wait()
        self._work = None


class PooledByCollective(ByCollective):
    """Pooled embeddings in one call of the group's backend, when all are pooled."""

    def __init__(self, context: ExchangeContext, crossing: Crossing, lookup: Any) -> None:
        super().__init__(context, crossing.pooled)
        self._lookup = lookup
        self._windows = StepCache[tuple[range, BatchSizes], Any]()

    def send(self, step: Step, tables: list[Any]) -> None:
        """Pool into the messages; `receive` sends them."""

        def pool(message: Message, sent: torch.Tensor) -> None:
            node, batch = message.node, step.batch
            windows = self._windows.get((node, batch), self._lookup.rows_of_ranks, sent, node, batch)
            self._lookup.store(windows, step, tables, node)

        self.fill(step, pool)

    def receive(self, step: Step) -> None:
        """Send all messages and receive the other nodes', in one call."""
        self.exchange(self._messages_of(step.batch)).wait()
