"""The distinct ids of a batch, table by table, on the rank that has the samples: what unpooled tables exchange.

A slot is a bag of one id or none; slot k of a table with n distinct ids has the k-th of them if k < n. So each row is
sent once. Received rows are expanded from slots to ids, and gradients are summed by slot before they are sent.

Example: features f: [7, 3] [7] and g: [3] of one table. Its distinct ids 3 and 7 are in slots 0 and 1; the ids of f and
g are in slots 1 0 1 and 0. The gradients of the first and third id of f are added and sent for slot 1.

Ids of a table of any id have no row before they arrive at its owner. They are sorted by all of their 64 bits within
their table or, if it is cut into ranges, by bucket, so that each range of buckets has its ids together.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dlrm_overlap.embedding.layout import SLOTS_FROM
from dlrm_overlap.kernels.backward.sum_rows import Runs
from dlrm_overlap.kernels.ids.id_map import mix, unsigned_remainder
from dlrm_overlap.kernels.launches import Key, StepCache, Value


class NamedSequence(NamedTuple):
    """A feature looked up in table number `table`, unpooled; its jagged tensor is `name` in the output."""

    name: str
    feature: str
    table: int


_WASTE = 1 / 8  # largest share of unused slots
_LEAST_BLOCK = 64  # slots; smaller blocks would cost more time than they save memory
_MAX_MISSING = 1 << 30  # slots, fits an int32


class SlotBlocks(NamedTuple):
    """The slots of T tables in blocks of `slots`, each the bags of one feature of an exchange; `counts` has blocks by
    table.

    Example: tables of at most 1000 and 90 distinct ids have 8 blocks and 1 of 125 slots; one block each would be 2000.
    """

    slots: int
    counts: tuple[int, ...]

    @classmethod
    def of(cls, most: Sequence[int]) -> "SlotBlocks":
        """Return the largest blocks with at most an eighth of unused slots, for `most` distinct ids by table."""
        slots = max(1, *most)
        while True:
            blocks = cls(slots, tuple(max(1, -(-each // slots)) for each in most))
            if slots <= _LEAST_BLOCK or slots * sum(blocks.counts) <= (1 + _WASTE) * sum(most):
                return blocks
            slots = -(-slots // 2)

    def by_feature(self, most: Mapping[str, int]) -> dict[str, tuple[str, int]]:
        """Return feature -> its table, and its share of the table's largest number of distinct ids."""
        found = {}
        for (table, ids), count in zip(most.items(), self.counts, strict=True):
            for block in range(count):
                first = block * self.slots
                found[f"{table}{SLOTS_FROM * (block > 0)}{first or ''}"] = table, min(self.slots, ids - first)
        return found


class Distinct(NamedTuple):
    """The ids of a batch in slots; P is the capacity for ids, sequence by sequence."""

    values: torch.Tensor
    """[P or more] the distinct ids, table by table; int64 for tables of any id"""
    lengths: torch.Tensor
    """[F * b] int32: 1 for a slot with an id, else 0; their sum exceeds the capacity if the batch exceeds it"""
    slots: torch.Tensor
    """[P] int32: bag * F + feature of each id's slot; -1 for padding"""
    runs: Runs
    """runs of equal ids among the P ids, for the sums of their gradients"""


class _PaddedPositions(NamedTuple):
    """Positions of the ids of S sequences, each padded to its capacity, on the device."""

    capacities: torch.Tensor  # [S] int64
    sequence: torch.Tensor  # [P] int64: sequence of each position
    within: torch.Tensor  # [P] int64: index in the sequence
    table: torch.Tensor  # [P] int64: table of the sequence
    rows: torch.Tensor  # [P] int64: rows of the table
    first_key: torch.Tensor  # [P]: first key of the table
    positions: torch.Tensor  # [P + 2] int32: 0, 1, 2, ..


class _Blocks(NamedTuple):
    """`SlotBlocks` on the device, int64; slots are numbered table by table."""

    first: torch.Tensor  # [T]: first slot of each table
    counts: torch.Tensor  # [T]: slots of each table
    last: torch.Tensor  # [T]: last feature of each table
    table: torch.Tensor  # [F]: table of each feature
    within: torch.Tensor  # [F, b]: index of each slot among its table's
    window_rows: torch.Tensor  # [F * b] int32: bag * F + feature of each slot, its row in the window


class SortedBatch(NamedTuple):
    padded: _PaddedPositions
    ids: torch.Tensor  # [P], unsorted
    order: torch.Tensor  # [P] int64: position of each sorted id
    table: torch.Tensor  # [P] int64: table, or range, of each sorted id
    begins: torch.Tensor  # [P] bool: a sorted id is the first of equal ids
    run: torch.Tensor  # [P] int64: number of distinct ids before a sorted id
    first_run: torch.Tensor  # [T + 1] int64: first distinct id of each table, and the number of all
    total: torch.Tensor  # [] int64: ids within the capacity; padding is sorted after them
    counts: torch.Tensor  # [T] int64: distinct ids of each table; more than P if ids exceed the capacity


class DistinctIds:
    """Finds the distinct ids of batches on the device.

    Args:
        sequences: in the order of their tables.
        rows: number of rows of each table, or of buckets of tables of any id.
        ranges: by table, the first row, or bucket, of each range with its own slots, like a table. By default a table
            is one range.
        any_id: whether all tables are of any id; else none is.
        mixes: whether an id's bucket is its hash's bucket, see `IdLayout.mixes`.
    """

    def __init__(
        self,
        sequences: Sequence[NamedSequence],
        rows: Sequence[int],
        device: torch.device,
        ranges: Sequence[Sequence[int]] = (),
        any_id: bool = False,
        mixes: bool = False,
    ) -> None:
        self.any_id, self._mixes = any_id, mixes
        ranges = ranges or [[0]] * len(rows)
        self.sequences, self._is_cut = sequences, sum(map(len, ranges)) > len(rows)
        assert [s.table for s in sequences] == sorted(s.table for s in sequences)
        keys = [0]
        for count in rows:
            keys.append(keys[-1] + count + 1)  # one more for all ids outside the table, which their owner reports
        self._key_type = torch.int32 if keys[-1] < 2**31 else torch.int64
        firsts = [key + first for key, of_table in zip(keys, ranges, strict=False) for first in of_table]
        self._first_keys = torch.tensor([*firsts, keys[-1]], dtype=self._key_type, device=device)
        self._table_keys = torch.tensor(keys, dtype=self._key_type, device=device)
        self._rows = torch.tensor(rows, device=device)
        self._no_slot = torch.tensor(-1, dtype=torch.int32, device=device)
        self._of_tables = torch.tensor([s.table for s in sequences], device=device)
        self._first_ranges = torch.tensor([firsts.index(keys[s.table]) for s in sequences], device=device)
        self._device = device
        self._positions = StepCache[tuple[int, ...], _PaddedPositions]()
        self._indices = StepCache[tuple[str, ...], torch.Tensor]()
        self._blocks = StepCache[SlotBlocks, _Blocks]()

    def _positions_of(self, features: KeyedJaggedTensor, capacities: tuple[int, ...]) -> _PaddedPositions:
        if hasattr(features, "capacities") and not getattr(features, "is_exact", False):
            return self._positions.get(capacities, self._finished, self._make_positions, capacities)
        return self._make_positions(capacities)

    def _finished(self, make: Callable[[Key], Value], key: Key) -> Value:
        """Return `make(key)` once its tensors are written, since other streams read them, too."""
        made = make(key)
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        return made

    def _make_positions(self, capacities: tuple[int, ...]) -> _PaddedPositions:
        each, total = torch.tensor(capacities, device=self._device), sum(capacities)
        sequence = torch.repeat_interleave(each, output_size=total)
        within = torch.arange(total, device=self._device) - (each.cumsum(0) - each)[sequence]
        positions = torch.arange(total + 2, dtype=torch.int32, device=self._device)
        table = self._of_tables[sequence]
        return _PaddedPositions(each, sequence, within, table, self._rows[table], self._table_keys[table], positions)

    def _make_indices(self, keys: tuple[str, ...]) -> torch.Tensor:
        return torch.tensor([keys.index(s.feature) for s in self.sequences], device=self._device)

    def capacities_of(self, features: KeyedJaggedTensor, most: Sequence[int] | None = None) -> list[int]:
        """Return each sequence's capacity in a captured step, else its number of ids; at most `most`."""
        by_key: Any = getattr(features, "capacities", None)
        by_key = dict(zip(features.keys(), by_key or features.length_per_key(), strict=True))
        capacities = [by_key[s.feature] for s in self.sequences]
        return capacities if most is None else [min(pair) for pair in zip(capacities, most, strict=True)]

    def padded(self, features: KeyedJaggedTensor, capacities: Sequence[int]) -> torch.Tensor:
        """Return [P]: the ids of each sequence, padded with 0."""
        _, _, valid, ids = self._read(features, capacities)
        return ids.masked_fill(~valid, 0)

    def _read(self, features: KeyedJaggedTensor, capacities: Sequence[int]) -> tuple[Any, ...]:
        """Return positions, [S] ids of each sequence, [P] which positions have an id, and the ids [P]."""
        padded = self._positions_of(features, tuple(capacities))
        keys = tuple(features.keys())
        indices, values = self._indices.get(keys, self._finished, self._make_indices, keys), features.values()
        by_key = features.lengths().view(len(keys), features.stride()).sum(1, dtype=torch.int64)
        counts, starts = by_key[indices], (by_key.cumsum(0) - by_key)[indices]
        valid = padded.within < counts[padded.sequence]
        if values.numel() == 0:  # and P is 0, or no id is valid
            return padded, counts, valid, values.new_zeros(valid.numel())
        ids = values[(starts[padded.sequence] + padded.within).clamp_(max=values.numel() - 1)]
        return padded, counts, valid, ids

    def sort(self, features: KeyedJaggedTensor, capacities: Sequence[int]) -> SortedBatch:
        padded, sizes, valid, ids = self._read(features, capacities)
        if self.any_id:
            ids = ids.long()
            key, order, differs = self._sort_any_ids(ids, padded, valid)
        else:
            # Keys are in the order of tables and rows, one key for ids outside the table; padding comes last.
            row = ids.where((ids >= 0) & (ids < padded.rows), padded.rows).to(self._key_type)
            key, order = (padded.first_key + row).where(valid, self._first_keys[-1]).sort(stable=True)
            differs = key[1:] != key[:-1]
        begins = key < self._first_keys[-1]
        begins[1:].logical_and_(differs)
        # Number the distinct ids, and count those of each range.
        first = torch.searchsorted(key, self._first_keys)
        ranges = self._first_keys[1:-1]
        table = torch.searchsorted(ranges, key, right=True) if self._is_cut else padded.table[order]
        ends = begins.cumsum(0)
        first_run = torch.cat([ends.new_zeros(1), ends])[first]
        beyond = (sizes - padded.capacities).clamp_(min=0)
        counts = first_run.diff().index_add_(0, self._first_ranges, beyond, alpha=ids.numel() + 1)
        return SortedBatch(padded, ids, order, table, begins, ends - 1, first_run, first[-1], counts)

    def _sort_any_ids(
        self, ids: torch.Tensor, padded: _PaddedPositions, valid: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Sort ids by table, then by bucket if tables have ranges, then by id; padding comes last.

        Returns:
            [P] sorted keys, [P] int64 position of each sorted id, and [P - 1] bool: an id differs from the one before.
        """
        key = padded.first_key
        if self._is_cut:
            bucket = unsigned_remainder(mix(ids) if self._mixes else ids, padded.rows)
            key = key + bucket.to(self._key_type)
        by_id, order = ids.sort(stable=True)
        key, again = key.where(valid, self._first_keys[-1])[order].sort(stable=True)
        by_id, order = by_id[again], order[again]
        return key, order, (key[1:] != key[:-1]) | (by_id[1:] != by_id[:-1])

    def assign_slots(self, batch: SortedBatch, blocks: SlotBlocks) -> Distinct:
        """Assign the ids of a batch to slots; if it has too many, `lengths` show that and `slots` are wrong."""
        capacity, positions = batch.ids.numel(), batch.padded.positions
        found = self._blocks.get(blocks, self._finished, self._make_blocks, blocks)
        # The slot of each sorted id, then its row in the window.
        slot = batch.run + (found.first - batch.first_run[:-1])[batch.table]
        row = found.window_rows[slot.clamp_(0, found.window_rows.numel() - 1)]
        row = row.where(positions[:capacity] < batch.total, self._no_slot)
        # Distinct ids and their runs: equal ids after the first are stored after the end.
        run = batch.run.where(batch.begins, positions[capacity + 1])
        values = batch.ids.new_zeros(capacity + 2).scatter_(0, run, batch.ids[batch.order])
        rows = row.new_zeros(capacity + 2).scatter_(0, run, row.clamp(min=0))
        slots = torch.empty_like(row).scatter_(0, batch.order, row)
        starts = batch.total.to(torch.int32).repeat(capacity + 2).scatter_(0, run, positions[:capacity])[: capacity + 1]
        # Slots with an id. Missing slots make lengths exceed the capacity, which is reported where ids are published.
        lengths = (found.within < batch.counts[found.table][:, None]).to(torch.int32)
        missing = (batch.counts - found.counts).clamp_(0, _MAX_MISSING).to(torch.int32)
        lengths[:, 0].index_add_(0, found.last, missing)
        count = batch.first_run[-1:].to(torch.int32)
        runs = Runs(rows[:capacity], starts, count, batch.order.to(torch.int32))
        return Distinct(values[:capacity], lengths.flatten(), slots, runs)

    def _make_blocks(self, blocks: SlotBlocks) -> _Blocks:
        b, features = blocks.slots, sum(blocks.counts)
        counts = torch.tensor(blocks.counts, device=self._device)
        slots = torch.arange(features * b, device=self._device)
        table, ends = torch.repeat_interleave(counts, output_size=features), counts.cumsum(0)
        first = (ends - counts) * b
        within = slots.view(features, b) - first[table][:, None]
        window_rows = slots.view(b, features).T.flatten().int()
        return _Blocks(first, counts * b, ends - 1, table, within, window_rows)
