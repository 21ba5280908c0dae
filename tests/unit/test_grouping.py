"""The groups of messages between hosts."""

import pytest

from dlrm_overlap.kernels.grouping import group_rows


@pytest.mark.parametrize("aggregate_bytes", [0, 1, 65536, 100_000])
@pytest.mark.parametrize(("row_bytes", "least"), [(512, 2), (16, 4), (4, 1)])
def test_groups_have_the_bytes_that_are_asked_for(row_bytes: int, least: int, aggregate_bytes: int) -> None:
    rows = group_rows(row_bytes, aggregate_bytes, least)
    assert rows % least == 0
    assert rows * row_bytes >= aggregate_bytes
    assert (rows - least) * row_bytes < max(aggregate_bytes, 1), "fewer rows would do"
