"""The bar that prepare and predict show: on a terminal, and in a log."""

import contextlib
import io
import re

import pytest

from dlrm_overlap.launching import progress_bar
from dlrm_overlap.launching.progress_bar import ProgressBar


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_shows_a_bar_that_ends_with_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stderr", terminal := _Terminal())
    with ProgressBar("writing samples", 4000) as bar:
        bar.advance(1000)
        bar.advance(3000)
    states = terminal.getvalue().split("\r")
    assert re.match(r"writing samples:   0%\|.*\| 0.00 of 4.00k rows, \? rows/s, \? left", states[1])
    assert re.match(r"writing samples: 100%\|.*\| 4.00k of 4.00k rows, .* rows/s, 00:00 left", states[-1])
    assert states[-1].endswith("\n")
    assert bar.count == 4000


def test_a_number_of_rows_that_is_unknown_is_estimated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stderr", terminal := _Terminal())
    with contextlib.suppress(KeyError), ProgressBar("predicting", None) as bar:
        bar.estimate(400.4)
        bar.advance(100)
        raise KeyError
    assert re.search(r"predicting:  25%\|.*\| 100 of about 400 rows, .* left *\n$", terminal.getvalue())
    with ProgressBar("predicting", None, "samples") as bar:
        bar.estimate(400)
        bar.advance(100)
    assert re.search(r"predicting: 100%\|.*\| 100 of about 100 samples, .* left *\n$", terminal.getvalue())


def test_a_log_gets_lines_and_only_of_what_takes_long(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with ProgressBar("counting values", 400) as bar:
        bar.estimate(999)
        bar.advance(400)
    assert capsys.readouterr() == ("", "")
    monkeypatch.setattr(progress_bar, "_LINE_EVERY_S", 0.0)
    with ProgressBar("counting values", 400) as bar:
        bar.estimate(999)  # the number is known
        bar.advance(100)
        bar.advance(300)
    lines = capsys.readouterr().err.splitlines(keepends=True)
    assert all(re.fullmatch(r"counting values: \d+%, \d.* of 400 rows, .* rows/s, .* left\n", line) for line in lines)
    assert [line.split(",")[0] for line in lines] == [f"counting values: {share}%" for share in (0, 25, 100, 100)]
