"""Partial sums for samples of other hosts: gathered and added up within the host of their owners, then sent once.

Of a table whose rows several ranks of a host own, a message to another host has one sum a bag, not a partial sum of
each owner. The rank that serves a rank of another host (`Crossing.served`) gathers those of its samples in a window:

    owners      | pool into the windows of the ranks that gather, empty bags too | raise |
    who gathers                                                                  | await | add up, in order | message ->

The windows have flags of their own and the epochs of the output's windows, by whose proof they may be overwritten: a
rank has added up step e - 2 before it raises its flag of step e - 1, which its host's ranks await before they begin
step e. All of a host raise their flags before any of them waits.

Source: the intra-host reduce-scatter in front of TorchRec's table-row-wise All-to-All; the sums are made by stores.
"""

from collections.abc import Callable, Mapping
from functools import partial
from itertools import accumulate
from math import gcd

import torch

from dlrm_overlap.comm.arena import HostArena
from dlrm_overlap.embedding.backends.cpu import pool_on_cpu
from dlrm_overlap.embedding.backends.messages import PackedByCollective
from dlrm_overlap.embedding.backends.pgas import DeviceLookup
from dlrm_overlap.embedding.crossing import Crossing, Message
from dlrm_overlap.embedding.layout import FeatureShard
from dlrm_overlap.embedding.options import ExchangeContext
from dlrm_overlap.embedding.steps import BatchSizes, Step, StepCache
from dlrm_overlap.embedding.tables import BadIds
from dlrm_overlap.embedding.windows import WindowPair, one_flag_each, peer_windows, ready_flags
from dlrm_overlap.kernels import reference
from dlrm_overlap.kernels.arguments import FeatureTable, Partials, Windows
from dlrm_overlap.kernels.flags import awaiting_flags, raising_flags
from dlrm_overlap.kernels.forward.add_partials import add_partials, partial_table
from dlrm_overlap.kernels.forward.put_columns import PutColumns, put_columns

Column = Callable[[FeatureShard], int]
"""Returns the column of an output window's row at which what is pooled of a shard arrives."""


class HostSums:
    """The windows of one rank in which its host's partial sums are gathered, and what all know of them."""

    def __init__(self, context: ExchangeContext, windows: WindowPair, crossing: Crossing) -> None:
        """Take the windows in the arena of those of the output, `windows`, which some host needs."""
        spec, reach = crossing.sum_windows(context.samples_per_rank), crossing.reach
        assert spec is not None, "a layout without such sums"
        self.pair = WindowPair(spec, windows.arena, windows.counter)
        self.crossing, self.rank, self.here, self.most = crossing, reach.rank, reach.here, context.samples_per_rank
        self.columns = crossing.sum_columns[self.here]
        self.own = {shard: column for shard, column in self.columns.items() if shard.owner == self.rank}
        """of this rank's shards the first columns of their partial sums"""
        self.pitch = crossing.pitch(self.columns)
        self.sums = [
            Partials([self.columns[shard] for shard in shards], shards[0].dim) for shards in crossing.sums_on[self.here]
        ]

    def rows_of(self, window: torch.Tensor) -> torch.Tensor:
        """Return a window of this host as its rows [samples, pitch], `most` of each rank that is served."""
        rows = self.crossing.reach.most_taken * self.most
        return window[: rows * self.pitch].view(rows, self.pitch)

    def pack(self, step: Step, message: Message, sent: torch.Tensor) -> None:
        """Copy the sums for the ranks of a host that this rank serves into the message to it."""
        rows, sources, end = self.rows_of(self.pair.local), self.crossing.reach.sources, 0
        for rank in self.crossing.served(self.rank, message.host):
            first, samples = sources.index(rank) * self.most, step.batch.per_rank[rank]
            begin, end = end, end + samples
            sent[begin:end].copy_(rows[first : first + samples, : message.pitch])


class CpuHostSums(HostSums):
    """On CPUs, by the reference."""

    def __init__(self, context: ExchangeContext, windows: WindowPair, crossing: Crossing) -> None:
        super().__init__(context, windows, crossing)
        assert isinstance(windows.arena, HostArena)
        self._arena, self._tables, self._timeout_s = windows.arena, context.tables, context.options.wait_timeout_s
        self._carrier = PackedByCollective(context, crossing.sums)

    def store(self, step: Step) -> None:
        """Pool for the samples of other hosts, at the ranks that gather, and raise this rank's flag at each."""
        weights = self._tables.weights(list(self.own))
        for rank in (rank for host in self.crossing.reach.others for rank in host):
            gatherer, slot = self.crossing.gathered_at(rank)
            window = self.rows_of(self._arena.view(self.pair.name, gatherer))
            first, samples = step.batch.first_sample[rank], step.batch.per_rank[rank]
            rows = window[slot * self.most : slot * self.most + samples]
            for (shard, column), weight in zip(self.own.items(), weights, strict=True):
                rows[:, column : column + shard.dim] = pool_on_cpu(shard, weight, step, first, first + samples)
        for peer in self.here:
            self._arena.raise_flag(self.pair.flags, peer, 0, self.pair.epoch)

    def pass_on(self, step: Step, windows: Mapping[int, torch.Tensor], column: Column) -> None:
        """Add up this host's partial sums, send them, and store those that arrive into this host's output windows."""
        flags = one_flag_each(self.here, self._arena.world_size)
        self._arena.wait(self.pair.flags, flags, self.pair.epoch, self._timeout_s)
        reference.add_partials(self.rows_of(self.pair.local), self.sums)
        self._carrier.send(step, partial(self.pack, step))
        self._carrier.receive(step)
        for slot, message in enumerate(self.crossing.sums(step.batch).received):
            rows, end, host = self._carrier.arrived(step, slot), 0, self.crossing.reach.host_of(message.peer)
            columns = self.crossing.sum_columns[host]
            for rank in self.crossing.served(message.peer, self.here):
                begin, end = end, end + step.batch.per_rank[rank]
                for first, *_ in self.crossing.sums_on[host]:
                    at, into = columns[first], column(first)
                    windows[rank][: end - begin, into : into + first.dim] = rows[begin:end, at : at + first.dim]


class DeviceHostSums(HostSums):
    """On GPUs, by the zero-copy kernel and the one that adds partial sums up."""

    def __init__(
        self,
        context: ExchangeContext,
        windows: WindowPair,
        crossing: Crossing,
        outputs: list[Windows],
        column: Column,
        bad_ids: BadIds,
    ) -> None:
        """Take the windows.

        Args:
            outputs: the output windows of this host's ranks, of even epochs and of odd ones.
        """
        super().__init__(context, windows, crossing)
        self._device, self._order = context.device, context.order
        reach, wire = crossing.reach, context.options.wire_dtype
        self.lookup = DeviceLookup(context, self.own, bad_ids, every_bag=True)
        flags = one_flag_each(self.here, context.group.size())
        flags[self.rank] = 0  # its own work is ordered by the streams
        ready = ready_flags(self.pair, flags, self.lookup.record.status, context.options.wait_timeout_s)
        self._raising, self._awaiting = raising_flags(ready, self.rank, 0), awaiting_flags(ready, self.rank)
        peers, row_bytes = peer_windows(self.pair, self.pitch, wire), self.pitch * wire.itemsize
        self._gathering = {host: [self._rows_at(host, each, row_bytes) for each in peers] for host in reach.others}
        """of each other host, where the rows of its ranks' samples begin, in windows of even epochs and of odd ones"""
        divisible = [number for each in self.sums for number in (each.dim, *each.columns)]
        self._table = partial_table(self.sums, gcd(16, *divisible), self._device) if self.sums else None
        self._carrier = PackedByCollective(context, crossing.sums)
        self._columns_of: dict[int, PutColumns] = {}
        self._outputs: dict[int, list[torch.Tensor]] = {}
        """by the rank that sends sums, the windows of the ranks that it serves, of even epochs and of odd ones"""
        for source in reach.sources:
            shards = [(each[0].dim, column(each[0])) for each in crossing.sums_on[reach.host_of(source)]]
            self._columns_of[source] = PutColumns.of(shards, outputs[0].stride, wire.itemsize, self._device)
            served = [self.here.index(rank) for rank in crossing.served(source, self.here)]
            self._outputs[source] = [each.addresses[served] for each in outputs]
        self._stride = outputs[0].stride
        self._firsts = StepCache[tuple[BatchSizes, int], torch.Tensor]()

    def _rows_at(self, host: range, windows: Windows, row_bytes: int) -> Windows:
        addresses = windows.addresses.tolist()
        places = [self.crossing.gathered_at(rank) for rank in host]
        first = [addresses[self.here.index(rank)] + slot * self.most * row_bytes for rank, slot in places]
        return Windows(torch.tensor(first, dtype=torch.int64, device=self._device), windows.stride, windows.dtype)

    def store(self, step: Step, tables: list[FeatureTable]) -> None:
        """Pool for the samples of other hosts, at the ranks that gather, and raise this rank's flag at each."""
        for host in self.crossing.reach.others:
            self.lookup.store(self._gathering[host][self.pair.epoch % 2], step, tables, host)
        with self._order:
            self._raising(self.pair.counter.argument)

    def send(self, step: Step) -> None:
        """Await this host's partial sums, add them up and send the sums, on the current stream."""
        self._awaiting(self.pair.counter.argument)
        if self._table is not None:
            add_partials(self.rows_of(self.pair.local), self._table)
        self._carrier.send(step, partial(self.pack, step))

    def receive(self, step: Step) -> None:
        """Wait, on the current stream, for the messages that `put` stores."""
        self._carrier.receive(step)

    def put(self, step: Step, slot: int) -> None:
        """Store the message of the rank in `slot` into the output windows of this host's ranks."""
        message = self.crossing.sums(step.batch).received[slot]
        rows, source = self._carrier.arrived(step, slot), message.peer
        if message.elements:
            windows = self._outputs[source][self.pair.epoch % 2]
            first = self._firsts.get((step.batch, source), self._firsts_of, step.batch, source)
            put_columns(rows, self._columns_of[source], windows, first, self._stride, step.batch.most, 0)

    def _firsts_of(self, batch: BatchSizes, source: int) -> torch.Tensor:
        """Return [ranks + 1] int32: the first row in its message of each rank that `source` serves, and the end."""
        served = self.crossing.served(source, self.here)
        firsts = [0, *accumulate(batch.per_rank[rank] for rank in served)]
        return torch.tensor(firsts, dtype=torch.int32, device=self._device)

    def check(self) -> None:
        """Raise the faults that kernels have recorded."""
        self.lookup.check()

    def close(self) -> None:
        """Forget the windows."""
        self._gathering, self._outputs = {}, {}
