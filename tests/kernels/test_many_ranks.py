"""The 72 ranks of a GB200 NVL72 in one node. One rank runs its kernel, or those that have something to send."""

import pytest
import torch

from dlrm_overlap.comm.device_errors import DeviceErrorRecord
from dlrm_overlap.kernels import reference
from dlrm_overlap.kernels.flags import Flags, signal_flags, wait_flags
from dlrm_overlap.kernels.peer_copy import RowFlags, Rows, store_rows
from tests.agreement import assert_same
from tests.kernels import test_pull_ids, test_push_gradients
from tests.kernels.emulation import CLOCK, CPU, Case, SlicedWorld, interpreted

pytestmark = interpreted
RANKS, LAST = 72, 71


def _addresses(each_rank: list[torch.Tensor]) -> torch.Tensor:
    return torch.tensor([each.data_ptr() for each in each_rank])


def test_the_last_rank_signals_all_and_waits_for_all() -> None:
    ready, record = [torch.zeros(RANKS, 2, dtype=torch.int64) for _ in range(RANKS)], DeviceErrorRecord(CPU)
    flags = Flags(_addresses(ready), CLOCK, ready[LAST], torch.full((RANKS,), 2).int(), timeout=3, status=record.status)
    signal_flags(flags, LAST, 1, epoch=4)
    expected = torch.zeros(RANKS, 2, dtype=torch.int64)
    expected[LAST, 1] = 4
    for rank, found in enumerate(ready):
        assert_same(found, expected, f"flags at rank {rank}")
    ready[LAST].fill_(4)
    wait_flags(flags, LAST, epoch=4)
    assert record.empty
    ready[LAST][64, 1] = 3
    wait_flags(flags, LAST, epoch=4)
    assert record.expired() == [LAST, 64, 1, 4, 3]


def test_rows_arrive_at_all_ranks() -> None:
    memory, flags = ([torch.zeros(RANKS, n, dtype=torch.int64) for _ in range(RANKS)] for n in (2, 1))
    sent = torch.arange(2 * RANKS).view(RANKS, 2)
    row_flags = RowFlags(_addresses(flags), torch.zeros(1, dtype=torch.int32), torch.tensor([5]))
    store_rows(Rows(sent, 16, 16, _addresses(memory), 16 * LAST, own=True), row_flags, LAST, programs=5)
    for rank in range(RANKS):
        assert memory[rank][LAST].tolist() == [2 * rank, 2 * rank + 1]
        assert memory[rank].count_nonzero() == 2 - (rank == 0)
        assert flags[rank].flatten().tolist() == [0] * LAST + [5]


@pytest.mark.parametrize("in_place", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_pooled_embeddings_arrive_at_all_ranks(in_place: bool) -> None:
    """The last rank has the only table. A pooling kernel stores a row at each rank, then one that puts slices."""
    case = Case((1,) * RANKS, (0,) * LAST + (1,), dim=4, longest=2)
    for epoch, world in enumerate((SlicedWorld(case), SlicedWorld(case))):
        if epoch == 0:
            world.store_pooled(LAST)
        else:
            world.put_slices(LAST, epoch, in_place=in_place)
        world.assert_windows()
        world.assert_no_record()


def test_gradients_arrive_at_all_ranks() -> None:
    """The last rank has the only sample; each rank has a table."""
    world = test_push_gradients.World(test_push_gradients.Case((0,) * LAST + (1,), ((4,),) * RANKS, gap=0))
    world.push(LAST, scale=0.5)
    world.assert_windows(scale=0.5)
    for rank, ready in enumerate(world.ready):
        assert ready[LAST].all(), f"signal at rank {rank}"
        assert ready.count_nonzero() == world.case.parts


def test_ids_are_pulled_from_all_ranks() -> None:
    ranks = test_pull_ids.Ranks([(0, 2), (1, 1)], RANKS, samples=1)
    values, offsets = ranks.pull([0])
    expected, starts = reference.pull_ids(ranks.published, [0], 1)
    assert_same(values[: expected.numel()], expected.int(), "ids")
    assert_same(offsets[: starts.numel()], starts.int(), "offsets")
    assert ranks.record.empty
