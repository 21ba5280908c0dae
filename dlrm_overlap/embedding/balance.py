"""Which rank holds which table, and which tables are cut, so that all ranks have alike work in a step.

A step waits for its slowest rank twice, in the exchange of pooled embeddings and in that of gradients. A rank's work
there is memory traffic, which goes with the elements of rows that it reads (ids a bag times columns), and traffic on
its links, which goes with the columns that it sends. Both are balanced.

A table is cut by columns first: its owners send as many bytes as one owner would. But each of them reads all ids, and
shorter rows. Rows are cut over all ranks, which have alike work then. But each sends a partial sum of the whole
columns for every bag that has an id of its rows: of 8 ranks and 100 ids a bag, 8 times the bytes.

Of several nodes, pooled tables are cut by rows over the ranks of one node: partial sums are added up before they leave
it, so no more bytes travel between nodes than of a whole table, neither of sums nor of ids, which owners of columns on
several nodes would each take. There columns are cut where rows are few, and of tables that are not pooled.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import ceil
from typing import NamedTuple

from dlrm_overlap.embedding.traffic import partial_sums

_ENOUGH = 1.1  # times the mean: a fuller rank is worth another cut; times less work: worth cuts by rows
_MOST_TRIES = 400_000  # a second or so
_LEAST_ROW_BYTES = 64  # of a shard: the least that memory gives at once
# The time of a row's element in memory, read by the lookup, read and written by the update (4 bytes at 3.35 TB/s), over
# that of a column between nodes, there and back (2 bytes at 400 Gb/s).
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
    """tables that are cut by rows, over all ranks or those of a node"""
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
    node_size: int | None = None,
) -> Balance | None:
    """Place all tables on the ranks; None if they do not fit.

    Starts from whole tables. While there is no room, or the fullest rank has more than 1.1 times the mean's work, the
    table whose shards are the largest, or the heaviest, is cut by columns in twice as many, down to rows of 64 bytes.
    If that was not enough, tables are cut by rows instead, one after the other, from the best of these placements on.
    Of several nodes, each is cut at once as the module says. Of all placements on the way the one with the least
    `worst` is returned, the least cut of equals; cuts by rows must make it 1.1 times less. The same arguments give the
    same placement; the search's length is counted, not timed.

    Args:
        capacity_bytes: the room of a rank.
        cut_columns: whether tables may be cut by columns.
        node_size: ranks of a node, which divide the ranks; None for all of them.

    Example:
        4 ranks, tables of 128 columns: one of 100 ids a bag, eight of 12, sixteen of 1. The mean is 53 ids a rank. The
        first table is cut in two, of 64 columns on two ranks each, which so read 50 ids' worth of it and little else.
        Without cuts of columns its rows are cut: each rank reads 25 ids' worth of it, and sends 128 columns for it.
    """
    memory = sum(table.pooling * table.dim for table in tables) / world_size or 1.0  # all bags may be empty
    links = sum(table.sent_columns for table in tables) / world_size or 1.0
    neighbours = world_size if node_size in (None, 1) else node_size
    one_node = neighbours == world_size
    counts = 1.0 if one_node else min(1.0, _ELEMENT_OVER_COLUMN * memory / links)
    memory /= counts  # so all shares of it are as large as they count
    whole = [
        _Shard(t, table.pooling * table.dim / memory, table.sent_columns / links, table.bytes)
        for t, table in enumerate(tables)
    ]
    begun = [_Rank(capacity_bytes, 0.0, 0.0) for _ in range(world_size)]  # with the tables cut by rows
    owners = [neighbours if table.pooled else world_size for table in tables]  # where rows are cut
    columns, by_rows = [1] * len(tables), dict[int, range]()
    best, tries = None, 0
    while True:
        left = [t for t in range(len(tables)) if t not in by_rows]
        ranks, tries = _place([shard for t in left for shard in whole[t].cut(columns[t])], begun, tries)
        if ranks:
            held = [list(by_rows.get(t, ())) for t in range(len(tables))]
            for number, rank in enumerate(ranks):
                for shard in rank.shards:
                    held[shard.table].append(number)
            memory, links = max(rank.memory for rank in ranks), max(rank.links for rank in ranks)
            least_gain = _ENOUGH if by_rows else 1 + 1e-9  # to add partial sums up is work, too
            if best is None or max(memory, links) * least_gain < best.worst:
                best = Balance(held, memory / counts, links, frozenset(by_rows), counts)
            if best.worst <= _ENOUGH:
                return best
        mean = (sum(rank.links for rank in begun) + sum(whole[t].links for t in left)) / world_size
        if best is not None and (tries > _MOST_TRIES or mean >= best.worst):  # further cuts by rows only add to it
            return best
        in_rows = [t for t in left if _can_cut_rows(tables[t], owners[t])]
        in_columns = [t for t in left if cut_columns and _can_cut_columns(tables[t], 2 * columns[t], world_size)]
        if one_node and in_columns and not by_rows:
            in_rows = []
        elif one_node:  # from the best cuts of columns on
            in_columns = []
            if not by_rows and best is not None:
                columns = [len(held) for held in best.ranks]
        else:  # whichever is the heaviest, by columns where its owners may be any or its rows are few
            in_rows = [t for t in in_rows if tables[t].pooled or t not in in_columns]
            in_columns = [t for t in in_columns if t not in in_rows]
        if not in_rows and not in_columns:
            return best
        parts = [whole[t].cut(columns[t])[0] for t in (*in_rows, *in_columns)]
        # The heaviest or, while there is no room, the largest.
        chosen = max(parts, key=lambda s: (s.bytes, s.work, -s.table) if best is None else (s.work, s.bytes, -s.table))
        if (t := chosen.table) in in_columns:
            columns[t] *= 2
            continue
        for count in dict.fromkeys((owners[t], world_size)):  # all ranks, if no node has room
            shard = whole[t].cut_by_rows(tables[t], count, summed=not one_node and count == neighbours)
            by_rows[t] = _lightest(begun, count, shard)
            if all(begun[number].room >= shard.bytes for number in by_rows[t]):
                break
        for number in by_rows[t]:
            begun[number].add(shard)


def _can_cut_columns(table: TableLoad, shards: int, world_size: int) -> bool:
    return (
        shards <= world_size and table.dim % (4 * shards) == 0 and table.row_bytes >= shards * _LEAST_ROW_BYTES
    )  # FBGEMM takes columns by fours


def _can_cut_rows(table: TableLoad, owners: int) -> bool:
    # Each owner has some, though TorchRec gives all but the last the number that is rounded up.
    return owners > 1 and table.rows >= owners**2


@dataclass(eq=False)  # two of a table are not the same
class _Shard:
    """Columns or rows of a table, all or some, as shares of the mean rank's work."""

    table: int
    memory: float
    links: float
    bytes: float

    @property
    def work(self) -> float:
        return max(self.memory, self.links)

    def cut(self, shards: int) -> "list[_Shard]":
        """Return so many equal ranges of the columns."""
        n = shards
        return [_Shard(self.table, self.memory / n, self.links / n, self.bytes / n) for _ in range(n)]

    def cut_by_rows(self, table: TableLoad, shards: int, summed: bool) -> "_Shard":
        """Return the largest of so many ranges of the rows, of which only bags travel that have one of them.

        Partial sums that are `summed` before they travel are as many as whole ones.
        """
        rows = ceil(table.rows / shards) / table.rows
        links = self.links * (partial_sums(table.pooling, shards) if table.pooled and not summed else 1.0) / shards
        return _Shard(self.table, self.memory / shards, links, self.bytes * rows)


_NOTHING = _Shard(-1, 0.0, 0.0, 0.0)


@dataclass(eq=False)
class _Rank:
    """The shards that have been placed on a rank, as shares of the mean rank's work."""

    room: float
    memory: float
    links: float
    shards: list[_Shard] = field(default_factory=list)

    def score(self, plus: _Shard = _NOTHING, minus: _Shard = _NOTHING) -> tuple[float, float]:
        """Return the greater share, then their sum, if a shard were added and another taken away."""
        memory, links = self.memory + plus.memory - minus.memory, self.links + plus.links - minus.links
        return max(memory, links), memory + links

    def takes(self, shard: _Shard, instead_of: _Shard = _NOTHING) -> bool:
        """Return whether there is room for a shard, and no other shard of its table."""
        fits = shard.bytes <= self.room + instead_of.bytes
        return fits and all(each.table != shard.table or each is instead_of for each in self.shards)

    def add(self, shard: _Shard, sign: int = 1) -> None:
        """Place a shard here, or take it away again."""
        self.memory += sign * shard.memory
        self.links += sign * shard.links
        self.room -= sign * shard.bytes
        (self.shards.append if sign > 0 else self.shards.remove)(shard)


def _place(shards: Sequence[_Shard], begun: Sequence[_Rank], tries: int) -> tuple[list[_Rank], int]:
    """Place shards on ranks like `begun`, the heaviest first, or the largest first if there is no room so.

    Then mend the fullest rank. Returns no ranks if there is no room, and the count of changes that were tried.
    """
    ranks = _fill(sorted(shards, key=lambda shard: (-shard.work, -shard.bytes, shard.table)), begun)
    ranks = ranks or _fill(sorted(shards, key=lambda shard: -shard.bytes), begun)
    mended = bool(ranks)
    while mended and tries <= _MOST_TRIES and max(rank.score() for rank in ranks)[0] > _ENOUGH:
        mended, tried = _mend(ranks)
        tries += tried
    return ranks, tries


def _lightest(ranks: Sequence[_Rank], owners: int, shard: _Shard) -> range:
    """Return so many neighbours that have least work, and room, after each has taken a shard."""

    def after(first: int) -> tuple[bool, tuple[float, float]]:
        node = ranks[first : first + owners]
        return any(rank.room < shard.bytes for rank in node), max(rank.score(shard) for rank in node)

    first = min(range(0, len(ranks), owners), key=after)
    return range(first, first + owners)


def _fill(shards: Sequence[_Shard], begun: Sequence[_Rank]) -> list[_Rank]:
    """Place each shard, in order, on the rank that then has the least work; no ranks if one finds no room."""
    ranks = [_Rank(rank.room, rank.memory, rank.links) for rank in begun]
    if any(rank.room < 0 for rank in ranks):
        return []
    for shard in shards:
        free = [rank for rank in ranks if rank.takes(shard)]
        if not free:
            return []
        min(free, key=lambda rank: rank.score(shard)).add(shard)
    return ranks


def _mend(ranks: Sequence[_Rank]) -> tuple[bool, int]:
    """Move a shard away from the fullest rank, or swap it for another, if that helps; return whether, and the tries."""
    fullest = max(ranks, key=lambda rank: rank.score())
    best, change, tried = fullest.score()[0] - 1e-6, None, 0
    for other in ranks:
        if other is fullest:
            continue
        tried += len(fullest.shards) * (1 + len(other.shards))
        for shard in fullest.shards:
            for back in (_NOTHING, *other.shards):
                after = max(fullest.score(back, shard)[0], other.score(shard, back)[0])
                if after < best and other.takes(shard, back) and fullest.takes(back, shard):
                    best, change = after, (other, shard, back)
    if change is not None:
        other, shard, back = change
        fullest.add(shard, -1)
        other.add(shard)
        if back is not _NOTHING:
            other.add(back, -1)
            fullest.add(back)
    return change is not None, tried
