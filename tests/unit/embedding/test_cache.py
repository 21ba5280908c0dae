"""What steps make once: bounded, but for what captures have used."""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import pytest

from dlrm_overlap.kernels import launches
from dlrm_overlap.kernels.launches import StepCache


class _Made:
    """Something that is made for a key."""


@contextmanager
def _capturing() -> Iterator[None]:
    with patch.multiple(launches, is_initialized=lambda: True, is_current_stream_capturing=lambda: True):
        yield


@pytest.fixture(autouse=True)
def _three_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launches, "_MOST", 3)


def _asked(known: StepCache[int, _Made], *keys: int) -> list["weakref.ref[_Made]"]:
    return [weakref.ref(known.get(key, _Made)) for key in keys]


def _is_there(*made: "weakref.ref[_Made]") -> list[bool]:
    return [each() is not None for each in made]


def test_what_was_asked_for_longest_ago_is_forgotten() -> None:
    known = StepCache[int, _Made]()
    first, second, third = _asked(known, 1, 2, 3)
    assert known.get(1, _Made) is first(), "made once"
    (fourth,) = _asked(known, 4)
    assert _is_there(first, second, third, fourth) == [True, False, True, True]
    assert len(known) == 3


@pytest.mark.parametrize("when", ["when it was made", "afterwards"])
def test_what_a_capture_has_used_stays(when: str) -> None:
    known = StepCache[int, _Made]()
    if when == "afterwards":
        _asked(known, 1)
    with _capturing():
        (used,) = _asked(known, 1)
    others = _asked(known, *range(2, 12))
    assert _is_there(used, *others) == [True] + 7 * [False] + 3 * [True], "nor is it one of the three"
    assert known.get(1, _Made) is used(), "and another capture finds it"
    del known
    assert not any(_is_there(used, *others))


def test_what_a_capture_has_used_stays_when_it_is_replaced() -> None:
    known = StepCache[int, _Made]()
    with _capturing():
        (used,) = _asked(known, 1)
    (other,) = _asked(known, 2)
    known.forget()
    assert _is_there(used, other) == [True, False]
    assert len(known) == 0
    assert known.get(1, _Made) is not used(), "made anew"
    del known
    assert not any(_is_there(used))
