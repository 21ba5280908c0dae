"""A cache for Triton's interpreter, which spends a third of its time looking up functions and types."""

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
    """Return the interpreted functions of `owner`, a module or class of Triton's language, with their names."""
    return [(name, member) for name, member in inspect.getmembers(owner) if tl.core.is_builtin(member)]


def _patch_builtin(owner: ModuleType | type, builder: Any, scope: Any) -> None:
    """Replace Triton's function of this name, which each call of a function in a kernel calls five times."""
    for name, member in _builtins(owner):
        if getattr(owner, name) is member:  # else the kernel that calls has patched it
            interpreter._patch_attr(owner, name, member, builder, scope)


def _known_np_dtype(given: Any) -> np.dtype:
    """Replace Triton's function of this name, which makes a dictionary of all types for each value."""
    name = given.scalar.name
    if name not in _np_dtypes:
        _np_dtypes[name] = _get_np_dtype(given)
    return _np_dtypes[name]


def _take_masks_of_integers(name: str) -> None:
    """Have a masked load or store take a mask of integers: in the interpreter of triton 3.9 `&` may give one."""
    access = getattr(interpreter.InterpreterBuilder, name)

    def call(self: Any, *operands: Any, **options: Any) -> Any:
        mask = operands[1 if "load" in name else 2]
        if isinstance(mask, interpreter.TensorHandle):  # older tritons also pass arrays, which are of bools
            mask.data = mask.data.astype(bool, copy=False)
        return access(self, *operands, **options)

    setattr(interpreter.InterpreterBuilder, name, call)


def quicken() -> None:
    """Cache lookups of the interpreter in this process and in those forked from it."""
    for owner in (tl, tl.core, tl.tensor, tl.math, tl.core.tensor_descriptor_base):
        _builtins(owner)  # as they are before any is patched
    interpreter._patch_builtin = _patch_builtin
    interpreter._get_np_dtype = _known_np_dtype
    for name in ("create_masked_load", "create_masked_store"):
        _take_masks_of_integers(name)
