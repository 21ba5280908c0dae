"""The pitches and errors of a copy engine, and the choice between its copies and stores."""

from pathlib import Path

import pytest

from dlrm_overlap.comm.calls import COPIED_FROM_BYTES, fastest_way
from tests.conftest import read_rows
from tests.pages import todays


@pytest.mark.parametrize(("case", "least"), COPIED_FROM_BYTES.items())
def test_large_rows_are_copied_and_small_ones_stored(case: tuple[str, bool], least: int) -> None:
    beside, captured = case
    assert (fastest_way(least - 1, beside, captured), fastest_way(least, beside, captured)) == ("stores", "dma")


def test_no_way_is_faster_than_the_chosen_one_by_more_than_a_twentieth() -> None:
    medians: dict[tuple[str, ...], dict[str, float]] = {}
    best: dict[tuple[str, ...], float] = {}
    for row in read_rows(Path("docs/results/collectives.csv")):
        case = row["operation"], row["beside"], row["captured"], row["mb_per_peer"]
        median = float(row["median_ms"])
        best[case] = min(median, best.get(case, median))
        if todays([row]):
            medians.setdefault(case, {})[row["contender"]] = median
    assert best
    for case, least in best.items():
        way = fastest_way(int(case[3]) << 20, case[1], case[2] == "True")
        assert medians[case][way] <= least / 0.95, f"{case}: {way}, of {medians[case]}"
