"""The exchange of unpooled tables: that of pooled embeddings, with slots of distinct ids as bags, see `distinct`.

ids           distinct ids of each table, in slots --------------> owners, as bags of one id
forward       rows, each once, in the slots of the window <------- the owner of a row stores it
              expanded to the ids that name them, with autograd
backward      gradients summed by slot --------------------------> owners, which sum over all ranks, and update
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dlrm_overlap.comm.order import uncompiled
from dlrm_overlap.embedding.backends.ids import ArrivedIds
from dlrm_overlap.embedding.distinct import Distinct, DistinctIds, SlotBlocks
from dlrm_overlap.embedding.exchange import Exchange, poison_on_error
from dlrm_overlap.embedding.id_layout import BatchCapacity
from dlrm_overlap.embedding.layout import Layout, RowRange
from dlrm_overlap.embedding.options import ExchangeOptions
from dlrm_overlap.embedding.replicated import ReplicatedTables
from dlrm_overlap.embedding.tables import LocalTables
from dlrm_overlap.kernels import reference
from dlrm_overlap.kernels.backward.sum_rows import RowSums
from dlrm_overlap.kernels.forward.expand_rows import expand_rows


class UnpooledExchange(Exchange):
    """An exchange that returns a row for each id of this rank's samples."""

    def __init__(
        self,
        layout: Layout,
        tables: LocalTables,
        options: ExchangeOptions,
        group: dist.ProcessGroup,
        device: torch.device,
    ) -> None:
        """Take an exchange's arguments; the layout's names are tables, all with the same number of columns."""
        # Rows are narrowed only when they are expanded, so that sums of gradients keep the precision of the wire.
        widest = torch.promote_types(options.wire_dtype, options.output_dtype)
        super().__init__(layout, tables, replace(options, output_dtype=widest), group, device)
        self._clips = False  # gradients are clipped before they are summed
        self.expanded_dtype = options.output_dtype
        self.sums: RowSums | None = None
        self._batch_capacity: BatchCapacity | None = None
        self.distinct: DistinctIds
        """set by `take_distinct`"""
        self._is_counted = False  # the capacity limits distinct ids, too
        self.table_layout = layout
        """one feature for each table"""
        self._blocks = SlotBlocks(1, ())
        self._buffers: list[list[torch.Tensor]] = [[], []]
        """buffers of `_keep`, for even and for odd epochs"""

    @property
    def bound(self) -> BatchCapacity | None:
        """The capacity for batches, if this exchange takes ids."""
        return self._batch_capacity

    def take_distinct(
        self, distinct: DistinctIds, capacity: BatchCapacity, layout: Layout, replicated: ReplicatedTables | None
    ) -> None:
        """From now on, take the ids of this rank's samples, see `take_ids`; a collective."""
        self.distinct, self._is_counted = distinct, bool(capacity.distinct)
        self.table_layout, self._replicated = layout, replicated
        self.dim = layout.dims[0]
        self.sums = RowSums(self.dim, self.device) if self.device.type == "cuda" else None
        self.take_bound(capacity)

    @property
    def row_ranges(self) -> Mapping[str, RowRange]:
        """What has its own slots, by name: a table or, if it is cut by rows over several nodes, each owner's rows.

        An owner sends another node a row for every slot that may have an id of its rows.
        """
        return self.table_layout.row_ranges(self.has_rows_apart)

    @cached_property
    def has_rows_apart(self) -> bool:
        """Whether rows of a table are on several nodes; the first access is a collective."""
        shards = [shard for shards in self.table_layout.by_owner for shard in shards]
        return any(shard.is_cut_by_rows for shard in shards) and not self.reach.whole

    def take_bound(self, bound: BatchCapacity) -> None:
        """From now on, take ids of another capacity; a collective, between steps."""
        self._batch_capacity, most = bound, self._slot_capacities(bound)
        self._blocks = SlotBlocks.of(list(most.values()))
        features = self._blocks.by_feature(most)
        ids = {name: most for name, (_, most) in features.items()}
        ranges = self.row_ranges
        layout = self.table_layout.with_features({name: ranges[of] for name, (of, _) in features.items()})
        slots = BatchCapacity(self._blocks.slots, dict.fromkeys(ids, (0, 1)), ids)
        self.take_ids(list(ids), slots, layout, self._replicated)
        most_ids, bags = sum(self._id_capacities(bound)), len(ids) * self._blocks.slots
        # Ids, lengths and slots; rows, starts, count and order of the runs.
        sizes = most_ids, bags, most_ids, most_ids, most_ids + 1, 1, most_ids
        self._buffers = [[torch.zeros(size, dtype=torch.int32, device=self.device) for size in sizes] for _ in range(2)]

    def _slot_capacities(self, capacity: BatchCapacity) -> dict[str, int]:
        """Return the most slots that a batch fills, by name of `row_ranges`."""
        ids = dict.fromkeys(self.table_layout.names, 0)
        for sequence, most in zip(self.distinct.sequences, self._id_capacities(capacity), strict=True):
            ids[self.table_layout.names[sequence.table]] += most
        distinct = capacity.distinct if self._is_counted else {}
        return {
            name: min(most, distinct.get(name, distinct.get(of.table, most)))
            for name, of in self.row_ranges.items()
            for most in [ids[of.table]]
        }

    def _id_capacities(self, capacity: BatchCapacity) -> list[int]:
        """Return the most ids of each sequence."""
        return capacity.capacity([sequence.feature for sequence in self.distinct.sequences])

    def capacities_of(self, features: KeyedJaggedTensor) -> list[int]:
        """Return the capacity of each sequence in a batch."""
        assert self._batch_capacity is not None
        return self.distinct.capacities_of(features, self._id_capacities(self._batch_capacity))

    def _keep(self, distinct: Distinct) -> Distinct:
        """Return a copy in the buffers of the next epoch."""
        ids = distinct.values
        if ids.dtype == torch.int64:  # ids beyond int32 stay outside every table
            ids = ids.clamp(-1, torch.iinfo(torch.int32).max).int()
        flat = [ids, distinct.lengths, distinct.slots, *distinct.runs]
        memory = self._buffers[(self.counters.ids.value + 1) % 2]
        kept = [each[: tensor.numel()] for each, tensor in zip(memory, flat, strict=True)]
        torch._foreach_copy_(kept, flat)  # pyright: ignore[reportPrivateImportUsage]  in one kernel
        values, lengths, slots, *runs = kept
        return Distinct(values, lengths, slots, type(distinct.runs)(*runs))

    def _most_samples(self, samples: int) -> int:
        """Return the slots, the same number on every rank."""
        return samples

    @poison_on_error
    def _send(self, features: KeyedJaggedTensor, count: torch.Tensor | None) -> ArrivedIds:
        assert self._ids is not None
        batch = self.distinct.sort(features, self.capacities_of(features))
        distinct = self._keep(self.distinct.assign_slots(batch, self._blocks))
        bags = KeyedJaggedTensor(
            list(self._ids.keys), distinct.values, lengths=distinct.lengths, stride=self._blocks.slots
        )
        return super()._send(bags, None)._replace(distinct=distinct)

    def start_sent_rows(self, features: KeyedJaggedTensor) -> Callable[[], torch.Tensor]:
        """Start the step of `features`, see `start_sent`.

        Returns:
            A function that waits for the rows [P, D] of this rank's ids, see `Distinct`, of type
            `options.output_dtype`.
        """
        if not self._sent:
            self.send_ids(features)
        distinct = self._sent[0][1].distinct
        slots = self.start_sent(features)
        slots.samples = None
        return uncompiled(lambda: ExpandRows.apply(slots.wait(), self, distinct))


class ExpandRows(torch.autograd.Function):
    """Copies a row for each of its ids; the backward sums the gradients of each row."""

    @staticmethod
    def forward(ctx: Any, slots: torch.Tensor, exchange: UnpooledExchange, distinct: Distinct) -> torch.Tensor:
        """Return [P, D] of the slots [b, F * D]."""
        ctx.exchange, ctx.distinct, ctx.shape, ctx.dtype = exchange, distinct, slots.shape, slots.dtype
        rows = slots.reshape(-1, exchange.dim).to(exchange.expanded_dtype)
        return (reference.expand_rows if exchange.sums is None else expand_rows)(rows, distinct.slots)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        """Return the gradient [b, F * D] of the slots."""
        (gradient,) = gradients
        exchange, distinct = ctx.exchange, ctx.distinct
        gradient, rows = exchange.clipped(gradient), ctx.shape.numel() // exchange.dim
        if exchange.sums is None:
            sums = reference.sum_rows(gradient, distinct.slots, rows)
        else:
            sums = exchange.sums(gradient.contiguous(), distinct.runs, rows)
        return sums.view(ctx.shape).to(ctx.dtype), None, None
