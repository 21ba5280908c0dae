"""Places tables on ranks, and cuts some, so that every rank has the same work in a step.

Work is the row elements that a rank reads, and the columns that it sends; docs/architecture/step.md (The plan) explains
the order of the cuts. With several nodes, pooled tables are cut by rows within one machine, so that its node adds up
partial sums before they leave it. Owners of columns on several nodes would each receive all ids, so columns are cut
only where rows are few, and for unpooled tables.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import ceil
from typing import NamedTuple

from dlrm_overlap.embedding.traffic import partial_sums

_ENOUGH = 1.1  # work relative to the mean that is worth another cut, and gain that is worth cuts by rows
_MAX_TRIES = 400_000  # about a second
_MIN_ROW_BYTES = 64  # of a shard: the smallest memory access
# Time of a row element in memory (read by the lookup, read and written by the update; 4 bytes at 3.35 TB/s), divided
# by the time of a column between nodes (both ways; 2 bytes at 400 Gb/s).
_ELEMENT_OVER_COLUMN = 0.045


class TableLoad(NamedTuple):
    pooling: float
    """mean ids of a bag"""
    dim: int
    row_bytes: int
    bytes: int
    """of all rows and optimizer states and, of a table of any id, of its map"""
    rows: int = 0
    """number of rows; 0 if they must not be cut"""
    pooled: bool = True
    """sums of bags are sent, instead of a row for each id"""
    map_bytes: int = 0
    """of the map of a table of any id, which is always in GPU memory"""

    @property
    def sent_columns(self) -> float:
        """Columns that the whole table sends for each sample."""
        return self.dim if self.pooled else self.dim * self.pooling


class Balance(NamedTuple):
    ranks: list[list[int]]
    """by table, the rank of each shard, in order; the shards are equal ranges of the table's columns or rows"""
    memory: float
    """row elements that the fullest rank reads, relative to the mean"""
    links: float
    """columns of the rank that sends most, relative to the mean with no table cut by rows"""
    by_rows: frozenset[int] = frozenset()
    """indices of the tables that are cut by rows"""
    memory_weight: float = 1.0
    """weight of `memory` against `links`; below 1 if the links are a network"""

    @property
    def worst(self) -> float:
        return max(self.memory * self.memory_weight, self.links)


def balance(
    tables: Sequence[TableLoad],
    world_size: int,
    capacity_bytes: int,
    cut_columns: bool = True,
    machine_size: int | None = None,
) -> Balance | None:
    """Place all tables on the ranks; return None if they do not fit.

    While there is no room, or the fullest rank has more than 1.1 times the mean work, one table is cut into twice as
    many ranges of columns; if that is not enough, tables are cut by rows, one after the other, from the best placement
    so far. Returns the placement with the smallest `worst`, among equals the one with the fewest cuts; cuts by rows
    must make `worst` 1.1 times smaller. The search is limited by count, not by time, so the same arguments give the
    same result.

    Args:
        capacity_bytes: room for tables on each rank.
        machine_size: with several nodes, the ranks of a machine, a divisor of `world_size`; None for one node, or if
            machines have different numbers of ranks.
    """
    # Work is measured relative to the mean of the ranks; the memory's is scaled by its weight against the links'.
    memory = sum(table.pooling * table.dim for table in tables) / world_size or 1.0  # all bags may be empty
    links = sum(table.sent_columns for table in tables) / world_size or 1.0
    machine_ranks = world_size if machine_size in (None, 1) else machine_size
    one_node = machine_ranks == world_size
    weight = 1.0 if one_node else min(1.0, _ELEMENT_OVER_COLUMN * memory / links)
    memory /= weight
    whole = [
        _Shard(t, table.pooling * table.dim / memory, table.sent_columns / links, table.bytes)
        for t, table in enumerate(tables)
    ]
    begun = [_Rank(capacity_bytes, 0.0, 0.0) for _ in range(world_size)]  # has the tables cut by rows
    owners = [machine_ranks if table.pooled else world_size for table in tables]  # of row shards
    columns, by_rows = [1] * len(tables), dict[int, range]()
    best, tries = None, 0
    while True:
        # Place the other tables, and keep the placement if it is the best so far.
        others = [t for t in range(len(tables)) if t not in by_rows]
        ranks, tries = _place([shard for t in others for shard in whole[t].cut(columns[t])], begun, tries)
        if ranks:
            held = [list(by_rows.get(t, ())) for t in range(len(tables))]
            for number, rank in enumerate(ranks):
                for shard in rank.shards:
                    held[shard.table].append(number)
            memory, links = max(rank.memory for rank in ranks), max(rank.links for rank in ranks)
            least_gain = _ENOUGH if by_rows else 1 + 1e-9  # adding partial sums is work, too
            if best is None or max(memory, links) * least_gain < best.worst:
                best = Balance(held, memory / weight, links, frozenset(by_rows), weight)
            if best.worst <= _ENOUGH:
                return best
        mean = (sum(rank.links for rank in begun) + sum(whole[t].links for t in others)) / world_size
        if best is not None and (tries > _MAX_TRIES or mean >= best.worst):  # more cuts by rows only add to the mean
            return best
        # Find the tables that may be cut next.
        in_rows = [t for t in others if _can_cut_rows(tables[t], owners[t])]
        in_columns = [t for t in others if cut_columns and _can_cut_columns(tables[t], 2 * columns[t], world_size)]
        if one_node and in_columns and not by_rows:
            in_rows = []
        elif one_node:
            in_columns = []
            if not by_rows and best is not None:  # cuts by rows start from the best cuts by columns
                columns = [len(held) for held in best.ranks]
        else:
            in_rows = [t for t in in_rows if tables[t].pooled or t not in in_columns]
            in_columns = [t for t in in_columns if t not in in_rows]
        if not in_rows and not in_columns:
            return best
        # Cut the table with the heaviest shards or, while there is no room, the largest.
        parts = [whole[t].cut(columns[t])[0] for t in (*in_rows, *in_columns)]
        chosen = max(parts, key=lambda s: (s.bytes, s.work, -s.table) if best is None else (s.work, s.bytes, -s.table))
        if (t := chosen.table) in in_columns:
            columns[t] *= 2
            continue
        for count in dict.fromkeys((owners[t], world_size)):  # all ranks, if no machine has room
            shard = whole[t].cut_by_rows(tables[t], count, summed=not one_node and count == machine_ranks)
            by_rows[t] = _lightest_machine(begun, count, shard)
            if all(begun[number].room >= shard.bytes for number in by_rows[t]):
                break
        for number in by_rows[t]:
            begun[number].add(shard)


def _can_cut_columns(table: TableLoad, shards: int, world_size: int) -> bool:
    # FBGEMM needs multiples of 4 columns.
    return shards <= world_size and table.dim % (4 * shards) == 0 and table.row_bytes >= shards * _MIN_ROW_BYTES


def _can_cut_rows(table: TableLoad, owners: int) -> bool:
    # Every owner has rows, though TorchRec rounds up the share of all but the last.
    return owners > 1 and table.rows >= owners**2


@dataclass(eq=False)  # equal shards of a table are different objects
class _Shard:
    """A shard of a table, with its work relative to the mean of the ranks."""

    table: int
    memory: float
    links: float
    bytes: float

    @property
    def work(self) -> float:
        return max(self.memory, self.links)

    def cut(self, shards: int) -> "list[_Shard]":
        n = shards
        return [_Shard(self.table, self.memory / n, self.links / n, self.bytes / n) for _ in range(n)]

    def cut_by_rows(self, table: TableLoad, shards: int, summed: bool) -> "_Shard":
        """Return the load of the largest of `shards` ranges of the rows.

        If `summed`, a node adds its partial sums before it sends them, so every bag is sent.
        """
        rows = ceil(table.rows / shards) / table.rows
        links = self.links * (partial_sums(table.pooling, shards) if table.pooled and not summed else 1.0) / shards
        return _Shard(self.table, self.memory / shards, links, self.bytes * rows)


_NOTHING = _Shard(-1, 0.0, 0.0, 0.0)


@dataclass(eq=False)
class _Rank:
    room: float
    memory: float
    links: float
    shards: list[_Shard] = field(default_factory=list)

    def score(self, plus: _Shard = _NOTHING, minus: _Shard = _NOTHING) -> tuple[float, float]:
        """Return the greater share, then the sum, after adding `plus` and removing `minus`."""
        memory, links = self.memory + plus.memory - minus.memory, self.links + plus.links - minus.links
        return max(memory, links), memory + links

    def takes(self, shard: _Shard, replacing: _Shard = _NOTHING) -> bool:
        fits = shard.bytes <= self.room + replacing.bytes
        return fits and all(each.table != shard.table or each is replacing for each in self.shards)

    def add(self, shard: _Shard, sign: int = 1) -> None:
        self.memory += sign * shard.memory
        self.links += sign * shard.links
        self.room -= sign * shard.bytes
        (self.shards.append if sign > 0 else self.shards.remove)(shard)


def _place(shards: Sequence[_Shard], begun: Sequence[_Rank], tries: int) -> tuple[list[_Rank], int]:
    ranks = _fill(sorted(shards, key=lambda shard: (-shard.work, -shard.bytes, shard.table)), begun)
    ranks = ranks or _fill(sorted(shards, key=lambda shard: -shard.bytes), begun)
    improved = bool(ranks)
    while improved and tries <= _MAX_TRIES and max(rank.score() for rank in ranks)[0] > _ENOUGH:
        improved, tried = _improve(ranks)
        tries += tried
    return ranks, tries


def _lightest_machine(ranks: Sequence[_Rank], owners: int, shard: _Shard) -> range:
    """Return the `owners` consecutive ranks with room and the least work after each has taken `shard`."""

    def after(first: int) -> tuple[bool, tuple[float, float]]:
        machine = ranks[first : first + owners]
        return any(rank.room < shard.bytes for rank in machine), max(rank.score(shard) for rank in machine)

    first = min(range(0, len(ranks), owners), key=after)
    return range(first, first + owners)


def _fill(shards: Sequence[_Shard], begun: Sequence[_Rank]) -> list[_Rank]:
    ranks = [_Rank(rank.room, rank.memory, rank.links) for rank in begun]
    if any(rank.room < 0 for rank in ranks):
        return []
    for shard in shards:
        free = [rank for rank in ranks if rank.takes(shard)]
        if not free:
            return []
        min(free, key=lambda rank: rank.score(shard)).add(shard)
    return ranks


def _improve(ranks: Sequence[_Rank]) -> tuple[bool, int]:
    """Move or swap a shard of the fullest rank; return whether that helps, and the number of tries."""
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
