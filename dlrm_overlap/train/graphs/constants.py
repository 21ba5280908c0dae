"""Parts of a batch that are not tensors: what they were, and whether a later batch has the same."""

import copy
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

_LONGEST = 40  # characters of a value in a message


class Constant(NamedTuple):
    """A part of a batch that is not a tensor; of a list, dictionary or object, its type."""

    parent: str
    """path of the part that holds it; empty for the batch itself"""
    key: Any
    """index, key or attribute"""
    value: Any

    @property
    def path(self) -> str:
        """The path from the batch, as in "meta.k"."""
        return f"{self.parent}.{self.key}".strip(".")


def frozen(constants: Sequence[Constant]) -> list[Constant]:
    """Return copies that stay as they are where a caller changes its values in place."""
    return [each._replace(value=_frozen(each.value)) for each in constants]


def _frozen(value: Any) -> Any:
    copied = copy_of(value)
    # A value that can change, and of which there is no copy, counts as changed: an object is equal to itself alone.
    return object() if copied is value and type(value).__hash__ is None else copied


def copy_of(value: Any) -> Any:
    """Return a value that nobody else changes: a hashable one as it is, such as a number, and a copy of an array."""
    if type(value).__hash__ is not None:
        return value
    try:
        return copy.deepcopy(value)
    except Exception:  # whatever a user's class raises
        return value


def difference(given: Sequence[Constant], first: Sequence[Constant]) -> tuple[str, str] | None:
    """Return the path of the first part that differs, and how it differs from the first batch's, or None."""
    for ours, theirs in zip(given, first, strict=False):
        if (ours.parent, ours.key) != (theirs.parent, theirs.key):
            return ours.parent, f"{_named(ours.parent)} has other parts than in the first batch"
        if not is_same(ours.value, theirs.value):
            return (
                ours.path,
                f"{_named(ours.path)} is {_shown(ours.value)}, and was {_shown(theirs.value)} in the first batch",
            )
    if len(given) != len(first):
        return "", "the batch has more or fewer parts than the first one"
    return None


def is_same(value: Any, other: Any) -> bool:
    """Return whether a model computes the same with either value; NaN is NaN. False where nobody can tell."""
    if type(value) is not type(other):
        return False
    if isinstance(value, float | complex | np.inexact):
        return repr(value) == repr(other)  # which tells 0.0 from -0.0
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        return (value.dtype, value.shape) == (other.dtype, other.shape) and value.tobytes() == other.tobytes()
    try:
        return value is other or bool(value == other)
    except Exception:  # as of arrays within a set, or whatever a user's class raises
        return False


def _named(path: str) -> str:
    return f"part {path}" if path else "the batch"


def _shown(value: Any) -> str:
    text = value.__name__ if isinstance(value, type) else repr(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}.."
