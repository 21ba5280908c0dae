"""What a figure tells of how far it is: a bar on a terminal, else lines in the log."""

import io
import logging
import time
from collections.abc import Iterator

import pytest
from rich.console import Console

from dlrm_overlap.bench.harness.timing import counted
from dlrm_overlap.observe.run_log import start_logging

log = logging.getLogger("dlrm_overlap")


@pytest.fixture(autouse=True)
def _restored_log() -> Iterator[None]:
    before = log.handlers, log.level, log.propagate
    yield
    log.handlers, log.level, log.propagate = before


def test_a_terminal_shows_a_bar_that_counts_and_is_gone_at_the_end() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=100)
    start_logging(0, console)
    shown: list[str] = []
    file = console.file
    assert isinstance(file, io.StringIO)
    for item in counted("shapes", "abc"):
        shown.append(f"{item}: {file.getvalue()[-200:]}")
        log.info("measured %s", item)
    assert [f"{i}/3" in text for i, text in enumerate(shown)] == [True] * 3
    assert "measured a" in file.getvalue()
    assert file.getvalue().endswith("\x1b[2K"), "the bar's line is wiped"


def test_elsewhere_a_line_tells_the_time_left_every_ten_seconds(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    log.handlers, log.propagate = [], True
    clock = iter(range(0, 100, 4))  # an item takes 4 s
    monkeypatch.setattr(time, "monotonic", lambda: float(next(clock)))
    with caplog.at_level(logging.INFO, logger="dlrm_overlap"):
        assert list(counted("shapes", range(6))) == list(range(6))
    assert caplog.messages == ["3 of 6 shapes, about 12 s left"]
