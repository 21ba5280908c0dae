"""Which finished pieces of a message leave together, in plain Python; `aggregate` is its twin on the device.

A message from a rank to another host is made of units of equal bytes, in the order in which they are finished, more or
less. Units are counted in pieces, and pieces are gathered in groups. A group has at least `aggregate_bytes`, the last
one of a message excepted, and at most 32 pieces, so that one word says which are finished. The rule, which whoever
finishes a piece applies to the piece's group:

    if all pieces of the group are finished, or if the oldest finished piece that has not left has waited for the
    longest wait, then all finished pieces that have not left leave now; those next to each other leave as one put.

So each piece leaves once, and the piece that is finished last takes all that is left with it. Nobody looks at a clock
between two pieces: a piece waits for the longest wait and until the next piece of its group is finished. Places in the
message are fixed. What arrives does not depend on how it was gathered.

Example: groups of 4 pieces, longest wait 10 us. Pieces 1, 0, 3, 2 are finished at 0, 4, 12 and 13 us. At 4 us two wait,
none for 10 us. At 12 us piece 1 has waited for 12, so 0 and 1 leave as one put and 3 as another. At 13 us all are
finished, and 2 leaves.

Source: the aggregator that Chen et al. 2024 propose for several nodes.
"""

from collections.abc import Iterable
from typing import NamedTuple

GROUP_PIECES = 32
"""the most pieces of a group: the bits of half a word, `aggregate` keeps the epoch in the other half"""


class Grouping(NamedTuple):
    """How a message is cut into pieces and groups."""

    units: int
    """of the message"""
    piece_units: int
    """units of a piece; the last one may have fewer"""
    group_pieces: int
    """pieces of a group; the last one may have fewer"""

    @staticmethod
    def of(units: int, unit_bytes: int, aggregate_bytes: int, least_units: int = 1) -> "Grouping":
        """Return how to cut a message.

        Args:
            units: of the message.
            unit_bytes: of each.
            aggregate_bytes: that a group has at least; 0 makes each piece a group.
            least_units: finished together; a piece has them, or two, four, .. times as many.

        Example:
            1000 units of 512 bytes, 64 KB a group: pieces of 4 units, 32 in a group; 250 pieces, 8 groups.
        """
        least_bytes = max(1, least_units * unit_bytes)
        times = -(-aggregate_bytes // (GROUP_PIECES * least_bytes))
        piece_units = least_units << max(0, times - 1).bit_length()
        pieces = -(-aggregate_bytes // max(1, piece_units * unit_bytes))
        return Grouping(units, piece_units, max(1, pieces))

    @property
    def pieces(self) -> int:
        """Pieces of the message."""
        return -(-self.units // self.piece_units)

    @property
    def groups(self) -> int:
        """Groups of the message."""
        return -(-self.pieces // self.group_pieces)

    def pieces_of(self, group: int) -> range:
        """Return the pieces of a group."""
        first = group * self.group_pieces
        return range(first, min(first + self.group_pieces, self.pieces))

    def units_of(self, pieces: range) -> range:
        """Return the units of some consecutive pieces."""
        return range(pieces.start * self.piece_units, min(pieces.stop * self.piece_units, self.units))


class Aggregator:
    """The finished pieces of one message that have not left; tells with each piece what leaves."""

    def __init__(self, grouping: Grouping, longest_wait: float) -> None:
        """Begin with no piece finished.

        Args:
            grouping: of the message.
            longest_wait: of a finished piece, in the caller's unit of time.
        """
        self.grouping, self._longest_wait = grouping, longest_wait
        self._waiting: dict[int, dict[int, float]] = {}  # by group: pieces, and when they were finished
        self._finished = [0] * grouping.groups

    def finish(self, piece: int, now: float) -> list[range]:
        """Note that a piece is finished; return the pieces that leave now, a range for each put."""
        group = piece // self.grouping.group_pieces
        waiting = self._waiting.setdefault(group, {})
        waiting[piece] = now
        self._finished[group] += 1
        whole = self._finished[group] == len(self.grouping.pieces_of(group))
        if not whole and now - min(waiting.values()) < self._longest_wait:
            return []
        return ranges_of(self._waiting.pop(group))


def ranges_of(pieces: Iterable[int]) -> list[range]:
    """Return the fewest ranges that have these pieces and no others.

    Example: 5, 0, 1 are the ranges 0 .. 1 and 5 .. 5.
    """
    found: list[range] = []
    for piece in sorted(pieces):
        if found and found[-1].stop == piece:
            found[-1] = range(found[-1].start, piece + 1)
        else:
            found.append(range(piece, piece + 1))
    return found
