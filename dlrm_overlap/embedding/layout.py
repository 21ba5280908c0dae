"""Which rank pools which feature, and where pooled embeddings and their gradients are; all ranks know all of it."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

import torch
from torchrec.modules.embedding_configs import PoolingType

from dlrm_overlap.comm.arena import Region
from dlrm_overlap.embedding.windows import WindowSpec

EVERY_RANK = -1
Key = TypeVar("Key")
SLOTS_FROM = " slots from "
"""in the name of a feature of slots, between its table and the first slot, unless that is 0"""


@dataclass(frozen=True)
class FeatureShard:
    """The columns of one feature's pooled embedding that one rank computes: those of a shard of its table.

    A table that is not cut has one shard, and so its feature one FeatureShard. Two features that share a table have
    one each. Of a table that is cut by rows each shard gives a partial sum of the same columns; their sum is pooled.
    """

    name: str
    """name of the feature's pooled embedding in the output, see `distinct`"""
    owner: int
    """rank that holds the shard; EVERY_RANK for a whole table that each rank holds and looks up for its own samples"""
    input: int
    """which of the owner's inputs holds the feature's bags; an owner has an input for each input distribution"""
    feature: int
    """index of the feature in that input: the bag of sample s is number feature * B + s"""
    lookup: int
    """which of the owner's fused lookups (FBGEMM TBE) holds the shard"""
    table: int
    """index of the shard in that lookup"""
    first_column: int
    """first column of the shard in those of its name: its first in its table, unless that names the feature twice"""
    dim: int
    """number of the shard's columns, D"""
    mean: bool
    """whether a bag is pooled into the mean of its rows, rather than their sum"""
    dtype: torch.dtype
    """type of the rows"""
    feature_name: str
    """name of the feature in the ids: `name` unless several tables pool the feature"""
    rows: tuple[int, int] = (0, 0)
    """first row and end of the shard in its table, if that is cut by rows; else (0, 0)"""
    row_shard: int = 0
    """index of the shard among those of other rows and the same columns of the table, in order of their owners"""
    slots: bool = False
    """whether the bags are slots, of one id or of none: so one owner of rows at most has something of a bag to store,
    which needs no addition, and nothing is stored of an empty one, which nobody reads"""

    @property
    def is_cut_by_rows(self) -> bool:
        """Whether other ranks may have other rows of the table."""
        return self.rows != (0, 0)


def distinct(names: Iterable[str]) -> dict[str, str]:
    """Return the names in their order, each under one of its own: a table that names a feature twice pools it twice.

    Example: a, b, a are {"a": "a", "b": "b", "a (2)": "a"}.
    """
    times: Counter[str] = Counter()
    found: dict[str, str] = {}
    for name in names:
        times[name] += 1
        found[name if times[name] == 1 else f"{name} ({times[name]})"] = name
    return found


def outputs_of(table: Any) -> list[tuple[str, str]]:
    """Return the pooled embeddings of a table of TorchRec's, each by its name and that of its feature.

    A table that is not pooled has one, of its slots, which has the table's name.
    """
    if table.pooling == PoolingType.NONE:
        return [(table.name, table.name)]
    return list(zip(distinct(table.embedding_names), table.feature_names, strict=True))


@dataclass(frozen=True)
class FusedLookup:
    """The shards of one fused lookup, in its own order, in which their bags and their columns are contiguous."""

    number: int
    """which of the owner's lookups it is"""
    shards: Sequence[FeatureShard]

    @property
    def input(self) -> int:
        """The owner's input that holds the bags."""
        return self.shards[0].input

    @property
    def first_feature(self) -> int:
        """Index of the first shard's feature in that input."""
        return self.shards[0].feature

    @property
    def dim(self) -> int:
        """Sum of the shards' dims."""
        return sum(shard.dim for shard in self.shards)


class RowRange(NamedTuple):
    """A table, or a row shard of it."""

    table: str
    row_shard: int | None
    """see `FeatureShard`; None of a whole table"""
    first: int
    """its first row"""


class PartialSums(NamedTuple):
    """The columns of the output that are a sum of partial sums, one of each row shard.

    Example: a table of dim 4 at columns 8 .. 11 of an output of 20, cut by rows over three ranks. The first rank's
    partial sums arrive at 8, where the sum is stored, those of the others at 20 and 24, the first columns after it.
    """

    shards: tuple[FeatureShard, ...]
    """the row shards, in the order of their owners"""

    def on(self, node: range) -> tuple[FeatureShard, ...]:
        """Return the row shards of the ranks of `node`; of several the sum is made there for samples of other nodes."""
        return tuple(shard for shard in self.shards if shard.owner in node)


class Layout:
    """The feature shards of all ranks, and the output [b, D_total], whose columns are in the order of `names`.

    Pooled embeddings arrive in rows of `arrival_dim` columns: those of the output, then a place for the partial sums of
    each row shard but the first.

    Example: features a and b of dims 4 and 8, a on rank 1, b cut into two halves on ranks 0 and 1. The output has 12
    columns: a at 0, the first half of b at 4, the second at 8. Rank 1 pools a and the second half: `owner_dims` is
    [4, 8], and `owner_columns(1)` is 0 .. 3, 8 .. 11.
    """

    def __init__(self, shards: Sequence[FeatureShard], names: Sequence[str], world_size: int) -> None:
        """Lay out `shards`, given in each owner's own order, for an output with the features `names`."""
        self.names, self.world_size = list(names), world_size
        self.by_owner = [[shard for shard in shards if shard.owner == rank] for rank in range(world_size)]
        self.replicated = [shard for shard in shards if shard.owner == EVERY_RANK]
        """shards that are never sent: each rank pools them for its own samples"""
        width: dict[str, int] = dict.fromkeys(names, 0)
        for shard in shards:
            width[shard.name] += shard.dim if shard.row_shard == 0 else 0
        self.dims = list(width.values())
        self.total_dim = sum(self.dims)
        first = 0
        self._first_column: dict[str, int] = {}
        for name, dim in width.items():
            self._first_column[name] = first
            first += dim
        self._behind: dict[FeatureShard, int] = {}
        for shard in shards:
            if shard.row_shard > 0 and not shard.slots:
                self._behind[shard] = first
                first += shard.dim
        self.arrival_dim = first

    def column(self, shard: FeatureShard) -> int:
        """Return the first of the columns in which the shard's pooled embeddings arrive."""
        return self._behind.get(shard, self.output_column(shard))

    def output_column(self, shard: FeatureShard) -> int:
        """Return the first of the output's columns that the shard fills, or adds to; its gradient is there."""
        return self._first_column[shard.name] + shard.first_column

    def with_features(self, range_of: Mapping[str, RowRange]) -> "Layout":
        """Return the layout of tables of slots that have several features each.

        Args:
            range_of: by feature in order, its table, or the row shard of it that alone has the feature.
        """
        shards = [
            replace(shard, name=name, feature_name=name, row_shard=shard.row_shard if of.row_shard is None else 0)
            for shards in (*self.by_owner, self.replicated)
            for shard in shards
            for name, of in range_of.items()
            if of.table == shard.name and of.row_shard in (None, shard.row_shard)
        ]
        return Layout(shards, list(range_of), self.world_size)

    def row_ranges(self, cut: bool) -> Mapping[str, RowRange]:
        """Return the tables by name or, with `cut`, the ranges of the rows of each that is cut by rows, by names."""
        found: dict[str, RowRange] = {}
        for name in self.names:
            shards = {s.row_shard: s.rows for of in self.by_owner for s in of if s.name == name and s.is_cut_by_rows}
            with_rows = sorted((first, number) for number, (first, end) in shards.items() if first < end)
            if not cut or not with_rows:
                found[name] = RowRange(name, None, 0)
            found |= {f"{name}, rows from {first}": RowRange(name, number, first) for first, number in with_rows * cut}
        return found

    @cached_property
    def partial_sums(self) -> Sequence[PartialSums]:
        """The columns of the output that are sums of the partial sums of several ranks."""
        summed = [shard for shards in self.by_owner for shard in shards if not shard.slots]
        together = _grouped(summed, self.output_column)
        return [PartialSums(tuple(shards)) for _, shards in sorted(together.items()) if len(shards) > 1]

    @cached_property
    def added_up(self) -> frozenset[FeatureShard]:
        """The shards whose partial sums are added to those of others."""
        return frozenset(shard for each in self.partial_sums for shard in each.shards)

    @cached_property
    def has_slots(self) -> bool:
        """Whether the bags are slots, as they are of all shards or of none."""
        return any(shard.slots for shards in (*self.by_owner, self.replicated) for shard in shards)

    @cached_property
    def owner_dims(self) -> list[int]:
        """Number of the output's columns that each rank computes: D_local of rank 0, 1, .."""
        return [sum(shard.dim for shard in shards) for shards in self.by_owner]

    def owner_columns(self, rank: int) -> torch.Tensor:
        """Return [D_local] int64: the output's columns that `rank` computes, in the order of its shards."""
        return column_numbers([(self.output_column(shard), shard.dim) for shard in self.by_owner[rank]])

    @cached_property
    def sent_columns(self) -> torch.Tensor:
        """[sum of D_local] int64: the column of each that a collective brings where it arrives, rank 0's first."""
        return column_numbers([(self.column(shard), shard.dim) for shards in self.by_owner for shard in shards])

    @cached_property
    def sent_in_order(self) -> bool:
        """Whether a collective brings the columns in the order of the output."""
        return torch.equal(self.sent_columns, torch.arange(self.total_dim, device="cpu"))

    def tables(self, rank: int) -> list[list[FeatureShard]]:
        """Return the rank's feature shards in order, those that share a table's rows together."""
        return list(_grouped(self.by_owner[rank], lambda shard: (shard.lookup, shard.table)).values())

    def lookups(self, rank: int) -> list[FusedLookup]:
        """Return the rank's fused lookups in order."""
        together = _grouped(self.by_owner[rank], lambda shard: shard.lookup)
        return [FusedLookup(number, shards) for number, shards in together.items()]

    def pooled_together(self, rank: int) -> Mapping[tuple[int, int, torch.dtype], list[FeatureShard]]:
        """Return the shards of a rank, or EVERY_RANK's, by kernel that pools them: (input, dim, type of the rows)."""
        shards = self.replicated if rank == EVERY_RANK else self.by_owner[rank]
        return _grouped(shards, lambda shard: (shard.input, shard.dim, shard.dtype))


def _grouped(shards: Iterable[FeatureShard], key: Callable[[FeatureShard], Key]) -> dict[Key, list[FeatureShard]]:
    """Return the shards by key, in their order; keys in the order of their first shards."""
    together: dict[Key, list[FeatureShard]] = {}
    for shard in shards:
        together.setdefault(key(shard), []).append(shard)
    return together


def column_numbers(ranges: Sequence[tuple[int, int]]) -> torch.Tensor:
    """Return [n] int64: the columns of some ranges, each given by its first column and its number of columns."""
    columns = [torch.arange(first, first + dim, device="cpu") for first, dim in ranges]
    return torch.cat(columns) if columns else torch.empty(0, dtype=torch.int64, device="cpu")


_PART_BYTES = 32 << 20  # of a window: so much takes the links longer than the launches that a part costs
_HEAVY = 0.25  # share of a rank's ids from which a table travels first
_MOST_PARTS = 6  # from here on the CPU's launches cost more than they hide


class GradientLayout:
    """The gradient windows [D_local * B], shard after shard, and the parts in which gradients travel.

    A shard whose columns begin at `start` of D_local has its gradient [B, D] from element start * B on, so that a
    table's gradients are together while its rows are updated. Parts are some of a rank's tables: the rows of one part
    are updated while the next part travels. A part has a flag of its own. Where the ids of a bag are known, tables of
    more than a quarter of a rank's ids travel first, since their update takes longest.

    Example: B is 2, a rank has shards of dims 4 and 8. The first one's gradient is [2, 4] at elements 0 .. 7, the
    second one's [2, 8] at 8 .. 23.
    """

    def __init__(
        self,
        layout: Layout,
        samples_per_rank: int,
        wire_dtype: torch.dtype,
        bag_ids: Mapping[str, float] | None = None,
    ) -> None:
        """Lay out the gradients of up to `samples_per_rank` samples a rank.

        Args:
            bag_ids: feature -> ids of a bag, alike on all ranks; None where nobody knows.
        """
        self._layout, self._wire_dtype, self._bag_ids = layout, wire_dtype, bag_ids or {}
        self._elements = max(layout.owner_dims) * samples_per_rank * layout.world_size
        parts = min(_MOST_PARTS, self._elements * wire_dtype.itemsize // _PART_BYTES)
        self.parts = max(1, parts) if self._elements else 0
        """none where nothing is exchanged: no kernel would raise a part's flag"""

    @property
    def windows(self) -> WindowSpec:
        """The windows of the gradients in every rank's arena, with a flag a part."""
        return WindowSpec("gradients", Region((self._elements,), self._wire_dtype), max(1, self.parts))

    @cached_property
    def starts(self) -> Mapping[FeatureShard, int]:
        """The first column of each shard in its owner's D_local."""
        starts: dict[FeatureShard, int] = {}
        for shards in self._layout.by_owner:
            column = 0
            for shard in shards:
                starts[shard] = column
                column += shard.dim
        return starts

    @cached_property
    def part_of(self) -> Mapping[FeatureShard, int]:
        """The part of each shard, by the columns that travel before its table, whose rows are updated at once.

        The first part is half as long as the others: nothing is updated while it travels.
        """
        parts: dict[FeatureShard, int] = {}
        for rank, columns in enumerate(self._layout.owner_dims):
            before = 0
            for shards in self._in_order(rank):
                parts |= dict.fromkeys(shards, (before * (2 * self.parts - 1) // columns + 1) // 2)
                before += sum(shard.dim for shard in shards)
        return parts

    def _in_order(self, rank: int) -> Sequence[Sequence[FeatureShard]]:
        """Return the rank's shards by table, in the order in which they travel."""
        tables = self._layout.tables(rank)
        ids = [sum(self._bag_ids.get(shard.feature_name, 0.0) for shard in shards) for shards in tables]
        heavy = [each / max(sum(ids), 1e-9) > _HEAVY for each in ids]
        first = [table for table, travels_first in zip(tables, heavy, strict=True) if travels_first]
        return first + [table for table, travels_first in zip(tables, heavy, strict=True) if not travels_first]

    @cached_property
    def shards(self) -> Sequence[Sequence[Sequence[FeatureShard]]]:
        """The shards by part, then by owner, in order."""
        return [
            [[shard for shard in shards if self.part_of[shard] == part] for shards in self._layout.by_owner]
            for part in range(self.parts)
        ]

    def views(
        self, shards: Iterable[FeatureShard], window: torch.Tensor, samples: int
    ) -> Mapping[FeatureShard, torch.Tensor]:
        """Return the gradient [B, D] of each shard, as a view of their owner's `window`; `samples` is B."""
        found: dict[FeatureShard, torch.Tensor] = {}
        for shard in shards:
            start = self.starts[shard] * samples
            found[shard] = window[start : start + samples * shard.dim].view(samples, shard.dim)
        return found
