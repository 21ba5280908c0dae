"""Tables for a terminal, and counted things."""

from dlrm_overlap.observe.text_table import count_of, format_table


def test_numbers_stand_right_and_words_left() -> None:
    lines = [["name", "ms", "speedup", "note"], ["pgas", "6.2", "-", "fast"], ["a", "1e-05", "12", "-"]]
    assert format_table(lines).splitlines() == [
        "name     ms  speedup  note",
        "pgas    6.2        -  fast",
        "a     1e-05       12  -",
    ]


def test_one_thing_is_told_in_the_singular() -> None:
    assert [count_of(number, "bad row") for number in (0, 1, 2)] == ["0 bad rows", "1 bad row", "2 bad rows"]
