"""`pgas` on GPUs: the kernel that pools stores straight into the peers' windows.

`DeviceLookup` launches that kernel, for other backends too: it knows this rank's rows, and records ids outside them.

Source: Chen et al. 2024, and the zero-copy variant of arXiv 2305.06942.
"""

from collections.abc import Mapping, Sequence
from math import gcd
from typing import Any

import torch

from dlrm_overlap.comm.arena import Region
from dlrm_overlap.comm.device_errors import DeviceErrorRecord
from dlrm_overlap.embedding.backends.base import Forward
from dlrm_overlap.embedding.layout import EVERY_RANK, FeatureShard
from dlrm_overlap.embedding.options import ExchangeContext, ExchangeOptions
from dlrm_overlap.embedding.replicated import ReplicatedTables
from dlrm_overlap.embedding.steps import BatchSizes, Step, tensors_of
from dlrm_overlap.embedding.tables import BadIds, bad_id_message
from dlrm_overlap.embedding.windows import PairFlags, WindowPair, WindowSpec, skip_epoch
from dlrm_overlap.kernels.bags import Bags, FeatureTable, Windows
from dlrm_overlap.kernels.forward.store_pooled import prepare_store_pooled
from dlrm_overlap.kernels.launches import Launch, launches_of, prepared
from dlrm_overlap.kernels.tuning import PoolingOptions, Tuning, has_short_bags, tuning_for


class DeviceLookup:
    """The kernels that pool this rank's shards, one for each kind of shards that can be pooled together."""

    def __init__(
        self,
        context: ExchangeContext,
        columns: Mapping[FeatureShard, int],
        bad_ids: BadIds,
        replicated: ReplicatedTables | None = None,
        every_bag: bool = False,
    ) -> None:
        """Take, for each shard of this rank that is pooled, the first column of a destination's row that it fills.

        Args:
            replicated: the tables that every rank holds, where those are looked up.
            every_bag: whether zeros are stored for empty bags of all shards.
        """
        self._context, self._columns, self._bad_ids, self._every_bag = context, columns, bad_ids, every_bag
        self._rows = replicated or context.tables
        self._rank, self._device = context.group.rank(), context.device
        self._schedule = context.options.schedule
        owner = self._rank if replicated is None else EVERY_RANK
        together = context.layout.pooled_together(owner).values()
        self.pooled_together = [some for each in together if (some := [shard for shard in each if shard in columns])]
        """the shards of each kernel"""
        self.record = DeviceErrorRecord(self._device)
        self._storage: tuple[int, ...] | None = None
        self._tables: list[FeatureTable] = []
        self._first_samples: dict[tuple[BatchSizes, range | None], torch.Tensor] = {}
        """of all sizes, since a capture cannot copy to a GPU those that its launches need anew"""

    def peers(self, pair: WindowPair, stride: int) -> list[Windows]:
        """Return the windows of the ranks reached, of even epochs and of odd ones, whose rows are `stride` elements."""
        return pair.peers(stride, self._context.options.wire_dtype)

    def rows_of_ranks(self, rows: torch.Tensor, ranks: range, batch: BatchSizes) -> Windows:
        """Return where the rows of each of `ranks` begin in [rows, pitch] of all of them, as windows to pool into."""
        begin, row_bytes = batch.first_sample[ranks.start], rows.shape[1] * rows.element_size()
        addresses = [rows.data_ptr() + (batch.first_sample[rank] - begin) * row_bytes for rank in ranks]
        there = torch.tensor(addresses, dtype=torch.int64, device=rows.device)
        return Windows(there, rows.shape[1], rows.dtype, gcd(16, row_bytes))

    def tables(self) -> list[FeatureTable]:
        """Return the table of addresses of each kernel, made anew when the rows have moved."""
        if (storage := self._rows.storage()) != self._storage:
            self._tables = [self._table(shards) for shards in self.pooled_together]
            launches_of(self).forget()
            self._storage = storage
        return self._tables

    def _table(self, shards: list[FeatureShard]) -> FeatureTable:
        weights = [self._rows.weight(shard) for shard in shards]
        leaves_out = [not self._every_bag and self._context.leaves_out(shard) for shard in shards]
        entries = [
            [weight.data_ptr(), weight.shape[0], self._columns[shard], shard.feature, int(shard.mean), int(left_out)]
            for shard, weight, left_out in zip(shards, weights, leaves_out, strict=True)
        ]
        dim, dtype = shards[0].dim, shards[0].dtype
        return FeatureTable(
            entries=torch.tensor(entries, dtype=torch.int64, device=self._device),
            dim=dim,
            weight_dtype=dtype,
            alignment=gcd(16, dim * dtype.itemsize, *(weight.data_ptr() for weight in weights)),
            column_alignment=gcd(16, *(self._columns[shard] for shard in shards)),
            leaves_out=any(leaves_out),
        )

    def first_samples(self, batch: BatchSizes, ranks: range | None = None) -> torch.Tensor:
        """Return [R + 1] int32 on the device: the first sample of each of R ranks, and the end; None are all ranks."""
        if (batch, ranks) not in self._first_samples:
            first = batch.first_sample if ranks is None else batch.first_sample[ranks.start : ranks.stop + 1]
            self._first_samples[batch, ranks] = torch.tensor(first, dtype=torch.int32, device=self._device)
        return self._first_samples[batch, ranks]

    def bags(self, tensors: Sequence[torch.Tensor], batch: BatchSizes, ranks: range | None = None) -> Bags:
        """Return the bags of `tensors`, see `tensors_of`, for the samples of `ranks`, None for all."""
        values, offsets, weights = tensors
        return Bags(values, offsets, self.first_samples(batch, ranks), batch.total, batch.most, weights)

    def pooling_options(self, tuning: Tuning) -> PoolingOptions:
        """Return the options of a kernel beside its tensors."""
        # Ids that our own exchange has brought have been checked when they arrived.
        check = self._bad_ids.looks and self._context.ids is None
        return PoolingOptions(self._rank, self._schedule, tuning, check)

    def store(self, windows: Windows, step: Step, tables: list[FeatureTable], ranks: range | None = None) -> None:
        """Pool every bag of the samples of `ranks`, None for all, into its rank's window, by the zero-copy kernel.

        Args:
            windows: of these ranks.
            step: whose ids are looked up.
            tables: the result of `tables()`.
            ranks: that follow one another.
        """
        for shards, table in zip(self.pooled_together, tables, strict=True):
            tensors = tensors_of(step.inputs[shards[0].input])
            short = has_short_bags(table, *tensors[:2])
            self._store_launch(tensors, table, windows, step.batch, ranks, short)(*tensors)

    @prepared
    def _store_launch(
        self,
        tensors: Sequence[torch.Tensor],
        table: FeatureTable,
        windows: Windows,
        batch: BatchSizes,
        ranks: range | None,
        short: bool,
    ) -> Launch:
        """Return the launch that pools the features of `table`; it is called with ids like `tensors`."""
        options = self.pooling_options(tuning_for(table.dim, table.weight_dtype.itemsize, short=short))
        return prepare_store_pooled(self.bags(tensors, batch, ranks), table, windows, self.record.status, options)

    def check(self) -> None:
        """Raise the faults that kernels have recorded; under bounds check WARNING, log an id outside its table.

        Raises:
            ExchangeTimeoutError: if a wait for a peer has expired.
            ValueError: if an id is outside its table, under bounds check FATAL.
        """
        if self.record.empty:
            return
        self.record.raise_expired(self._context.options.wait_timeout_s)
        if bad := self.record.bad_id():
            feature, sample, rows = bad
            shards = self._context.layout.by_owner[self._rank]
            names = " or ".join(shard.name for shard in shards if shard.feature == feature)
            self._bad_ids.report(f"sample {sample} of the global batch: {bad_id_message(names, None, rows)}")


class ZeroCopyForward(Forward):
    """Pools into the windows [b, leading + D_total] of the samples' ranks, then raises one flag at each rank.

    `finish` awaits the peers' flags.
    """

    lookup_type: Any = DeviceLookup
    flags_type: type[PairFlags] = PairFlags

    def __init__(self, context: ExchangeContext, windows: WindowPair) -> None:
        super().__init__(context, windows)
        self.windows, self.leading = windows, context.options.leading_columns
        self.stride = self.leading + self.layout.arrival_dim
        """elements of a window's row"""
        columns = {shard: self.column(shard) for shard in self.layout.by_owner[self.rank]}
        self.lookup = self.lookup_type(context, columns, self.bad_ids)
        self.peers = self.lookup.peers(windows, self.stride)
        """the windows of the ranks reached: of even epochs, of odd ones"""
        self.reached = windows.arena.reached
        self._flags: dict[int, PairFlags] = {}
        """by slices of a shard"""

    def column(self, shard: FeatureShard) -> int:
        """Return the first of a window's columns that the shard fills."""
        return self.leading + self.layout.column(shard)

    @classmethod
    def window_spec(cls, context: ExchangeContext) -> WindowSpec:
        """Return the windows of the pooled embeddings: a row a sample, and the flags of the rank that sends most."""
        layout, samples = context.layout, context.samples_per_rank
        most = max(len(shards) for shards in layout.by_owner)
        slots = max(1, most * cls.slices(context.options, samples))
        columns = context.options.leading_columns + layout.arrival_dim
        return WindowSpec("outputs", Region((samples, columns), context.options.wire_dtype), slots)

    @classmethod
    def slices(cls, options: ExchangeOptions, samples: int) -> int:
        """Return how many slices with a ready flag of their own a shard's bags for a destination of `samples` make.

        0 where one flag of a rank covers all that it sends.
        """
        return 0

    def awaited_flags(self, step: Step) -> torch.Tensor:
        """Return [W] int32: the number of flags to wait for from each rank; the stream orders this rank's own work.

        There is at least one flag from each peer, which also signals that the peer has released its previous window. A
        rank of another node sends one message, for which a rank of this node signals one flag.
        """
        slices, reached = self.slices(self.options, step.batch.most), self.windows.arena.reached
        counts = [
            max(1, slices * len(shards)) if owner in reached else 1 for owner, shards in enumerate(self.layout.by_owner)
        ]
        counts[self.rank] = 0
        return torch.tensor(counts, dtype=torch.int32, device="cpu")

    def output(self, step: Step, copy: bool) -> torch.Tensor:
        """Return the pooled embeddings that have arrived: the window itself, lent, or a copy of it."""
        samples = step.batch.per_rank[self.rank]
        if self._partials:
            self.add_partials(step, self.windows.local[:samples])
        pooled = self.windows.acquire(samples, self.leading, self.layout.total_dim)
        return pooled.clone(memory_format=torch.contiguous_format) if copy else pooled

    def flags_of(self, step: Step) -> PairFlags:
        """Return the flags that this rank raises and awaits in `step`."""
        slices = self.slices(self.options, step.batch.most)
        if slices not in self._flags:
            counts, status = self.awaited_flags(step), self.lookup.record.status
            self._flags[slices] = self.flags_type(self.windows, counts, self.options.wait_timeout_s, status)
        return self._flags[slices]

    def begin(self, step: Step) -> int:
        """Begin the step on the current stream and return its epoch; messages to other nodes are sent after that."""
        epoch = self.windows.begin()
        self.join_stream()
        return epoch

    def start(self, step: Step) -> None:
        """Launch the kernels that pool, and after them the one that raises the flags."""
        flags, tables = self.flags_of(step), self.prepare(step)
        epoch = self.begin(step)
        self.lookup.store(self.peers[epoch % 2], step, tables, self.reached)
        with self.order:
            flags.raise_at_all()

    def prepare(self, step: Step) -> list[Any]:
        """Return the tables of the lookup; all that may fail is made here, before the step has begun."""
        self.check()
        return self.lookup.tables()

    def finish(self, step: Step, copy: bool = False) -> torch.Tensor:
        """Make the stream wait for the flags, and lend the window or copy it."""
        flags = self.flags_of(step)
        self.join_stream()
        with self.order:
            flags.wait()
        return self.output(step, copy)

    def skip(self) -> None:
        """Take an epoch in which nothing is stored."""
        self.join_stream()
        skip_epoch(self.windows, self.flags_type, self.options.wait_timeout_s, self.lookup.record.status)

    def check(self) -> None:
        """Raise the faults that kernels have recorded, see `DeviceLookup.check`."""
        self.lookup.check()
