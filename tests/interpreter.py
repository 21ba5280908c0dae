"""Triton's interpreter, which takes a third of its time to look for functions and types: here it finds each once."""

import inspect
from functools import cache
from types import ModuleType
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

_get_np_dtype = interpreter._get_np_dtype
_np_dtypes: dict[str, np.dtype] = {}


@cache
def _builtins(owner: ModuleType | type) -> list[tuple[str, Any]]:
    """Return the functions of `owner`, a module or class of Triton's language, that are interpreted, by name."""
    return [(name, member) for name, member in inspect.getmembers(owner) if tl.core.is_builtin(member)]


def _patch_builtin(owner: ModuleType | type, builder: Any, scope: Any) -> None:
    """Do as Triton's function of this name, which each call of a function within a kernel calls five times."""
    for name, member in _builtins(owner):
        if getattr(owner, name) is member:  # else the kernel that calls has patched it
            interpreter._patch_attr(owner, name, member, builder, scope)


def _known_np_dtype(given: Any) -> np.dtype:
    """Do as Triton's function of this name, which makes a dictionary of all types for each value."""
    name = given.scalar.name
    if name not in _np_dtypes:
        _np_dtypes[name] = _get_np_dtype(given)
    return _np_dtypes[name]


def quicken() -> None:
    """Let the interpreter of this process, and of those forked from it, keep what it has found."""
    for owner in (tl, tl.core, tl.tensor, tl.math, tl.core.tensor_descriptor_base):
        _builtins(owner)  # as they are before any is patched
    interpreter._patch_builtin = _patch_builtin
    interpreter._get_np_dtype = _known_np_dtype
