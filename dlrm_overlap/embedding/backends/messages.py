"""Carriers that exchange the messages between nodes by one collective; on GPUs NCCL sends and receives in one group.

All carriers, including `PooledByPuts`, have these methods, which every rank calls in this order:

    send        fills the messages on the current stream, and may start to send them
    receive     sends the rest, and receives, on the current stream, which has waited for `send`
    arrived     returns a message, for which the current stream waits
"""

from collections.abc import Callable, Sequence
from typing import Generic

import torch
import torch.distributed as dist

from dlrm_overlap.embedding.backends.lookup import Lookup, Rows
from dlrm_overlap.embedding.internode import InternodeLayout, Message, Messages, arriving_windows
from dlrm_overlap.embedding.options import ExchangeContext
from dlrm_overlap.embedding.steps import BatchSizes, Step
from dlrm_overlap.embedding.windows import WindowPair
from dlrm_overlap.kernels.launches import StepCache


def send_window(windows: WindowPair, group: dist.ProcessGroup) -> None:
    """Send this rank's current window to other nodes, and copy received ones to where `published_window` finds them.

    A collective, on the current stream. It sends a copy, since in a CUDA graph NCCL may not be able to send windows.
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
"""fills a message, given as a view [rows, pitch], on the current stream"""
MessagesOf = Callable[[BatchSizes], Messages]
"""returns the messages of a batch, see `InternodeLayout`"""


class ByCollective:
    """The base of carriers by a collective.

    Messages have the same memory in all steps, as captured steps need it. A message may be filled once the message of
    the previous step is sent, and a received message is valid until the next step's `receive`; the caller ensures this.
    """

    def __init__(self, context: ExchangeContext, messages_of: MessagesOf) -> None:
        """Allocate memory for the messages of the largest batch."""
        self._group, self._messages_of = context.group, messages_of
        self._sent, self._received = (
            torch.empty(sum(each.elements for each in way), dtype=context.options.wire_dtype, device=context.device)
            for way in messages_of(context.largest_batch)
        )

    def fill(self, step: Step, pack: Pack) -> None:
        for message in self._messages_of(step.batch).sent:
            if message.elements:
                pack(message, message.within(self._sent))

    def exchange(self, messages: Messages) -> dist.Work:
        """Start the collective, after all work on the current stream."""
        send_sizes, receive_sizes = self._sizes(messages.sent), self._sizes(messages.received)
        sent, received = self._sent[: sum(send_sizes)], self._received[: sum(receive_sizes)]
        work = dist.all_to_all_single(received, sent, receive_sizes, send_sizes, self._group, async_op=True)
        assert work is not None
        return work

    def _sizes(self, messages: Sequence[Message]) -> list[int]:
        sizes = [0] * self._group.size()
        for message in messages:
            sizes[message.peer] = message.elements
        return sizes

    def arrived(self, step: Step, slot: int) -> torch.Tensor:
        return self._messages_of(step.batch).received[slot].within(self._received)


class PackedByCollective(ByCollective):
    """A carrier of messages that a function fills."""

    _work: dist.Work | None = None

    def send(self, step: Step, pack: Pack) -> None:
        self.fill(step, pack)
        self._work = self.exchange(self._messages_of(step.batch))

    def receive(self, step: Step) -> None:
        assert self._work is not None
        self._work.wait()
        self._work = None


class PooledByCollective(ByCollective, Generic[Rows]):
    """A carrier of pooled embeddings."""

    def __init__(self, context: ExchangeContext, layout: InternodeLayout, lookup: Lookup[Rows]) -> None:
        super().__init__(context, layout.pooled)
        self._lookup = lookup
        self._windows = StepCache[tuple[range, BatchSizes], Rows]()

    def send(self, step: Step) -> None:
        def pool(message: Message, sent: torch.Tensor) -> None:
            node, batch = message.node, step.batch
            windows = self._windows.get((node, batch), self._lookup.rows_of_ranks, sent, node, batch)
            self._lookup.store(windows, step, node)

        self.fill(step, pool)

    def receive(self, step: Step) -> None:
        self.exchange(self._messages_of(step.batch)).wait()
