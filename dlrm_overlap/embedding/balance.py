"""Which rank holds which table, and which tables are cut, so that all ranks have alike work in a step.

A step waits for its slowest rank twice, in the exchange of pooled embeddings and in that of gradients. A rank's work
there is memory traffic, which goes with the elements of rows that it reads (ids a bag times columns), and traffic on
its links, which goes with the columns that it sends. Both are balanced.

A table is cut by columns first: its owners send as many bytes as one owner would. But each of them reads all ids, and
shorter rows. Rows are cut over all ranks, which have alike work then. But each sends a partial sum of the whole
columns for every bag that has an id of its rows: of 8 ranks and 100 ids a bag, 8 times the bytes.

Of several hosts, pooled tables are cut by rows over the ranks of one host: partial sums are added up before they leave
it, so no more bytes travel between hosts than of a whole table, neither of sums nor of ids, which owners of columns on
several hosts would each take. There columns are cut where rows are few, and of tables that are not pooled.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import ceil
from typing import NamedTuple

from dlrm_overlap.embedding.traffic import partial_sums

_ENOUGH = 1.13  # times the mean: a fuller rank is worth another cut
_WORTH = 1.1  # times less work: worth cuts by rows
_LEAST_ROW_BYTES = 64  # of a shard: the least that memory gives at once
# The time of a row's element in memory, read by the lookup, read and written by the update (4 bytes at 3.35 TB/s), over
# that of a column between hosts, there and back (2 bytes at 400 Gb/s).
_ELEMENT_OVER_COLUMN = 0.045


class TableLoad(NamedTuple):
    """The cost of a table for the rank that holds it."""

    pooling: float
    """mean number of ids in a bag"""
    dim: int
    """columns, D"""
    row_bytes: int
    """bytes of a row"""
    bytes: int
    """bytes of all rows and their optimizer's state"""
    rows: int = 0
    """number of rows; 0 if they must not be cut"""
    pooled: bool = True
    """whether the sum of a bag travels; otherwise the row of each id does"""

    @property
    def sent_columns(self) -> float:
        """The columns that travel for a sample from whole tables."""
        return self.dim if self.pooled else self.dim * self.pooling


class Balance(NamedTuple):
    """Where each table's shards are placed, and how even the ranks' work is then."""

    ranks: list[list[int]]
    """of each table the ranks that hold its shards: equal ranges of its columns or rows, in their order"""
    memory: float
    """row elements that the fullest rank reads, over the mean of the ranks"""
    links: float
    """columns that the rank sends which sends most, over the mean of the ranks if no table were cut by rows"""
    by_rows: frozenset[int] = frozenset()
    """tables that are cut by rows, over all ranks or those of a host"""
    memory_counts: float = 1.0
    """what a share of the memory's work counts beside one of the links', less where these are a network's"""

    @property
    def worst(self) -> float:
        """The greater of `memory`, as much as it counts, and `links`."""
        return max(self.memory * self.memory_counts, self.links)


def balance(
    tables: Sequence[TableLoad],
    world_size: int,
    capacity_bytes: int,
    cut_columns: bool = True,
    host_size: int | None = None,
) -> Balance | None:
    """Place all tables on the ranks; None if they do not fit.

    Starts from whole tables. While there is no room, or the fullest rank has more than 1.13 times the mean's work, the
    table whose shards are the largest, or the heaviest, is cut by columns in twice as many, down to rows of 64 bytes.
    If that was not enough, tables are cut by rows instead, one after the other, from the best of these placements on.
    Of several hosts, each is cut at once as the module says. Of all placements on the way the one with the least
    `worst` is returned, the least cut of equals; cuts by rows must make it 1.1 times less. The same arguments give the
    same placement.

    Args:
        capacity_bytes: the room of a rank.
        cut_columns: whether tables may be cut by columns.
        host_size: ranks of a host, which divide the ranks; None for all of them.

    Example:
        4 ranks, tables of 128 columns: one of 100 ids a bag, eight of 12, sixteen of 1. The mean is 53 ids a rank. The
        first table is cut in two, of 64 columns on two ranks each, which so read 50 ids' worth of it and little else.
        Without cuts of columns its rows are cut: each rank reads 25 ids' worth of it, and sends 128 columns for it.
    """
    memory = sum(table.pooling * table.dim for table in tables) / world_size or 1.0  # all bags may be empty
    links = sum(table.sent_columns for table in tables) / world_size or 1.0
    neighbours = world_size if host_size in (None, 1) else host_size
    one_host = neighbours == world_size
    counts = 1.0 if one_host else min(1.0, _ELEMENT_OVER_COLUMN * memory / links)
    memory /= counts  # so all shares of it are as large as they count
    whole = [
        _Shard(t, table.pooling * table.dim / memory, table.sent_columns / links, table.bytes)
        for t, table in enumerate(tables)
    ]
    begun = [_Rank(capacity_bytes) for _ in range(world_size)]  # with the tables that are cut by rows
    owners = [neighbours if table.pooled else world_size for table in tables]  # where rows are cut
    columns, by_rows = [1] * len(tables), dict[int, range]()
    best: Balance | None = None

    def weight(t: int) -> tuple[float, float, int]:
        """Return what is cut first: a table of heavy shards or, while there is no room, of large ones."""
        shard = whole[t].part(columns[t])
        return (shard.bytes, shard.work, -t) if best is None else (shard.work, shard.bytes, -t)

    while True:
        left = [t for t in range(len(tables)) if t not in by_rows]
        shards = [shard for t in left for shard in [whole[t].part(columns[t])] * columns[t]]
        if (ranks := _place(shards, begun)) is not None:
            held = [list(by_rows.get(t, ())) for t in range(len(tables))]
            for number, rank in enumerate(ranks):
                for table in sorted(rank.tables):
                    held[table].append(number)
            memory, links = max(rank.memory for rank in ranks), max(rank.links for rank in ranks)
            least_gain = _WORTH if by_rows else 1 + 1e-9  # to add partial sums up is work, too
            if best is None or max(memory, links) * least_gain < best.worst:
                best = Balance(held, memory / counts, links, frozenset(by_rows), counts)
            if best.worst <= _ENOUGH:
                return best
        mean = (sum(rank.links for rank in begun) + sum(whole[t].links for t in left)) / world_size
        if best is not None and mean >= best.worst:  # further cuts by rows only add to the mean
            return best
        in_rows = [t for t in left if _can_cut_rows(tables[t], owners[t])]
        in_columns = [t for t in left if cut_columns and _can_cut_columns(tables[t], 2 * columns[t], world_size)]
        if one_host and in_columns and not by_rows:
            in_rows = []
        elif one_host:  # from the best cuts of columns on
            in_columns = []
            if not by_rows and best is not None:
                columns = [len(held) for held in best.ranks]
        else:  # whichever is the heaviest, by columns where its owners may be any or its rows are few
            in_rows = [t for t in in_rows if tables[t].pooled or t not in in_columns]
            in_columns = [t for t in in_columns if t not in in_rows]
        if not in_rows and not in_columns:
            return best
        if (chosen := max([*in_rows, *in_columns], key=weight)) in in_columns:
            columns[chosen] *= 2
            continue
        for count in dict.fromkeys((owners[chosen], world_size)):  # all ranks, if no host has room
            shard = whole[chosen].cut_by_rows(tables[chosen], count, summed=not one_host and count == neighbours)
            by_rows[chosen] = _lightest(begun, count, shard)
            if all(begun[number].room >= shard.bytes for number in by_rows[chosen]):
                break
        for number in by_rows[chosen]:
            begun[number].add(shard)


def _can_cut_columns(table: TableLoad, shards: int, world_size: int) -> bool:
    return (
        shards <= world_size and table.dim % (4 * shards) == 0 and table.row_bytes >= shards * _LEAST_ROW_BYTES
    )  # FBGEMM takes columns by fours


def _can_cut_rows(table: TableLoad, owners: int) -> bool:
    # Each owner has some, though TorchRec gives all but the last the number that is rounded up.
    return owners > 1 and table.rows >= owners**2


@dataclass(frozen=True)
class _Shard:
    """Columns or rows of a table, all or some, as shares of the mean rank's work."""

    table: int
    memory: float
    links: float
    bytes: float

    @property
    def work(self) -> float:
        """The greater share."""
        return max(self.memory, self.links)

    def part(self, shards: int) -> "_Shard":
        """Return one of so many equal ranges of the columns."""
        return _Shard(self.table, self.memory / shards, self.links / shards, self.bytes / shards)

    def cut_by_rows(self, table: TableLoad, shards: int, summed: bool) -> "_Shard":
        """Return the largest of so many ranges of the rows, of which only bags travel that have one of them.

        Partial sums that are `summed` before they travel are as many as whole ones.
        """
        rows = ceil(table.rows / shards) / table.rows
        links = self.links * (partial_sums(table.pooling, shards) if table.pooled and not summed else 1.0) / shards
        return _Shard(self.table, self.memory / shards, links, self.bytes * rows)


@dataclass
class _Rank:
    """A rank's room, and its work as shares of the mean rank's."""

    room: float
    memory: float = 0.0
    links: float = 0.0
    tables: set[int] = field(default_factory=set)
    """those of which it holds a shard; none has two here"""

    def score(self, shard: _Shard) -> tuple[float, float]:
        """Return the greater share, then their sum, if a shard were added."""
        memory, links = self.memory + shard.memory, self.links + shard.links
        return max(memory, links), memory + links

    def add(self, shard: _Shard) -> None:
        """Place a shard here."""
        self.memory += shard.memory
        self.links += shard.links
        self.room -= shard.bytes


def _lightest(ranks: Sequence[_Rank], owners: int, shard: _Shard) -> range:
    """Return so many neighbours that have least work, and room, after each has taken a shard."""

    def after(first: int) -> tuple[bool, tuple[float, float]]:
        host = ranks[first : first + owners]
        return any(rank.room < shard.bytes for rank in host), max(rank.score(shard) for rank in host)

    first = min(range(0, len(ranks), owners), key=after)
    return range(first, first + owners)


def _place(shards: Sequence[_Shard], begun: Sequence[_Rank]) -> list[_Rank] | None:
    """Place all shards on ranks like `begun`, the heaviest first, or the largest first if there is no room so."""
    if any(rank.room < 0 for rank in begun):
        return None
    heaviest_first = sorted(shards, key=lambda shard: (-shard.work, -shard.bytes, shard.table))
    return _fill(heaviest_first, begun) or _fill(sorted(shards, key=lambda shard: -shard.bytes), begun)


def _fill(shards: Sequence[_Shard], begun: Sequence[_Rank]) -> list[_Rank] | None:
    """Place each shard, in order, on the rank that then has the least work; None if one finds no room."""
    ranks = [_Rank(rank.room, rank.memory, rank.links) for rank in begun]
    for shard in shards:
        free = [rank for rank in ranks if shard.bytes <= rank.room and shard.table not in rank.tables]
        if not free:
            return None
        lightest = min(free, key=lambda rank: rank.score(shard))
        lightest.add(shard)
        lightest.tables.add(shard.table)
    return ranks
