import pytest
import torch

from dlrm_overlap.kernels import reference
from dlrm_overlap.kernels.tuning import Tuning
from tests.agreement import assert_same
from tests.kernels.emulation import Case, World, every_case, interpreted

pytestmark = interpreted


def _run(world: World) -> None:
    for rank in range(world.case.world_size):
        world.store_pooled(rank)


@every_case
def test_windows_hold_what_the_reference_pools(case: Case) -> None:
    world = World(case)
    ids = [ids.storage.clone() for ids in world.ids]
    _run(world)
    world.assert_windows()
    world.assert_no_record()
    for rank, before in enumerate(ids):
        assert_same(world.ids[rank].storage, before, f"ids of rank {rank}")


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("bad", [World.ROWS, -1, 2**31 - 1, -(2**31)])
def test_an_id_outside_its_table_is_recorded_and_row_0_is_taken(dtype: torch.dtype, bad: int) -> None:
    world = World(Case(ids=dtype))
    feature, index, sample = 2, 0, 6  # on rank 0: the second sample of rank 1
    position = int(world.ids[0].offsets[index * 8 + sample])
    assert world.ids[0].lengths[index * 8 + sample] > 1
    assert world.input_feature(0, feature) == index
    world.ids[0].values[position + 1] = bad
    ids = world.ids[0].storage.clone()
    ids[1 + position + 1] = 0
    _run(world)
    assert world.records[0].bad_id() == [index, sample, World.ROWS]
    assert world.records[1].bad_id() is None
    assert_same(world.ids[0].storage, ids, "ids")
    world.assert_windows()  # of the ids as they are now


@pytest.mark.parametrize("checked_ids", [8, 64])
def test_ids_at_the_end_of_a_long_bag_are_checked(checked_ids: int) -> None:
    tuning = Tuning(2, unroll=4, num_warps=1, checked_ids=checked_ids)
    world = World(Case((2,), (1,), dim=4, longest=70, tuning=tuning))
    values, end = world.ids[0].values, int(world.ids[0].offsets[2])  # of sample 1, whose bag is the longest
    assert world.ids[0].lengths.tolist() == [0, 70]
    values[end - 40], values[end - 1] = World.ROWS, -1
    _run(world)
    assert world.records[0].bad_id() == [0, 1, World.ROWS]
    assert (values[end - 40], values[end - 1]) == (0, 0)
    world.assert_windows()  # of the ids as they are now


def test_bad_ids_that_are_not_recorded_do_not_hide_those_of_another_table() -> None:
    world = World(Case((4,), (2,), dim=4))
    values, offsets = world.ids[0].values, world.ids[0].offsets
    for bag in (1, 7):
        values[int(offsets[bag])] = World.ROWS
    first = next(feature for feature in range(2) if world.input_feature(0, feature) == 1)
    world.rows_to_check[first] = -World.ROWS
    _run(world)
    assert world.records[0].bad_id() == [0, 1, World.ROWS]
    assert values[int(offsets[7])] == 0, "row 0 is taken for it, too"
    world.assert_windows()


def test_unchecked_ids_are_taken_as_they_are() -> None:
    world = World(Case((4,), (1,), dim=4, check=False))
    values, offsets = world.ids[0].values, world.ids[0].offsets
    values[int(offsets[1])] = World.ROWS  # the row after the table, which is in the same allocation
    ids = world.ids[0].storage.clone()
    _run(world)
    world.assert_no_record()
    assert_same(world.ids[0].storage, ids, "ids")
    column = world.columns[0][0]
    expected = reference.pool(world.storage[0].flatten(0, 1), world.ids[0].lengths, values)
    assert_same(world.windows[0][1:5, column : column + 4], expected, "window")
