"""The distinct ids of a batch, table by table, at the rank whose samples name them: what unpooled tables exchange.

Each table has slots, which are bags of one id or of none: slot k of a table with n distinct ids has the k-th of them if
k < n. So the exchange of pooled embeddings brings each row once, as the "pooled embedding" of a slot. Its features have
b bags each, and tables as many features as their slots need: see `SlotBlocks`. `places` says of each id of the batch
which slot it is expanded from; gradients are summed by slot before they leave, see `Runs`.

Example: features f: [7, 3] [7] and g: [3] of one table. Its distinct ids are 3 and 7, in slots 0 and 1; the ids of f
and g are in slots 1 0 1 and 0. The gradients of the first and the third id of f are added up, and sent for slot 1.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dlrm_overlap.embedding.layout import SLOTS_FROM
from dlrm_overlap.kernels.backward.sum_rows import Runs
from dlrm_overlap.kernels.launches import Key, StepCache, Value


class NamedSequence(NamedTuple):
    """A feature that is looked up in a table, unpooled: one jagged tensor of a collection's output."""

    name: str
    """in the output"""
    feature: str
    """in the ids"""
    table: int
    """index of its table"""


_WASTE = 1 / 8  # of the slots that are needed: so many more may there be
_LEAST_BLOCK = 64  # slots, below which blocks would be more work than memory
_MOST_MISSING = 1 << 30  # slots, which an int32 holds


class SlotBlocks(NamedTuple):
    """The slots of T tables in blocks of b, each the bags of one feature of an exchange.

    Example: tables of at most 1000 and 90 distinct ids have 8 blocks and 1 of 125 slots, 1125 in all; were there as
    many slots of each table, there would be 2000.
    """

    slots: int
    """of a block, b"""
    counts: tuple[int, ...]
    """blocks of each table"""

    @classmethod
    def of(cls, most: Sequence[int]) -> "SlotBlocks":
        """Return the blocks for the most distinct ids of each table: the largest with at most an eighth of waste."""
        slots = max(1, *most)
        while True:
            blocks = cls(slots, tuple(max(1, -(-each // slots)) for each in most))
            if slots <= _LEAST_BLOCK or slots * sum(blocks.counts) <= (1 + _WASTE) * sum(most):
                return blocks
            slots = -(-slots // 2)

    def by_feature(self, most: Mapping[str, int]) -> dict[str, tuple[str, int]]:
        """Return the features of the exchange, each with its table, and its share of the most distinct ids of that."""
        found = {}
        for (table, ids), count in zip(most.items(), self.counts, strict=True):
            for block in range(count):
                first = block * self.slots
                found[f"{table}{SLOTS_FROM * (block > 0)}{first or ''}"] = table, min(self.slots, ids - first)
        return found


class Distinct(NamedTuple):
    """Of one batch, the ids in slots and the way back from there; P ids in all, in order of the sequences."""

    values: torch.Tensor
    """[P or more]: the distinct ids, table by table, of the type of the batch's ids"""
    lengths: torch.Tensor
    """[F * b] int32: 1 for a slot that has an id, else 0; more than the most ids where a batch is beyond its bound"""
    places: torch.Tensor
    """[P] int32: bag * F + feature of the slot of each id; -1 for room behind a sequence's ids"""
    runs: Runs
    """of the gradients of the P ids, by place"""


class _Rooms(NamedTuple):
    """Where the ids of sequences with so much room each are: tensors on the device, which a capture cannot make."""

    rooms: torch.Tensor  # [S] int64
    sequence: torch.Tensor  # [P] int64: of each place for an id, the sequence
    within: torch.Tensor  # [P] int64: its number in the sequence
    table: torch.Tensor  # [P] int64: the sequence's table
    rows: torch.Tensor  # [P] int64: that table's
    first_key: torch.Tensor  # [P]: that table's
    positions: torch.Tensor  # [P + 2] int32: 0, 1, 2, ..


class _Blocks(NamedTuple):
    """`SlotBlocks` on the device, int64; slots are numbered table by table."""

    first: torch.Tensor  # [T]: the first slot of each table
    counts: torch.Tensor  # [T]: slots of each table
    last: torch.Tensor  # [T]: the last feature of each table
    table: torch.Tensor  # [F]: the table of each feature
    within: torch.Tensor  # [F, b]: of each slot the number among its table's
    places: torch.Tensor  # [F * b] int32: of each slot the row in the window, see `Distinct.places`


class SortedBatch(NamedTuple):
    """The ids of a batch in the order of their tables and of themselves."""

    rooms: _Rooms
    ids: torch.Tensor  # [P]
    order: torch.Tensor  # [P] int64: the place of the first id in order, of the second, ..
    table: torch.Tensor  # [P] int64: of each in order, the table or the range
    begins: torch.Tensor  # [P] bool: which of them, in order, are the first of their kind
    run: torch.Tensor  # [P] int64: of each in order, the number of distinct ids before its own
    first_run: torch.Tensor  # [T + 1] int64: the first distinct id of each table, and the number of all
    total: torch.Tensor  # [] int64: ids of the batch that have room; after them come, in order, places without one
    counts: torch.Tensor  # [T] int64: distinct ids of each table; more than P where there is no room for some


class DistinctIds:
    """Finds the distinct ids of batches, all on the device; the same arithmetic on CPUs and GPUs.

    Ranges of a table's rows may have slots of their own, as if each were a table.
    """

    def __init__(
        self,
        sequences: Sequence[NamedSequence],
        rows: Sequence[int],
        device: torch.device,
        ranges: Sequence[Sequence[int]] = (),
    ) -> None:
        """Take the sequences, those of a table together, the rows of each table, and the first of each range of them.

        Without ranges each table has one, so there are as many, T, as tables.
        """
        ranges = ranges or [[0]] * len(rows)
        self.sequences, self._is_cut = sequences, sum(map(len, ranges)) > len(rows)
        assert [s.table for s in sequences] == sorted(s.table for s in sequences)
        keys = [0]
        for count in rows:
            keys.append(keys[-1] + count + 1)  # one key for all ids outside the table, which their owner finds
        self._key_type = torch.int32 if keys[-1] < 2**31 else torch.int64
        firsts = [key + first for key, of_table in zip(keys, ranges, strict=False) for first in of_table]
        self._first_keys = torch.tensor([*firsts, keys[-1]], dtype=self._key_type, device=device)
        self._table_keys = torch.tensor(keys, dtype=self._key_type, device=device)
        self._rows = torch.tensor(rows, device=device)
        self._nowhere = torch.tensor(-1, dtype=torch.int32, device=device)
        self._of_tables = torch.tensor([s.table for s in sequences], device=device)
        self._first_ranges = torch.tensor([firsts.index(keys[s.table]) for s in sequences], device=device)
        self._device = device
        self._rooms = StepCache[tuple[int, ...], _Rooms]()
        self._indices = StepCache[tuple[str, ...], torch.Tensor]()
        self._blocks = StepCache[SlotBlocks, _Blocks]()

    def _rooms_of(self, features: KeyedJaggedTensor, rooms: tuple[int, ...]) -> _Rooms:
        """Return the rooms, kept where those of later batches are the same: where ids have a bound."""
        if hasattr(features, "capacities") and not getattr(features, "is_exact", False):
            return self._rooms.get(rooms, self._finished, self._make_rooms, rooms)
        return self._make_rooms(rooms)

    def _finished(self, make: Callable[[Key], Value], key: Key) -> Value:
        """Return what is made, once its tensors are on the device, where other streams read them, too."""
        made = make(key)
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        return made

    def _make_rooms(self, rooms: tuple[int, ...]) -> _Rooms:
        each, total = torch.tensor(rooms, device=self._device), sum(rooms)
        sequence = torch.repeat_interleave(each, output_size=total)
        within = torch.arange(total, device=self._device) - (each.cumsum(0) - each)[sequence]
        positions = torch.arange(total + 2, dtype=torch.int32, device=self._device)
        table = self._of_tables[sequence]
        return _Rooms(each, sequence, within, table, self._rows[table], self._table_keys[table], positions)

    def _make_indices(self, keys: tuple[str, ...]) -> torch.Tensor:
        return torch.tensor([keys.index(s.feature) for s in self.sequences], device=self._device)

    def rooms_of(self, features: KeyedJaggedTensor, most: Sequence[int] | None = None) -> list[int]:
        """Return the room for the ids of each sequence: as many as there are or, of ids with a bound, as may be there.

        Args:
            features: ids; those of a captured step have `capacities`.
            most: of each sequence, where more have no room.
        """
        by_key: Any = getattr(features, "capacities", None)
        by_key = dict(zip(features.keys(), by_key or features.length_per_key(), strict=True))
        rooms = [by_key[s.feature] for s in self.sequences]
        return rooms if most is None else [min(pair) for pair in zip(rooms, most, strict=True)]

    def padded(self, features: KeyedJaggedTensor, rooms: Sequence[int]) -> torch.Tensor:
        """Return [P] the ids of each sequence, 0 behind them."""
        _, _, valid, ids = self._read(features, rooms)
        return ids.masked_fill(~valid, 0)

    def _read(self, features: KeyedJaggedTensor, rooms: Sequence[int]) -> tuple[Any, ...]:
        """Return rooms, the number [S] of ids of each sequence, which places [P] have an id, and the ids [P]."""
        made = self._rooms_of(features, tuple(rooms))
        keys = tuple(features.keys())
        indices, values = self._indices.get(keys, self._finished, self._make_indices, keys), features.values()
        by_key = features.lengths().view(len(keys), features.stride()).sum(1, dtype=torch.int64)
        counts, starts = by_key[indices], (by_key.cumsum(0) - by_key)[indices]
        valid = made.within < counts[made.sequence]
        if values.numel() == 0:  # and P is 0, or no id is valid
            return made, counts, valid, values.new_zeros(valid.numel())
        ids = values[(starts[made.sequence] + made.within).clamp_(max=values.numel() - 1)]
        return made, counts, valid, ids

    def sort(self, features: KeyedJaggedTensor, rooms: Sequence[int]) -> SortedBatch:
        """Sort the ids of a batch by table and id."""
        made, sizes, valid, ids = self._read(features, rooms)
        row = ids.where((ids >= 0) & (ids < made.rows), made.rows).to(self._key_type)
        key, order = (made.first_key + row).where(valid, self._first_keys[-1]).sort(stable=True)
        begins = key < self._first_keys[-1]
        begins[1:].logical_and_(key[1:] != key[:-1])
        first = torch.searchsorted(key, self._first_keys)
        ranges = self._first_keys[1:-1]  # a key is in the range after all whose first keys it has reached
        table = torch.searchsorted(ranges, key, right=True) if self._is_cut else made.table[order]
        ends = begins.cumsum(0)
        first_run = torch.cat([ends.new_zeros(1), ends])[first]
        beyond = (sizes - made.rooms).clamp_(min=0)
        counts = first_run.diff().index_add_(0, self._first_ranges, beyond, alpha=ids.numel() + 1)
        return SortedBatch(made, ids, order, table, begins, ends - 1, first_run, first[-1], counts)

    def place(self, batch: SortedBatch, blocks: SlotBlocks) -> Distinct:
        """Return a batch's ids in their slots; of one that has more, lengths that tell so, and wrong places."""
        room, positions = batch.ids.numel(), batch.rooms.positions
        found = self._blocks.get(blocks, self._finished, self._make_blocks, blocks)
        slot = batch.run + (found.first - batch.first_run[:-1])[batch.table]
        place = found.places[slot.clamp_(0, found.places.numel() - 1)]
        place = place.where(positions[:room] < batch.total, self._nowhere)
        # Of others than the first of their kind nothing is kept: they are stored behind the end.
        run = batch.run.where(batch.begins, positions[room + 1])
        values = batch.ids.new_zeros(room + 2).scatter_(0, run, batch.ids[batch.order])
        rows = place.new_zeros(room + 2).scatter_(0, run, place.clamp(min=0))
        places = torch.empty_like(place).scatter_(0, batch.order, place)
        starts = batch.total.to(torch.int32).repeat(room + 2).scatter_(0, run, positions[:room])[: room + 1]
        lengths = (found.within < batch.counts[found.table][:, None]).to(torch.int32)
        # The slots that are missing make more ids than any bound says, which is found where they are published.
        missing = (batch.counts - found.counts).clamp_(0, _MOST_MISSING).to(torch.int32)
        lengths[:, 0].index_add_(0, found.last, missing)
        count = batch.first_run[-1:].to(torch.int32)
        return Distinct(
            values[:room], lengths.flatten(), places, Runs(rows[:room], starts, count, batch.order.to(torch.int32))
        )

    def _make_blocks(self, blocks: SlotBlocks) -> _Blocks:
        b, features = blocks.slots, sum(blocks.counts)
        counts = torch.tensor(blocks.counts, device=self._device)
        slots = torch.arange(features * b, device=self._device)
        table, ends = torch.repeat_interleave(counts, output_size=features), counts.cumsum(0)
        first = (ends - counts) * b
        within = slots.view(features, b) - first[table][:, None]
        places = slots.view(b, features).T.flatten().int()
        return _Blocks(first, counts * b, ends - 1, table, within, places)
