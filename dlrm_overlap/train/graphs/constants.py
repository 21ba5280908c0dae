"""The parts of a batch that are not tensors, and their comparison."""

import copy
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

_LONGEST = 40  # characters of a value in a message


class Constant(NamedTuple):
    """A part of a batch that is not a tensor, or the type of a list, dictionary or object."""

    parent: str
    """path of the list, dictionary or object that contains the part; empty if that is the batch itself"""
    key: Any
    """index, key or attribute name of the part in its parent"""
    value: Any

    @property
    def path(self) -> str:
        return f"{self.parent}.{self.key}".strip(".")


def frozen(constants: Sequence[Constant]) -> list[Constant]:
    """Return copies of `constants` that do not change if the caller changes the values."""
    return [each._replace(value=_frozen(each.value)) for each in constants]


def _frozen(value: Any) -> Any:
    copied = copy_of(value)
    # A mutable value that cannot be copied counts as changed: an object() equals nothing but itself.
    return object() if copied is value and type(value).__hash__ is None else copied


def copy_of(value: Any) -> Any:
    """Return a deep copy of a value that is not hashable, such as an array, and hashable values as they are."""
    if type(value).__hash__ is not None:
        return value
    try:
        return copy.deepcopy(value)
    except Exception:  # of any type: the class is the user's
        return value


def difference(given: Sequence[Constant], first: Sequence[Constant]) -> tuple[str, str] | None:
    """Return the path of the first part in which two batches differ, and how it differs; None if none does."""
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
    """Return whether two values are equal for a model; False if they cannot be compared.

    NaN equals NaN, but 0.0 does not equal -0.0, nor 1 equal 1.0.
    """
    if type(value) is not type(other):
        return False
    if isinstance(value, float | complex | np.inexact):
        return repr(value) == repr(other)  # 0.0 is not -0.0
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        return (value.dtype, value.shape) == (other.dtype, other.shape) and value.tobytes() == other.tobytes()
    try:
        return value is other or bool(value == other)
    except Exception:  # of any type: the class is the user's
        return False


def _named(path: str) -> str:
    return f"part {path}" if path else "the batch"


def _shown(value: Any) -> str:
    text = value.__name__ if isinstance(value, type) else repr(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}.."
