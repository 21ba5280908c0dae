"""Messages between hosts: on GPUs each way of a step in one call, NCCL's grouped sends and receives; on CPUs group
by group, by gloo, as groups are finished.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from dlrm_overlap.embedding.options import ExchangeContext
from dlrm_overlap.embedding.protocol.crossing import Message, Messages, arriving_windows
from dlrm_overlap.embedding.protocol.windows import WindowPair
from dlrm_overlap.kernels.grouping import Grouping

Fill = Callable[[Message, torch.Tensor, range], None]
"""writes the rows `range` of a message; the tensor is where they belong"""

_WAYS = 2  # forward and backward, whose groups are told apart by their tags


class MessageBuffers:
    """Memory for the messages that a rank sends in a step, and for those that it receives.

    It is the same in all steps, since captured ones go on using it. The messages of a step may be written once those of
    the step before have been sent, and received ones are there until the next `exchange` begins: the caller orders
    both, on one stream or by waiting.
    """

    def __init__(self, context: ExchangeContext, largest: Messages) -> None:
        """Make room for the messages of any step, of which those of the largest batch are the largest."""
        self._group = context.group
        self.sent, self.received = (
            torch.empty(
                sum(message.elements for message in each), dtype=context.options.wire_dtype, device=context.device
            )
            for each in largest
        )
        """flat; the first elements are in use"""

    def exchange(self, messages: Messages) -> Any:
        """Start to send and to receive, behind what is on the current stream, and return what waits for the end.

        All ranks of the group call this, each with its messages. Ranks without a message between them exchange nothing.
        """
        send_sizes, receive_sizes = self._sizes(messages.sent), self._sizes(messages.received)
        sent, received = self.sent[: sum(send_sizes)], self.received[: sum(receive_sizes)]
        return dist.all_to_all_single(received, sent, receive_sizes, send_sizes, self._group, async_op=True)

    def _sizes(self, messages: Sequence[Message]) -> list[int]:
        """Return the elements of each rank's message."""
        sizes = [0] * self._group.size()
        for message in messages:
            sizes[message.peer] = message.elements
        return sizes


class MessageGroups(MessageBuffers):
    """Messages that go group by group: while one is on its way, the next one is made. For CPUs.

    Groups are those of `kernels.grouping`: all but a message's last have at least `aggregate_bytes`. Both ends know
    where they begin: each is asked for before it is sent, since gloo sends nothing before. That leaves no choice to a
    clock.
    """

    def __init__(self, context: ExchangeContext, largest: Messages, way: int) -> None:
        """Make room as `MessageBuffers`; `way` is the number of these among the `_WAYS` that cross at a time."""
        super().__init__(context, largest)
        self._aggregate_bytes, self._way = context.options.aggregate_bytes, way

    def send(self, messages: Messages, fill: Fill) -> "GroupsOnTheirWay":
        """Ask for all that is received, then fill and send group after group; return what waits for both."""
        work: list[Any] = []
        for message in messages.received:
            rows = message.within(self.received)
            for tag, group in self._groups(message):
                here = rows[group.start : group.stop]
                work.append(dist.irecv(here, group=self._group, group_src=message.peer, tag=tag))
        for message in messages.sent:
            rows = message.within(self.sent)
            for tag, group in self._groups(message):
                here = rows[group.start : group.stop]
                fill(message, here, group)
                work.append(dist.isend(here, group=self._group, group_dst=message.peer, tag=tag))
        return GroupsOnTheirWay(work)

    def _groups(self, message: Message) -> list[tuple[int, range]]:
        """Return the tag and the rows of each group of a message that has elements."""
        if not message.elements:
            return []
        grouping = Grouping.of(message.rows, message.pitch * self.sent.element_size(), self._aggregate_bytes)
        groups = [grouping.units_of(grouping.parts_of(group)) for group in range(grouping.groups)]
        return [(number * _WAYS + self._way, rows) for number, rows in enumerate(groups)]


class GroupsOnTheirWay:
    """Groups that are sent and received."""

    def __init__(self, work: Sequence[Any]) -> None:
        self._work = work

    def wait(self) -> None:
        """Wait until those that are received are here, and the memory of those that are sent may be written."""
        for each in self._work:
            each.wait()


def send_window(windows: WindowPair, group: dist.ProcessGroup) -> None:
    """Send this rank's current window to the other hosts, and put what they send where this host's ranks read it.

    All ranks call this; see `published_window`. On a GPU it is issued on the current stream, on a CPU it is done. The
    messages are in memory of their own, since NCCL may ask for more of memory that it sends from in a CUDA graph than
    windows give.
    """
    reach, window = windows.arena.reach, windows.local.flatten()
    send_sizes, receive_sizes = [0] * group.size(), [0] * group.size()
    for host in reach.others:
        send_sizes[reach.relay(reach.rank, host)] = window.numel()
    for source in reach.sources:
        receive_sizes[source] = window.numel()
    received = window.new_empty(sum(receive_sizes))
    sent = window.repeat(len(reach.others))
    work = dist.all_to_all_single(received, sent, receive_sizes, send_sizes, group, async_op=True)
    assert work is not None
    work.wait()
    arriving_windows(windows.arena, windows.name).copy_(received)
