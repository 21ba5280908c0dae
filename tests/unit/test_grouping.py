"""The groups of messages between hosts."""

import pytest

from dlrm_overlap.kernels.grouping import group_rows, groups_of


@pytest.mark.parametrize("aggregate_bytes", [0, 1, 4096, 65536, 100_000, 1 << 40])
@pytest.mark.parametrize(("rows", "row_bytes", "least"), [(1000, 512, 2), (7, 16, 4), (1, 4, 1), (333, 48, 1)])
def test_groups_have_the_bytes_that_are_asked_for(rows: int, row_bytes: int, least: int, aggregate_bytes: int) -> None:
    each = group_rows(row_bytes, aggregate_bytes, least)
    assert each % least == 0
    groups = groups_of(rows, each)
    assert [row for group in groups for row in group] == list(range(rows))
    for group in groups[:-1]:
        nbytes = len(group) * row_bytes
        assert nbytes >= aggregate_bytes
        assert nbytes - least * row_bytes < max(aggregate_bytes, 1), "fewer rows would do"
