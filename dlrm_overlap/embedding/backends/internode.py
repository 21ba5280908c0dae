"""Sends pooled embeddings and gradients to other nodes; in each direction a rank sends each node one message.

    current stream  | pool for the other nodes | pool for this node | signal |   bottom MLP ..   | wait for all | output
    NCCL's stream                              | messages out and in ...... |
    passing stream                                                         | unpack into windows, signal as the sender |

By puts, the kernel that pools sends groups of rows, for which the passing stream waits.

The receiver of a message copies it to the windows of its node's ranks, and signals each as the sender would. It does so
for step e after it has begun step e, hence after the flags of step e - 1 of all ranks of its node: so it overwrites no
window before its reader is done.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Generic

import torch

from dlrm_overlap.embedding.backends.lookup import ColumnOf, DeviceLookup, Lookup, Rows
from dlrm_overlap.embedding.backends.messages import PackedByCollective, PooledByCollective
from dlrm_overlap.embedding.backends.puts import PooledByPuts
from dlrm_overlap.embedding.backends.sums import NodeSums
from dlrm_overlap.embedding.internode import InternodeLayout, Message
from dlrm_overlap.embedding.options import ExchangeContext
from dlrm_overlap.embedding.steps import Step
from dlrm_overlap.embedding.windows import Signals, WindowPair


class PooledTransport(Generic[Rows]):
    """Sends pooled embeddings to other nodes, and passes on what arrives from there to this node's ranks."""

    def __init__(
        self,
        context: ExchangeContext,
        layout: InternodeLayout,
        windows: WindowPair,
        lookup: Lookup[Rows],
        column: ColumnOf,
        stride: int,
    ) -> None:
        """`lookup` pools for this node; a row of a window has `stride` elements, a shard's from `column(shard)` on."""
        self._layout, self._windows, self._lookup = layout, windows, lookup
        self._peers = lookup.peers(windows, stride)
        self._order, self._device, self._here = context.order, context.device, windows.arena.reached
        rank, wire = windows.arena.rank, context.options.wire_dtype
        self._sent_lookup = sent_lookup = type(lookup)(context, layout.pooled_columns[rank], lookup.bad_ids)
        self.puts: PooledByPuts | None = None
        self._sums: NodeSums | None = None
        if context.options.internode == "puts":
            assert isinstance(sent_lookup, DeviceLookup)
            self.puts = PooledByPuts(context, windows, layout, sent_lookup)
        if layout.has_sums:
            self._sums = NodeSums(context, windows, layout, windows.peers(stride, wire), column, lookup.bad_ids)
        self._carrier = self.puts or PooledByCollective(context, layout, self._sent_lookup)
        # Of the highest priority, since peers wait for it.
        self._pass_stream = torch.cuda.Stream(self._device, priority=-2) if self._device.type == "cuda" else None
        self._unpack = {
            source: lookup.unpack({shard: column(shard) for shard in layout.pooled_columns[source]}, stride)
            for source in layout.reach.sources
        }

    def prepare(self, step: Step) -> None:
        """Do what may fail, before the step begins."""
        self._sent_lookup.refresh()
        if self._sums is not None:
            self._sums.lookup.refresh()
        self._lookup.first_samples(step.batch, self._here)  # on this stream

    def send(self, step: Step, signals: Signals) -> None:
        if self._sums is not None:
            self._sums.store(step)
        self._carrier.send(step)
        # This comes after this rank's own messages in the order, since later work may wait for a rank that needs them.
        with self._passing(), self._order:
            if self._sums is not None:
                self._sums.send(step)
            self._carrier.receive(step)
            if self._sums is not None:
                self._sums.receive(step)
            self._pass_on(step, signals)

    def _passing(self) -> AbstractContextManager[Any]:
        if self._pass_stream is None:
            return nullcontext()
        self._pass_stream.wait_stream(torch.cuda.current_stream(self._device))
        return torch.cuda.stream(self._pass_stream)

    def _pass_on(self, step: Step, signals: Signals) -> None:
        windows = self._peers[self._windows.epoch % 2]
        for slot, message in enumerate(self._layout.pooled(step.batch).received):
            self._unpack[message.peer](self._carrier.arrived(step, slot), windows, self._here, step.batch)
            if self._sums is not None:
                self._sums.put(step, slot)
            signals.signal(message.peer)

    def finish(self) -> None:
        """Make the current stream, which has waited for all flags, wait for this rank's messages, too.

        The next step uses their memory. The wait for flags, which has a limit, comes first in case a node has failed.
        """
        if self._pass_stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._pass_stream)

    def check(self) -> None:
        for part in (self._sent_lookup, self.puts, self._sums):
            if part is not None:
                part.check()

    def close(self) -> None:
        if self.puts is not None:
            self.puts.close()


class GradientTransport:
    def __init__(self, context: ExchangeContext, layout: InternodeLayout) -> None:
        self._layout = layout
        self._carrier = PackedByCollective(context, layout.gradients)
        others = layout.reach.others
        self._columns = {node: layout.output_columns(node).to(context.device) for node in others}

    def send(self, step: Step, gradient: torch.Tensor, scale: float) -> None:
        """Start to send the gradient of the pooled embeddings to the owners on other nodes, multiplied by `scale`.

        Args:
            gradient: [b, D_total], which is copied on the current stream.
        """

        def pack(message: Message, sent: torch.Tensor) -> None:
            columns = self._columns[message.node]
            if scale == 1.0 and gradient.dtype == sent.dtype:
                torch.index_select(gradient, 1, columns, out=sent)
            else:
                torch.mul(gradient.index_select(1, columns), scale, out=sent)

        self._carrier.send(step, pack)

    def receive(self, step: Step) -> Iterator[tuple[int, torch.Tensor]]:
        """Wait for the messages; yield each with its sender, in the columns of `InternodeLayout.gradient_columns`."""
        self._carrier.receive(step)
        for slot, message in enumerate(self._layout.gradients(step.batch).received):
            yield message.peer, self._carrier.arrived(step, slot)
