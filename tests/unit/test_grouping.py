"""The aggregator's rule, for parts that are finished in any order at any times."""

import random

import pytest

from dlrm_overlap.kernels.grouping import GROUP_PARTS, Aggregator, Grouping, ranges_of


@pytest.mark.parametrize("aggregate_bytes", [0, 1, 4096, 65536, 100_000, 1 << 40])
@pytest.mark.parametrize(("units", "unit_bytes", "least"), [(1000, 512, 2), (7, 16, 4), (1, 4, 1), (333, 48, 1)])
def test_groups_have_the_bytes_that_are_asked_for(
    units: int, unit_bytes: int, least: int, aggregate_bytes: int
) -> None:
    grouping = Grouping.of(units, unit_bytes, aggregate_bytes, least)
    assert grouping.part_units % least == 0
    assert 1 <= grouping.group_parts <= GROUP_PARTS
    cut = [unit for group in range(grouping.groups) for unit in grouping.units_of(grouping.parts_of(group))]
    assert cut == list(range(units))
    for group in range(grouping.groups - 1):
        nbytes = len(grouping.units_of(grouping.parts_of(group))) * unit_bytes
        assert nbytes >= aggregate_bytes
        assert nbytes - grouping.part_units * unit_bytes < max(aggregate_bytes, 1), "a part fewer would do"


@pytest.mark.parametrize("longest_wait", [0, 3, 50, float("inf")])
def test_every_part_leaves_once_and_in_time(longest_wait: float) -> None:
    choices = random.Random(0)
    for _ in range(100):
        grouping = Grouping(choices.randint(1, 90), 1, choices.randint(1, GROUP_PARTS))
        plain, now = Aggregator(grouping, longest_wait), 0
        finished: dict[int, int] = {}
        left: set[int] = set()
        for part in choices.sample(range(grouping.parts), grouping.parts):
            now += choices.randrange(10)
            finished[part] = now
            puts = plain.finish(part, now)
            leaving = [each for put in puts for each in put]
            assert len(set(leaving)) == len(leaving)
            assert not left & {*leaving}, "a part leaves once"
            left |= {*leaving}
            group = set(grouping.parts_of(part // grouping.group_parts))
            assert {*leaving} <= finished.keys() & group
            due = group <= finished.keys() or any(
                now - finished[each] >= longest_wait for each in (group & finished.keys()) - (left - {*leaving})
            )
            assert bool(puts) == due
            assert not due or group & finished.keys() <= left
        assert left == set(range(grouping.parts))


def test_ranges_are_as_few_as_possible() -> None:
    assert ranges_of([5, 0, 1]) == [range(0, 2), range(5, 6)]
    assert ranges_of([]) == []
