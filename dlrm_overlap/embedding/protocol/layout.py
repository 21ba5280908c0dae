"""Which rank pools which feature, and where in the output its pooled embedding lies: all ranks know all of it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch


@dataclass(frozen=True)
class FeatureShard:
    """A feature's columns that one shard holds: a whole table's, or a range of them."""

    name: str
    """of the feature's pooled embedding in the output"""
    owner: int
    """rank that holds the shard"""
    source: int
    """which of the owner's inputs holds the feature's bags: one an input distribution"""
    position: int
    """of the feature in that input"""
    group: int
    """which of the owner's fused lookups (FBGEMM TBE) holds the shard"""
    table: int
    """of the shard in that lookup"""
    first_column: int
    """of the shard in its table"""
    dim: int
    """columns of the shard, D"""
    mean: bool
    dtype: torch.dtype
    """of the rows"""


@dataclass(frozen=True)
class Group:
    """The shards of one fused lookup, in its own order: the bags' positions and the columns are contiguous."""

    number: int
    """which of the owner's lookups it is"""
    shards: Sequence[FeatureShard]

    @property
    def source(self) -> int:
        """The input that holds their bags."""
        return self.shards[0].source

    @property
    def first_position(self) -> int:
        """Position of the first shard in that input."""
        return self.shards[0].position

    @property
    def dim(self) -> int:
        """Sum of the shards' dims."""
        return sum(shard.dim for shard in self.shards)


class Layout:
    """Shards in the owners' order, and the output [b, D_total] in the model's feature order."""

    def __init__(self, shards: Sequence[FeatureShard], names: Sequence[str], world_size: int) -> None:
        """Lay out `shards`, given in each owner's own order, for features `names` in the model's order."""
        self.names, self.world_size = list(names), world_size
        self.by_owner = [[shard for shard in shards if shard.owner == rank] for rank in range(world_size)]
        width: dict[str, int] = dict.fromkeys(names, 0)
        for shard in shards:
            width[shard.name] += shard.dim
        self.dims = list(width.values())
        self.total_dim = sum(self.dims)
        first = 0
        self._first_column: dict[str, int] = {}
        for name, dim in width.items():
            self._first_column[name] = first
            first += dim

    def column(self, shard: FeatureShard) -> int:
        """Return the column of the output from which on the shard lies."""
        return self._first_column[shard.name] + shard.first_column

    @cached_property
    def owner_dims(self) -> list[int]:
        """Columns of the output that each rank's shards make up, D_local of rank 0, 1, .."""
        return [sum(shard.dim for shard in shards) for shards in self.by_owner]

    def owner_columns(self, rank: int) -> torch.Tensor:
        """Return [D_local] int64: the output's columns in the order in which `rank` pools its shards."""
        ranges = [torch.arange(self.column(p), self.column(p) + p.dim) for p in self.by_owner[rank]]
        return torch.cat(ranges) if ranges else torch.empty(0, dtype=torch.int64)

    @cached_property
    def sent_columns(self) -> torch.Tensor:
        """[D_total] int64: the output's columns as a collective brings them, rank 0's shards, then rank 1's, .."""
        return torch.cat([self.owner_columns(rank) for rank in range(self.world_size)])

    @cached_property
    def sent_in_order(self) -> bool:
        """Whether the owners, one after the other, hold the columns as the output has them."""
        return torch.equal(self.sent_columns, torch.arange(self.total_dim))

    def tables(self, rank: int) -> list[list[FeatureShard]]:
        """Return the rank's shards by the shard whose rows they name, in order."""
        together: dict[tuple[int, int], list[FeatureShard]] = {}
        for shard in self.by_owner[rank]:
            together.setdefault((shard.group, shard.table), []).append(shard)
        return list(together.values())

    def groups(self, rank: int) -> list[Group]:
        """Return the rank's fused lookups in order."""
        together: dict[int, list[FeatureShard]] = {}
        for shard in self.by_owner[rank]:
            together.setdefault(shard.group, []).append(shard)
        return [Group(number, shards) for number, shards in together.items()]

    def launches(self, rank: int) -> Mapping[tuple[int, int, torch.dtype], list[FeatureShard]]:
        """Return the rank's shards by what one launch can pool together: input, dim and type of the rows."""
        together: dict[tuple[int, int, torch.dtype], list[FeatureShard]] = {}
        for shard in self.by_owner[rank]:
            together.setdefault((shard.source, shard.dim, shard.dtype), []).append(shard)
        return together
