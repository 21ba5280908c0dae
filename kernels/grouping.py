"""Which finished parts of a message leave together, in plain Python; `aggregate` is its twin on the device.

A message from a rank to another host is made of units of equal bytes, in the order in which they are finished, more or
less. Units are counted in parts, and parts are gathered in groups. A group has at least `aggregate_bytes`, the last
one of a message excepted, and at most 32 parts, so that one word says which are finished. The rule, which whoever
finishes a part applies to the part's group:

    if all parts of the group are finished, or if the oldest finished part that has not left has waited for the
    longest wait, then all finished parts that have not left leave now; those next to each other leave as one put.

So each part leaves once, and the part that is finished last takes all that is left with it. Nobody looks at a clock
between two parts: a part waits for the longest wait and until the next part of its group is finished. Places in the
message are fixed. The bytes that arrive do not depend on how they were gathered.

Example: groups of 4 parts, longest wait 10 us. Parts 1, 0, 3, 2 are finished at 0, 4, 12 and 13 us. At 4 us two wait,
none for 10 us. At 12 us part 1 has waited for 12, so 0 and 1 leave as one put and 3 as another. At 13 us all are
finished, and 2 leaves.

Source: the aggregator that Chen et al. 2024 propose for several nodes.
"""

from collections.abc import Iterable
from typing import NamedTuple

GROUP_PARTS = 32
"""the most parts of a group: the bits of half a word, `aggregate` keeps the epoch in the other half"""


class Grouping(NamedTuple):
    """How a message is cut into parts and groups."""

    units: int
    """of the message"""
    part_units: int
    """units of a part; the last one may have fewer"""
    group_parts: int
    """parts of a group; the last one may have fewer"""

    @staticmethod
    def of(units: int, unit_bytes: int, aggregate_bytes: int, least_units: int = 1) -> "Grouping":
        """Return how to cut a message.

        Args:
            units: of the message.
            unit_bytes: of each.
            aggregate_bytes: that a group has at least; 0 makes each part a group.
            least_units: finished together; a part has them, or two, four, .. times as many.

        Example:
            1000 units of 512 bytes, 64 KB a group: parts of 4 units, 32 in a group; 250 parts, 8 groups.
        """
        unit_bytes = max(1, unit_bytes)
        least_bytes = least_units * unit_bytes
        times = -(-aggregate_bytes // (GROUP_PARTS * least_bytes))
        part_units = least_units << max(0, times - 1).bit_length()
        parts = -(-aggregate_bytes // (part_units * unit_bytes))
        return Grouping(units, part_units, max(1, parts))

    @property
    def parts(self) -> int:
        """Pieces of the message."""
        return -(-self.units // self.part_units)

    @property
    def groups(self) -> int:
        """Groups of the message."""
        return -(-self.parts // self.group_parts)

    def parts_of(self, group: int) -> range:
        """Return the parts of a group."""
        first = group * self.group_parts
        return range(first, min(first + self.group_parts, self.parts))

    def units_of(self, parts: range) -> range:
        """Return the units of some consecutive parts."""
        return range(parts.start * self.part_units, min(parts.stop * self.part_units, self.units))


class Aggregator:
    """The finished parts of one message that have not left; returns with each part those that leave."""

    def __init__(self, grouping: Grouping, longest_wait: float) -> None:
        """Begin with no part finished.

        Args:
            grouping: of the message.
            longest_wait: of a finished part, in the caller's unit of time.
        """
        self.grouping, self._longest_wait = grouping, longest_wait
        self._waiting: dict[int, dict[int, float]] = {}  # by group: parts, and when they were finished
        self._finished = [0] * grouping.groups

    def finish(self, part: int, now: float) -> list[range]:
        """Note that a part is finished; return the parts that leave now, a range for each put."""
        group = part // self.grouping.group_parts
        waiting = self._waiting.setdefault(group, {})
        waiting[part] = now
        self._finished[group] += 1
        whole = self._finished[group] == len(self.grouping.parts_of(group))
        if not whole and now - min(waiting.values()) < self._longest_wait:
            return []
        return ranges_of(self._waiting.pop(group))


def ranges_of(parts: Iterable[int]) -> list[range]:
    """Return the fewest ranges that have these parts and no others.

    Example: 5, 0, 1 are the ranges 0 .. 1 and 5 .. 5.
    """
    found: list[range] = []
    for part in sorted(parts):
        if found and found[-1].stop == part:
            found[-1] = range(found[-1].start, part + 1)
        else:
            found.append(range(part, part + 1))
    return found
