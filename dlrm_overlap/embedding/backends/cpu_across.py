"""The exchange between hosts on CPUs: gloo carries messages.

A message that has arrived is passed on where the stage is waited for, so a rank that never waits keeps its host's ranks
waiting, for a bounded time. Partial sums travel as they are: no host adds its own up first.
"""

from collections.abc import Sequence

import torch

from dlrm_overlap.embedding.backends.cpu import CpuPush, CpuZeroCopyForward, pool_on_cpu
from dlrm_overlap.embedding.backends.messages import PackedByCollective
from dlrm_overlap.embedding.crossing import Crossing, Message
from dlrm_overlap.embedding.options import ExchangeContext
from dlrm_overlap.embedding.steps import Step
from dlrm_overlap.embedding.windows import WindowPair


class CpuZeroCopyAcross(CpuZeroCopyForward):
    """`pgas` and `fused` between hosts: a rank sends to other hosts first, then serves this host's ranks."""

    with_sums = False

    def __init__(self, context: ExchangeContext, windows: WindowPair) -> None:
        super().__init__(context, windows)
        self._crossing = Crossing(self.layout, windows.arena.reach, self.options.wire_dtype, with_sums=False)
        self._columns = self._crossing.pooled_columns[self.rank]
        self._carrier = PackedByCollective(context, self._crossing.pooled)

    def begin(self, step: Step, weights: Sequence[torch.Tensor]) -> None:
        """Begin the step, then pool for the other hosts' ranks, and send."""
        super().begin(step, weights)
        sent = [self.tables.weight(shard) for shard in self._columns]

        def pool(message: Message, rows: torch.Tensor) -> None:
            first = step.batch.first_sample[message.host.start]
            for (shard, column), weight in zip(self._columns.items(), sent, strict=True):
                rows[:, column : column + shard.dim] = pool_on_cpu(shard, weight, step, first, first + len(rows))

        self._carrier.send(step, pool)

    def pass_on(self, step: Step) -> None:
        """Store messages of other hosts into the windows of this host's ranks, and raise the senders' flags."""
        windows = {rank: self._arena.view(self.windows.name, rank) for rank in self._reached}
        self._carrier.receive(step)
        for slot, message in enumerate(self._crossing.pooled(step.batch).received):
            rows, columns = self._carrier.arrived(step, slot), self._crossing.pooled_columns[message.peer]
            for rank in self._reached:
                begin = step.batch.first_sample[rank] - step.batch.first_sample[self._reached.start]
                here = rows[begin : begin + step.batch.per_rank[rank]]
                for shard, column in columns.items():
                    into = self.column(shard)
                    windows[rank][: len(here), into : into + shard.dim] = here[:, column : column + shard.dim]
            for rank in self._reached:
                self._raise(rank, source=message.peer)


class CpuPushAcross(CpuPush):
    """Gradients stored at the owners of this host, and sent to the other hosts."""

    def __init__(self, context: ExchangeContext, windows: WindowPair) -> None:
        super().__init__(context, windows)
        self._crossing = Crossing(self.layout, windows.arena.reach, self.options.wire_dtype, with_sums=False)
        self._columns = self._crossing.gradient_columns[self._reached]
        self._carrier = PackedByCollective(context, self._crossing.gradients)

    def send(self, step: Step, gradient: torch.Tensor) -> None:
        """Start to send gradients to the owners of other hosts."""

        def gather(message: Message, rows: torch.Tensor) -> None:
            for shard, column in self._crossing.gradient_columns[message.host].items():
                first = self.layout.output_column(shard)
                rows[:, column : column + shard.dim] = gradient[:, first : first + shard.dim]

        self._carrier.send(step, gather)

    def pass_on(self, step: Step) -> None:
        """Store messages of other hosts into the windows of this host's ranks, and raise the senders' flags."""
        self._carrier.receive(step)
        for slot, message in enumerate(self._crossing.gradients(step.batch).received):
            sent, first = self._carrier.arrived(step, slot), step.batch.first_sample[message.peer]
            for shard, column in self._columns.items():
                window = self._arena.view(self.windows.name, shard.owner)
                rows = self.gradients_of([shard], window, step.batch.total)[shard]
                rows[first : first + message.rows] = sent[:, column : column + shard.dim]
            for rank in self._reached:
                for part in range(self.gradients.parts):
                    self._arena.raise_flag(self.windows.flags, rank, part, self.windows.epoch, message.peer)
