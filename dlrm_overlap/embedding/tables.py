"""This rank's rows, stored by FBGEMM's fused lookups (TBE), and what happens on ids outside their table."""

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dlrm_overlap.embedding.cache import CachedTable, RowCache, activate, make_caches
from dlrm_overlap.embedding.layout import FeatureShard
from dlrm_overlap.embedding.row_marks import RowMarks
from dlrm_overlap.embedding.steps import UpdateRule
from dlrm_overlap.torchrec_private import BoundsCheckMode, SplitTableBatchedEmbeddingBagsCodegen
from dlrm_overlap.torchrec_private.attributes import fused_lookups_of
from dlrm_overlap.torchrec_private.fbgemm import STATE_BUFFERS, counts, optimizer_of

log = logging.getLogger("dlrm_overlap")


class StoredRows(NamedTuple):
    weights: torch.Tensor
    """[n], flat: rows of all shards of the lookup"""
    states: tuple[torch.Tensor, ...]
    """each [m] float32, flat"""
    optimizer: str
    """key of `kernels.backward.optimizers.OPTIMIZERS`"""
    stochastic_rounding: bool


class ReservedRows(NamedTuple):
    """Rows that are not trained: of every `period` rows, those from number `first` on."""

    period: int
    first: int

    def among(self, rows: int) -> torch.Tensor:
        """Return these rows of a table of `rows` rows, [p] int64, ascending."""
        starts = torch.arange(0, rows, self.period)
        return (starts[:, None] + torch.arange(self.first, self.period)).flatten()


class CachedRows(NamedTuple):
    """A table whose rows are in a cache."""

    rows: list[torch.Tensor]
    """the cache's rows [slots, D], then the states"""
    slot_of: torch.Tensor
    """[rows of the table] int32: the slot of each row; -1 without one"""


class LocalTables:
    """The fused lookups that hold this rank's shards; their storage is read and updated in place.

    Between `open_caches` and `close_caches` the rows of cached tables are in their caches, see `cache`. Caches move
    rows on the current stream.

    Args:
        fractions: (lookup, table), both by index -> share of the table's rows that a cache has slots for.
    """

    def __init__(
        self,
        lookups: Sequence[SplitTableBatchedEmbeddingBagsCodegen],
        fractions: Mapping[tuple[int, int], float] | None = None,
    ) -> None:
        self.lookups = list(lookups)
        self.fractions = fractions or {}
        self._cached: dict[tuple[int, int], tuple[RowCache, int]] = {}
        """(lookup, table) -> its cache, and the number of its first row there"""
        self._cached_features: list[tuple[RowCache, torch.Tensor]] = []
        self._may_be_written = False
        """others may have written to the tables since the caches were stored"""
        self._storages: list[tuple[Any, str]] = [
            (tbe, f"{name}_{'host' if tbe.use_cpu else 'dev'}")
            for tbe in lookups
            for name in ("weights", *STATE_BUFFERS.get(optimizer_of(tbe), ()))
        ]
        for number in {lookup for lookup, _ in self.fractions}:
            if not lookups[number].use_cpu:
                self._storages.append((lookups[number], "weights_uvm"))
        self._storage: tuple[int, ...] | None = None
        self._weights: list[list[torch.Tensor]] = []
        self._states: list[list[list[torch.Tensor]]] = []
        self._counting: list[Any] = [tbe for tbe in lookups if counts(tbe)]
        self.numbers_of: Mapping[str, tuple[int, int]] = {}
        """table -> its lookup and its number there"""
        self.reserved: dict[tuple[int, int], ReservedRows] = {}
        """(lookup, table) -> which of its rows are not trained"""
        self.marks: RowMarks | None = None
        """which rows were updated, if `mark_updates` was called"""
        self._step: int | None = None
        """step up to which `iter_cpu` has counted"""

    @classmethod
    def of(cls, lookups: Sequence[Any], cached: Mapping[str, float] | None = None) -> "LocalTables":
        """Return the tables of TorchRec's lookup modules, one a sharding; `cached` has shares of rows by table name."""
        fused, cached = [each for lookup in lookups for each in fused_lookups_of(lookup)], cached or {}
        fractions = {
            (number, index): cached[table.name]
            for number, (group, _) in enumerate(fused)
            for index, table in enumerate(group.embedding_tables)
            if table.name in cached
        }
        tables = cls([tbe for _, tbe in fused], fractions)
        tables.numbers_of = {
            table.name: (number, index)
            for number, (group, _) in enumerate(fused)
            for index, table in enumerate(group.embedding_tables)
        }
        return tables

    @property
    def bounds_checks(self) -> list[BoundsCheckMode]:
        return [BoundsCheckMode(lookup.bounds_check_mode_int) for lookup in self.lookups]

    def storage(self) -> tuple[int, ...]:
        """Return the addresses of all rows and states."""
        addresses = [getattr(tbe, name).data_ptr() for tbe, name in self._storages]
        return *addresses, *[cache.rows[0].data_ptr() for cache, _ in self._cached_features]

    def _table_tensors(self, lookup: int, table: int) -> list[torch.Tensor]:
        if (storage := self.storage()) != self._storage:
            self._weights = [tbe.split_embedding_weights() for tbe in self.lookups]
            self._states = [tbe.split_optimizer_states() for tbe in self.lookups]
            self._storage = storage
        states = self._states[lookup]
        return [self._weights[lookup][table], *(states[table] if states else ())]

    def _tensors(self, shard: FeatureShard) -> list[torch.Tensor]:
        cached = self._cached.get((shard.lookup, shard.table))
        return self._table_tensors(shard.lookup, shard.table) if cached is None else cached[0].rows

    def tensors_of(self, name: str) -> list[torch.Tensor]:
        """Return the rows [rows, D] of a table, and the states of its optimizer."""
        return self._table_tensors(*self.numbers_of[name])

    def mark_updates(self, device: torch.device) -> None:
        """Mark the rows that updates change from now on; call it before the first step. Caches are not supported."""
        assert not self.fractions, "a cache's updates name slots, not rows"
        self.marks = RowMarks({number: rows.shape[0] for number, rows in self.shards()}, device)

    def shards(self) -> Iterator[tuple[tuple[int, int], torch.Tensor]]:
        """Yield (lookup, table), both by index, and the rows [rows, D] of each of this rank's shards."""
        for number, tbe in enumerate(self.lookups):
            for table, rows in enumerate(tbe.split_embedding_weights()):
                yield (number, table), rows

    def cached_rows_of(self, name: str) -> CachedRows | None:
        """Return where the rows of a table are; None if they are in the table itself."""
        number = self.numbers_of[name]
        if number not in self._cached:
            return None
        cache, first = self._cached[number]
        return CachedRows(cache.rows, cache.slots_of(first, self._table_tensors(*number)[0].shape[0]))

    def reserved_rows(self, shard: FeatureShard) -> ReservedRows | None:
        """Return which rows of `weight` are not trained; of a cache, the resident rows, which have the last slots."""
        number = shard.lookup, shard.table
        reserved, cached = self.reserved.get(number), self._cached.get(number)
        if reserved is None or cached is None:
            return reserved
        return ReservedRows(cached[0].rows[0].shape[0], cached[0].slots)

    def weight(self, shard: FeatureShard) -> torch.Tensor:
        """Return the rows of a shard, [rows, D]; the cache's rows [slots, D] if the table is cached."""
        return self._tensors(shard)[0]

    def states(self, shard: FeatureShard) -> list[torch.Tensor]:
        """Return the optimizer states of a shard's rows, or of the cache's slots, each [rows, D] or [rows] float32."""
        return self._tensors(shard)[1:]

    def rows(self, shard: FeatureShard) -> int:
        return self._table_tensors(shard.lookup, shard.table)[0].shape[0]

    def stored(self, shard: FeatureShard) -> StoredRows:
        """Return the memory that holds a shard's rows or its cache's slots, on a GPU."""
        tbe: Any = self.lookups[shard.lookup]
        optimizer, tensors = self.optimizer(shard), self._tensors(shard)
        if (shard.lookup, shard.table) in self._cached:
            weights, *states = [rows.flatten() for rows in tensors]
        else:
            weights, *states = [
                _holding(rows, getattr(tbe, f"{name}_dev"), getattr(tbe, f"{name}_uvm"))
                for name, rows in zip(("weights", *STATE_BUFFERS[optimizer]), tensors, strict=True)
            ]
        given = tbe.optimizer_args  # SGD and Adagrad read none of them, as in FBGEMM
        if optimizer == "rowwise_adagrad" and (given.weight_decay_mode or given.max_norm):
            optimizer = "decaying_rowwise_adagrad"
        return StoredRows(weights, tuple(states), optimizer, bool(tbe.stochastic_rounding))

    def open_caches(self, shards: Sequence[FeatureShard], ids: Sequence[int], device: torch.device) -> None:
        """Make the caches, in whose slots rows are looked up from now on; an InputError if there is no room.

        Args:
            shards: in the order of the features of this rank's only input.
            ids: largest number of ids of a step, by shard.
        """
        assert not self._cached, "caches are closed before others are made"
        tables = dict[tuple[int, int], CachedTable]()
        for (number, table), fraction in sorted(self.fractions.items()):
            given: Any = self.lookups[number].optimizer_args
            if self.lookups[number].use_cpu and (given.weight_decay or given.max_norm):
                continue  # FBGEMM's CPU operator updates such rows in the table
            tensors = self._table_tensors(number, table)
            held = zip(shards, ids, strict=True)
            most = sum(count for shard, count in held if (shard.lookup, shard.table) == (number, table))
            if rows := tensors[0].shape[0]:
                reserved = self.reserved.get((number, table))
                resident = None if reserved is None else reserved.among(rows)
                tables[number, table] = CachedTable(tensors, fraction, most, resident)
        for cache, firsts in make_caches(tables, device):
            self._cached |= {key: (cache, first) for key, first in firsts.items()}
            first = [firsts.get((shard.lookup, shard.table), -1) for shard in shards]
            # One more feature pads the number of ids; the last entry is for ids after all bags.
            self._cached_features.append((cache, torch.tensor([*first, -1, -1], device=device)))

    def close_caches(self, write_back: bool = True) -> None:
        """Write the caches back to their tables, where rows are looked up from now on."""
        if write_back:
            self.write_back()
        self._cached, self._cached_features = {}, []

    def activate(self, ids: KeyedJaggedTensor) -> None:
        """Load the next step's rows into the caches, and replace its ids by slots."""
        self.read_again()
        activate(self._cached_features, ids)

    def write_back(self) -> None:
        self.read_again()
        for cache, _ in self._cached_features:
            cache.write_back()

    def note_writes(self) -> None:
        """Write the caches back to their tables, which others may write to until the next step."""
        self.write_back()
        self._may_be_written = bool(self._cached_features)

    def read_again(self) -> None:
        """Load the caches again if others may have written to the tables."""
        if self._may_be_written:
            self._may_be_written = False
            for cache, _ in self._cached_features:
                cache.read_again()

    def optimizer(self, shard: FeatureShard) -> str:
        return optimizer_of(self.lookups[shard.lookup])

    @property
    def frozen(self) -> list[bool]:
        """Whether each lookup's rows and states keep their values, see `UpdateRule.frozen`."""
        return [_frozen(tbe) for tbe in self.lookups]

    def rules(self, step: int) -> list[UpdateRule]:
        """Return each lookup's update rule after the forward of step number `step`; FBGEMM reads it then, too.

        `iter_cpu` advances by the steps since the last call, including replays of captured steps.
        """
        if self._counting:
            self._count(1 if self._step is None else step - self._step)
            self._step = step
        return [rule_of(tbe) for tbe in self.lookups]

    def _count(self, forwards: int) -> None:
        for tbe in self._counting:
            if forwards and int(tbe.iter_cpu) == 0:  # as FBGEMM takes a count from `set_optimizer_step`
                tbe.iter_cpu.fill_(int(tbe.iter))
            tbe.iter_cpu.add_(forwards)

    def count_on_device(self) -> None:
        """Advance the lookups' `iter` for one forward; a captured call repeats in each replay."""
        for tbe in self._counting:
            tbe.iter.add_(1)

    def count_evaluation(self) -> bool:
        """Count a forward without backward, as FBGEMM does; return whether any lookup counts."""
        self._count(1)
        self.count_on_device()
        return bool(self._counting)


def rule_of(tbe: Any) -> UpdateRule:
    """Return the update rule of a lookup after a forward."""
    return UpdateRule(
        tbe.get_learning_rate(),
        tbe.optimizer_args,
        _frozen(tbe),
        int(tbe.iter_cpu) if counts(tbe) else 0,
        "momentum2" in STATE_BUFFERS[optimizer_of(tbe)],
    )


def _frozen(tbe: Any) -> bool:
    """Return whether no weights require a gradient; on a GPU FBGEMM has a placeholder for them."""
    known = [parameter for parameter in tbe._parameters.values() if parameter is not None]
    return bool(known) and not any(parameter.requires_grad for parameter in known)


def _holding(rows: torch.Tensor, *memories: torch.Tensor) -> torch.Tensor:
    for memory in memories:
        if memory.data_ptr() <= rows.data_ptr() < memory.data_ptr() + max(1, memory.nbytes):
            return memory.detach()
    return memories[0].detach()  # the shard has no rows


class BadIds:
    """The response to ids outside their table: the strictest of the lookups' FBGEMM bounds check modes.

    NONE does not check, IGNORE and WARNING take row 0 instead, FATAL stops the run.
    """

    def __init__(self, modes: Sequence[BoundsCheckMode]) -> None:
        self.mode = min(modes, default=BoundsCheckMode.NONE)
        self.looks = self.mode != BoundsCheckMode.NONE
        self._warned = False

    def report(self, message: str) -> None:
        if self.mode == BoundsCheckMode.FATAL:
            raise ValueError(message)
        if self.mode == BoundsCheckMode.WARNING and not self._warned:
            log.warning("%s; row 0 was taken. Later ones are not reported", message)
            self._warned = True


def bounds_check_modes(fused_params: Iterable[Mapping[str, Any]]) -> list[BoundsCheckMode]:
    modes = (each.get("bounds_check_mode", BoundsCheckMode.WARNING) for each in fused_params)  # FBGEMM's default
    return [BoundsCheckMode[BoundsCheckMode(mode).name.removeprefix("V2_")] for mode in modes]


def bad_id_message(name: str, value: int | None, rows: int) -> str:
    what = "an id" if value is None else f"id {value}"
    return f"{name}: {what} is outside its table of {rows} rows; map ids into 0 .. {rows - 1} where they are read"


def max_gradients(fused_params: Iterable[Mapping[str, Any]]) -> set[float | None]:
    """Return the limits to which lookups clip gradients of pooled embeddings; None is no clipping."""
    return {each.get("max_gradient", 1.0) if each.get("gradient_clipping") else None for each in fused_params}
