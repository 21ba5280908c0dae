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


def cut(rows: int, parts: int) -> list[tuple[int, int]]:
    """Cut the rows of a rank into at most `parts` ranges of about one size, which begin at multiples of 256, or 8.

    Example: 1000 rows in 3: 0 .. 336, 336 .. 672, 672 .. 1000; 8192 in 3: 0 .. 2816, 2816 .. 5632, 5632 .. 8192.
    """
    step = _COARSE if rows >= 4 * _COARSE * parts else _FINE
    size = -(-rows // (parts * step)) * step
    return [(begin, min(begin + size, rows)) for begin in range(0, rows, size)]


def turns(rank: int, world_size: int) -> list[int]:
    """Return the peers of `rank` in its order: at each turn every rank has another one.

    For a power of two they are rank ^ 1, rank ^ 2, ..: the ranks of turns 2^i to 2^(i+1) - 1 are then neighbours, so
    that one product can take all of them. Otherwise they follow the rank.

    Example: rank 2 of 4: 3, 0, 1; rank 1 of 4: 0, 3, 2; rank 1 of 3: 2, 0.
    """
    if world_size & (world_size - 1):
        return staggered_peers(rank, world_size)
    return [rank ^ turn for turn in range(1, world_size)]


def last_sender(rank: int, world_size: int) -> int:
    """Return the peer in whose order `rank` comes last; a rank alone returns itself.

    Example: rank 1 of 4: 2, whose order is 3, 0, 1.
    """
    peers = (peer for peer in range(world_size) if peer != rank and turns(peer, world_size)[-1] == rank)
    return next(peers, rank)


def gathered_parts(rank: int, world_size: int, rows: int, parts: int) -> list[Part]:
    """Return the parts of the peers' rows in the order in which they arrive.

    Only at both ends are they small, so that what comes first is there soon, and what comes last leaves little to do:
    the last peer's rows come in `parts`, the first one's in one of that size and the rest, the others' whole. Each part
    costs a copy and a product of its own.

    Args:
        rank: of the caller.
        world_size: ranks.
        rows: of each rank.
        parts: of the last peer's rows, or WHOLE: the first peer's rows, then twice as many ranks' each time, where they
            are neighbours.

    Example: rank 1 of 4 with 32 rows. In 4: rows 0 .. 8 and 8 .. 32 of rank 0, all of rank 3, four times 8 of rank 2.
    WHOLE: rank 0; ranks 2 and 3.
    """
    peers = turns(rank, world_size)
    if parts != WHOLE:
        pieces = cut(rows, parts)
        ends = [[pieces[0], (pieces[0][1], rows)] if len(pieces) > 1 else pieces, pieces]
        cuts = [*ends[:1], *[[(0, rows)]] * (len(peers) - 2), *ends[1:]] if len(peers) > 1 else ends[1:]
        return [Part(range(peer, peer + 1), *piece) for peer, of in zip(peers, cuts, strict=False) for piece in of]
    if world_size & (world_size - 1):
        return [Part(range(peer, peer + 1), 0, rows) for peer in peers]
    blocks = [peers[first - 1 : 2 * first - 1] for first in (1 << i for i in range(world_size.bit_length() - 1))]
    return [Part(range(min(block), max(block) + 1), 0, rows) for block in blocks]


def scattered_parts(rank: int, world_size: int, rows: int, parts: int) -> list[Part]:
    """Return the parts of the rows that peers own in the order in which they are multiplied.

    As `gathered_parts`, but of whole blocks the largest comes first: its rows travel while the others are multiplied.
    """
    order = gathered_parts(rank, world_size, rows, parts)
    return order[::-1] if parts == WHOLE else order
