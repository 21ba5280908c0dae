"""The exchange between processes of several hosts, on CPUs: stores within a host, messages of gloo between hosts.

What arrives from another host is passed on where the stage is waited for: a rank that never waits keeps its host's
ranks waiting, for a bounded time.
"""

import torch

from dlrm_overlap.embedding.backends.host import (
    HostPush,
    HostSlicedForward,
    HostWindowForward,
    HostZeroCopyForward,
    pool_on_host,
)
from dlrm_overlap.embedding.backends.messages import MessageGroups
from dlrm_overlap.embedding.options import ExchangeContext
from dlrm_overlap.embedding.protocol.crossing import Crossing, Message
from dlrm_overlap.embedding.protocol.step import Step
from dlrm_overlap.embedding.protocol.windows import WindowPair


class _HostAcross(HostWindowForward):
    """A forward that pools and sends what other hosts need first, and then serves this host's ranks."""

    def __init__(self, context: ExchangeContext, windows: WindowPair) -> None:
        super().__init__(context, windows)
        self._crossing = Crossing(self.layout, windows.arena.reach, self.options.wire_dtype)
        self._columns = self._crossing.columns_of([self.rank])
        self._buffers = MessageGroups(context, self._crossing.pooled(context.largest_batch), way=0)

    def begin(self, step: Step) -> None:
        """Begin the step, then pool for the other hosts' ranks, and send group by group."""
        super().begin(step)
        weights = [self.tables.weight(shard) for shard in self._columns]

        def pool(message: Message, rows: torch.Tensor, group: range) -> None:
            first = step.batch.first_sample[message.host.start] + group.start
            for (shard, column), weight in zip(self._columns.items(), weights, strict=True):
                rows[:, column : column + shard.dim] = pool_on_host(shard, weight, step, first, first + len(group))

        step.work = self._buffers.send(self._crossing.pooled(step.batch), pool)

    def pass_on(self, step: Step) -> None:
        """Store what has come from other hosts into the windows of this host's ranks, and raise the senders' flags."""
        step.work.wait()
        step.work = None
        for message in self._crossing.pooled(step.batch).received:
            rows, columns = message.within(self._buffers.received), self._crossing.columns_of([message.peer])
            for rank in self._reached:
                begin = step.batch.first_sample[rank] - step.batch.first_sample[self._reached.start]
                here = rows[begin : begin + step.batch.per_rank[rank]]
                window = self._arena.view(self.windows.name, rank)
                for shard, column in columns.items():
                    into = self.column(shard)
                    window[: len(here), into : into + shard.dim] = here[:, column : column + shard.dim]
                self._raise(rank, source=message.peer)


class HostZeroCopyAcross(_HostAcross, HostZeroCopyForward):
    """`pgas` between hosts."""


class HostSlicedAcross(_HostAcross, HostSlicedForward):
    """`fused` between hosts: slices within the host; to each other host all of a step is one message."""


class HostPushAcross(HostPush):
    """Gradients stored at the owners of this host, and sent to the other hosts."""

    def __init__(self, context: ExchangeContext, windows: WindowPair) -> None:
        super().__init__(context, windows)
        self._crossing = Crossing(self.layout, windows.arena.reach, self.options.wire_dtype)
        self._columns = self._crossing.columns_of(self._reached)
        self._buffers = MessageGroups(context, self._crossing.gradients(context.largest_batch), way=1)

    def send(self, step: Step, gradient: torch.Tensor) -> None:
        """Start to send what the owners of other hosts are due, group by group."""

        def gather(message: Message, rows: torch.Tensor, group: range) -> None:
            for shard, column in self._crossing.columns_of(message.host).items():
                first = self.layout.column(shard)
                rows[:, column : column + shard.dim] = gradient[group.start : group.stop, first : first + shard.dim]

        step.work = self._buffers.send(self._crossing.gradients(step.batch), gather)

    def pass_on(self, step: Step) -> None:
        """Store what has come from other hosts into the windows of this host's ranks, and raise the senders' flags."""
        step.work.wait()
        step.work = None
        for message in self._crossing.gradients(step.batch).received:
            sent, first = message.within(self._buffers.received), step.batch.first_sample[message.peer]
            for shard, column in self._columns.items():
                window = self._arena.view(self.windows.name, shard.owner)
                rows = self.gradient_of(shard, window, step.batch.total)
                rows[first : first + message.rows] = sent[:, column : column + shard.dim]
            for rank in self._reached:
                for part in range(self.gradients.parts):
                    self._arena.raise_flag(self.windows.flags, rank, part, self.windows.epoch, message.peer)
