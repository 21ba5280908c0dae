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
from math import ceil
from typing import NamedTuple

from dlrm_overlap.embedding.traffic import partial_sums

_ENOUGH = 1.1  # times the mean: a fuller rank is worth another cut; times less work: worth cuts by rows
_MOST_TRIES = 400_000  # a second or so
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

    Starts from whole tables. While there is no room, or the fullest rank has more than 1.1 times the mean's work, the
    table whose shards are the largest, or the heaviest, is cut by columns in twice as many, down to rows of 64 bytes.
    If that was not enough, tables are cut by rows instead, one after the other, from the best of these placements on.
    Of several hosts, each is cut at once as the module says. Of all placements on the way the one with the least
    `worst` is returned, the least cut of equals; cuts by rows must make it 1.1 times less. The same arguments give the
    same placement; the search's length is counted, not timed.

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
    begun = [_Rank(capacity_bytes, 0.0, 0.0) for _ in range(world_size)]  # with the tables cut by rows
    owners = [neighbours if table.pooled else world_size for table in tables]  # where rows are cut
    columns, by_rows = [1] * len(tables), dict[int, range]()
    tries = _Tries()
    best: Balance | None = None

    def worst_of(candidates: Sequence[int]) -> int:
        """Return the table of the heaviest shards or, while there is no room, of the largest."""
        shards = [(whole[t].cut(columns[t])[0], -t) for t in candidates]
        return -max((s.bytes, s.work, t) if best is None else (s.work, s.bytes, t) for s, t in shards)[-1]

    while True:
        left = [t for t in range(len(tables)) if t not in by_rows]
        shards = [shard for t in left for shard in whole[t].cut(columns[t])]
        if (ranks := _place(shards, begun, tries)) is not None:
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
        if best is not None and (tries.used_up or mean >= best.worst):  # further cuts by rows only add to the mean
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
        if (chosen := worst_of([*in_rows, *in_columns])) in in_columns:
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


class _Tries:
    """How many changes of placements have been tried, over all placements."""

    def __init__(self) -> None:
        self.count = 0

    @property
    def used_up(self) -> bool:
        """Whether the search has gone on for long enough."""
        return self.count > _MOST_TRIES


class _Rank:
    """The shards that have been placed on a rank, as shares of the mean rank's work."""

    def __init__(self, room: float, memory: float, links: float) -> None:
        self.room, self.memory, self.links = room, memory, links
        self.shards: list[_Shard] = []

    def score(self, plus: "_Shard | None" = None, minus: "_Shard | None" = None) -> tuple[float, float]:
        """Return the greater share, then their sum, if a shard were added and another taken away."""
        memory, links = self.memory, self.links
        if plus is not None:
            memory, links = memory + plus.memory, links + plus.links
        if minus is not None:
            memory, links = memory - minus.memory, links - minus.links
        return max(memory, links), memory + links

    def takes(self, shard: "_Shard", instead_of: "_Shard | None" = None) -> bool:
        """Return whether there is room for a shard, and no other shard of its table."""
        room = self.room + (instead_of.bytes if instead_of is not None else 0.0)
        return shard.bytes <= room and all(s.table != shard.table or s is instead_of for s in self.shards)

    def add(self, shard: "_Shard", sign: int = 1) -> None:
        """Place a shard here, or take it away again."""
        self.memory += sign * shard.memory
        self.links += sign * shard.links
        self.room -= sign * shard.bytes
        if sign > 0:
            self.shards.append(shard)
        else:
            self.shards.remove(shard)


class _Shard:
    """Columns or rows of a table, all or some, as shares of the mean rank's work; two of a table are not the same."""

    def __init__(self, table: int, memory: float, links: float, bytes: float) -> None:
        self.table, self.memory, self.links, self.bytes = table, memory, links, bytes
        self.work = max(memory, links)

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


def _place(shards: Sequence[_Shard], begun: Sequence[_Rank], tries: _Tries) -> list[_Rank] | None:
    """Place all shards on ranks like `begun`, the heaviest first, or the largest first if there is no room so.

    Then mend the fullest rank.
    """
    if any(rank.room < 0 for rank in begun):
        return None
    ranks = _fill(sorted(shards, key=lambda shard: (-shard.work, -shard.bytes, shard.table)), begun)
    if ranks is None:
        ranks = _fill(sorted(shards, key=lambda shard: -shard.bytes), begun)
    if ranks is None:
        return None
    while max(rank.score() for rank in ranks)[0] > _ENOUGH and not tries.used_up and _mend(ranks, tries):
        pass
    return ranks


def _lightest(ranks: Sequence[_Rank], owners: int, shard: _Shard) -> range:
    """Return so many neighbours that have least work, and room, after each has taken a shard."""

    def after(first: int) -> tuple[bool, tuple[float, float]]:
        host = ranks[first : first + owners]
        return any(rank.room < shard.bytes for rank in host), max(rank.score(shard) for rank in host)

    first = min(range(0, len(ranks), owners), key=after)
    return range(first, first + owners)


def _fill(shards: Sequence[_Shard], begun: Sequence[_Rank]) -> list[_Rank] | None:
    """Place each shard, in order, on the rank that then has the least work; None if one finds no room."""
    ranks = [_Rank(rank.room, rank.memory, rank.links) for rank in begun]
    for shard in shards:
        free = [rank for rank in ranks if rank.takes(shard)]
        if not free:
            return None
        min(free, key=lambda rank: rank.score(shard)).add(shard)
    return ranks


def _mend(ranks: Sequence[_Rank], tries: _Tries) -> bool:
    """Move a shard away from the fullest rank, or swap it for another, if that helps; return whether it did."""
    fullest = max(ranks, key=lambda rank: rank.score())
    best, change = fullest.score()[0] - 1e-6, None
    for other in ranks:
        if other is fullest:
            continue
        tries.count += len(fullest.shards) * (1 + len(other.shards))
        for shard in fullest.shards:
            for back in (None, *other.shards):
                after = max(fullest.score(back, shard)[0], other.score(shard, back)[0])
                if after < best and other.takes(shard, back) and (back is None or fullest.takes(back, shard)):
                    best, change = after, (other, shard, back)
    if change is None:
        return False
    other, shard, back = change
    fullest.add(shard, -1)
    other.add(shard)
    if back is not None:
        other.add(back, -1)
        fullest.add(back)
    return True
