import numpy as np
import pytest

from dlrm_overlap.data.zipf import ZipfRanks, ZipfTable


def error_bound(alpha: float) -> float:
    """What the class's docstring promises for the relative error of a row's probability."""
    return 4e-4 if alpha <= 1.05 else 2e-3 if alpha <= 2 else 9e-3


def exact_probability(rows: int, alpha: float, ranks: np.ndarray) -> np.ndarray:
    total = sum(float((np.arange(k, min(k + 2**20, rows + 1)) ** -alpha).sum()) for k in range(1, rows + 1, 2**20))
    return (ranks + 1.0) ** -alpha / total


def draw_in_parts(ranks: ZipfRanks) -> tuple[np.ndarray, np.ndarray]:
    """Return the first draw of each part of each cell, and the first after it, as offsets in the cell."""
    cell = 2 ** (64 - ranks.bits)
    split = [-(-int(threshold) * cell // 2**63) for threshold in ranks.thresholds]
    begin = np.array([first for middle in split for first in (0, middle)], dtype=np.uint64)
    end = np.array([last for middle in split for last in (middle, cell)], dtype=np.uint64)
    return begin, end


def draws_below(ranks: ZipfRanks, rank: int) -> np.ndarray:
    """Return how many draws of each part give a rank below `rank`; ranks rise with the draw in a part."""
    begin, end = draw_in_parts(ranks)
    cells = (np.arange(len(begin), dtype=np.uint64) // np.uint64(2)) << np.uint64(64 - ranks.bits)
    low, high = begin.copy(), end.copy()
    while (low < high).any():
        middle = low + (high - low) // np.uint64(2)
        below = (low < high) & (ranks.draw(cells + np.minimum(middle, end - np.uint64(1) * (end > 0))) < rank)
        low, high = np.where(below, middle + np.uint64(1), low), np.where(below | (low >= high), high, middle)
    return low - begin


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0, 1.05, 2.0, 4.0, 5.0, 8.0, 40.0])
@pytest.mark.parametrize("rows", [1, 2, 128, 130, 1000, 40_000_000])
def test_each_row_has_its_zipf_probability(rows: int, alpha: float) -> None:
    ranks = ZipfRanks(rows, alpha)
    within_an_item = [2**24 + quarter * 2**18 for quarter in range(4)]
    asked = [0, 1, 2, 9, 127, 128, 129, 135, 136, 999, 10**6, *within_an_item, 2**24 + 2**20 - 1, rows - 2, rows - 1]
    asked = np.unique(np.clip(asked, 0, rows - 1))
    exact = exact_probability(rows, min(alpha, 32.0), asked)
    asked, exact = asked[exact > 1e-14], exact[exact > 1e-14]  # 2**64 draws cannot tell the others' mass so finely
    parts = [draws_below(ranks, int(rank) + 1) - draws_below(ranks, int(rank)) for rank in asked]
    drawn = [sum(part.tolist()) / 2**64 for part in parts]
    np.testing.assert_allclose(drawn, exact, rtol=error_bound(alpha))
    np.testing.assert_allclose(ranks.probability(asked), exact, rtol=1e-4 if alpha <= 2 else 1e-3)


@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0, 1.05, 3.0, 20.0, 1e6])
@pytest.mark.parametrize("rows", [1, 2, 5, 128, 129, 3000])
def test_draws_fall_on_ranks_in_proportion(rows: int, alpha: float) -> None:
    ranks, draws = ZipfRanks(rows, alpha), 2**18
    counts = np.bincount(ranks.draw(np.arange(draws, dtype=np.uint64) << np.uint64(46)), minlength=rows)
    expected = draws * exact_probability(rows, min(alpha, 32.0), np.arange(rows))
    # A range of draws has as many evenly spaced draws as its length, +-1. A rank has a range in each part of its item.
    firsts, parts = np.unique(ranks.first_ranks, return_counts=True)
    stretches = parts[np.searchsorted(firsts, np.arange(rows), side="right") - 1]
    assert len(counts) == rows
    assert (np.abs(counts - expected) < 1 + stretches + error_bound(alpha) * expected).all()


@pytest.mark.parametrize("alpha", [0.0, 1.05, 4.5, 50.0])
@pytest.mark.parametrize("rows", [1, 129, 300, 40_000_000, 2**31 - 1])
def test_draws_at_the_ends_of_cells_and_parts_give_ids_of_the_table(rows: int, alpha: float) -> None:
    ranks = ZipfRanks(rows, alpha)
    begin, end = draw_in_parts(ranks)
    cells = (np.arange(len(begin), dtype=np.uint64) // np.uint64(2)) << np.uint64(64 - ranks.bits)
    held = begin < end
    firsts = np.append(np.unique(ranks.first_ranks), rows)
    first_of_part = ranks.draw((cells + begin)[held])
    last_of_part = ranks.draw((cells + end - np.uint64(1))[held])
    np.testing.assert_array_equal(first_of_part, ranks.first_ranks[held])
    assert (last_of_part < firsts[np.searchsorted(firsts, first_of_part, side="right")]).all()
    table = ZipfTable(ranks, offset=rows - 1)
    ids = table.row_ids(np.append(last_of_part, [0, rows - 1]))
    assert ids.dtype == np.int32
    assert ids.min() >= 0
    assert ids.max() < rows


@pytest.mark.parametrize("rows", [1, 2, 3, 10, 97, 1000, 4096])
def test_ranks_and_rows_are_one_to_one(rows: int) -> None:
    ids = ZipfTable(ZipfRanks(rows, 1.05), offset=rows // 3).row_ids(np.arange(rows))
    assert sorted(ids.tolist()) == list(range(rows))
