"""Measures the way of a step through the files of the package: how many it enters, and how often it goes to another."""

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import dlrm_overlap

_PACKAGE = Path(dlrm_overlap.__file__).parent


class StepPath(NamedTuple):
    """The calls of a step, as Python makes them on one thread."""

    files: list[str]
    """files of the package in which a function is called, in the order of the first call"""
    functions: int
    """different functions of these files"""
    changes: int
    """calls of a function of another file than that of the call before"""


def step_path(step: Callable[[], Any]) -> StepPath:
    """Take a step, and return its way through the package's files."""
    calls: list[tuple[str, str]] = []

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(str(_PACKAGE)):
            calls.append((frame.f_code.co_filename, frame.f_code.co_qualname))

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        step()
    finally:
        sys.setprofile(before)
    files = [str(Path(file).relative_to(_PACKAGE)) for file, _ in calls]
    changes = sum(file != last for file, last in zip(files[1:], files, strict=False))
    return StepPath(list(dict.fromkeys(files)), len(set(calls)), changes)
