"""Slices that copy engines move: the persistent kernel, interpreted, then the copies that its counters release."""

import ctypes
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dlrm_overlap.comm.copy_engine import Copy2D
from dlrm_overlap.embedding.backends import fused_copies
from dlrm_overlap.embedding.backends.fused_copies import CopiedLaunch, Region, cut
from dlrm_overlap.embedding.steps import BatchSizes
from dlrm_overlap.kernels.forward.put_slices import SlicedPut
from dlrm_overlap.kernels.forward.slices import COPIED, Slices
from tests.agreement import assert_same
from tests.kernels.emulation import CPU, Case, SlicedWorld, interpreted

pytestmark = interpreted


class _Engine:
    """Does at once what a copy engine does behind its waits, and fails where it would wait for ever."""

    def __init__(self) -> None:
        self.copies = 0

    def wait_counter(self, word: torch.Tensor, count: int) -> None:
        assert word.tolist() == [count], "a region's slices are counted once each"

    def issue(self, copy: Copy2D) -> None:
        for row in range(copy.rows):
            source = copy.source + row * copy.source_pitch_bytes
            ctypes.memmove(copy.destination + row * copy.destination_pitch_bytes, source, copy.width_bytes)
        self.copies += 1


def _windows(world: SlicedWorld, rank: int) -> Any:
    arena = SimpleNamespace(rank=rank, world_size=world.case.world_size, view=lambda _, peer: world.windows[peer][1:])
    return SimpleNamespace(arena=arena, name="outputs0")


def _run(world: SlicedWorld, rank: int, launch: CopiedLaunch, engine: Any) -> list[int]:
    state = replace(world.shared[rank][0], trace=None, regions=launch.regions)
    bags, table, tuning = world.bags(rank), world.feature_table(rank), world.tuning
    slices = Slices(world.slice_bags, world.first_slot, COPIED, end_wait=False)
    put = SlicedPut(bags, table, world.destinations(), world.flags(rank), state, world.options(rank), slices)
    launch.begin()
    put.launch_kernel(1, 3)
    rows = -(-world.samples // tuning.task_bags) * tuning.task_bags
    each = -(-world.samples // world.slice_bags)
    batch = BatchSizes.of(world.case.batch_sizes)
    return list(launch.issue(engine, _windows(world, rank), state.staging, batch, rows, each))


@pytest.mark.parametrize("region_bytes", [pytest.param(1, marks=pytest.mark.slow), 1 << 20])
@pytest.mark.parametrize(
    "case",
    [
        Case((5, 9, 2), (3, 1, 2), dim=4, gap=0, schedule="remote_first"),
        pytest.param(Case((3, 0, 2), (2, 1, 2), dim=12, gap=4, schedule="balanced"), marks=pytest.mark.slow),
        pytest.param(Case((5, 3), (2, 1), dim=64, wire=torch.bfloat16), marks=pytest.mark.slow),
    ],
    ids=["side_by_side", "a_rank_without_samples", "bf16"],
)
def test_every_window_is_filled_once_all_slices_of_a_region_are_counted(
    case: Case, region_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fused_copies, "_REGION_BYTES", region_bytes)
    world, size = SlicedWorld(case), case.world_size
    launches = [CopiedLaunch(columns, case.dim, world.samples, size, case.wire, CPU) for columns in world.columns]
    for _ in range(2):
        world._poison()
        for rank, launch in enumerate(launches):
            engine = _Engine()
            sent = _run(world, rank, launch, engine)
            assert sent == [(rank + turn) % size for turn in range(1, size)], "staggered"
            assert engine.copies == (size - 1) * len(launch.cut)
        world.assert_windows()
        world.assert_ready_for_another_launch()
    for ready in world.ready:
        assert not ready.any(), "no slice has a flag"


def test_copies_take_the_rows_of_their_own_launch() -> None:
    """Though one before it, of larger tasks, has staged as many samples in more rows of the same memory."""
    launch, staging = CopiedLaunch([0], 4, 5, 2, torch.float32, CPU), torch.arange(2 * 8 * 4.0)
    received = torch.empty(5, 4)
    arena = SimpleNamespace(rank=0, world_size=2, view=lambda *_: received)
    windows: Any = SimpleNamespace(arena=arena, name="outputs0")
    launch.regions.finished.fill_(1)
    for rows in (8, 5, 8):
        engine: Any = _Engine()
        assert list(launch.issue(engine, windows, staging, BatchSizes.of((5, 5)), rows, slices=1)) == [1]
        assert_same(received, staging.view(-1, 4)[rows : rows + 5], f"rank 1's samples, behind {rows} rows")


def test_regions_are_neighbours_of_up_to_some_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_copies, "_REGION_BYTES", 200)
    assert cut([0, 4, 12, 16], 4, 100) == [Region(0, 2, 0), Region(2, 2, 12)]
    assert cut([0, 4, 8, 12, 16], 4, 100) == [Region(0, 2, 0), Region(2, 2, 8), Region(4, 1, 16)]
    assert cut([0, 4], 4, 300) == [Region(0, 1, 0), Region(1, 1, 4)], "a feature is not cut"
    assert [region.count for region in cut([4 * i for i in range(26)], 4, 1000)] == [4] * 6 + [2], "few are enough"
    assert cut([8, 4], 4, 1) == [Region(0, 1, 8), Region(1, 1, 4)], "in the kernel's order alone"
