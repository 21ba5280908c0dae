"""The order of tasks in plain Python, the twin of `primitives.task_at` on the device."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple


class Task(NamedTuple):
    """The bags of the destination's samples [block * task_bags, (block + 1) * task_bags), for one feature."""

    destination: int
    feature: int  # among those pooled on this rank
    block: int


@dataclass(frozen=True)
class TaskGrid:
    """All tasks of one launch on one rank."""

    rank: int
    world_size: int
    features: int  # pooled on this rank
    samples: int  # of a rank
    task_bags: int

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
        return (self.task_at(position, schedule) for position in range(len(self)))
