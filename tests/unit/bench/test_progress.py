"""A figure shows its progress: a bar on a terminal."""

import io
import logging
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
