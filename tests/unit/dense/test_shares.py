import pytest

from dlrm_overlap.dense.stores import cut
from dlrm_overlap.kernels.dense.arguments import LINE

RANGES = [(0, 1), (1, 4), (4, 4), (4, 21), (21, 121)]  # lines


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("piece_lines", [1, 3, 10, 1000])
def test_every_line_has_one_owner_and_flags_are_numbered_in_order(world_size: int, piece_lines: int) -> None:
    ranges = cut([(first * LINE, end * LINE) for first, end in RANGES], piece_lines * LINE, world_size)
    owned, signaled = [], []
    for (first, end), (ready, pieces) in zip(RANGES, ranges, strict=True):
        assert [piece.begin for piece in pieces] == [first, *(piece.end for piece in pieces[:-1])]
        assert pieces[-1].end == end
        assert len(pieces) <= max(1, round((end - first) / piece_lines))
        for piece in pieces:
            for rank in range(world_size):
                lines = piece.lines(rank)
                owned += range(piece.first(rank), piece.first(rank) + lines)
                assert 0 <= lines <= piece.share
        signaled += [ready, *(piece.slot for piece in pieces)]
    assert owned == list(range(RANGES[-1][1]))
    assert signaled == list(range(len(signaled)))


def test_a_range_that_is_not_whole_lines_is_refused() -> None:
    with pytest.raises(AssertionError, match=r"range 0 .. 65 must consist of lines of 64 elements"):
        cut([(0, 65)], LINE, 2)
