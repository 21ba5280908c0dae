"""How products are cut into parts, and in which order these come."""

import pytest

from dlrm_overlap.dense.gemm.plan import WHOLE, double, halve, scattered_parts, senders, turns


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5, 8])
def test_no_two_ranks_take_the_same_peer_at_a_turn(world_size: int) -> None:
    orders = [turns(rank, world_size) for rank in range(world_size)]
    for rank, order in enumerate(orders):
        assert sorted([rank, *order]) == list(range(world_size))
    for turn in zip(*orders, strict=True):
        assert len(set(turn)) == world_size
    for rank in range(world_size):
        for turn, peer in enumerate(senders(rank, world_size)):
            assert orders[peer][turn] == rank


@pytest.mark.parametrize("parts", [WHOLE, 1, 4])
@pytest.mark.parametrize("world_size", [2, 3, 4, 8])
def test_parts_cover_the_peers_rows_once(world_size: int, parts: int) -> None:
    rows = 100
    for rank in range(world_size):
        plan = scattered_parts(rank, world_size, rows, parts)
        covered = [row for part in plan for row in range(1000)[part.rows(rows)]]
        assert sorted(covered) == [row for row in range(world_size * rows) if row // rows != rank]


def test_parts_are_small_at_both_ends_alone() -> None:
    scattered = [(*part.ranks, part.begin, part.end) for part in scattered_parts(1, 4, 64, 3)]
    assert scattered == [(0, 0, 16), (0, 16, 32), (0, 32, 64), (3, 0, 64), (2, 0, 32), (2, 32, 48), (2, 48, 64)]
    assert len(scattered_parts(0, 2, 64, 4)) == 4
    assert double(8192, 4) == [(0, 1024), (1024, 2048), (2048, 4096), (4096, 8192)]
    assert double(19, 3) == [(0, 8), (8, 19)]
    assert halve(8192, 4) == [(0, 4096), (4096, 6144), (6144, 7168), (7168, 8192)]
    assert halve(5, 4) == [(0, 5)]
