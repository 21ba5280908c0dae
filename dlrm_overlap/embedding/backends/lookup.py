"""The lookup of this rank's shards, which pools each bag into the window of its sample's rank; here, on GPUs."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from math import gcd
from typing import Any, Generic, NamedTuple, TypeVar

import torch

from dlrm_overlap.comm.device_errors import DeviceErrorRecord
from dlrm_overlap.embedding.layout import EVERY_RANK, FeatureShard
from dlrm_overlap.embedding.options import ExchangeContext
from dlrm_overlap.embedding.replicated import ReplicatedTables
from dlrm_overlap.embedding.steps import BatchSizes, Step, StepCache, tensors_of
from dlrm_overlap.embedding.tables import BadIds, bad_id_message
from dlrm_overlap.embedding.windows import Signals, WindowPair
from dlrm_overlap.kernels.arguments import (
    Bags,
    FeatureTable,
    PoolingOptions,
    Tuning,
    Windows,
    has_short_bags,
    tuning_for,
)
from dlrm_overlap.kernels.forward.put_columns import PutColumns, put_columns
from dlrm_overlap.kernels.forward.store_pooled import prepare_store_pooled
from dlrm_overlap.kernels.launches import Launch

Rows = TypeVar("Rows")
"""Memory that rows are stored to, one window for each of some ranks."""

Unpack = Callable[[torch.Tensor, Rows, range, BatchSizes], None]
"""Copies the rows [samples, pitch] of a message to the windows of some ranks, whose samples they are."""


class Lookup(ABC, Generic[Rows]):
    """Pools the bags of some of this rank's shards."""

    def __init__(
        self,
        context: ExchangeContext,
        columns: Mapping[FeatureShard, int],
        bad_ids: BadIds,
        replicated: ReplicatedTables | None = None,
        every_bag: bool = False,
    ) -> None:
        """Take the shards.

        Args:
            columns: for each shard, the first column that it fills in a row of a window.
            replicated: the tables that every rank holds, to look those up; None takes this rank's tables.
            every_bag: whether zeros are stored for empty bags of all shards.
        """
        self._context, self._columns, self._bad_ids = context, columns, bad_ids
        self._rows = replicated or context.tables
        self._owner = context.group.rank() if replicated is None else EVERY_RANK
        self._left_out = {shard for shard in columns if not every_bag and context.leaves_out(shard)}
        self.record = DeviceErrorRecord(context.device)

    @abstractmethod
    def peers(self, pair: WindowPair, stride: int) -> list[Rows]:
        """Return the windows of the ranks reached, of even epochs and of odd ones; rows are `stride` elements apart."""

    @abstractmethod
    def rows_of_ranks(self, rows: torch.Tensor, ranks: range, batch: BatchSizes) -> Rows:
        """Return the rows of each of `ranks` in [samples, pitch] of all of them, as windows."""

    @abstractmethod
    def unpack(self, columns: Mapping[FeatureShard, int], stride: int) -> Unpack[Rows]:
        """Return a function that copies messages to windows.

        Args:
            columns: for each shard in a message, in order and without gaps, its first column in a row of a window.
            stride: elements of a row of a window.
        """

    @abstractmethod
    def refresh(self) -> None:
        """Find the tables where they are now. Called before each `store`, outside a step: it may fail."""

    @abstractmethod
    def store(self, windows: Rows, step: Step, ranks: range | None = None) -> None:
        """Pool every bag of the samples of `ranks`, None for all, into the window of its rank.

        Args:
            windows: of these ranks.
            step: whose ids are looked up.
            ranks: consecutive ranks.
        """

    def first_samples(self, batch: BatchSizes, ranks: range | None = None) -> torch.Tensor | None:
        """Return [R + 1] int32 on the GPU: the first sample of each of R ranks, and the end; `ranks` None are all.

        The first call for a batch's sizes copies them, on the current stream. A CPU needs no copy, and gets None.
        """
        return None

    def check(self) -> None:
        """Raise the faults that kernels have recorded; never waits for the device."""


class Platform(NamedTuple, Generic[Rows]):
    """How a forward does its work on one type of device."""

    lookup: type[Lookup[Rows]]
    signals: type[Signals]
    adds_sums: bool
    """whether nodes add up their partial sums before they send them, see `InternodeLayout`"""


def types_and_devices(tensors: Iterable[torch.Tensor]) -> tuple[tuple[torch.dtype, int], ...]:
    """Return the properties of ids' tensors that a prepared launch depends on: their dtypes and devices."""
    return tuple([(each.dtype, each.get_device()) for each in tensors])


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
        """of all sizes: a capture cannot copy them to the GPU again"""
        self._launches = StepCache[tuple[Any, ...], Launch]()
        """by everything that they depend on, except the tables' addresses"""

    def peers(self, pair: WindowPair, stride: int) -> list[Windows]:
        """Return the addresses of windows."""
        return pair.peers(stride, self._context.options.wire_dtype)

    def rows_of_ranks(self, rows: torch.Tensor, ranks: range, batch: BatchSizes) -> Windows:
        """Return the address of each rank's first row."""
        begin, row_bytes = batch.first_sample[ranks.start], rows.shape[1] * rows.element_size()
        addresses = [rows.data_ptr() + (batch.first_sample[rank] - begin) * row_bytes for rank in ranks]
        there = torch.tensor(addresses, dtype=torch.int64, device=rows.device)
        return Windows(there, rows.shape[1], rows.dtype, gcd(16, row_bytes))

    def unpack(self, columns: Mapping[FeatureShard, int], stride: int) -> Unpack[Windows]:
        """Return a function that copies by a kernel."""
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
            self._launches.forget()
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
        """Return them from a cache."""
        if (batch, ranks) not in self._first_samples:
            first = batch.first_sample if ranks is None else batch.first_sample[ranks.start : ranks.stop + 1]
            self._first_samples[batch, ranks] = torch.tensor(first, dtype=torch.int32, device=self._device)
        return self._first_samples[batch, ranks]

    def bags(self, shards: list[FeatureShard], step: Step, ranks: range | None = None) -> Bags:
        """Return the ids of the kernel that pools `shards` for the samples of `ranks`, None for all."""
        ids = step.inputs[shards[0].input]
        return Bags(
            values=ids.values(),
            offsets=ids.offsets(),
            first_sample=self.first_samples(step.batch, ranks),
            samples=step.batch.total,
            samples_per_rank=step.batch.most,
            weights=ids.weights_or_none(),
        )

    def pooling_options(self, tuning: Tuning) -> PoolingOptions:
        """Return the options of a kernel."""
        # Ids that our own exchange has sent were checked when they arrived.
        check = self._bad_ids.looks and self._context.ids is None
        return PoolingOptions(self._rank, self._context.options.schedule, tuning, check)

    def store(self, windows: Windows, step: Step, ranks: range | None = None) -> None:
        """Launch the zero-copy kernels."""
        for shards, table in zip(self.pooled_together, self.tables, strict=True):
            tensors = tensors_of(step.inputs[shards[0].input])
            short = has_short_bags(table, *tensors[:2])
            key = table, windows, step.batch, ranks, short, types_and_devices(tensors)
            launch = self._launches.get(key, self._prepare, shards, table, windows, step, ranks, short)
            launch(*tensors)

    def _prepare(
        self,
        shards: list[FeatureShard],
        table: FeatureTable,
        windows: Windows,
        step: Step,
        ranks: range | None,
        short: bool,
    ) -> Launch:
        options = self.pooling_options(tuning_for(table.dim, table.weight_dtype.itemsize, short=short))
        return prepare_store_pooled(self.bags(shards, step, ranks), table, windows, self.record.status, options)

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
