"""Which time counts towards a deadline."""

import time

import pytest

from dlrm_overlap.comm.deadline import Deadline


def test_time_in_which_the_process_stands_still_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    deadline = Deadline(2.0)
    for step in [0.25] * 4 + [3600.0]:
        now += step
        assert not deadline.is_over()
    assert deadline.waited_s == 2.0, "an hour counts as the longest poll"
    now += 0.25
    assert deadline.is_over()
