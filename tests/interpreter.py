"""Caches for Triton's interpreter, which otherwise spends most of its time on making types and looking up functions.

What is cached depends on types and constants alone, so kernels compute the same.
"""

import inspect
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import product
from types import ModuleType
from typing import Any

import numpy as np
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

_get_np_dtype = interpreter._get_np_dtype
_np_dtypes: dict[str, np.dtype] = {}


_semantic = TritonSemantic(interpreter.interpreter_builder)


def _interpreted(member: Any) -> Callable[..., Any]:
    """Return a function of Triton's language for the interpreter."""
    function = getattr(member, "__wrapped__", member)

    def call(*arguments: Any, **options: Any) -> Any:
        options["_semantic"] = _semantic
        return function(*arguments, **options)

    return call


@cache
def _builtins(owner: ModuleType | type) -> list[tuple[str, Any, Callable[..., Any]]]:
    """Return name, function and interpreted function of what `owner`, a module or class of Triton's language, has."""
    members = inspect.getmembers(owner)
    return [(name, member, _interpreted(member)) for name, member in members if tl.core.is_builtin(member)]


def _patch_builtin(owner: ModuleType | type, builder: Any, scope: Any) -> None:
    """Replace Triton's function of this name, which each launch calls five times."""
    for name, member, interpreted in _builtins(owner):
        if getattr(owner, name) is member:  # else a call in this launch has patched it
            scope.set_attr(owner, name, interpreted)


_patch_lang = interpreter._patch_lang
_patched: set[frozenset[str]] = set()
"""names of the modules of Triton's language that are patched"""


@cache
def _language_of(kernel: Any) -> frozenset[str]:
    return frozenset(each.__name__ for each in kernel.__globals__.values() if each is tl or each is tl.core)


def _patch_lang_once(kernel: Any) -> Any:
    """Replace Triton's function of this name, which each launch and each call of a function in a kernel calls."""
    language = _language_of(kernel)
    if language not in _patched:
        _patched.add(language)
        _patch_lang(kernel)
    return _LangPatchScope()


class _LangPatchScope(interpreter._LangPatchScope):
    def restore(self) -> None:
        """Leave the language patched: nothing in this process compiles."""


_implicit_cvt, _int32, _int64 = interpreter._implicit_cvt, range(-(2**31), 2**31), range(-(2**63), 2**63)


def _known_implicit_cvt(value: Any) -> Any:
    """Replace Triton's function of this name, which makes the type of each argument of a launch from a text."""
    if type(value) is int and value in _int64:
        kind, number = (tl.int32, np.int32) if value in _int32 else (tl.int64, np.int64)
        return tl.tensor(interpreter.TensorHandle(np.array([value], dtype=number), kind), kind)
    return _implicit_cvt(value)


@cache
def _signature_of(kernel: Any) -> tuple[list[str], dict[str, Any]]:
    """Return the names of a kernel's arguments, and the defaults of those that have one."""
    parameters = inspect.signature(kernel).parameters.values()
    return [each.name for each in parameters], {e.name: e.default for e in parameters if e.default is not e.empty}


def _run_on_cpu(self: Any, *arguments: Any, **options: Any) -> None:
    """Replace the method that runs a kernel, which copies tensors to the host and back, though they are there.

    It also reads the kernel's signature twice.
    """
    names, defaults = _signature_of(self.fn)
    given = {**defaults, **dict(zip(names, arguments, strict=False))}
    given |= {name: value for name, value in options.items() if name in names}
    assert len(given) == len(names) >= len(arguments), f"{self.fn.__name__}: arguments {list(given)} of {names}"
    assert not self.pre_run_hooks
    interpreter._patch_lang(self.fn)
    converted = {
        name: value if name in self.constexprs else interpreter._implicit_cvt(value) for name, value in given.items()
    }
    given_grid: Any = self.grid(converted) if callable(self.grid) else self.grid
    grid = *given_grid, *(1,) * (3 - len(given_grid))
    interpreter.interpreter_builder.set_grid_dim(*grid)
    try:
        for place in product(*map(range, grid)):
            interpreter.interpreter_builder.set_grid_idx(*place)
            self.fn(**converted)
    except Exception as error:
        raise interpreter.InterpreterError(repr(error)) from error


def _known_np_dtype(given: Any) -> np.dtype:
    """Replace Triton's function of this name, which makes a dictionary of all types for each value."""
    name = given.scalar.name
    if name not in _np_dtypes:
        _np_dtypes[name] = _get_np_dtype(given)
    return _np_dtypes[name]


_make_block_type, _make_tensor = tl.block_type.__init__, tl.tensor.__init__
_block_types: dict[tuple[str, int, tuple[int, ...]], dict[str, Any]] = {}


def _init_block_type(self: tl.block_type, element_ty: Any, shape: Any) -> None:
    """Replace the constructor of a block's type: equal ones share their attributes."""
    sizes = tuple([getattr(size, "value", size) for size in shape])
    key = str(element_ty), getattr(element_ty, "address_space", 0), sizes
    if (known := _block_types.get(key)) is None:
        _make_block_type(self, element_ty, shape)
        known = _block_types[key] = self.__dict__
    self.__dict__ = known


def _init_tensor(self: tl.tensor, handle: Any, type: Any) -> None:
    """Replace the constructor of a block: those of one type share all attributes but the handle."""
    of_type = type.__dict__
    if "tensor" not in of_type:
        _make_tensor(self, None, type)
        of_type["tensor"] = dict(self.__dict__)
    self.__dict__.update(of_type["tensor"], handle=handle)


_element_types: dict[tuple[str, int, str], tl.block_type] = {}


def _known_element_type(self: tl.block_type, scalar_ty: Any) -> tl.block_type:
    """Replace the method `with_element_ty`: equal types are one."""
    key = self.name, getattr(scalar_ty, "address_space", 0), scalar_ty.name
    if key not in _element_types:
        _element_types[key] = tl.block_type(scalar_ty, list(self.shape))
    return _element_types[key]


_unwrap_if_constexpr = tl.core._unwrap_if_constexpr
_OPERANDS = {tl.tensor, int, float, bool, str, type(None), tl.dtype, tl.block_type, tl.pointer_type}


def _unwrap_unless_operand(value: Any) -> Any:
    """Replace Triton's function of this name, which asks each operand whether it is a list or a tuple."""
    return value if type(value) in _OPERANDS else _unwrap_if_constexpr(value)


_check_handle = interpreter.TensorHandle.__post_init__
_checked: set[tuple[int, str]] = set()


def _check_new_handle(self: Any) -> None:
    """Replace the method that compares the bytes of values with those of their type: once for each pair is enough."""
    key = self.data.itemsize, self.dtype.name
    if key not in _checked:
        _check_handle(self)
        _checked.add(key)


def _known_operands(find: Callable[..., tuple[Any, Any]]) -> Callable[..., tuple[Any, Any]]:
    """Replace a method that gives two operands the same type and shape, which most have.

    Their types decide, so `find` decides for two types once, and a number is made a block of the other operand's type
    once.
    """
    elements, blocks = dict[tuple[Any, ...], Any](), dict[tuple[Any, ...], Any]()

    def operands(self: Any, lhs: Any, rhs: Any, *rules: bool) -> tuple[Any, Any]:
        ours, kind = getattr(lhs, "type", None), type(rhs)
        if not isinstance(ours, tl.dtype) or (kind is float and rhs == 0):  # 0.0 equals -0.0
            return find(self, lhs, rhs, *rules)
        if kind is tl.tensor:
            key = ours.name, rhs.type.name, rules
            if key in elements:
                if (known := elements[key]) is None:
                    return lhs, rhs
                return self.broadcast_impl_value(self.cast(lhs, known[0]), self.cast(rhs, known[1]))
            found = find(self, lhs, rhs, *rules)
            same = found[0] is lhs and found[1] is rhs
            elements[key] = None if same else (found[0].type.scalar, found[1].type.scalar)
            return found
        if kind is not int and kind is not float:
            return find(self, lhs, rhs, *rules)
        key = ours.name, kind, rhs, rules
        if key in blocks:
            return lhs, blocks[key]
        found = find(self, lhs, rhs, *rules)
        if found[0] is lhs:
            blocks[key] = found[1]
        return found

    return operands


_cast = TritonSemantic.cast


def _cast_unless_equal(self: Any, input: Any, dst_ty: Any, fp_downcast_rounding: str | None = None) -> Any:
    """Replace the method of this name, which compares all that types have."""
    return input if input.type.scalar is dst_ty.scalar else _cast(self, input, dst_ty, fp_downcast_rounding)


_broadcast, _scalar_constant = TritonSemantic.broadcast_impl_value, TritonSemantic.scalar_constant
_constants: dict[tuple[str, type, int | float], Any] = {}


def _broadcast_unless_equal(self: Any, lhs: Any, rhs: Any) -> tuple[Any, Any]:
    """Replace the method of this name, which compares all sizes of two blocks, though most have the same shape."""
    ours, theirs = lhs.type, rhs.type
    if ours.is_block() and theirs.is_block() and ours.shape.values == theirs.shape.values:
        return lhs, rhs
    return _broadcast(self, lhs, rhs)


def _known_scalar_constant(self: Any, value: Any, dtype: Any) -> Any:
    """Replace the method of this name, which makes the constants of a kernel again in each program."""
    if value == 0 and type(value) is float:  # 0.0 equals -0.0
        return _scalar_constant(self, value, dtype)
    key = dtype.name, type(value), value
    if key not in _constants:
        _constants[key] = _scalar_constant(self, value, dtype)
    return _constants[key]


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
    """Cache what the interpreter looks up and makes, in this process and in those forked from it."""
    for owner in (tl, tl.core, tl.tensor, tl.math, tl.core.tensor_descriptor_base):
        _builtins(owner)  # as they are before any is patched
    interpreter._patch_builtin = _patch_builtin
    interpreter._patch_lang = _patch_lang_once
    interpreter._LangPatchScope = _LangPatchScope
    interpreter._implicit_cvt = _known_implicit_cvt
    interpreter.GridExecutor.__call__ = _run_on_cpu
    interpreter.TensorHandle.__post_init__ = _check_new_handle
    tl.str_to_ty = cache(tl.str_to_ty)
    interpreter._get_np_dtype = _known_np_dtype
    tl.block_type.__init__, tl.tensor.__init__ = _init_block_type, _init_tensor
    tl.block_type.with_element_ty = _known_element_type
    tl.core._unwrap_if_constexpr = _unwrap_unless_operand
    for name in ("binary_op_type_checking_impl", "bitwise_op_type_checking_impl"):
        setattr(TritonSemantic, name, _known_operands(getattr(TritonSemantic, name)))
    TritonSemantic.cast = _cast_unless_equal
    TritonSemantic.broadcast_impl_value = _broadcast_unless_equal
    TritonSemantic.scalar_constant = _known_scalar_constant
    builder = interpreter.interpreter_builder
    if not builder.options.debug:  # else an overflow would be reported
        builder.options = replace(builder.options, sanitize_overflow=False)
    for name in ("create_masked_load", "create_masked_store"):
        _take_masks_of_integers(name)
