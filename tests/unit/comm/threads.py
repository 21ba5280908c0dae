"""Ranks that are threads of one process, for tests of what they agree on."""

import threading
from typing import Any


class Rank:
    """A group, as one of its ranks sees it."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.size = lambda: rank, lambda: world_size


class Threads:
    """What ranks do together; one that none of the others meets gives up."""

    def __init__(self, world_size: int) -> None:
        barrier = threading.Barrier(world_size, timeout=30)
        self.meet, self._given = barrier.wait, [None] * world_size

    def gather(self, found: list[Any], given: Any, group: Rank) -> None:
        """Be `dist.all_gather_object`."""
        self._given[group.rank()] = given
        self.meet()
        found[:] = self._given
        self.meet()
