"""The exchange of unpooled tables: that of pooled embeddings, whose bags are slots for distinct ids, see `distinct`.

ids           distinct ids of each table, in slots --------------> owners, as bags of one id
forward       rows, each once, in the slots of the window <------- each owner stores a row where it has it
              expanded to the ids that name them, with autograd
backward      gradients summed by slot --------------------------> owners, which add those of all ranks, and update
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
    """An exchange whose tables have slots: ids of this rank's samples in, a row for each of them out."""

    def __init__(
        self,
        layout: Layout,
        tables: LocalTables,
        options: ExchangeOptions,
        group: dist.ProcessGroup,
        device: torch.device,
    ) -> None:
        """Take an exchange's arguments, of a layout that names tables, all of as many columns."""
        # Rows are narrowed as they are expanded: so sums of gradients are sent as precisely as they travel.
        widest = torch.promote_types(options.wire_dtype, options.output_dtype)
        super().__init__(layout, tables, replace(options, output_dtype=widest), group, device)
        self._clips = False  # gradients are clipped before they are summed
        self.expanded_dtype = options.output_dtype
        self.sums: RowSums | None = None
        self._batch_bound: BatchCapacity | None = None
        self.distinct: DistinctIds
        """of the tables in the order of `table_layout`, where this exchange takes ids"""
        self._is_counted = False  # whether the distinct ids of the batches are within the bound's
        self.table_layout = layout
        """of the tables, each with one feature"""
        self._blocks = SlotBlocks(1, ())
        """where this exchange takes ids"""
        self._kept: list[list[torch.Tensor]] = [[], []]
        """the memory of what is known of the ids that were sent in even epochs, and in odd ones"""

    @property
    def bound(self) -> BatchCapacity | None:
        """The bound of batches by which ids are taken, if they are."""
        return self._batch_bound

    def take_distinct(
        self, distinct: DistinctIds, bound: BatchCapacity, layout: Layout, replicated: ReplicatedTables | None
    ) -> None:
        """From now on, take the ids of this rank's samples, see `take_ids`; a collective."""
        self.distinct, self._is_counted = distinct, bool(bound.distinct)
        self.table_layout, self._replicated = layout, replicated
        self.dim = layout.dims[0]
        self.sums = RowSums(self.dim, self.device) if self.device.type == "cuda" else None
        self.take_bound(bound)

    @property
    def row_ranges(self) -> Mapping[str, RowRange]:
        """What has slots of its own, by name: each table or, of one cut by rows over several nodes, each owner's rows.

        An owner sends another node a row for every slot that may have an id of its rows.
        """
        return self.table_layout.row_ranges(self.has_rows_apart)

    @cached_property
    def has_rows_apart(self) -> bool:
        """Whether rows of a table are on several nodes; the first access is a collective."""
        shards = [shard for shards in self.table_layout.by_owner for shard in shards]
        return any(shard.is_cut_by_rows for shard in shards) and not self.reach.whole

    def take_bound(self, bound: BatchCapacity) -> None:
        """From now on, take ids of another bound; a collective, of ranks that are through with their steps."""
        self._batch_bound, most = bound, self._most_slots(bound)
        self._blocks = SlotBlocks.of(list(most.values()))
        features = self._blocks.by_feature(most)
        ids = {name: room for name, (_, room) in features.items()}
        ranges = self.row_ranges
        layout = self.table_layout.with_features({name: ranges[of] for name, (of, _) in features.items()})
        slots = BatchCapacity(self._blocks.slots, dict.fromkeys(ids, (0, 1)), ids)
        self.take_ids(list(ids), slots, layout, self._replicated)
        room, bags = sum(self._most(bound)), len(ids) * self._blocks.slots
        # Ids, lengths, slots; rows, starts, count and order of the runs.
        sizes = room, bags, room, room, room + 1, 1, room
        self._kept = [[torch.zeros(size, dtype=torch.int32, device=self.device) for size in sizes] for _ in range(2)]

    def _most_slots(self, bound: BatchCapacity) -> dict[str, int]:
        """Return the most slots that a batch fills, by name of `row_ranges`."""
        ids = dict.fromkeys(self.table_layout.names, 0)
        for sequence, room in zip(self.distinct.sequences, self._most(bound), strict=True):
            ids[self.table_layout.names[sequence.table]] += room
        distinct = bound.distinct if self._is_counted else {}
        return {
            name: min(most, distinct.get(name, distinct.get(of.table, most)))
            for name, of in self.row_ranges.items()
            for most in [ids[of.table]]
        }

    def _most(self, bound: BatchCapacity) -> list[int]:
        """Return the most ids of each sequence."""
        return bound.capacity([sequence.feature for sequence in self.distinct.sequences])

    def rooms_of(self, features: KeyedJaggedTensor) -> list[int]:
        """Return the room for the ids of each sequence in a batch, where this exchange takes ids."""
        assert self._batch_bound is not None
        return self.distinct.capacities_of(features, self._most(self._batch_bound))

    def _keep(self, distinct: Distinct) -> Distinct:
        """Return the same in memory that stays, of the epoch that comes next."""
        ids = distinct.values
        if ids.dtype == torch.int64:  # those that no int32 holds stay outside every table
            ids = ids.clamp(-1, torch.iinfo(torch.int32).max).int()
        flat = [ids, distinct.lengths, distinct.slots, *distinct.runs]
        memory = self._kept[(self.counters.ids.value + 1) % 2]
        kept = [each[: tensor.numel()] for each, tensor in zip(memory, flat, strict=True)]
        torch._foreach_copy_(kept, flat)  # pyright: ignore[reportPrivateImportUsage]  by one kernel
        values, lengths, places, *runs = kept
        return Distinct(values, lengths, places, type(distinct.runs)(*runs))

    def _most_samples(self, samples: int) -> int:
        """Return the slots, which are as many on all ranks."""
        return samples

    @poison_on_error
    def _send(self, features: KeyedJaggedTensor, count: torch.Tensor | None) -> ArrivedIds:
        assert self._ids is not None
        rooms = self.rooms_of(features)
        slots = self._blocks.slots
        distinct = self._keep(self.distinct.assign_slots(self.distinct.sort(features, rooms), self._blocks))
        bags = KeyedJaggedTensor(list(self._ids.keys), distinct.values, lengths=distinct.lengths, stride=slots)
        return super()._send(bags, None)._replace(distinct=distinct)

    def start_sent_rows(self, features: KeyedJaggedTensor) -> Callable[[], torch.Tensor]:
        """Start the step of `features`, see `start_sent`.

        Returns:
            A function that waits for the rows [P, D] of the ids of this rank's samples, see `Distinct`, of the options'
            `output_dtype`.
        """
        if not self._sent:
            self.send_ids(features)
        distinct = self._sent[0][1].distinct
        slots = self.start_sent(features)
        slots.samples = None
        return uncompiled(lambda: ExpandRows.apply(slots.wait(), self, distinct))


class ExpandRows(torch.autograd.Function):
    """A copy of its row for every id; backward, the sum of a row's gradients."""

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
