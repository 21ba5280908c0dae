"""How a rank's product is cut into parts, and the order in which these come.

Ranks take turns so that at every turn no two of them send to one rank, or read from one.
"""

from typing import NamedTuple

from dlrm_overlap.kernels.schedule import staggered_peers

WHOLE = 0
"""parts: as few products as there can be"""
_HEADS = 8
_FINE, _COARSE = 8, 256  # rows: 16 bytes divide 8 of two bytes each; cuBLAS's tiles divide 256


class Part(NamedTuple):
    """Rows of all ranks' that one product takes: the rows [begin, end) of each of some neighbouring ranks.

    Several ranks' are whole, so that the rows follow each other.
    """

    ranks: range
    begin: int
    end: int

    def rows(self, rank_rows: int) -> slice:
        """Return the rows among those of all ranks, of which each rank has `rank_rows`."""
        return slice(self.ranks[0] * rank_rows + self.begin, self.ranks[-1] * rank_rows + self.end)


def halve(rows: int, parts: int) -> list[tuple[int, int]]:
    """Cut the rows of a rank into at most `parts` ranges, each half of the rest, the last as large as that before.

    The product of such a range ends before the next range is there, if it takes less than half as long; so only the
    product of the last, small range is seen. Ranges begin at multiples of 256, or 8.

    Example: 8192 rows in 4: 0 .. 4096, 4096 .. 6144, 6144 .. 7168, 7168 .. 8192.
    """
    step = _COARSE if rows >= _COARSE << parts else _FINE
    ranges, begin = [], 0
    while len(ranges) < parts - 1 and rows - begin > step:
        end = begin + -(-(rows - begin) // (2 * step)) * step
        ranges.append((begin, end))
        begin = end
    return [*ranges, (begin, rows)]


def double(rows: int, parts: int) -> list[tuple[int, int]]:
    """Cut the rows of a rank as `halve` does, but the small ranges first.

    Example: 8192 rows in 4: 0 .. 1024, 1024 .. 2048, 2048 .. 4096, 4096 .. 8192.
    """
    sizes = [end - begin for begin, end in halve(rows, parts)][::-1]
    step = _COARSE if sizes[0] >= _COARSE else _FINE
    ends = [min(rows, -(-sum(sizes[: count + 1]) // step) * step) for count in range(len(sizes))]
    return [(begin, end) for begin, end in zip([0, *ends], ends, strict=False) if begin < end]


def head(rows: int, parts: int) -> int:
    """Return how many of a rank's rows are to be first on the links: an eighth, or all where they are not cut.

    Example: 8192 rows: 1024; 1000 rows: 128.
    """
    step = _COARSE if rows >= 4 * _COARSE * _HEADS else _FINE
    return rows if parts in (WHOLE, 1) else min(rows, -(-rows // (_HEADS * step)) * step)


def turns(rank: int, world_size: int) -> list[int]:
    """Return the peers of `rank` in its order: at each turn every rank has another one.

    For a power of two they are rank ^ 1, rank ^ 2, ..: the ranks of turns 2^i to 2^(i+1) - 1 are then neighbours, so
    that one product can take all of them. Otherwise they follow the rank.

    Example: rank 2 of 4: 3, 0, 1; rank 1 of 4: 0, 3, 2; rank 1 of 3: 2, 0.
    """
    if world_size & (world_size - 1):
        return staggered_peers(rank, world_size)
    return [rank ^ turn for turn in range(1, world_size)]


def senders(rank: int, world_size: int) -> list[int]:
    """Return the peers in the order in which they turn to `rank`.

    Example: rank 2 of 4: 3, 0, 1; rank 1 of 3: 0, 2.
    """
    orders = {peer: turns(peer, world_size) for peer in range(world_size) if peer != rank}
    return sorted(orders, key=lambda peer: orders[peer].index(rank))


def _whole_blocks(rank: int, world_size: int, rows: int) -> list[Part]:
    """Return the first peer's rows, then twice as many ranks' each time, where they are neighbours."""
    peers = turns(rank, world_size)
    if world_size & (world_size - 1):
        return [Part(range(peer, peer + 1), 0, rows) for peer in peers]
    blocks = [peers[first - 1 : 2 * first - 1] for first in (1 << i for i in range(world_size.bit_length() - 1))]
    return [Part(range(min(block), max(block) + 1), 0, rows) for block in blocks]


def _fine_at_ends(peers: list[int], rows: int, first: list[tuple[int, int]], last: list[tuple[int, int]]) -> list[Part]:
    """Return the first peer's rows in the ranges `first`, the last one's in `last`, and all others' whole."""
    cuts = [first, *[[(0, rows)]] * (len(peers) - 2), last][-len(peers) :] if peers else []
    return [Part(range(peer, peer + 1), *piece) for peer, of in zip(peers, cuts, strict=True) for piece in of]


def gathered_parts(rank: int, world_size: int, rows: int, parts: int) -> list[Part]:
    """Return the parts of the peers' rows in the order in which they arrive.

    Only at both ends are they small, so that the first is there soon, and the last leaves little to do. Each part costs
    a copy and a product of its own.

    Args:
        rank: of the caller.
        world_size: ranks.
        rows: of each rank.
        parts: of the last peer's rows, which are halved, or WHOLE: as few products as there can be.

    Example: rank 1 of 4 with 64 rows. In 2: rows 0 .. 8 and 8 .. 64 of rank 0, all of rank 3, twice 32 of rank 2.
    WHOLE: rank 0; ranks 2 and 3.
    """
    if parts == WHOLE:
        return _whole_blocks(rank, world_size, rows)
    first = head(rows, parts)
    begin = [(0, first), (first, rows)] if first < rows else [(0, rows)]
    return _fine_at_ends(turns(rank, world_size), rows, begin, halve(rows, parts))


def scattered_parts(rank: int, world_size: int, rows: int, parts: int) -> list[Part]:
    """Return the parts of the rows that peers own in the order in which they are multiplied.

    As `gathered_parts`, but the first peer's rows are doubled, so that each range is multiplied while the one before is
    on the links; and of whole blocks the largest comes first: its rows travel while the others are multiplied.

    Example: 8192 rows in 4: of the first peer 0 .. 1024, 1024 .. 2048, 2048 .. 4096, 4096 .. 8192.
    """
    if parts == WHOLE:
        return _whole_blocks(rank, world_size, rows)[::-1]
    return _fine_at_ends(turns(rank, world_size), rows, double(rows, parts), halve(rows, parts))
