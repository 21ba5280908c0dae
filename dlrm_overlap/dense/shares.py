"""How the flat gradient is cut for its reduction by stores: into pieces, and each piece into a share a rank."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from dlrm_overlap.kernels.dense.arguments import LINE


@dataclass(frozen=True)
class Piece:
    """Some lines of the flat gradient, of `LINE` elements each, that are reduced by one launch."""

    begin: int
    end: int
    share: int
    """lines that each rank owns, the last ones fewer, or none"""
    slot: int
    """of the flag that a rank raises once the mean of its share is at all ranks"""

    def lines(self, rank: int) -> int:
        """Return how many lines `rank` owns."""
        return max(0, min(self.share, self.end - self.begin - rank * self.share))

    def first(self, rank: int) -> int:
        """Return the first line that `rank` owns."""
        return min(self.end, self.begin + rank * self.share)


class Range(NamedTuple):
    """A range of the flat gradient whose reduction begins when all of it is there on every rank."""

    ready: int
    """slot of the flag by which a rank says that its gradients are there, and may be overwritten by their mean"""
    pieces: list[Piece]
    """one at least, in order; their slots follow `ready`"""


def cut(ranges: Sequence[tuple[int, int]], piece_elements: int, world_size: int) -> list[Range]:
    """Cut each range of elements, whose borders are multiples of `LINE`, into pieces of about `piece_elements`.

    Slots are numbered in the order in which their flags are raised, so who awaits a slot may as well await all before
    it.

    Example: the range 0 .. 640 elements on two ranks, 256 elements a piece: lines 0 .. 4 and 5 .. 9, of which rank 0
    owns lines 0 .. 2 and 5 .. 7, rank 1 lines 3 .. 4 and 8 .. 9. Slot 0 says that the range is there, slots 1 and 2
    that the pieces are averaged.
    """
    cut_ranges, slot = [], 0
    for begin, end in ranges:
        assert begin % LINE == end % LINE == 0, f"a range {begin} .. {end}, not of whole lines of {LINE}"
        count = max(1, round((end - begin) / piece_elements))
        lines = -(-(end - begin) // LINE // count)
        pieces = []
        for first in range(begin // LINE, max(end // LINE, begin // LINE + 1), max(1, lines)):
            last = min(first + lines, end // LINE)
            pieces.append(Piece(first, last, -(-(last - first) // world_size), slot + 1 + len(pieces)))
        cut_ranges.append(Range(slot, pieces))
        slot += 1 + len(pieces)
    return cut_ranges
