"""`pgas` and `fused` between nodes: stores within a node, and between nodes one message a node and rank.

    current stream    | pool for the other nodes | pool for this node | raise |   bottom MLP ..   | await all | output
    NCCL's stream                                | messages out and in ...... |
    passing stream                                                            | put into windows, raise for the sender |

    or by puts:
    current stream    | pool and put by groups  | pool for this node | raise |   bottom MLP ..   | await all | output
    passing stream                               | await groups    | put into windows, raise for the sender |

Messages go by a collective or by puts of the kernel that pools (`messages`, `puts`), partial sums of a node's ranks by
messages of their own (`sums`), gradients by the collective. What has come is stored into the windows of all ranks of
the node, each column where it belongs, and the sender's flag is raised at each, as the sender would. A CPU waits for
messages where it sends its own.

No rank overwrites a window before its reader is done: a rank passes on step e's messages after its own beginning of
step e, and so after the flags of step e - 1 of all ranks of its node, as it stores its own pooled embeddings.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from dlrm_overlap.embedding.backends.base import WindowBackward
from dlrm_overlap.embedding.backends.cpu import CpuPush, CpuZeroCopyForward
from dlrm_overlap.embedding.backends.fused import SlicedForward
from dlrm_overlap.embedding.backends.messages import PackedByCollective, PooledByCollective
from dlrm_overlap.embedding.backends.pgas import ZeroCopyForward
from dlrm_overlap.embedding.backends.push import Push
from dlrm_overlap.embedding.backends.puts import PooledByPuts
from dlrm_overlap.embedding.backends.sums import NodeSums
from dlrm_overlap.embedding.internode import Crossing, Message
from dlrm_overlap.embedding.options import ExchangeContext
from dlrm_overlap.embedding.steps import Step
from dlrm_overlap.embedding.windows import WindowPair
from dlrm_overlap.kernels.forward.put_columns import PutColumns, put_columns


class ZeroCopyAcross(ZeroCopyForward):
    """`pgas` between nodes: pooled embeddings of the other nodes come first, and travel while this node is served."""

    def __init__(self, context: ExchangeContext, windows: WindowPair) -> None:
        super().__init__(context, windows)
        wire = self.options.wire_dtype
        self._crossing = Crossing(self.layout, windows.arena.reach, wire, self.with_sums)
        self._sent_lookup = self.lookup_type(context, self._crossing.pooled_columns[self.rank], self.bad_ids)
        self._sent_tables: list[Any] = []
        self._puts: PooledByPuts | None = None
        self._sums: NodeSums | None = None
        if self.options.internode == "puts":
            self._puts = PooledByPuts(context, windows, self._crossing, self._sent_lookup)
        if self._crossing.has_sums:
            self._sums = NodeSums(context, windows, self._crossing, self.peers, self.column, self.bad_ids)
        self._carrier = self._puts or PooledByCollective(context, self._crossing, self._sent_lookup)
        self._sum_tables: list[Any] = []
        # Work that peers wait for comes first.
        self._pass_stream = torch.cuda.Stream(self.device, priority=-2) if self._on_gpu else None
        self._columns_of: dict[int, PutColumns] = {}
        for source in self._crossing.reach.sources:
            shards = [(shard.dim, self.column(shard)) for shard in self._crossing.pooled_columns[source]]
            self._columns_of[source] = PutColumns.of(shards, self.stride, wire.itemsize, self.device)

    def prepare(self, step: Step) -> list[Any]:
        """Return the tables of the lookup for this node, and find those for the others."""
        self._sent_tables = self._sent_lookup.tables()
        self._sum_tables = self._sums.lookup.tables() if self._sums is not None else []
        self.lookup.first_samples(step.batch, self.reached)  # made, if it is new, on this stream
        return super().prepare(step)

    def begin(self, step: Step) -> int:
        """Begin the step, then pool for the other nodes, and start to send and to pass on their messages."""
        epoch = super().begin(step)
        if self._sums is not None:
            self._sums.store(step, self._sum_tables)
        self._carrier.send(step, self._sent_tables)
        # After the messages of this rank: later work may wait for a rank that waits for them.
        with self._passing(), self.order:
            if self._sums is not None:
                self._sums.send(step)
            self._carrier.receive(step)
            if self._sums is not None:
                self._sums.receive(step)
            self._pass_on(step)
        return epoch

    def _passing(self) -> AbstractContextManager[Any]:
        """Return a context on the stream on which messages are passed on, after the current one."""
        if self._pass_stream is None:
            return nullcontext()
        self._pass_stream.wait_stream(torch.cuda.current_stream(self.device))
        return torch.cuda.stream(self._pass_stream)

    def finish(self, step: Step, copy: bool = False) -> torch.Tensor:
        """Make the stream wait for the flags, then for the messages of this rank, whose memory is used again.

        In this order, since the wait for flags is bounded, and passing on may wait for a node that is gone.
        """
        pooled = super().finish(step, copy)
        if self._pass_stream is not None:
            torch.cuda.current_stream(self.device).wait_stream(self._pass_stream)
        return pooled

    def _pass_on(self, step: Step) -> None:
        """Store messages that have come into the windows of this node's ranks, and raise the senders' flags."""
        for slot, message in enumerate(self._crossing.pooled(step.batch).received):
            self.put(step, self._carrier.arrived(step, slot), message.peer)
            if self._sums is not None:
                self._sums.put(step, slot)
            self.flags_of(step).raise_at_all(message.peer)

    def put(self, step: Step, rows: torch.Tensor, source: int) -> None:
        """Store the rows that `source` has sent into the windows of this node's ranks."""
        windows, here = self.peers[self.windows.epoch % 2].addresses, self.reached.index(self.rank)
        first_sample = self.lookup.first_samples(step.batch, self.reached)
        put_columns(rows, self._columns_of[source], windows, first_sample, self.stride, step.batch.most, here)

    def skip(self) -> None:
        """Take an epoch in which nothing is stored."""
        self.join_stream()
        if self._puts is not None:
            self._puts.skip()
        else:  # without a collective: each node skips the epoch alone
            super().skip()

    def check(self) -> None:
        """Raise the faults that kernels have recorded, those that pool for other nodes and pass on included."""
        super().check()
        self._sent_lookup.check()
        for part in (self._puts, self._sums):
            if part is not None:
                part.check()

    def close(self) -> None:
        """Give the messages' memory back."""
        if self._puts is not None:
            self._puts.close()


class SlicedAcross(ZeroCopyAcross, SlicedForward):
    """`fused` between nodes: slices within the node, by the persistent kernel; all of a step to each other node.

    The kernel does not await the flags, since its programs would hold the multiprocessors that the messages need.
    """

    ends_with_wait = False


class CpuZeroCopyAcross(ZeroCopyAcross, CpuZeroCopyForward):
    """`pgas` and `fused` between nodes on CPUs. Partial sums travel as they are: no node adds its own up first."""

    with_sums = False

    def put(self, step: Step, rows: torch.Tensor, source: int) -> None:
        """Store the rows that `source` has sent into the windows of this node's ranks."""
        of_ranks = self.lookup.rows_of_ranks(rows, self.reached, step.batch)
        for window, here in zip(self.peers[self.windows.epoch % 2], of_ranks, strict=True):
            for shard, column in self._crossing.pooled_columns[source].items():
                into = self.column(shard)
                window[: len(here), into : into + shard.dim] = here[:, column : column + shard.dim]


class GradientsAcross(WindowBackward):
    """Gradients between nodes: stored at the owners of this node, and sent to the other nodes."""

    with_sums = True
    """see `Crossing`"""

    def __init__(self, context: ExchangeContext, windows: WindowPair) -> None:
        super().__init__(context, windows)
        reach = windows.arena.reach
        self._crossing = Crossing(self.layout, reach, self.options.wire_dtype, self.with_sums)
        self._carrier = PackedByCollective(context, self._crossing.gradients)
        self._sent_columns = {node: self._crossing.output_columns(node).to(self.device) for node in reach.others}
        columns = self._crossing.gradient_columns[reach.here]
        self._passed_on = {source: self.gradients_by(source, columns.__getitem__) for source in reach.sources}
        """by the rank that sends them, the gradients that this rank stores at this node's owners as that one would"""

    def push(self, step: Step, gradient: torch.Tensor, first: int, end: int) -> None:
        """Store at this node's owners and, with the first part, send to the other nodes and pass on their messages."""
        if first > 0:
            super().push(step, gradient, first, end)
            return

        def pack(message: Message, sent: torch.Tensor) -> None:
            columns = self._sent_columns[message.node]
            if self.sent_scale == 1.0 and gradient.dtype == sent.dtype:
                torch.index_select(gradient, 1, columns, out=sent)
            else:
                torch.mul(gradient.index_select(1, columns), self.sent_scale, out=sent)

        self._carrier.send(step, pack)
        super().push(step, gradient, first, end)
        self._carrier.receive(step)
        for slot, message in enumerate(self._crossing.gradients(step.batch).received):
            received = self._carrier.arrived(step, slot)
            self.store_of(self._passed_on[message.peer], step, received, 1.0, 0, self.gradients.parts)


class PushAcross(GradientsAcross, Push):
    """`push` between nodes."""


class CpuPushAcross(GradientsAcross, CpuPush):
    """`push` between nodes on CPUs."""

    with_sums = False
