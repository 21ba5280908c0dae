"""The exchange of unpooled tables: the pooled one, whose bags are slots for distinct ids, see `distinct`.

ids           distinct ids of each table, in slots --------------> owners, as bags of one id
forward       rows, each once, in the slots of the window <------- each owner stores a row where it has it
              expanded to the ids that name them, with autograd
backward      gradients summed by slot --------------------------> owners, which add all ranks' sums, and update
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
from dlrm_overlap.embedding.id_layout import BatchCapacity, IdLayout, joined
from dlrm_overlap.embedding.id_sender import IdSender
from dlrm_overlap.embedding.layout import Layout, RowRange
from dlrm_overlap.embedding.options import ExchangeOptions
from dlrm_overlap.embedding.replicated import ReplicatedTables
from dlrm_overlap.embedding.tables import LocalTables
from dlrm_overlap.kernels import reference
from dlrm_overlap.kernels.backward.sum_rows import RowSums
from dlrm_overlap.kernels.compiled import in_aligned_memory
from dlrm_overlap.kernels.forward.expand_rows import expand_rows


class UnpooledExchange(Exchange):
    """An exchange whose `layout` names tables, all of the same number of columns, instead of features."""

    def __init__(
        self,
        layout: Layout,
        tables: LocalTables,
        options: ExchangeOptions,
        group: dist.ProcessGroup,
        device: torch.device,
    ) -> None:
        # Rows are narrowed when they are expanded, so sums of gradients keep the wire's precision.
        widest = torch.promote_types(options.wire_dtype, options.output_dtype)
        super().__init__(layout, tables, replace(options, output_dtype=widest), group, device)
        self._clips = False  # gradients are clipped before they are summed
        self.expanded_dtype = options.output_dtype
        self.table_layout = layout

    @cached_property
    def has_rows_apart(self) -> bool:
        """True if rows of a table are on several nodes; the first access is a collective."""
        shards = [shard for shards in self.table_layout.by_owner for shard in shards]
        return any(shard.is_cut_by_rows for shard in shards) and not self.reach.is_one_node


class UnpooledIdSender(IdSender):
    """Sends the distinct ids of each table in slots, and expands the rows that arrive to the ids of the batch.

    Args:
        distinct: finds the distinct ids of the tables, which are in the order of `layout`.
        capacity: if its `distinct` is empty, there is a slot for every id.
        layout: shards of the tables, each with one feature and the same number of columns.
        mixes: see `IdLayout.mixes`.
    """

    exchange: UnpooledExchange

    def __init__(
        self,
        exchange: UnpooledExchange,
        distinct: DistinctIds,
        capacity: BatchCapacity,
        layout: Layout,
        replicated: ReplicatedTables | None,
        mixes: bool = False,
    ) -> None:
        self.distinct, self._is_counted = distinct, bool(capacity.distinct)
        self.table_layout, self.dim = layout, layout.dims[0]
        self.sums = RowSums(self.dim, exchange.device) if exchange.device.type == "cuda" else None
        super().__init__(exchange, [], capacity, layout, replicated, mixes=mixes)

    def _id_layout(self, capacity: BatchCapacity) -> IdLayout:
        most = self._most_slots(capacity)
        self._blocks = SlotBlocks.of(list(most.values()))
        features, ranges = self._blocks.by_feature(most), self.row_ranges
        counts = {name: count for name, (_, count) in features.items()}
        self._keys = list(counts)
        ids, bags = sum(self._most(capacity)), len(counts) * self._blocks.slots
        # Words of ids, lengths, slots; rows, starts, count and order of the runs.
        words, device = 2 if self.distinct.any_id else 1, self.exchange.device
        sizes = (words * ids, bags, ids, ids, ids + 1, 1, ids)
        self._kept = [[torch.zeros(size, dtype=torch.int32, device=device) for size in sizes] for _ in range(2)]
        """memory for `Distinct` in even epochs, and in odd ones"""
        layout = self.table_layout.with_features({name: ranges[of] for name, (of, _) in features.items()})
        slots = BatchCapacity(self._blocks.slots, dict.fromkeys(counts, (0, 1)), counts)
        return IdLayout(joined(layout), self._keys, slots, mixes=self._mixes)

    @property
    def row_ranges(self) -> Mapping[str, RowRange]:
        """The ranges of rows that have their own slots, by name.

        A range is a table, or each row shard of a table that is cut by rows over several nodes: an owner sends another
        node a row for every slot that may have an id of the owner's rows.
        """
        return self.table_layout.row_ranges(self.exchange.has_rows_apart)

    def _most_slots(self, capacity: BatchCapacity) -> dict[str, int]:
        ids = dict.fromkeys(self.table_layout.names, 0)
        for sequence, count in zip(self.distinct.sequences, self._most(capacity), strict=True):
            ids[self.table_layout.names[sequence.table]] += count
        distinct = capacity.distinct if self._is_counted else {}
        return {
            name: min(most, distinct.get(name, distinct.get(of.table, most)))
            for name, of in self.row_ranges.items()
            for most in [ids[of.table]]
        }

    def _most(self, capacity: BatchCapacity) -> list[int]:
        return capacity.capacity([sequence.feature for sequence in self.distinct.sequences])

    def capacities_of(self, features: KeyedJaggedTensor) -> list[int]:
        """Return the number of ids of each sequence, with padding."""
        return self.distinct.capacities_of(features, self._most(self.capacity))

    def _keep(self, distinct: Distinct) -> Distinct:
        """Return a copy of `distinct` in the memory of the next epoch of ids."""
        ids = distinct.values
        if self.distinct.any_id:
            ids = ids.view(torch.int32)
        elif ids.dtype == torch.int64:  # clamped ids stay outside every table
            ids = ids.clamp(-1, torch.iinfo(torch.int32).max).int()
        flat = [ids, distinct.lengths, distinct.slots, *distinct.runs]
        memory = self._kept[(self.exchange.counters.ids.value + 1) % 2]
        kept = [each[: tensor.numel()] for each, tensor in zip(memory, flat, strict=True)]
        torch._foreach_copy_(kept, flat)  # pyright: ignore[reportPrivateImportUsage]  by one kernel
        values, lengths, slots, *runs = kept
        values = values.view(torch.int64) if self.distinct.any_id else values
        return Distinct(values, lengths, slots, type(distinct.runs)(*runs))

    def _most_samples(self, samples: int, group: dist.ProcessGroup) -> int:
        return samples  # slots, the same number on all ranks

    @poison_on_error
    def _send(self, features: KeyedJaggedTensor, count: torch.Tensor | None) -> ArrivedIds:
        capacities, slots = self.capacities_of(features), self._blocks.slots
        distinct = self._keep(self.distinct.assign_slots(self.distinct.sort(features, capacities), self._blocks))
        bags = KeyedJaggedTensor(list(self._keys), distinct.values, lengths=distinct.lengths, stride=slots)
        return super()._send(bags, None)._replace(distinct=distinct)

    def start_rows(self, features: KeyedJaggedTensor) -> Callable[[], torch.Tensor]:
        """Start the step of `features`, see `start`.

        Returns:
            A function that waits for the rows [P, D] of the ids of this rank's samples, see `Distinct`, and returns
            them, of the options' `output_dtype`.
        """
        distinct = self._first(features).arrived.distinct
        slots = self.start(features)
        slots.samples = None
        return uncompiled(lambda: ExpandRows.apply(slots.wait(), self, distinct))


class ExpandRows(torch.autograd.Function):
    """Copies rows from slots, [b, F * D], to every id, [P, D]; the backward sums the ids' gradients by slot."""

    @staticmethod
    def forward(ctx: Any, slots: torch.Tensor, sender: UnpooledIdSender, distinct: Distinct) -> torch.Tensor:
        ctx.sender, ctx.distinct, ctx.shape, ctx.dtype = sender, distinct, slots.shape, slots.dtype
        rows = slots.reshape(-1, sender.dim).to(sender.exchange.expanded_dtype)
        return (reference.expand_rows if sender.sums is None else expand_rows)(rows, distinct.slots)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (gradient,) = gradients
        sender, distinct = ctx.sender, ctx.distinct
        gradient, rows = sender.exchange.clipped(gradient), ctx.shape.numel() // sender.dim
        if sender.sums is None:
            sums = reference.sum_rows(gradient, distinct.slots, rows)
        else:
            sums = sender.sums(in_aligned_memory(gradient), distinct.runs, rows)
        return sums.view(ctx.shape).to(ctx.dtype), None, None
