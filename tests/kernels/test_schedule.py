"""Every task once, destinations in the promised order, and the same order on the device."""

# A kernel is Triton code, not Python:
# pyright: reportGeneralTypeIssues=false, reportArgumentType=false

from collections import Counter
from itertools import product

import pytest
import torch
import triton
import triton.language as tl

from dlrm_overlap.kernels.primitives import task_at
from dlrm_overlap.kernels.schedule import SCHEDULES
from tests.agreement import assert_same
from tests.kernels.emulation import interpreted
from tests.kernels.tasks import Task, TaskGrid

# With batches below a task and not a multiple of it, with one rank, one feature and none.
GRIDS = [
    TaskGrid(rank, world_size, features, samples, task_bags)
    for world_size, features, samples, task_bags in product((1, 2, 3, 5, 8), (0, 1, 3), (1, 2, 7, 32, 33), (1, 4))
    for rank in sorted({0, world_size // 2, world_size - 1})
]
every_schedule = pytest.mark.parametrize("schedule", SCHEDULES)


@every_schedule
def test_every_bag_belongs_to_one_task(schedule: str) -> None:
    for grid in GRIDS:
        tasks = list(grid.order(schedule))
        assert len(tasks) == len(set(tasks)) == len(grid), grid
        bags = Counter(
            (task.destination, task.feature, bag)
            for task in tasks
            for bag in range(task.block * grid.task_bags, (task.block + 1) * grid.task_bags)
            if bag < grid.samples
        )
        assert bags == Counter(product(range(grid.world_size), range(grid.features), range(grid.samples))), grid


def test_destinations_are_in_the_order_of_the_schedule() -> None:
    for grid in GRIDS:
        each = grid.features * grid.blocks
        ring = [(grid.rank + 1 + turn) % grid.world_size for turn in range(grid.world_size)]
        order = {schedule: [task.destination for task in grid.order(schedule)] for schedule in SCHEDULES}
        assert order["linear"] == [rank for rank in range(grid.world_size) for _ in range(each)], grid
        assert order["remote_first"] == [rank for rank in ring for _ in range(each)], grid
        assert order["balanced"] == ring * each, grid
        for tasks in map(list, map(grid.order, SCHEDULES)):  # a slice is complete before the next one begins
            assert sorted(tasks, key=lambda task: task.destination) == sorted(tasks), grid


@triton.jit
def _tasks(out, tasks, rank, world_size, features, blocks, SCHEDULE: tl.constexpr, BLOCK: tl.constexpr):
    position = tl.arange(0, BLOCK)
    destination, feature, block = task_at(position, rank, world_size, features, blocks, SCHEDULE)
    mask = position < tasks
    tl.store(out + position * 3, destination, mask=mask)
    tl.store(out + position * 3 + 1, feature, mask=mask)
    tl.store(out + position * 3 + 2, block, mask=mask)


@interpreted
@every_schedule
@pytest.mark.parametrize("world_size", [1, 2, 3, 5, 8])
def test_the_device_has_the_order_of_the_host(schedule: str, world_size: int) -> None:
    for features, samples, rank in product((1, 2, 5), (1, 4, 13, 24), sorted({0, world_size // 2, world_size - 1})):
        grid = TaskGrid(rank, world_size, features, samples, task_bags=4)
        tasks = torch.full((len(grid), 3), -1, dtype=torch.int32)
        block = triton.next_power_of_2(len(grid))
        _tasks[(1,)](tasks, len(grid), rank, world_size, features, grid.blocks, SCHEDULE=schedule, BLOCK=block)
        expected = torch.tensor(list(grid.order(schedule)), dtype=torch.int32)
        assert_same(tasks, expected, f"tasks of {grid}")


def test_a_small_grid_has_the_order_by_hand() -> None:
    grid = TaskGrid(rank=1, world_size=3, features=1, samples=2, task_bags=1)
    a, b = ({rank: Task(rank, 0, block) for rank in range(3)} for block in (0, 1))
    assert list(grid.order("linear")) == [a[0], b[0], a[1], b[1], a[2], b[2]]
    assert list(grid.order("remote_first")) == [a[2], b[2], a[0], b[0], a[1], b[1]]
    assert list(grid.order("balanced")) == [a[2], a[0], a[1], b[2], b[0], b[1]]
