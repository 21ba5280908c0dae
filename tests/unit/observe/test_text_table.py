"""Tables for a terminal."""

from dlrm_overlap.observe.text_table import format_table


def test_numbers_stand_right_and_words_left() -> None:
    lines = [["name", "ms", "speedup", "note"], ["pgas", "6.2", "-", "fast"], ["a", "1e-05", "12", "-"]]
    assert format_table(lines).splitlines() == [
        "name     ms  speedup  note",
        "pgas    6.2        -  fast",
        "a     1e-05       12  -",
    ]
