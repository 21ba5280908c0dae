"""Tables for a terminal, and counted things."""

import pytest

from dlrm_overlap.launching.text_table import duration, format_table, plain


def test_numbers_stand_right_and_words_left() -> None:
    lines = [["name", "ms", "speedup", "note"], ["pgas", "6.2", "-", "fast"], ["a", "1e-05", "12", "-"]]
    assert format_table(lines).splitlines() == [
        "name     ms  speedup  note",
        "pgas    6.2        -  fast",
        "a     1e-05       12  -",
    ]


def test_nothing_of_a_text_is_for_the_terminal_to_obey() -> None:
    text = "\x1b]0;title\x07 \x9b2J \u202e\udc80\r\n\u65e5\u672c\u00e9 a"
    assert plain(text) == r"\x1b]0;title\x07 \x9b2J \u202e\udc80\r\n" + "\u65e5\u672c\u00e9 a"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "1 s"),
        (8.6, "9 s"),
        (59.6, "1 min"),
        (312, "5 min 12 s"),
        (4330, "1 h 12 min"),
        (3600, "1 h"),
        (3601, "1 h"),
        (3 * 86400 + 4 * 3600, "3 d 4 h"),
    ],
)
def test_a_duration_has_two_units(seconds: float, text: str) -> None:
    assert duration(seconds) == text
