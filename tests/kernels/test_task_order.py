"""The order of tasks on the device is `TaskGrid`'s."""

# A kernel is Triton code, not Python:
# pyright: reportGeneralTypeIssues=false, reportArgumentType=false

from itertools import product

import pytest
import torch
import triton
import triton.language as tl

from dlrm_overlap.kernels.primitives import task_at
from dlrm_overlap.kernels.schedule import SCHEDULES
from tests.agreement import assert_same
from tests.kernels.emulation import interpreted
from tests.kernels.tasks import TaskGrid

pytestmark = interpreted


@triton.jit
def _tasks(out, tasks, rank, world_size, features, blocks, SCHEDULE: tl.constexpr, BLOCK: tl.constexpr):
    position = tl.arange(0, BLOCK)
    destination, feature, block = task_at(position, rank, world_size, features, blocks, SCHEDULE)
    mask = position < tasks
    tl.store(out + position * 3, destination, mask=mask)
    tl.store(out + position * 3 + 1, feature, mask=mask)
    tl.store(out + position * 3 + 2, block, mask=mask)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("world_size", [1, 2, 3, 5, 8])
def test_device_and_node_agree(schedule: str, world_size: int) -> None:
    for features, samples, rank in product((1, 2, 5), (1, 4, 13, 24), sorted({0, world_size // 2, world_size - 1})):
        grid = TaskGrid(rank, world_size, features, samples, task_bags=4)
        tasks = torch.full((len(grid), 3), -1, dtype=torch.int32)
        block = triton.next_power_of_2(len(grid))
        _tasks[(1,)](tasks, len(grid), rank, world_size, features, grid.blocks, SCHEDULE=schedule, BLOCK=block)
        expected = torch.tensor(list(grid.order(schedule)), dtype=torch.int32)
        assert_same(tasks, expected, f"tasks of {grid}")
