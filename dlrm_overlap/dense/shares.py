"""How the flat gradient is cut for its reduction by stores: into pieces, and each piece into a share a rank."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import NamedTuple

from dlrm_overlap.kernels.dense.arguments import LINE


@dataclass(frozen=True)
class Piece:
    """A range of the flat gradient that is reduced by one launch, in lines of `LINE` elements."""

    begin: int
    end: int
    share: int
    """lines that each rank owns, the last ones fewer, or none"""
    staging: int
    """where in every rank's staging memory the piece begins: W rows of `share` lines"""

    def lines(self, rank: int) -> int:
        """Return how many lines `rank` owns."""
        return max(0, min(self.share, self.end - self.begin - rank * self.share))

    def first(self, rank: int) -> int:
        """Return the first line that `rank` owns."""
        return min(self.end, self.begin + rank * self.share)


def cut(ranges: Sequence[tuple[int, int]], piece_elements: int, world_size: int) -> list[list[Piece]]:
    """Cut each range of elements, whose borders are multiples of `LINE`, into pieces of about `piece_elements`.

    Example: the range 0 .. 640 elements on two ranks, 256 elements a piece: lines 0 .. 4 and 5 .. 9, of which rank 0
    owns lines 0 .. 2 and 5 .. 7, rank 1 lines 3 .. 4 and 8 .. 9. In the staging memory they begin at lines 0 and 6.
    """
    cut_ranges, staging = [], 0
    for begin, end in ranges:
        assert begin % LINE == end % LINE == 0, f"a range {begin} .. {end}, not of whole lines of {LINE}"
        count = max(1, round((end - begin) / piece_elements))
        lines = -(-(end - begin) // LINE // count)
        pieces = []
        for first in range(begin // LINE, max(end // LINE, begin // LINE + 1), max(1, lines)):
            last = min(first + lines, end // LINE)
            share = -(-(last - first) // world_size)
            pieces.append(Piece(first, last, share, staging))
            staging += share * world_size
        cut_ranges.append(pieces)
    return cut_ranges


class Kind(Enum):
    """What an action does; each but a wait ends by raising a flag."""

    READY = auto()
    """say that this rank's gradients are there, and may be overwritten by their mean"""
    SEND = auto()
    """store a piece's shares to their owners' staging memory"""
    WAIT = auto()
    """wait until all ranks have raised a flag"""
    AVERAGE = auto()
    """store the mean of this rank's share of a piece to all ranks"""


class Action(NamedTuple):
    """A part of a range's reduction, on the stream of the reductions."""

    kind: Kind
    slot: int
    """of the flag that is raised, or awaited"""
    piece: int = 0
    """number of the piece among those of its range"""


def actions(pieces: Sequence[Piece], push: bool, first_slot: int) -> list[Action]:
    """Return what reduces a range of `pieces`, in order. Slots are numbered in the order in which they are raised.

    So a wait for a slot may as well await all slots before it. Of pushed pieces, each is on its way while the one
    before is awaited and averaged.

    Example: two pieces, pulled: READY 0, WAIT 0, AVERAGE 1, AVERAGE 2. Pushed: SEND 0, SEND 1, WAIT 0, AVERAGE 2,
    WAIT 1, AVERAGE 3.
    """
    slot, last = first_slot, len(pieces) - 1
    if not push:
        means = [Action(Kind.AVERAGE, slot + 1 + number, number) for number in range(len(pieces))]
        return [Action(Kind.READY, slot), Action(Kind.WAIT, slot), *means]
    found, sent = [Action(Kind.SEND, slot, 0)], [slot]
    for number in range(len(pieces)):
        if number < last:
            slot += 1
            found.append(Action(Kind.SEND, slot, number + 1))
            sent.append(slot)
        slot += 1
        found += [Action(Kind.WAIT, sent[number], number), Action(Kind.AVERAGE, slot, number)]
    return found
