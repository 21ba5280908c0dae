"""What a `CompiledKernel` asks of the names and values that it is given, and that its launches pass them in order."""

from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from dlrm_overlap.kernels.compiled import CompiledKernel
from tests.kernels.emulation import interpreted

pytestmark = interpreted


def _add(into, values, count, epoch, BLOCK: tl.constexpr, WARPS: tl.constexpr):
    pass


_ARGUMENTS = ("into", "values", "count", "epoch")
_CONSTANTS = {"BLOCK": 4, "WARPS": 1}
_NAMED = {"do_not_specialize": ["count"], "do_not_specialize_on_alignment": ["values"]}
_KERNELS = {
    "interpreted": triton.jit(_add, **_NAMED),  # pyright: ignore[reportCallIssue]
    "compiled": triton.runtime.JITFunction(_add, **_NAMED),  # pyright: ignore[reportArgumentType]
}
every_kernel = pytest.mark.parametrize("kernel", _KERNELS.values(), ids=_KERNELS)


def _make(kernel: Any) -> CompiledKernel:
    return CompiledKernel(kernel, _ARGUMENTS, _CONSTANTS, num_warps=1)


@every_kernel
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("into", "count", "values", "epoch"), "argument 1 is named count, but the kernel's is values"),
        (("into", "values", "number", "epoch"), "argument 2 is named number, but the kernel's is count"),
        (("into", "values", "count"), "argument 3 is named None, but the kernel's is epoch"),
        ((*_ARGUMENTS, "BLOCK"), "argument 4 is named BLOCK, but the kernel's is None"),
    ],
)
def test_arguments_that_are_not_named_as_the_kernels_are_refused(
    kernel: Any, arguments: tuple[str, ...], message: str
) -> None:
    with pytest.raises(AssertionError, match=f"_add: {message}"):
        CompiledKernel(kernel, arguments, _CONSTANTS, num_warps=1)


@every_kernel
def test_a_tensor_that_begins_anywhere_is_refused_unless_it_is_named(kernel: Any) -> None:
    compiled, aligned = _make(kernel), torch.zeros(8)
    compiled.check(aligned, aligned[1:], 1, 1.0)
    compiled.check(aligned[4:], aligned[3:], 1, 1.0)
    with pytest.raises(AssertionError, match=r"_add: into begins 12 bytes behind a multiple of 16; .*on_alignment"):
        compiled.check(aligned[3:], aligned, 1, 1.0)


@every_kernel
def test_an_integer_is_refused_unless_it_is_named(kernel: Any) -> None:
    with pytest.raises(AssertionError, match=r"_add: epoch is specialised on; .*do_not_specialize"):
        _make(kernel).check(torch.zeros(8), torch.zeros(8), 1, 7)


@triton.jit(do_not_specialize=["count"])
def _store(into, count, factor, FIRST: tl.constexpr, SECOND: tl.constexpr):
    tl.store(into, count)
    tl.store(into + 1, factor)
    tl.store(into + 2, FIRST)
    tl.store(into + 3, SECOND)


def test_values_arrive_where_their_names_are() -> None:
    into = torch.zeros(4)
    store = CompiledKernel(_store, ("into", "count", "factor"), {"FIRST": 5, "SECOND": 6}, num_warps=1)
    store(1, (), into, 3, 0.5)
    assert into.tolist() == [3, 0.5, 5, 6]
