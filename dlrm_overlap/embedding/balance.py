"""Which rank holds which table, and which tables are cut by columns, so that all ranks have alike work in a step.

A step waits for its slowest rank twice, in the exchange of pooled embeddings and in that of gradients. A rank's work
there is memory traffic, which goes with the elements of rows that it reads (ids a bag times columns), and traffic on
its links, which goes with its columns. Both are balanced.
"""

from collections.abc import Sequence
from typing import NamedTuple

_ENOUGH = 1.1  # times the mean: a fuller rank is worth another cut
_MOST_TRIES = 400_000  # a second or so
_LEAST_ROW_BYTES = 64  # of a shard: the least that memory gives at once


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


class Balance(NamedTuple):
    """Where each table's shards are placed, and how even the ranks' work is then."""

    ranks: list[list[int]]
    """of each table the ranks that hold its shards: equal ranges of its columns, in their order"""
    memory: float
    """row elements that the fullest rank reads, over the mean of the ranks"""
    links: float
    """columns of the rank that has most, over the mean"""

    @property
    def worst(self) -> float:
        """The greater of `memory` and `links`."""
        return max(self.memory, self.links)


def balance(
    tables: Sequence[TableLoad],
    world_size: int,
    capacity_bytes: int,
    cut: bool = True,
    everywhere: Sequence[TableLoad] = (),
) -> Balance | None:
    """Place all tables on the ranks; None if they do not fit.

    Starts from whole tables. While the fullest rank has more than 1.1 times the mean's work, the table whose shards
    are the heaviest is cut in twice as many, down to rows of 64 bytes. Of all placements on the way the one with the
    least `worst` is returned, the least cut of equals. The same arguments give the same placement; how long the search
    goes on is counted, not timed.

    Args:
        capacity_bytes: the room of a rank.
        cut: whether tables may be cut.
        everywhere: tables that every rank holds and looks up for its own samples: of their work each rank has an equal
            part, beside which an imbalance of the others counts less. They are not placed.

    Example:
        4 ranks, tables of 128 columns: one of 100 ids a bag, eight of 12, sixteen of 1. The mean is 53 ids a rank. The
        first table is cut in two, of 64 columns on two ranks each, which so read 50 ids' worth of it and little else.
    """
    every = [*tables, *everywhere]
    memory = sum(table.pooling * table.dim for table in every) / world_size or 1.0  # all bags may be empty
    links = sum(table.dim for table in every) / world_size
    even_memory = sum(table.pooling * table.dim for table in everywhere) / world_size / memory
    even = even_memory, sum(table.dim for table in everywhere) / world_size / links
    whole = [
        _Shard(t, table.pooling * table.dim / memory, table.dim / links, table.bytes) for t, table in enumerate(tables)
    ]
    cuts = [1] * len(tables)
    tries = _Tries()
    best: Balance | None = None
    while True:
        placed = _place(whole, cuts, [_Rank(capacity_bytes, *even) for _ in range(world_size)], tries)
        if placed is not None and (best is None or placed.worst < best.worst - 1e-9):
            best = placed
        if best is not None and best.worst <= _ENOUGH:
            return best
        cuttable = [t for t, table in enumerate(tables) if cut and _can_cut(table, 2 * cuts[t], world_size)]
        if not cuttable or (tries.used_up and best is not None):
            return best
        heaviest = max(cuttable, key=lambda t: (whole[t].work / cuts[t], whole[t].bytes / cuts[t], -t))
        cuts[heaviest] *= 2


def _can_cut(table: TableLoad, shards: int, world_size: int) -> bool:
    return (
        shards <= world_size and table.dim % (4 * shards) == 0 and table.row_bytes >= shards * _LEAST_ROW_BYTES
    )  # FBGEMM takes columns by fours


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
    """Columns of a table, all or some, as shares of the mean rank's work; two of a table are not the same."""

    def __init__(self, table: int, memory: float, links: float, bytes: float) -> None:
        self.table, self.memory, self.links, self.bytes = table, memory, links, bytes
        self.work = max(memory, links)


def _place(whole: Sequence[_Shard], cuts: Sequence[int], empty: Sequence[_Rank], tries: _Tries) -> Balance | None:
    """Place all shards, the heaviest first, or the largest first if there is no room so; then mend the fullest rank."""
    shards = [
        _Shard(table.table, table.memory / n, table.links / n, table.bytes / n)
        for table, n in zip(whole, cuts, strict=True)
        for _ in range(n)
    ]
    shards.sort(key=lambda shard: (-shard.work, -shard.bytes, shard.table))
    ranks = _fill(shards, empty)
    if ranks is None:
        ranks = _fill(sorted(shards, key=lambda shard: -shard.bytes), empty)
    if ranks is None:
        return None
    while max(rank.score() for rank in ranks)[0] > _ENOUGH and not tries.used_up and _mend(ranks, tries):
        pass
    held: list[list[int]] = [[] for _ in whole]
    for number, rank in enumerate(ranks):
        for shard in rank.shards:
            held[shard.table].append(number)
    return Balance(held, max(rank.memory for rank in ranks), max(rank.links for rank in ranks))


def _fill(shards: Sequence[_Shard], empty: Sequence[_Rank]) -> list[_Rank] | None:
    """Place each shard, in order, on the rank that then has the least work; None if one finds no room."""
    ranks = [_Rank(rank.room, rank.memory, rank.links) for rank in empty]
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
