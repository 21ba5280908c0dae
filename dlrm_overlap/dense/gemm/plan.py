"""How a rank's product is cut into parts, and the order in which these come.

Ranks take turns so that at every turn no two of them send to one rank, or read from one.
"""

from typing import NamedTuple

from dlrm_overlap.kernels.schedule import staggered_peers

WHOLE = 0
"""parts: as few products as there can be"""
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
    product of the last, small range is seen. Ranges begin at multiples of 256, or 8; WHOLE is one range.

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


def scattered_parts(rank: int, world_size: int, rows: int, parts: int) -> list[Part]:
    """Return the parts of the rows that peers own in the order in which they are multiplied.

    Each costs a copy and a product of its own, so only those at both ends are small: the first peer's rows are doubled,
    so that each range is multiplied while the one before is on the links, and the last one's halved, so that little is
    left to send at the end.

    Args:
        rank: of the caller.
        world_size: ranks.
        rows: of each rank.
        parts: of these two peers' rows, or WHOLE: as few products as there can be, the largest first, whose rows travel
            while the others are multiplied.

    Example: rank 1 of 4 with 64 rows. In 2: twice 32 of rank 0, all of rank 3, twice 32 of rank 2. WHOLE: ranks 2 and
    3; rank 0.
    """
    if parts == WHOLE:
        return _whole_blocks(rank, world_size, rows)[::-1]
    peers = turns(rank, world_size)
    cuts = {peers[0]: double(rows, parts), peers[-1]: halve(rows, parts)} if peers else {}
    return [Part(range(peer, peer + 1), *piece) for peer in peers for piece in cuts.get(peer, [(0, rows)])]
