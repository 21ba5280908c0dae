"""How pooled embeddings and gradients get to other nodes: one message a node and rank, each way of a step.

    current stream  | pool for the other nodes | pool for this node | signal |   bottom MLP ..   | wait for all | output
    NCCL's stream                              | messages out and in ...... |
    passing stream                                                         | unpack into windows, signal as the sender |

    or by puts:
    current stream  | pool and put by groups   | pool for this node | signal |   bottom MLP ..   | wait for all | output
    passing stream                             | wait for groups | unpack into windows, signal as the sender |

Messages go by a collective or by puts of the kernel that pools (`messages`, `puts`), partial sums of a node's ranks by
messages of their own (`sums`), gradients by the collective. The rank that receives a message copies it to the windows
of all ranks of its node, each column where it belongs, and signals each as the sender would. A CPU waits for messages
where it sends its own.

No rank overwrites a window before its reader is done: a rank passes on step e's messages after its own beginning of
step e, and so after the flags of step e - 1 of all ranks of its node, as it stores its own pooled embeddings.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Generic

import torch

from dlrm_overlap.embedding.backends.lookup import DeviceLookup, Lookup, Rows
from dlrm_overlap.embedding.backends.messages import PackedByCollective, PooledByCollective
from dlrm_overlap.embedding.backends.puts import PooledByPuts
from dlrm_overlap.embedding.backends.sums import NodeSums
from dlrm_overlap.embedding.internode import InternodeLayout, Message
from dlrm_overlap.embedding.layout import FeatureShard
from dlrm_overlap.embedding.options import ExchangeContext
from dlrm_overlap.embedding.steps import Step
from dlrm_overlap.embedding.tables import BadIds
from dlrm_overlap.embedding.windows import Signals, WindowPair


class PooledTransport(Generic[Rows]):
    """Pools for the samples of other nodes, and brings their pooled embeddings to the windows of this node's ranks."""

    def __init__(
        self,
        context: ExchangeContext,
        layout: InternodeLayout,
        windows: WindowPair,
        lookup: Lookup[Rows],
        outputs: list[Rows],
        column: Callable[[FeatureShard], int],
        stride: int,
        bad_ids: BadIds,
    ) -> None:
        """Take the output's windows.

        Args:
            lookup: of this node's samples.
            outputs: the windows of this node's ranks, of even epochs and of odd ones.
            column: returns the first column of a row of a window that a shard fills.
            stride: elements of such a row.
        """
        self._layout, self._windows, self._lookup, self._outputs = layout, windows, lookup, outputs
        self._order, self._device, self._here = context.order, context.device, windows.arena.reached
        rank, wire = windows.arena.rank, context.options.wire_dtype
        self._sent_lookup = sent_lookup = type(lookup)(context, layout.pooled_columns[rank], bad_ids)
        self.puts: PooledByPuts | None = None
        self._sums: NodeSums | None = None
        if context.options.internode == "puts":
            assert isinstance(sent_lookup, DeviceLookup)
            self.puts = PooledByPuts(context, windows, layout, sent_lookup)
        if layout.has_sums:
            self._sums = NodeSums(context, windows, layout, windows.peers(stride, wire), column, bad_ids)
        self._carrier = self.puts or PooledByCollective(context, layout, self._sent_lookup)
        # Work that peers wait for comes first.
        self._pass_stream = torch.cuda.Stream(self._device, priority=-2) if self._device.type == "cuda" else None
        self._unpack = {
            source: lookup.unpack({shard: column(shard) for shard in layout.pooled_columns[source]}, stride)
            for source in layout.reach.sources
        }

    def prepare(self, step: Step) -> None:
        """Do what may fail, before the step has begun."""
        self._sent_lookup.refresh()
        if self._sums is not None:
            self._sums.lookup.refresh()
        self._lookup.first_samples(step.batch, self._here)  # on this stream

    def send(self, step: Step, signals: Signals) -> None:
        """Pool for the other nodes, and start to send and to pass on messages."""
        if self._sums is not None:
            self._sums.store(step)
        self._carrier.send(step)
        # After the messages of this rank: later work may wait for a rank that waits for them.
        with self._passing(), self._order:
            if self._sums is not None:
                self._sums.send(step)
            self._carrier.receive(step)
            if self._sums is not None:
                self._sums.receive(step)
            self._pass_on(step, signals)

    def _passing(self) -> AbstractContextManager[Any]:
        """Return a context on the stream on which messages are passed on, after the current one."""
        if self._pass_stream is None:
            return nullcontext()
        self._pass_stream.wait_stream(torch.cuda.current_stream(self._device))
        return torch.cuda.stream(self._pass_stream)

    def _pass_on(self, step: Step, signals: Signals) -> None:
        """Copy the messages received to the windows of this node's ranks, and signal as their senders."""
        windows = self._outputs[self._windows.epoch % 2]
        for slot, message in enumerate(self._layout.pooled(step.batch).received):
            self._unpack[message.peer](self._carrier.arrived(step, slot), windows, self._here, step.batch)
            if self._sums is not None:
                self._sums.put(step, slot)
            signals.signal(message.peer)

    def finish(self) -> None:
        """Make the current stream wait for the messages of this rank, whose memory is used again.

        It has waited for the flags before: that wait is bounded, and passing on may wait for a node that is gone.
        """
        if self._pass_stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._pass_stream)

    def check(self) -> None:
        """Raise the faults that kernels have recorded."""
        for part in (self._sent_lookup, self.puts, self._sums):
            if part is not None:
                part.check()

    def close(self) -> None:
        """Give the messages' memory back."""
        if self.puts is not None:
            self.puts.close()


class GradientTransport:
    """Sends the gradients of this rank's samples to other nodes, and receives those of samples there."""

    def __init__(self, context: ExchangeContext, layout: InternodeLayout) -> None:
        self._layout = layout
        self._carrier = PackedByCollective(context, layout.gradients)
        others = layout.reach.others
        self._columns = {node: layout.output_columns(node).to(context.device) for node in others}

    def send(self, step: Step, gradient: torch.Tensor, scale: float) -> None:
        """Start to send `scale` times the gradient [b, D_total]."""

        def pack(message: Message, sent: torch.Tensor) -> None:
            columns = self._columns[message.node]
            if scale == 1.0 and gradient.dtype == sent.dtype:
                torch.index_select(gradient, 1, columns, out=sent)
            else:
                torch.mul(gradient.index_select(1, columns), scale, out=sent)

        self._carrier.send(step, pack)

    def receive(self, step: Step) -> Iterator[tuple[int, torch.Tensor]]:
        """Wait for the messages; yield the rank of each, and its gradients in the columns of `gradient_columns`."""
        self._carrier.receive(step)
        for slot, message in enumerate(self._layout.gradients(step.batch).received):
            yield message.peer, self._carrier.arrived(step, slot)
