from typing import Any

import pytest

from dlrm_overlap.kernels.tuning import Tuning
from tests.kernels.emulation import Case, SlicedWorld, every_case, interpreted

OTHER_SCHEDULES = ("linear", "remote_first")
PUTS = {"stores": False, "in_place": True}

pytestmark = interpreted
every_put = pytest.mark.parametrize("in_place", PUTS.values(), ids=PUTS)


def _run(world: SlicedWorld, epoch: int = 1, **options: Any) -> None:
    for rank in range(world.case.world_size):
        world.put_slices(rank, epoch, **options)


@pytest.mark.parametrize("in_place", [False, pytest.param(True, marks=pytest.mark.slow)], ids=PUTS)
@every_case
def test_windows_hold_what_the_reference_pools_and_all_flags_are_set(case: Case, in_place: bool) -> None:
    world = SlicedWorld(case)
    _run(world, in_place=in_place)
    world.assert_windows()
    world.assert_flags(epoch=1)
    world.assert_ready_for_another_launch()
    world.assert_no_record()


@pytest.mark.parametrize("schedule", [*(pytest.param(s, marks=pytest.mark.slow) for s in OTHER_SCHEDULES), "balanced"])
@every_put
@pytest.mark.parametrize("slice_tasks", [1, 2, 16])
@pytest.mark.parametrize("tuning", [pytest.param(Tuning(2, 2, 1), marks=pytest.mark.slow), Tuning(4, 1, 1, groups=2)])
def test_slices_have_any_size(schedule: str, slice_tasks: int, tuning: Tuning, in_place: bool) -> None:
    case = Case((5, 9, 2), (2, 1, 1), dim=4, schedule=schedule, longest=2, tuning=tuning)
    world = SlicedWorld(case, slice_tasks, first_slot=3, spare=2)
    _run(world, in_place=in_place)
    world.assert_windows()
    world.assert_flags(epoch=1)
    world.assert_ready_for_another_launch()


def test_launches_follow_each_other_without_a_reset() -> None:
    world = SlicedWorld(Case())
    for epoch in (41, 42, 43):
        for ids in world.ids:
            ids.values.copy_((ids.values + 1) % world.ROWS)
        _run(world, epoch)
        world.assert_windows()
        world.assert_flags(epoch)
        world.assert_ready_for_another_launch()


def test_an_id_outside_its_table_is_recorded_and_row_0_is_taken() -> None:
    world = SlicedWorld(Case())
    values = world.ids[1].values
    values[-1] = world.ROWS
    _run(world)
    assert world.records[0].bad_id() is None
    feature, sample, rows = world.records[1].bad_id() or []
    assert (feature, rows) == (1, world.ROWS)
    assert world.ids[1].lengths[feature * 8 + sample :].tolist()[1:] == [0] * (7 - sample), "the last bag with ids"
    assert values[-1] == 0
    world.assert_windows()
    world.assert_flags(epoch=1)


def test_in_place_only_the_last_launch_signals() -> None:
    world = SlicedWorld(Case((3, 2), (1, 1), dim=4))
    _run(world, in_place=True, raises=False)
    world.assert_windows()
    world.assert_flags(epoch=0)
    world.assert_ready_for_another_launch()


@pytest.mark.parametrize(("stored_elsewhere", "signaled"), [(3, True), (2, False)])
def test_in_place_flags_follow_the_last_task_not_the_last_program(stored_elsewhere: int, signaled: bool) -> None:
    """One of four programs has drawn three tasks, and has counted all of them, or all but one that it still pools."""
    world = SlicedWorld(Case((5, 3), (2, 1), dim=4))
    ticket = world.shared[0][0].ticket
    ticket[0], ticket[2] = 3, stored_elsewhere
    world.put_slices(0, epoch=1, programs=3, in_place=True)
    assert [int(ready[0, 0]) for ready in world.ready] == [int(signaled)] * 2
    assert ticket.tolist() == [0, 0, 0 if signaled else len(world.grids[0]) - 1]


def test_in_place_the_end_wait_returns_where_one_program_runs_at_a_time() -> None:
    """The first program takes all tasks and waits; the others begin when it has ended, and have none."""
    world = SlicedWorld(Case((3, 2), (1, 1), dim=4))
    world.ready[0][1, 0] = 5  # as rank 1 would signal
    world.put_slices(0, epoch=5, programs=40, counts=[1, 1], in_place=True)
    world.put_slices(1, epoch=5, programs=40, counts=[1, 1], in_place=True)
    world.assert_windows()
    world.assert_flags(epoch=5)
    world.assert_no_record()


@pytest.mark.parametrize("programs", [1, 2, 40])
def test_the_end_wait_returns_when_the_peers_flags_are_there(programs: int) -> None:
    """Also where one program runs at a time: each waits for a share of the flags before the next one starts."""
    world = SlicedWorld(Case())
    world.ready[0][1, : world.used[1]] = 5  # as rank 1 would signal
    world.put_slices(0, epoch=5, programs=programs, counts=[0, world.used[1]])
    world.put_slices(1, epoch=5, programs=programs, counts=[world.used[0], 0])
    world.assert_windows()
    world.assert_flags(epoch=5)
    world.assert_no_record()


@pytest.mark.parametrize("programs", [1, 3])
@pytest.mark.parametrize("missing", [0, 31, 32, 69])  # a program looks at 32 flags at once
def test_the_end_wait_misses_no_flag(programs: int, missing: int) -> None:
    world = SlicedWorld(Case((1, 2), (1, 1), dim=4), spare=69)
    world.ready[0][1] = 8
    world.ready[0][1, missing] = 6
    world.put_slices(0, epoch=8, programs=programs, counts=[0, 70])
    assert world.records[0].expired() == [0, 1, missing, 8, 6]
