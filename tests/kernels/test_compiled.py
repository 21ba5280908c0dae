from typing import Any, NamedTuple

import pytest
import torch
import triton
import triton.language as tl

from dlrm_overlap.kernels.compiled import CompiledKernel
from tests.kernels.emulation import interpreted

pytestmark = interpreted


def _add(into, values, count, epoch, BLOCK: tl.constexpr, WARPS: tl.constexpr):
    pass


_NAMED = {"do_not_specialize": ["count"], "do_not_specialize_on_alignment": ["values"]}
_KERNELS = {
    "interpreted": triton.jit(_add, **_NAMED),  # pyright: ignore[reportCallIssue]
    "compiled": triton.runtime.JITFunction(_add, **_NAMED),  # pyright: ignore[reportArgumentType]
}
every_kernel = pytest.mark.parametrize("kernel", _KERNELS.values(), ids=_KERNELS)


def _make(kernel: Any) -> CompiledKernel:
    return CompiledKernel(kernel, num_warps=1, BLOCK=4, WARPS=1)


@every_kernel
def test_constants_and_the_number_of_arguments_must_be_the_kernels(kernel: Any) -> None:
    with pytest.raises(AssertionError, match=r"_add: its parameters do not end in \['WARPS', 'BLOCK'\]"):
        CompiledKernel(kernel, num_warps=1, WARPS=1, BLOCK=4)
    with pytest.raises(AssertionError, match="_add: 1 arguments are passed; pass into, values, count, epoch"):
        _make(kernel).check((), torch.zeros(8))


@every_kernel
def test_a_tensor_that_is_not_aligned_is_refused_unless_it_is_named(kernel: Any) -> None:
    compiled, aligned = _make(kernel), torch.zeros(8)
    compiled.check((), aligned, aligned[1:], 1, 1.0)
    compiled.check((), aligned[4:], aligned[3:], 1, 1.0)
    with pytest.raises(AssertionError, match=r"_add: into begins 12 bytes after a multiple of 16; .*on_alignment"):
        compiled.check((), aligned[3:], aligned, 1, 1.0)


@every_kernel
def test_an_integer_is_refused_unless_it_is_named(kernel: Any) -> None:
    with pytest.raises(AssertionError, match=r"_add: epoch is specialised on; .*do_not_specialize"):
        _make(kernel).check((), torch.zeros(8), torch.zeros(8), 1, 7)


@every_kernel
def test_types_that_differ_between_launches_are_refused_unless_they_are_named(kernel: Any) -> None:
    """Otherwise a launch would take the kernel that was compiled for the first one's types."""
    compiled, floats, halves = _make(kernel), torch.zeros(8), torch.zeros(8, dtype=torch.float16)
    compiled.check((torch.float32,), floats, floats, 1, 1.0)
    compiled.check((torch.float16,), floats, halves, 1, 1.0)
    with pytest.raises(AssertionError, match=r"_add: tensors of .*float16\] are passed after .* pass in dtypes"):
        compiled.check((torch.float32,), floats, halves, 1, 1.0)


@triton.jit(do_not_specialize=["count"])
def _store(into, count, factor, FIRST: tl.constexpr, SECOND: tl.constexpr):
    tl.store(into, count)
    tl.store(into + 1, factor)
    tl.store(into + 2, FIRST)
    tl.store(into + 3, SECOND)


def test_values_arrive_in_the_order_of_the_parameters() -> None:
    into = torch.zeros(4)
    store = CompiledKernel(_store, num_warps=1, FIRST=5, SECOND=6)
    store(1, (), into, 3, 0.5)
    assert into.tolist() == [3, 0.5, 5, 6]


class _Pair(NamedTuple):
    """Constants of one kernel."""

    width: int
    names: tuple[str | None, ...]


@triton.jit
def _width_of(PAIR: tl.constexpr):
    return PAIR.width if PAIR.names[1] == "elements" else 0  # pyright: ignore[reportAttributeAccessIssue]


@triton.jit
def _fill(into, PAIR: tl.constexpr):
    tl.store(into + tl.arange(0, PAIR.width), _width_of(PAIR))  # pyright: ignore[reportAttributeAccessIssue]


def test_the_fields_of_a_named_tuple_are_constants() -> None:
    into = torch.zeros(8)
    for width, names in ((8, (None, "elements")), (2, ("elements", None))):
        CompiledKernel(_fill, num_warps=1, PAIR=_Pair(width, names))(1, (), into)
    assert into.tolist() == [0, 0, 8, 8, 8, 8, 8, 8]
