"""Partial sums for samples of other nodes: gathered and added up within the node of their owners, then sent once.

Of a table whose rows several ranks of a node own, a message to another node has one sum a bag, not a partial sum of
each owner. The rank that serves a rank of another node (`Crossing.served`) gathers those of its samples in a window:

    owners      | pool into the windows of the ranks that gather, empty bags too | raise |
    who gathers                                                                  | await | add up, in order | message ->

The windows have flags of their own and the epochs of the output's windows, by whose proof they may be overwritten: a
rank has added up step e - 2 before it raises its flag of step e - 1, which its node's ranks await before they begin
step e. All of a node raise their flags before any of them waits.

Source: the intra-node reduce-scatter in front of TorchRec's table-row-wise All-to-All; the sums are made by stores.
"""

from collections.abc import Callable
from functools import partial
from itertools import accumulate
from math import gcd

import torch

from dlrm_overlap.embedding.backends.messages import PackedByCollective
from dlrm_overlap.embedding.backends.pgas import DeviceLookup
from dlrm_overlap.embedding.internode import Crossing, Message
from dlrm_overlap.embedding.layout import FeatureShard
from dlrm_overlap.embedding.options import ExchangeContext
from dlrm_overlap.embedding.steps import BatchSizes, Step
from dlrm_overlap.embedding.tables import BadIds
from dlrm_overlap.embedding.windows import PairFlags, WindowPair, one_flag_each
from dlrm_overlap.kernels.bags import FeatureTable, Partials, Windows
from dlrm_overlap.kernels.forward.add_partials import add_partials, partial_table
from dlrm_overlap.kernels.forward.put_columns import PutColumns, put_columns
from dlrm_overlap.kernels.launches import StepCache


class NodeSums:
    """The windows of one rank in which its node's partial sums are gathered, and what is made of them.

    It stores by the zero-copy kernel, and sums by the one that adds partial sums up.
    """

    def __init__(
        self,
        context: ExchangeContext,
        windows: WindowPair,
        crossing: Crossing,
        outputs: list[Windows],
        column: Callable[[FeatureShard], int],
        bad_ids: BadIds,
    ) -> None:
        """Take the windows in the arena of those of the output, `windows`, which some node needs.

        Args:
            outputs: the output windows of this node's ranks, of even epochs and of odd ones.
            column: returns the column of an output window's row at which what is pooled of a shard arrives.
        """
        spec, reach, wire = crossing.sum_windows(context.samples_per_rank), crossing.reach, context.options.wire_dtype
        assert spec is not None, "a layout without such sums"
        self._pair = WindowPair(spec, windows.arena, windows.counter)
        self._crossing, self._rank, self._here, self._most = crossing, reach.rank, reach.here, context.samples_per_rank
        self._device, self._order = context.device, context.order
        columns = crossing.sum_columns[self._here]
        own = {shard: first for shard, first in columns.items() if shard.owner == self._rank}
        self.lookup = DeviceLookup(context, own, bad_ids, every_bag=True)
        self._pitch = crossing.pitch(columns)
        flags = one_flag_each(self._here, context.group.size())
        flags[self._rank] = 0  # its own work is ordered by the streams
        self._flags = PairFlags(self._pair, flags, context.options.wait_timeout_s, self.lookup.record.status)
        peers, row_bytes = self._pair.peers(self._pitch, wire), self._pitch * wire.itemsize
        self._gathering = {node: [self._rows_at(node, each, row_bytes) for each in peers] for node in reach.others}
        """of each other node, where the rows of its ranks' samples begin, in windows of even epochs and of odd ones"""
        sums = [Partials([columns[each] for each in shards], shards[0].dim) for shards in crossing.sums_on[self._here]]
        divisible = [number for each in sums for number in (each.dim, *each.columns)]
        self._table = partial_table(sums, gcd(16, *divisible), self._device) if sums else None
        self._carrier = PackedByCollective(context, crossing.sums)
        self._columns_of: dict[int, PutColumns] = {}
        self._outputs: dict[int, list[torch.Tensor]] = {}
        """by the rank that sends sums, the windows of the ranks that it serves, of even epochs and of odd ones"""
        for source in reach.sources:
            shards = [(each[0].dim, column(each[0])) for each in crossing.sums_on[reach.node_of(source)]]
            self._columns_of[source] = PutColumns.of(shards, outputs[0].stride, wire.itemsize, self._device)
            served = [self._here.index(rank) for rank in crossing.served(source, self._here)]
            self._outputs[source] = [each.addresses[served] for each in outputs]
        self._stride = outputs[0].stride
        self._firsts = StepCache[tuple[BatchSizes, int], torch.Tensor]()

    def _rows_at(self, node: range, windows: Windows, row_bytes: int) -> Windows:
        addresses = windows.addresses.tolist()
        places = [self._crossing.gathered_at(rank) for rank in node]
        first = [addresses[self._here.index(rank)] + slot * self._most * row_bytes for rank, slot in places]
        return Windows(torch.tensor(first, dtype=torch.int64, device=self._device), windows.stride, windows.dtype)

    def _rows(self) -> torch.Tensor:
        """Return the current window as its rows [samples, pitch], `most` of each rank that is served."""
        rows = self._crossing.reach.most_taken * self._most
        return self._pair.local[: rows * self._pitch].view(rows, self._pitch)

    def store(self, step: Step, tables: list[FeatureTable]) -> None:
        """Pool for the samples of other nodes, at the ranks that gather, and raise this rank's flag at each."""
        for node in self._crossing.reach.others:
            self.lookup.store(self._gathering[node][self._pair.epoch % 2], step, tables, node)
        with self._order:
            self._flags.raise_at_all()

    def _pack(self, step: Step, message: Message, sent: torch.Tensor) -> None:
        """Copy the sums for the ranks of a node that this rank serves into the message to it."""
        rows, sources, end = self._rows(), self._crossing.reach.sources, 0
        for rank in self._crossing.served(self._rank, message.node):
            first, samples = sources.index(rank) * self._most, step.batch.per_rank[rank]
            begin, end = end, end + samples
            sent[begin:end].copy_(rows[first : first + samples, : message.pitch])

    def send(self, step: Step) -> None:
        """Await this node's partial sums, add them up and send the sums, on the current stream."""
        self._flags.wait()
        if self._table is not None:
            add_partials(self._rows(), self._table)
        self._carrier.send(step, partial(self._pack, step))

    def receive(self, step: Step) -> None:
        """Wait, on the current stream, for the messages that `put` stores."""
        self._carrier.receive(step)

    def put(self, step: Step, slot: int) -> None:
        """Store the message of the rank in `slot` into the output windows of this node's ranks."""
        message = self._crossing.sums(step.batch).received[slot]
        rows, source = self._carrier.arrived(step, slot), message.peer
        if message.elements:
            windows = self._outputs[source][self._pair.epoch % 2]
            first = self._firsts.get((step.batch, source), self._firsts_of, step.batch, source)
            put_columns(rows, self._columns_of[source], windows, first, self._stride, step.batch.most, 0)

    def _firsts_of(self, batch: BatchSizes, source: int) -> torch.Tensor:
        """Return [ranks + 1] int32: the first row in its message of each rank that `source` serves, and the end."""
        served = self._crossing.served(source, self._here)
        firsts = [0, *accumulate(batch.per_rank[rank] for rank in served)]
        return torch.tensor(firsts, dtype=torch.int32, device=self._device)

    def check(self) -> None:
        """Raise the faults that kernels have recorded."""
        self.lookup.check()
