"""Pools bags of this rank's shards into the windows of their samples' ranks: the interface, and its form for GPUs."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from math import gcd
from typing import Generic, NamedTuple, TypeVar

import torch

from dlrm_overlap.comm.device_errors import DeviceErrorRecord
from dlrm_overlap.embedding.layout import EVERY_RANK, FeatureShard
from dlrm_overlap.embedding.options import ExchangeContext
from dlrm_overlap.embedding.replicated import ReplicatedTables
from dlrm_overlap.embedding.steps import BatchSizes, Step, tensors_of
from dlrm_overlap.embedding.tables import BadIds, bad_id_message
from dlrm_overlap.embedding.windows import Signals, WindowPair
from dlrm_overlap.kernels.bags import Bags, FeatureTable, Windows
from dlrm_overlap.kernels.forward.put_columns import PutColumns, put_columns
from dlrm_overlap.kernels.forward.store_pooled import prepare_store_pooled
from dlrm_overlap.kernels.launches import Launch, launches_of, prepared
from dlrm_overlap.kernels.tuning import PoolingOptions, Tuning, has_short_bags, tuning_for

Rows = TypeVar("Rows")
"""memory that rows are stored to: a window for each of some ranks"""

Unpack = Callable[[torch.Tensor, Rows, range, BatchSizes], None]
"""copies rows [samples, pitch] of a message to the windows of the ranks whose samples they are"""


ColumnOf = Callable[[FeatureShard], int]
"""returns the first column of a shard in a row"""


class Lookup(ABC, Generic[Rows]):
    """Pools the bags of some shards."""

    def __init__(
        self,
        context: ExchangeContext,
        columns: Mapping[FeatureShard, int],
        bad_ids: BadIds,
        replicated: ReplicatedTables | None = None,
        every_bag: bool = False,
    ) -> None:
        """`columns` has the shards, each with its first column in a row of a window.

        The shards' tables are this rank's tables, or `replicated`. If `every_bag`, zeros are stored for all empty bags,
        also where `ExchangeContext.leaves_out` is True.
        """
        self._context, self._columns, self.bad_ids = context, columns, bad_ids
        self._rows = replicated or context.tables
        self._owner = context.group.rank() if replicated is None else EVERY_RANK
        self._left_out = {shard for shard in columns if not every_bag and context.leaves_out(shard)}
        self.record = DeviceErrorRecord(context.device)

    @abstractmethod
    def peers(self, pair: WindowPair, stride: int) -> list[Rows]:
        """Return the windows of the ranks reached, for even epochs and for odd ones, with rows of `stride` elements."""

    @abstractmethod
    def rows_of_ranks(self, rows: torch.Tensor, ranks: range, batch: BatchSizes) -> Rows:
        """Return, as windows, the parts of `rows` [samples, pitch] that have the samples of each rank."""

    @abstractmethod
    def unpack(self, columns: Mapping[FeatureShard, int], stride: int) -> Unpack[Rows]:
        """Return a function that copies messages to windows with rows of `stride` elements.

        `columns` has the shards in a message's order, each with its first column in a row of a window.
        """

    @abstractmethod
    def refresh(self) -> None:
        """Find out where the tables are now; call it before each `store`, before the step has begun."""

    @abstractmethod
    def store(self, windows: Rows, step: Step, ranks: range | None = None) -> None:
        """Pool the bags of the samples of `ranks`, None for all, into the windows of these ranks."""

    def first_samples(self, batch: BatchSizes, ranks: range | None = None) -> torch.Tensor | None:
        """Return [R + 1] int32 on the GPU: index of each rank's first sample, and the end. None on CPUs."""
        return None

    def check(self) -> None:
        """Raise the errors that kernels have recorded; never waits for the device."""


class Platform(NamedTuple, Generic[Rows]):
    """The parts of a forward that depend on the type of device."""

    lookup: type[Lookup[Rows]]
    signals: type[Signals]
    adds_sums: bool
    """whether a node adds up its partial sums before it sends them to other nodes"""


class DeviceLookup(Lookup[Windows]):
    """Pools by kernels, one for each kind of shards that can be pooled together."""

    def __init__(
        self,
        context: ExchangeContext,
        columns: Mapping[FeatureShard, int],
        bad_ids: BadIds,
        replicated: ReplicatedTables | None = None,
        every_bag: bool = False,
    ) -> None:
        super().__init__(context, columns, bad_ids, replicated, every_bag)
        self._rank, self._device = context.group.rank(), context.device
        together = context.layout.pooled_together(self._owner).values()
        self.pooled_together = [some for each in together if (some := [shard for shard in each if shard in columns])]
        """the shards of each kernel"""
        self.tables: list[FeatureTable] = []
        """the table of addresses of each kernel"""
        self._storage: tuple[int, ...] | None = None
        self._first_samples: dict[tuple[BatchSizes, range | None], torch.Tensor] = {}
        """of all batch sizes so far: during a capture they cannot be copied to the GPU again"""

    def peers(self, pair: WindowPair, stride: int) -> list[Windows]:
        return pair.peers(stride, self._context.options.wire_dtype)

    def rows_of_ranks(self, rows: torch.Tensor, ranks: range, batch: BatchSizes) -> Windows:
        begin, row_bytes = batch.first_sample[ranks.start], rows.shape[1] * rows.element_size()
        addresses = [rows.data_ptr() + (batch.first_sample[rank] - begin) * row_bytes for rank in ranks]
        there = torch.tensor(addresses, dtype=torch.int64, device=rows.device)
        return Windows(there, rows.shape[1], rows.dtype, gcd(16, row_bytes))

    def unpack(self, columns: Mapping[FeatureShard, int], stride: int) -> Unpack[Windows]:
        dims = [(shard.dim, column) for shard, column in columns.items()]
        put = PutColumns.of(dims, stride, self._context.options.wire_dtype.itemsize, self._device)

        def unpack(rows: torch.Tensor, windows: Windows, ranks: range, batch: BatchSizes) -> None:
            here = ranks.index(self._rank)
            put_columns(rows, put, windows.addresses, self.first_samples(batch, ranks), stride, batch.most, here)

        return unpack

    def refresh(self) -> None:
        """Make the tables of addresses again if the rows have moved."""
        if (storage := self._rows.storage()) != self._storage:
            self.tables = [self._table(shards) for shards in self.pooled_together]
            launches_of(self).forget()
            self._storage = storage

    def _table(self, shards: list[FeatureShard]) -> FeatureTable:
        weights = [self._rows.weight(shard) for shard in shards]
        left_out = [shard in self._left_out for shard in shards]
        entries = [
            [weight.data_ptr(), weight.shape[0], self._columns[shard], shard.feature, int(shard.mean), int(leaves_out)]
            for shard, weight, leaves_out in zip(shards, weights, left_out, strict=True)
        ]
        dim, dtype = shards[0].dim, shards[0].dtype
        return FeatureTable(
            entries=torch.tensor(entries, dtype=torch.int64, device=self._device),
            dim=dim,
            weight_dtype=dtype,
            alignment=gcd(16, dim * dtype.itemsize, *(weight.data_ptr() for weight in weights)),
            column_alignment=gcd(16, *(self._columns[shard] for shard in shards)),
            leaves_out=any(left_out),
        )

    def first_samples(self, batch: BatchSizes, ranks: range | None = None) -> torch.Tensor:
        if (batch, ranks) not in self._first_samples:
            first = batch.first_sample if ranks is None else batch.first_sample[ranks.start : ranks.stop + 1]
            self._first_samples[batch, ranks] = torch.tensor(first, dtype=torch.int32, device=self._device)
        return self._first_samples[batch, ranks]

    def bags(self, tensors: Sequence[torch.Tensor], batch: BatchSizes, ranks: range | None = None) -> Bags:
        """Return the bags of `tensors`, see `tensors_of`, for the samples of `ranks`."""
        values, offsets, weights = tensors
        return Bags(values, offsets, self.first_samples(batch, ranks), batch.total, batch.most, weights)

    def pooling_options(self, tuning: Tuning) -> PoolingOptions:
        # Ids that our own exchange has sent were checked when they arrived.
        check = self.bad_ids.looks and self._context.ids is None
        return PoolingOptions(self._rank, self._context.options.schedule, tuning, check)

    def store(self, windows: Windows, step: Step, ranks: range | None = None) -> None:
        for shards, table in zip(self.pooled_together, self.tables, strict=True):
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
        """Return the launch for the features of `table`; call it with ids like `tensors`."""
        options = self.pooling_options(tuning_for(table.dim, table.weight_dtype.itemsize, short=short))
        return prepare_store_pooled(self.bags(tensors, batch, ranks), table, windows, self.record.status, options)

    def check(self) -> None:
        """Raise an `ExchangeTimeoutError` if a wait has expired; raise or log an id outside its table, see `BadIds`."""
        if self.record.empty:
            return
        self.record.raise_expired(self._context.options.wait_timeout_s)
        if bad := self.record.bad_id():
            feature, sample, rows = bad
            shards = self._context.layout.by_owner[self._rank]
            names = " or ".join(shard.name for shard in shards if shard.feature == feature)
            self.bad_ids.report(f"sample {sample} of the global batch: {bad_id_message(names, None, rows)}")
