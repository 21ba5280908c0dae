"""Messages between hosts that kernels put, part by part: no collective and no host is in their way.

`message_heap` has their memory, and why nobody overwrites it too early.
"""

import torch

from dlrm_overlap.embedding.backends.carriers import GradientCarrier, Pack, PooledCarrier, rows_of_ranks
from dlrm_overlap.embedding.backends.message_heap import MessageHeap
from dlrm_overlap.embedding.device.lookup import DeviceLookup
from dlrm_overlap.embedding.options import ExchangeContext
from dlrm_overlap.embedding.protocol.cache import StepCache
from dlrm_overlap.embedding.protocol.crossing import Crossing
from dlrm_overlap.embedding.protocol.step import BatchSizes, Step
from dlrm_overlap.embedding.protocol.windows import WindowPair
from dlrm_overlap.kernels.aggregate import Gathered
from dlrm_overlap.kernels.arguments import FeatureTable, Windows, put_tuning_for
from dlrm_overlap.kernels.forward.put_columns import PutColumns, put_columns
from dlrm_overlap.kernels.forward.put_pooled import put_pooled


class PooledByPuts(PooledCarrier):
    """Pooled embeddings to other hosts, by the kernel that pools them."""

    def __init__(self, context: ExchangeContext, windows: WindowPair, crossing: Crossing, lookup: DeviceLookup) -> None:
        reach, most = crossing.reach, context.samples_per_rank
        widest = max(len(host) for host in reach.hosts)
        ranks = range(context.group.size())
        shapes = [(most * widest, crossing.pitch([rank])) for rank in ranks]
        self._heap = MessageHeap(context, windows, widest, shapes, context.options.wire_dtype)
        self._windows, self._crossing, self._lookup, self._device = windows, crossing, lookup, context.device
        self._wire = context.options.wire_dtype
        self._features = sum(map(len, lookup.pooled_together))
        parts, longest_wait_us = self._heap.most_parts, context.options.aggregate_us
        self._gathered = [Gathered.of(parts, longest_wait_us, context.device) for _ in reach.others]
        self._tables = StepCache[BatchSizes, dict[tuple[int, int], Windows]]()
        """by number of the other host and parity, where its ranks' rows begin in the message to it"""

    def send(self, step: Step, tables: list[FeatureTable]) -> None:
        """Pool for the other hosts, the next one first, and put parts, gathered in groups."""
        heap, counter, lookup = self._heap, self._windows.counter, self._lookup
        messages, parity = self._crossing.pooled(step.batch), heap.parity
        for host in heap.reach.others:
            number = next(i for i, message in enumerate(messages.sent) if message.host == host)
            message = messages.sent[number]
            if not message.elements:
                heap.put(number, message, 0)
                continue
            windows = self._tables.get(step.batch, self._rows, step.batch)[number, parity]
            out = heap.outgoing(number, message, parity)
            parts = heap.parts(step.batch.most, message.pitch)
            for shards, table in zip(lookup.pooled_together, tables, strict=True):
                put_pooled(
                    lookup.bags(shards, step, host),
                    table,
                    windows,
                    lookup.record.status,
                    lookup.pooling_options(put_tuning_for(table.dim, table.weight_dtype.itemsize)),
                    heap.network,
                    out,
                    parts,
                    self._gathered[number],
                    self._features,
                    counter.word,
                    counter.argument,
                )

    def _rows(self, batch: BatchSizes) -> dict[tuple[int, int], Windows]:
        """Return, by number of the other host and parity, where its ranks' rows begin in the message to it."""
        return {
            (number, parity): rows_of_ranks(self._heap.staged(number, message, parity), message.host, batch)
            for number, message in enumerate(self._crossing.pooled(batch).sent)
            for parity in (0, 1)
            if message.elements
        }

    def receive(self, step: Step) -> None:
        """Each message is awaited where it is passed on."""

    def put(
        self, step: Step, slot: int, place: PutColumns, windows: Windows, first_sample: torch.Tensor, rank: int
    ) -> None:
        """Await the message in `slot`, then store it into the windows of this host's ranks."""
        heap, message = self._heap, self._crossing.pooled(step.batch).received[slot]
        if not message.elements:
            heap.await_run(slot, message, 0)
            return
        heap.await_runs(slot, message, step.batch.most, first_sample)
        rows = heap.arrived(slot, message, heap.parity)
        put_columns(rows, place, windows.addresses, first_sample, windows.stride, step.batch.most, rank)

    def skip(self, status: torch.Tensor) -> bool:
        """Take an epoch in which signals go alone."""
        self._heap.skip(self._crossing.pooled(_nobody(self._windows)), status)
        return True

    def check(self) -> None:
        """Raise what a wait for a part has recorded."""
        self._heap.check()

    def close(self) -> None:
        """Give the heap back."""
        self._tables.clear()
        self._heap.close()


class GradientsByPuts(GradientCarrier):
    """Gradients to other hosts: packed by PyTorch, put by a kernel."""

    def __init__(self, context: ExchangeContext, windows: WindowPair, crossing: Crossing) -> None:
        most = context.samples_per_rank
        shapes = [(most, crossing.pitch(host)) for host in crossing.reach.hosts]
        self._heap = MessageHeap(context, windows, 1, shapes, context.options.wire_dtype)
        self._windows, self._crossing = windows, crossing

    def send(self, step: Step, pack: Pack) -> None:
        """Let `pack` fill each message, and put it."""
        for number, message in enumerate(self._crossing.gradients(step.batch).sent):
            if message.elements:
                pack(message, self._heap.staged(number, message, self._heap.parity))
            self._heap.put(number, message, message.rows if message.elements else 0)

    def receive(self, step: Step) -> None:
        """Each message is awaited where it is passed on."""

    def arrived(self, step: Step, slot: int) -> torch.Tensor:
        """Make the current stream wait for the message in `slot`, and return it."""
        message = self._crossing.gradients(step.batch).received[slot]
        self._heap.await_run(slot, message, message.rows if message.elements else 0)
        return self._heap.arrived(slot, message, self._heap.parity)

    def skip(self, status: torch.Tensor) -> bool:
        """Take an epoch in which signals go alone."""
        self._heap.skip(self._crossing.gradients(_nobody(self._windows)), status)
        return True

    def check(self) -> None:
        """Raise what a wait for a part has recorded."""
        self._heap.check()

    def close(self) -> None:
        """Give the heap back."""
        self._heap.close()


def _nobody(windows: WindowPair) -> BatchSizes:
    """Return the sizes of a batch without samples, whose messages are empty."""
    return BatchSizes.of((0,) * windows.arena.world_size)
