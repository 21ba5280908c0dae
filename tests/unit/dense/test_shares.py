"""Every line of the flat gradient has one owner, and flags are numbered in the order in which they are raised."""

import pytest

from dlrm_overlap.dense.shares import Action, Kind, Piece, actions, cut
from dlrm_overlap.kernels.dense.arguments import LINE

RANGES = [(0, 1), (1, 4), (4, 4), (4, 21), (21, 121)]  # lines


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("piece_lines", [1, 3, 10, 1000])
def test_every_line_has_one_owner_and_a_row_at_it(world_size: int, piece_lines: int) -> None:
    ranges = cut([(first * LINE, end * LINE) for first, end in RANGES], piece_lines * LINE, world_size)
    owned, landed = [], []
    for (first, end), pieces in zip(RANGES, ranges, strict=True):
        assert [piece.begin for piece in pieces] == [first, *(piece.end for piece in pieces[:-1])]
        assert pieces[-1].end == end
        assert len(pieces) <= max(1, round((end - first) / piece_lines))
        for piece in pieces:
            for rank in range(world_size):
                lines = piece.lines(rank)
                owned += range(piece.first(rank), piece.first(rank) + lines)
                assert 0 <= lines <= piece.share
            landed += range(piece.staging, piece.staging + world_size * piece.share)
    assert owned == list(range(RANGES[-1][1]))
    assert landed == list(range(len(landed)))


def test_a_range_of_no_whole_lines_is_refused() -> None:
    with pytest.raises(AssertionError, match=r"a range 0 .. 65, not of whole lines of 64"):
        cut([(0, 65)], LINE, 2)


@pytest.mark.parametrize("push", [False, True])
@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_what_is_awaited_is_raised_before_and_all_pieces_are_averaged(push: bool, count: int) -> None:
    first_slot = 7
    issued = actions([Piece(0, 1, 1, 0)] * count, push, first_slot)
    raised: list[int] = []
    ready: dict[int, int] = {}  # piece -> the flag that says that it is there
    for action in issued:
        if action.kind == Kind.WAIT:
            assert action.slot in raised, "a rank awaits its own flag, too"
            continue
        assert action.slot == first_slot + len(raised), "numbered in the order in which they are raised"
        raised.append(action.slot)
        if action.kind == Kind.AVERAGE:
            awaited = [a.slot for a in issued[: issued.index(action)] if a.kind == Kind.WAIT]
            assert awaited, "nothing is read before its rank has raised a flag"
            assert max(awaited) >= ready.get(action.piece, first_slot)
        else:
            ready[action.piece] = action.slot
    assert [action.piece for action in issued if action.kind == Kind.AVERAGE] == list(range(count))


def test_a_pushed_piece_travels_while_the_one_before_is_averaged() -> None:
    found = [Action(Kind.SEND, 0, 0), Action(Kind.SEND, 1, 1), Action(Kind.WAIT, 0, 0), Action(Kind.AVERAGE, 2, 0)]
    found += [Action(Kind.WAIT, 1, 1), Action(Kind.AVERAGE, 3, 1)]
    assert actions([Piece(0, 1, 1, 0)] * 2, push=True, first_slot=0) == found
