"""Which rank pools which feature, and into which columns; identical on every rank."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple, TypeVar

import torch
from torchrec.modules.embedding_configs import PoolingType

EVERY_RANK = -1
Key = TypeVar("Key")
SLOTS_FROM = " slots from "
"""joins table and first slot, if that is not 0, in the name of a feature of slots"""


@dataclass(frozen=True)
class FeatureShard:
    """The columns of one feature's pooled embedding, or of its partial sums, that one rank computes from its shard."""

    name: str
    """unique in the output, see `unique_names`"""
    owner: int
    """the owner's rank; EVERY_RANK for a data-parallel table, which each rank looks up for its own samples"""
    input: int
    """index of the owner's input that has the feature's bags; each sharding has an input"""
    feature: int
    """index of the feature in the input; the bag of sample s is number feature * B + s"""
    lookup: int
    """index of the owner's fused lookup (FBGEMM TBE)"""
    table: int
    """index of the table in the fused lookup"""
    first_column: int
    """first column of the shard within the pooled embedding"""
    dim: int
    mean: bool
    dtype: torch.dtype
    feature_name: str
    """key of the feature in the ids; several tables may pool one feature"""
    rows: tuple[int, int] = (0, 0)
    """first row and end, if the table is cut by rows"""
    row_shard: int = 0
    """index among the row shards of the same columns, in the order of their owners"""
    slots: bool = False
    """True if bags are slots of at most one id: nothing is added up, and nothing is stored for an empty slot"""
    buckets: int = 0
    """number of buckets of the whole table if it is a table of any id, see `IdLayout`; else 0"""
    bucket_rows: int = 0
    """rows of a bucket; 0 if they follow from the rows of all shards of `name`"""

    def __post_init__(self) -> None:
        assert not self.buckets or self.is_cut_by_rows, f"{self.name}: a table of any id is cut by rows, also on 1 rank"

    @property
    def is_cut_by_rows(self) -> bool:
        return self.rows != (0, 0)


def unique_names(names: Iterable[str]) -> dict[str, str]:
    """Return unique names, each with its original: a table that lists a feature twice pools it twice.

    Example: a, b, a give {"a": "a", "b": "b", "a (2)": "a"}.
    """
    times: Counter[str] = Counter()
    found: dict[str, str] = {}
    for name in names:
        times[name] += 1
        found[name if times[name] == 1 else f"{name} ({times[name]})"] = name
    return found


def outputs_of(table: Any) -> list[tuple[str, str]]:
    """Return (output name, feature name) for each pooled embedding of a TorchRec table config.

    An unpooled table has one output, its slots, under the table's name.
    """
    if table.pooling == PoolingType.NONE:
        return [(table.name, table.name)]
    return list(zip(unique_names(table.embedding_names), table.feature_names, strict=True))


@dataclass(frozen=True)
class FusedLookup:
    """The shards of one fused lookup; their bags and their columns are contiguous."""

    number: int
    shards: Sequence[FeatureShard]

    @property
    def input(self) -> int:
        return self.shards[0].input

    @property
    def first_feature(self) -> int:
        return self.shards[0].feature

    @property
    def dim(self) -> int:
        return sum(shard.dim for shard in self.shards)


class RowRange(NamedTuple):
    """A table, or one row shard of it."""

    table: str
    row_shard: int | None
    """None for the whole table"""
    first: int
    """first row"""


class PartialSums(NamedTuple):
    """Row shards whose partial sums add up to the same columns of the output.

    Example: a table of dim 4 at columns 8 .. 11 of 20, cut by rows over three ranks. The first rank's partial sums
    arrive at column 8, where the sum is stored; the others' at 20 and 24.
    """

    shards: tuple[FeatureShard, ...]
    """in the order of their owners"""

    def on(self, node: range) -> tuple[FeatureShard, ...]:
        return tuple(shard for shard in self.shards if shard.owner in node)


class Layout:
    """The feature shards of all ranks, and the output [b, D_total] with its columns in the order of `names`.

    Rows arrive with `arrival_dim` columns: first the columns of the output, then the partial sums of every row shard
    but the first.

    Example: features a and b of dims 4 and 8; a on rank 1, b cut by columns over ranks 0 and 1. The output has a at
    column 0, the first part of b at 4, the second at 8. `owner_dims` is [4, 8], `owner_columns(1)` is 0 .. 3, 8 .. 11.

    Args:
        shards: feature shards of all ranks, each owner's in the order of its inputs and their features.
    """

    def __init__(self, shards: Sequence[FeatureShard], names: Sequence[str], world_size: int) -> None:
        self.names, self.world_size = list(names), world_size
        self.by_owner = [[shard for shard in shards if shard.owner == rank] for rank in range(world_size)]
        self.replicated = [shard for shard in shards if shard.owner == EVERY_RANK]
        width: dict[str, int] = dict.fromkeys(names, 0)
        for shard in shards:
            width[shard.name] += shard.dim if shard.row_shard == 0 else 0
        self.dims = list(width.values())
        *starts, self.total_dim = accumulate(self.dims, initial=0)
        self._first_column = dict(zip(width, starts, strict=True))
        self.arrival_dim = self.total_dim
        self._partial_column: dict[FeatureShard, int] = {}
        for shard in shards:
            if shard.row_shard > 0 and not shard.slots:
                self._partial_column[shard] = self.arrival_dim
                self.arrival_dim += shard.dim

    def column(self, shard: FeatureShard) -> int:
        """Return the first column in which the shard's pooled embeddings arrive."""
        return self._partial_column.get(shard, self.output_column(shard))

    def output_column(self, shard: FeatureShard) -> int:
        """Return the first column of the output, and of its gradient, that belongs to the shard."""
        return self._first_column[shard.name] + shard.first_column

    def with_features(self, range_of: Mapping[str, RowRange]) -> "Layout":
        """Return a layout of unpooled tables with a feature for each name in `range_of`, which looks up that range."""
        every = [shard for shards in (*self.by_owner, self.replicated) for shard in shards]
        sizes = {shard.name: 0 for shard in every}
        for shard in every:
            if shard.buckets:
                sizes[shard.name] = max(sizes[shard.name], shard.rows[1] // shard.buckets)
        shards = [
            replace(
                shard,
                name=name,
                feature_name=name,
                row_shard=shard.row_shard if of.row_shard is None else 0,
                bucket_rows=sizes[shard.name],
            )
            for shard in every
            for name, of in range_of.items()
            if of.table == shard.name and of.row_shard in (None, shard.row_shard)
        ]
        return Layout(shards, list(range_of), self.world_size)

    def row_ranges(self, cut: bool) -> Mapping[str, RowRange]:
        """Return the tables by name; if `cut`, each row shard of a table cut by rows has its own name instead."""
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
        """The row shards that are added up, in the order of their columns in the output."""
        summed = [shard for shards in self.by_owner for shard in shards if not shard.slots]
        together = _grouped(summed, self.output_column)
        return [PartialSums(tuple(shards)) for _, shards in sorted(together.items()) if len(shards) > 1]

    @cached_property
    def added_up(self) -> frozenset[FeatureShard]:
        return frozenset(shard for each in self.partial_sums for shard in each.shards)

    @cached_property
    def has_slots(self) -> bool:
        """True if the bags of all shards are slots, else none is."""
        return any(shard.slots for shards in (*self.by_owner, self.replicated) for shard in shards)

    @cached_property
    def owner_dims(self) -> list[int]:
        """D_local by rank: the number of columns of the output that the rank computes."""
        return [sum(shard.dim for shard in shards) for shards in self.by_owner]

    def owner_columns(self, rank: int) -> torch.Tensor:
        """Return [D_local] int64: the columns of the output that `rank` computes."""
        return column_numbers([(self.output_column(shard), shard.dim) for shard in self.by_owner[rank]])

    @cached_property
    def sent_columns(self) -> torch.Tensor:
        """[sum of D_local] int64: the arrival column of each column that a collective receives, from rank 0 first."""
        return column_numbers([(self.column(shard), shard.dim) for shards in self.by_owner for shard in shards])

    @cached_property
    def sent_in_order(self) -> bool:
        return torch.equal(self.sent_columns, torch.arange(self.total_dim, device="cpu"))

    def tables(self, rank: int) -> list[list[FeatureShard]]:
        return list(_grouped(self.by_owner[rank], lambda shard: (shard.lookup, shard.table)).values())

    def lookups(self, rank: int) -> list[FusedLookup]:
        together = _grouped(self.by_owner[rank], lambda shard: shard.lookup)
        return [FusedLookup(number, shards) for number, shards in together.items()]

    def pooled_together(self, rank: int) -> Mapping[tuple[int, int, torch.dtype], list[FeatureShard]]:
        """Return a rank's shards, or EVERY_RANK's, by the kernel that pools them: (input, dim, row type)."""
        shards = self.replicated if rank == EVERY_RANK else self.by_owner[rank]
        return _grouped(shards, lambda shard: (shard.input, shard.dim, shard.dtype))


def _grouped(shards: Iterable[FeatureShard], key: Callable[[FeatureShard], Key]) -> dict[Key, list[FeatureShard]]:
    together: dict[Key, list[FeatureShard]] = {}
    for shard in shards:
        together.setdefault(key(shard), []).append(shard)
    return together


def column_numbers(ranges: Sequence[tuple[int, int]]) -> torch.Tensor:
    """Return [n] int64: the columns of (first, number) ranges, one after the other."""
    columns = [torch.arange(first, first + dim, device="cpu") for first, dim in ranges]
    return torch.cat(columns) if columns else torch.empty(0, dtype=torch.int64, device="cpu")
