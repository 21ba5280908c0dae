"""The tables and numbers of the pages are those of the measured rows."""

import re
from pathlib import Path

import pytest

from tests import pictures
from tests.pages import FOLDER, PAGES, TABLES, fill, origin, written


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_writing_a_page_anew_changes_nothing(page: Path) -> None:
    assert written(page) == page.read_text(), "run `python -m tests.pages`"


def test_every_table_is_on_a_page_and_all_rows_that_lack_their_origin_say_so() -> None:
    text = "\n".join(page.read_text() for page in PAGES)
    called = [call.split() for call in re.findall(r"<!-- rows: (.*?) -->", text)]
    assert {name for name, *_ in called} == set(TABLES)
    shown = {argument for call in called for argument in call}
    for path in FOLDER.rglob("*.csv"):
        name = path.relative_to(FOLDER).as_posix()
        if not re.search(r"no commit|uncommitted|no command", origin(name)) or name.startswith("calibration/"):
            continue
        assert name in shown or f"`{name}`" in text, f"{name}: {origin(name)}"


def test_the_numbers_of_a_sentence_are_replaced_and_nothing_else() -> None:
    text = "It takes 1.5 ms,\nnot 2. It takes 3 s."
    assert fill(text, "It takes {:.2f} ms, not {}", [1.25, 4]) == "It takes 1.25 ms,\nnot 4. It takes 3 s."
    with pytest.raises(ValueError, match="2 sentences"):
        fill(text, "It takes {}", [1])


def test_the_pictures_have_the_numbers_of_the_rows() -> None:
    shown = re.findall(r"<text [^>]*>([^<]*)</text>", pictures.STEP_TIMES.read_text())
    for title, ms in pictures.step_times():
        assert title in shown
        assert {f"{value:.2f}" for value in ms} <= set(shown), f"{title}: run `python -m tests.pictures`"
