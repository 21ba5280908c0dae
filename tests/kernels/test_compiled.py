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
@pytest.mark.parametrize(
    ("constants", "message"),
    [
        ({"WARPS": 1, "BLOCK": 4}, "constant 0 is named WARPS, but the kernel's is BLOCK"),
        ({"BLOCK": 4}, "constant 1 is named None, but the kernel's is WARPS"),
        ({**_CONSTANTS, "TILE": 2}, "constant 2 is named TILE, but the kernel's is None"),
    ],
)
def test_constants_that_are_not_named_as_the_kernels_are_refused(
    kernel: Any, constants: dict[str, int], message: str
) -> None:
    with pytest.raises(AssertionError, match=f"_add: {message}"):
        CompiledKernel(kernel, _ARGUMENTS, constants, num_warps=1)


def test_a_kernel_whose_constants_do_not_come_last_is_refused() -> None:
    def copy(into, BLOCK: tl.constexpr, values):
        pass

    with pytest.raises(AssertionError, match="copy: its constants do not come last"):
        CompiledKernel(triton.jit(copy), ("into", "values"), {"BLOCK": 4}, num_warps=1)


@every_kernel
def test_another_number_of_arguments_is_refused(kernel: Any) -> None:
    with pytest.raises(AssertionError, match="_add: 3 arguments are passed for 4 parameters; pass into, values, count"):
        _make(kernel).check(torch.zeros(8), torch.zeros(8), 1)


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


def test_the_interpreter_checks_every_launch() -> None:
    compiled, aligned = _make(_KERNELS["interpreted"]), torch.zeros(8)
    compiled(1, (), aligned, aligned, 3, 1.0)
    with pytest.raises(AssertionError, match="begins 4 bytes"):
        compiled(1, (), aligned[1:], aligned, 3, 1.0)


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


class _Recorded:
    """A compiled kernel that records what it is run with."""

    packed_metadata, function = "metadata", "function"

    def run(self, *arguments: Any) -> None:
        self.arguments = arguments


def test_later_launches_pass_arguments_then_constants_in_the_kernels_order(monkeypatch: pytest.MonkeyPatch) -> None:
    store = CompiledKernel(_store, ("into", "count", "factor"), {"FIRST": 5, "SECOND": 6}, num_warps=1)
    recorded, into = _Recorded(), torch.zeros(4)
    store._compiled[into.device.index, ()] = recorded
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 9, raising=False)
    store(2, (), into, 3, 0.5)
    assert recorded.arguments[:4] == (2, 1, 1, 9)
    assert recorded.arguments[-5:] == (into, 3, 0.5, 5, 6)
