"""Adds up partial sums for samples of other nodes within the owners' node, so that only the sums are sent.

The rank that serves a rank of another node (`InternodeLayout.served`) gathers the partial sums for its samples in a
window:

    owners            | pool into the windows of the ranks that gather, empty bags too | signal |
    ranks that gather                                                                  | wait | add up in order | send

The windows have flags of their own, and the epochs of the output's windows. They may be overwritten: a rank adds up
step e - 2 before it sets its output flags of step e - 1, for which the ranks of its node wait before they begin step e.
All ranks of a node set their flags before any of them waits.

Source: the reduce-scatter before TorchRec's table-row-wise All-to-All; here stores make the sums.
"""

from functools import partial
from itertools import accumulate
from math import gcd

import torch

from dlrm_overlap.embedding.backends.lookup import ColumnOf, DeviceLookup
from dlrm_overlap.embedding.backends.messages import PackedByCollective
from dlrm_overlap.embedding.internode import InternodeLayout, Message
from dlrm_overlap.embedding.options import ExchangeContext
from dlrm_overlap.embedding.steps import BatchSizes, Step
from dlrm_overlap.embedding.tables import BadIds
from dlrm_overlap.embedding.windows import DeviceSignals, WindowPair, one_flag_each
from dlrm_overlap.kernels.bags import Partials, Windows
from dlrm_overlap.kernels.forward.add_partials import add_partials, partial_table
from dlrm_overlap.kernels.forward.put_columns import PutColumns, put_columns
from dlrm_overlap.kernels.launches import StepCache


class NodeSums:
    """Gathers the partial sums of this node, adds them up, and exchanges the sums with other nodes; on GPUs."""

    def __init__(
        self,
        context: ExchangeContext,
        windows: WindowPair,
        layout: InternodeLayout,
        outputs: list[Windows],
        column: ColumnOf,
        bad_ids: BadIds,
    ) -> None:
        """`windows` are the output's windows; `outputs` are the output windows of this node's ranks."""
        spec, reach, wire = layout.sum_windows(context.samples_per_rank), layout.reach, context.options.wire_dtype
        assert spec is not None, "a layout without such sums"
        self._pair = WindowPair(spec, windows.arena, windows.counter)
        self._layout, self._rank, self._here, self._most = layout, reach.rank, reach.here, context.samples_per_rank
        self._device, self._order = context.device, context.order
        columns = layout.sum_columns[self._here]

        # The windows that gather: what this rank stores there, and for how many flags it waits.
        own = {shard: first for shard, first in columns.items() if shard.owner == self._rank}
        self.lookup = DeviceLookup(context, own, bad_ids, every_bag=True)
        self._pitch = layout.pitch(columns)
        flags = one_flag_each(self._here, context.group.size())
        flags[self._rank] = 0  # the stream orders this rank's own work
        self._flags = DeviceSignals(self._pair, flags, context.options.wait_timeout_s, self.lookup.record.status)
        peers, row_bytes = self._pair.peers(self._pitch, wire), self._pitch * wire.itemsize
        self._gathering = {node: [self._rows_at(node, each, row_bytes) for each in peers] for node in reach.others}
        """by other node, where its ranks' rows begin in the windows of even epochs and of odd ones"""

        # The sums, which are exchanged, and copied to the output windows.
        sums = [Partials([columns[each] for each in shards], shards[0].dim) for shards in layout.sums_on[self._here]]
        divisible = [number for each in sums for number in (each.dim, *each.columns)]
        self._table = partial_table(sums, gcd(16, *divisible), self._device) if sums else None
        self._carrier = PackedByCollective(context, layout.sums)
        self._columns_of: dict[int, PutColumns] = {}
        self._outputs: dict[int, list[torch.Tensor]] = {}
        """by sender, the output windows of the ranks that it serves, of even and of odd epochs"""
        for source in reach.sources:
            shards = [(each[0].dim, column(each[0])) for each in layout.sums_on[reach.node_of(source)]]
            self._columns_of[source] = PutColumns.of(shards, outputs[0].stride, wire.itemsize, self._device)
            served = [self._here.index(rank) for rank in layout.served(source, self._here)]
            self._outputs[source] = [each.addresses[served] for each in outputs]
        self._stride = outputs[0].stride
        self._firsts = StepCache[tuple[BatchSizes, int], torch.Tensor]()

    def _rows_at(self, node: range, windows: Windows, row_bytes: int) -> Windows:
        addresses = windows.addresses.tolist()
        slots = [self._layout.gathered_at(rank) for rank in node]
        first = [addresses[self._here.index(rank)] + slot * self._most * row_bytes for rank, slot in slots]
        return Windows(torch.tensor(first, dtype=torch.int64, device=self._device), windows.stride, windows.dtype)

    def _rows(self) -> torch.Tensor:
        """Return the current window as rows [samples, pitch], with room for the largest batch of each rank served."""
        rows = self._layout.reach.max_sources * self._most
        return self._pair.local[: rows * self._pitch].view(rows, self._pitch)

    def store(self, step: Step) -> None:
        for node in self._layout.reach.others:
            self.lookup.store(self._gathering[node][self._pair.epoch % 2], step, node)
        with self._order:
            self._flags.signal()

    def _pack(self, step: Step, message: Message, sent: torch.Tensor) -> None:
        rows, sources, end = self._rows(), self._layout.reach.sources, 0
        for rank in self._layout.served(self._rank, message.node):
            first, samples = sources.index(rank) * self._most, step.batch.per_rank[rank]
            begin, end = end, end + samples
            sent[begin:end].copy_(rows[first : first + samples, : message.pitch])

    def send(self, step: Step) -> None:
        """Wait for this node's partial sums, add them up and send the sums, on the current stream."""
        self._flags.wait()
        if self._table is not None:
            add_partials(self._rows(), self._table)
        self._carrier.send(step, partial(self._pack, step))

    def receive(self, step: Step) -> None:
        self._carrier.receive(step)

    def put(self, step: Step, slot: int) -> None:
        message = self._layout.sums(step.batch).received[slot]
        rows, source = self._carrier.arrived(step, slot), message.peer
        if message.elements:
            windows = self._outputs[source][self._pair.epoch % 2]
            first = self._firsts.get((step.batch, source), self._firsts_of, step.batch, source)
            put_columns(rows, self._columns_of[source], windows, first, self._stride, step.batch.most, 0)

    def _firsts_of(self, batch: BatchSizes, source: int) -> torch.Tensor:
        """Return [ranks + 1] int32: the first row in the message of each rank that `source` serves, and the end."""
        served = self._layout.served(source, self._here)
        firsts = [0, *accumulate(batch.per_rank[rank] for rank in served)]
        return torch.tensor(firsts, dtype=torch.int32, device=self._device)

    def check(self) -> None:
        self.lookup.check()
