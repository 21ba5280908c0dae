"""The order of tasks in plain Python, for the tests and the CPU path; `primitives.task_at` is its twin on the device.

A task is `task_bags` consecutive bags of one feature for one destination rank. A rank that pools F features, with b
samples a rank, has F * blocks tasks for each destination, where blocks = ceil(b / task_bags), feature after feature.
Schedules differ in the order of the destinations; the order of one destination's tasks is always the same.

Example: rank 1 of 3, two tasks, a and b, for each destination; 2a is the first task for rank 2:
    linear        0a 0b 1a 1b 2a 2b     the same on every rank: all write to rank 0 first
    remote_first  2a 2b 0a 0b 1a 1b     rank + 1, rank + 2, .., itself last (arXiv 2305.06942, section 3)
    balanced      2a 0a 1a 2b 0b 1b     destinations take turns: links and memory are busy for the whole kernel
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

SCHEDULES = ("linear", "remote_first", "balanced")


class Task(NamedTuple):
    """The bags of the destination's samples [block * task_bags, (block + 1) * task_bags), for one feature.

    `feature` counts the features that are pooled on this rank.
    """

    destination: int
    feature: int
    block: int


@dataclass(frozen=True)
class TaskGrid:
    """All tasks of one launch on one rank."""

    rank: int
    world_size: int
    features: int
    """features pooled on this rank, F"""
    samples: int
    """samples of a rank, b"""
    task_bags: int
    """bags a task"""

    @property
    def blocks(self) -> int:
        """Tasks of one feature for one destination."""
        return -(-self.samples // self.task_bags)

    def __len__(self) -> int:
        return self.world_size * self.features * self.blocks

    def task_at(self, position: int, schedule: str) -> Task:
        """Return the task at `position` in the order of `schedule`, 0 <= position < len(self)."""
        each = self.features * self.blocks
        if schedule == "balanced":
            turn, within = position % self.world_size, position // self.world_size
        else:
            turn, within = position // each, position % each
        first = 0 if schedule == "linear" else self.rank + 1
        return Task((first + turn) % self.world_size, within // self.blocks, within % self.blocks)

    def order(self, schedule: str) -> Iterator[Task]:
        """Yield all tasks in the order of `schedule`."""
        return (self.task_at(position, schedule) for position in range(len(self)))


def staggered_peers(rank: int, world_size: int) -> list[int]:
    """Return the peers of `rank` from the next one on: at each turn no two ranks send to one peer.

    Example: rank 2 of 4: 3, 0, 1.
    """
    return [(rank + turn) % world_size for turn in range(1, world_size)]
