"""The pieces in which an all-reduce sends and averages long rows, and the order in which it adds them up."""

import numpy
import pytest
import torch

from dlrm_overlap.comm.flows import Averaging, Transfer, mean_in_order


def _averaging(row_bytes: int, rank: int, world_size: int) -> Averaging:
    rows = torch.arange(world_size * row_bytes).to(torch.uint8)
    shares, output = 512, 1 << 20
    scatter = Transfer(rows, row_bytes, row_bytes, shares + rank * row_bytes, in_place=True, way="dma")
    gather = Transfer(rows[:row_bytes], 0, row_bytes, output + rank * row_bytes, in_place=True, way="dma")
    return Averaging(scatter, gather, shares, torch.float32)


@pytest.mark.parametrize(("row_bytes", "count"), [(0, 4), (4, 4), (1000, 1), (1000, 2), (1024, 4), (4112, 4), (600, 4)])
def test_pieces_cover_every_row_and_every_share_once(row_bytes: int, count: int) -> None:
    world_size = 3
    shares, means = torch.zeros(2, world_size, world_size * max(1, row_bytes), dtype=torch.int32)[:, 0].unbind()
    for rank in range(world_size):
        whole = _averaging(row_bytes, rank, world_size)
        pieces = whole.pieces(world_size, count)
        assert 1 <= len(pieces) <= count
        assert sum(piece.scatter.row_bytes for piece in pieces) == row_bytes
        for peer in range(world_size):
            sent = torch.cat([piece.scatter.row(peer) for piece in pieces])
            assert torch.equal(sent, whole.scatter.row(peer))
        for piece in pieces:
            begin, size = piece.scatter.offset - whole.shares, piece.scatter.row_bytes
            shares[begin : begin + size] += 1
            assert begin == piece.shares - whole.shares + rank * size  # in the order of the ranks
            begin = piece.gather.offset - (1 << 20)
            means[begin : begin + size] += 1
            assert begin % 4 == 0
        assert torch.equal(torch.cat([piece.gather.source for piece in pieces]), whole.gather.source)
    assert torch.equal(shares[: world_size * row_bytes], torch.ones(world_size * row_bytes, dtype=torch.int32))
    assert torch.equal(means, shares)


def test_the_pieces_of_the_example() -> None:
    pieces = _averaging(1000, 1, 2).pieces(2, 2)
    assert [piece.scatter.row_bytes for piece in pieces] == [512, 488]
    assert pieces[1].scatter.offset - 512 == 2 * 512 + 488


@pytest.mark.parametrize("world_size", [1, 4, 5, 8, 17])
def test_a_mean_is_added_up_in_the_order_of_the_ranks(world_size: int) -> None:
    rows = torch.randn(world_size, 33, generator=torch.Generator().manual_seed(world_size))
    rows *= torch.logspace(-3, 3, world_size)[:, None]
    expected = []
    for column in rows.t().numpy():
        total = numpy.float32(0)
        for number in column:
            total += number
        expected.append(total * numpy.float32(1 / world_size))
    assert mean_in_order(rows).tolist() == expected
    halves = rows.bfloat16()
    assert torch.equal(mean_in_order(halves), mean_in_order(halves.float()))
