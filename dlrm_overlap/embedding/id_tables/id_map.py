"""The map from ids to rows of this rank's shards of tables of any id."""

import time
from collections.abc import Callable, Mapping, Sequence

import torch
from torchrec.modules.embedding_configs import BaseEmbeddingConfig, data_type_to_dtype
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dlrm_overlap.embedding.backends.ids import ArrivedIds
from dlrm_overlap.embedding.exchange import Exchange
from dlrm_overlap.embedding.id_tables.rules import IdRules
from dlrm_overlap.embedding.layout import Layout
from dlrm_overlap.embedding.tables import CachedRows, ReservedRows
from dlrm_overlap.kernels.ids.fill_rows import FilledTable, RowTables, fill_rows, row_tables
from dlrm_overlap.kernels.ids.id_map import (
    CELLS,
    EMPTY,
    NO_FEATURE,
    SEGMENT,
    Claims,
    MapFeature,
    MapState,
    Policy,
    Totals,
    digests_of,
    halve,
    murmur,
    segments_of,
)
from dlrm_overlap.kernels.ids.map_ids import Features, IdSet, map_ids
from dlrm_overlap.kernels.reference import split_words

_ALIGNMENT = 16  # slots, see `probe`
_POOL = 4096  # upper limit of the initial rows of a table without reserved slots
Rows = Callable[[str], Sequence[torch.Tensor]]
"""returns the rows [rows, D] of a table's shard, then the states of its optimizer"""
Caches = Callable[[str], CachedRows | None]
"""returns where the rows of a table's shard are cached; None if they are not"""


class IdMap:
    """Which row each id has, for this rank's shards of the tables of a module.

    Args:
        rules: of the tables.
        shards: table -> its first row on this rank, and the end.
        is_training: whether ids that are looked up are inserted and count as used.
    """

    def __init__(
        self,
        rules: Sequence[IdRules],
        shards: Mapping[str, tuple[int, int]],
        device: torch.device,
        is_training: Callable[[], bool],
    ) -> None:
        self.rules = {each.name: each for each in rules}
        self._shards, self._device, self._is_training = shards, device, is_training
        self._clocked = any(each.in_hours for each in rules)
        assert all(each.in_hours == self._clocked for each in rules), "one clock for the tables of a module"
        self._first: dict[str, tuple[int, int]] = {}
        """table -> its first slot and its first segment in the map"""
        slots, segments = 0, 0
        for each in rules:
            self._first[each.name] = slots, segments
            first, end = shards[each.name]
            slots += -(-(end - first) // _ALIGNMENT) * _ALIGNMENT
            segments += (end - first) // each.size * segments_of(each.open_slots)
        policies = {each.policy for each in rules}
        counts = bool(policies & {Policy.LFU, Policy.DISTANCE_LFU})
        times = self._clocked or Policy.TTL in policies
        sketch = any(each.admit_after > 1 for each in rules)
        self.state = MapState.empty(slots, segments, device, times, counts, sketch)
        self._set = IdSet()
        self._features: dict[tuple[tuple[str | None, str], ...], Features] = {}
        self._rows: Rows | None = None
        self._pools: Mapping[str, torch.Tensor] = {}
        self._tables: RowTables | None = None
        self._storage: tuple[int, ...] = ()
        self._hour, self._is_taken = -1, True

    def bind(self, rows: Rows, pools: Mapping[str, torch.Tensor]) -> None:
        """Set where the tables' rows are; `pools` has the initial rows [P, D] of tables without reserved slots."""
        self._rows, self._pools, self._tables = rows, pools, None
        self._features.clear()

    def shard(self, column: torch.Tensor, table: str) -> torch.Tensor:
        """Return the part of a column of `state`, [S], that is the table's.

        The sketch is such a column, too: buckets of our own configuration have a segment, which has a counter a slot.
        """
        first, (begin, end) = self._first[table][0], self._shards[table]
        return column[first : first + end - begin]

    @property
    def rows(self) -> int:
        """Rows of this rank that ids may have."""
        return sum((end - begin) // of.size * of.open_slots for of, (begin, end) in self._by_table())

    def total(self, which: Totals) -> int:
        return self.state.total(which)

    def shares(self) -> torch.Tensor:
        """Return [tables] float64: the share of each table's rows on this rank that ids have."""
        used = [(self.shard(self.state.ids, name) != EMPTY).sum() for name in self.rules]
        rows = [(end - begin) // of.size * of.open_slots for of, (begin, end) in self._by_table()]
        return torch.stack(used).double() / torch.tensor(rows, device=self._device)

    def _by_table(self) -> list[tuple[IdRules, tuple[int, int]]]:
        return [(rules, self._shards[name]) for name, rules in self.rules.items()]

    def used(self) -> int:
        """Return the number of ids that have a slot; waits for the device."""
        return int((self.state.ids != EMPTY).sum())

    def features_of(self, names: Sequence[tuple[str | None, str]]) -> Features:
        """Return features, each given by its table and its name; the table is None if it is not in the map."""
        key = tuple(names)
        if key not in self._features:
            rows = [NO_FEATURE if table is None else self._feature(table, name) for table, name in names]
            self._features[key] = Features.of(rows, self._clocked, self._device)
        return self._features[key]

    def _feature(self, table: str, name: str) -> MapFeature:
        rules, (begin, end), (slot, segment) = self.rules[table], self._shards[table], self._first[table]
        return MapFeature(
            slot,
            begin // rules.size,
            (end - begin) // rules.size,
            rules.buckets,
            rules.size,
            rules.open_slots,
            min(rules.probes, rules.open_slots, SEGMENT),
            segment,
            segments_of(rules.open_slots),
            int(name not in rules.reading),
            rules.lifetimes.get(name, rules.lifetime),
            rules.admit_after,
            rules.halve_at,
            rules.admit_below,
            int(rules.policy),
            self._pools[table].shape[0] if table in self._pools else 0,
            list(self.rules).index(table),
        )

    def follow_clock(self) -> None:
        """Set the time to the hour of the clock, if times are hours."""
        if self._clocked and (hour := int(time.time() / 3600)) != self._hour:
            self.state.clock[1:].fill_(hour)
            self._hour = hour

    def expect(self, is_taken: bool) -> None:
        """Say whether a step will look up the ids that are mapped next; if not, they change nothing."""
        if is_taken != self._is_taken:
            self.state.taken.fill_(int(is_taken))
            self._is_taken = is_taken

    def map(
        self,
        words: tuple[torch.Tensor, torch.Tensor],
        out: torch.Tensor,
        offsets: torch.Tensor,
        samples: int,
        features: Features,
    ) -> Claims | None:
        """Write the rows of ids, given by their lower and upper words, to `out`; see `map_ids`.

        The returned rows must be filled before they are looked up.
        """
        return map_ids(self.state, features, self._set, *words, out, offsets, samples, self._is_training())

    def fill(self, claims: Claims | None, caches: Caches = lambda _: None) -> None:
        """Give the rows of new ids their initial values, in the caches of tables that have one, and zero their states.

        The rows of `claims` have slots there.
        """
        if claims is not None:
            fill_rows(self._row_tables(caches), claims)

    def _row_tables(self, caches: Caches) -> RowTables:
        assert self._rows is not None, "an IdMap whose rows are bound"
        cached = {name: caches(name) for name in self.rules}
        rows = {name: list(self._rows(name) if where is None else where.rows) for name, where in cached.items()}
        slots = {name: 0 if where is None else where.slot_of.data_ptr() for name, where in cached.items()}
        storage = *slots.values(), *(each.data_ptr() for of in rows.values() for each in of)
        if self._tables is None or storage != self._storage:
            tables = []
            for name, (weights, *states) in rows.items():
                source = self._pools.get(name, weights)
                of_states = [number for state in states for number in (state.data_ptr(), _words(state))]
                where = self._first[name][0], weights.data_ptr(), _words(weights), source.data_ptr()
                slots_of_source = 0 if name in self._pools else slots[name]
                tables.append(FilledTable(*where, slots[name], slots_of_source, tuple(of_states)))
            self._tables, self._storage = row_tables(tables, self._device), storage
        return self._tables

    def remap(self, ids: KeyedJaggedTensor, names: Sequence[tuple[str | None, str]]) -> KeyedJaggedTensor:
        """Return ids whose values are rows, int64; `names` has their features. Rows are in their tables, not cached."""
        values = ids.values().long()
        low, high = split_words(values)
        out = torch.empty_like(values)
        self.follow_clock()
        if ids.variable_stride_per_key():
            ends = torch.tensor(ids.offset_per_key(), device=values.device)
            self.fill(self.map((low, high), out, ends, 1, self.features_of(names)))
            return with_values(ids, out)
        self.fill(self.map((low, high), out, ids.offsets(), ids.stride(), self.features_of(names)))
        return with_values(ids, out, ids.offsets())

    def rebuild(self) -> None:
        """Compute again what `state` derives from the ids and the sketch, after they were loaded."""
        ids, sketch = self.state.ids, self.state.sketch
        self.state.digests.zero_()
        self.state.digests[: ids.numel()] = digests_of(murmur(ids)).masked_fill_(ids == EMPTY, 0)
        for rules, (begin, end) in self._by_table() if sketch.numel() else ():
            if rules.halve_at:
                first = self._first[rules.name][1]
                last = first + (end - begin) // rules.size * segments_of(rules.open_slots)
                # A checkpoint may have counters that were never halved, or counters of other rows.
                self.state.sketch_sums[first:last] = halve(sketch[first * CELLS : last * CELLS], rules.halve_at)


class MappedIds:
    """The `IdTables` of an exchange; `features` has each table's features."""

    waits = False

    def __init__(self, id_map: IdMap, exchange: Exchange, rank: int, features: Mapping[str, Sequence[str]]) -> None:
        self._map, self._exchange, self._rank, self._of_tables = id_map, exchange, rank, features
        self._names: tuple[Layout, list[tuple[str | None, str]]] | None = None
        for name, rules in id_map.rules.items():
            if rules.frozen:
                number = exchange.tables.numbers_of[name]
                exchange.tables.reserved[number] = ReservedRows(rules.size, rules.open_slots)

    def activate(self, arrived: ArrivedIds) -> Claims | None:
        ids, high = arrived.ids, arrived.high
        assert high is not None, "ids of 64 bits"
        low, features = ids.values(), self._map.features_of(self._features())
        if not self._exchange.order.is_captured:  # else the pipeline follows it before each step
            self._map.follow_clock()
        return self._map.map((low, high), low, ids.offsets(), ids.stride(), features)

    def fill(self, claims: Claims) -> None:
        self._map.fill(claims, self._exchange.tables.cached_rows_of)

    def _features(self) -> list[tuple[str | None, str]]:
        layout = self._exchange.layout
        if self._names is None or self._names[0] is not layout:
            tables = {number: name for name, number in self._exchange.tables.numbers_of.items()}
            shards = layout.by_owner[self._rank]
            of = [tables[shard.lookup, shard.table] if shard.buckets else None for shard in shards]
            names = [
                # Slots have ids of all features of their table.
                self._of_tables[table][0] if shard.slots and table is not None else shard.feature_name
                for table, shard in zip(of, shards, strict=True)
            ]
            self._names = layout, list(zip(of, names, strict=True))
        return self._names[1]

    def follow_clock(self) -> None:
        self._map.follow_clock()

    def expect(self, is_taken: bool) -> None:
        self._map.expect(is_taken)

    def prepare_step(self) -> None:
        """Do nothing: the device has mapped the ids."""


def _words(rows: torch.Tensor) -> int:
    """Return the words of 4 bytes from a row to the next."""
    return rows.stride(0) * rows.itemsize // 4


def with_values(ids: KeyedJaggedTensor, values: torch.Tensor, offsets: torch.Tensor | None = None) -> KeyedJaggedTensor:
    """Return `ids` with other values, one for each, and with `offsets` if they are known."""
    weights, lengths = ids.weights_or_none(), ids.lengths()
    if ids.variable_stride_per_key():
        strides, inverse = ids.stride_per_key_per_rank(), ids.inverse_indices_or_none()
        return KeyedJaggedTensor(
            ids.keys(), values, weights, lengths, stride_per_key_per_rank=strides, inverse_indices=inverse
        )
    return KeyedJaggedTensor(ids.keys(), values, weights, lengths, offsets, stride=ids.stride())


def pool_of(rows: int, config: BaseEmbeddingConfig, seed: int) -> torch.Tensor:
    """Return initial rows [P, D] on the CPU, drawn as TorchRec draws the table's rows; the same for one seed."""
    assert config.init_fn is not None
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        pool = torch.empty(min(rows, _POOL), config.embedding_dim)
        config.init_fn(pool)
    return pool.to(data_type_to_dtype(config.data_type))
