"""What a form asks of the arguments of its launches."""

from typing import Any

import pytest
import torch
import triton

from dlrm_overlap.kernels.compiled import CompiledKernel
from tests.kernels.emulation import interpreted

pytestmark = interpreted


def _add(into, values, count, epoch):
    pass


_NAMED = {"do_not_specialize": ["count"], "do_not_specialize_on_alignment": ["values"]}
_KERNELS = {
    "interpreted": triton.jit(_add, **_NAMED),  # pyright: ignore[reportCallIssue]
    "compiled": triton.runtime.JITFunction(_add, **_NAMED),  # pyright: ignore[reportArgumentType]
}
every_kernel = pytest.mark.parametrize("kernel", _KERNELS.values(), ids=_KERNELS)


@every_kernel
def test_a_tensor_that_begins_anywhere_is_refused_unless_it_is_named(kernel: Any) -> None:
    form, aligned = CompiledKernel(kernel, {}, {}), torch.zeros(8)
    form.check(aligned, aligned[1:], 1)
    form.check(aligned[4:], aligned[3:], 1)
    with pytest.raises(AssertionError, match=r"_add: into begins 12 bytes behind a multiple of 16; .*on_alignment"):
        form.check(aligned[3:], aligned, 1)


@every_kernel
def test_an_integer_is_refused_unless_it_is_named(kernel: Any) -> None:
    with pytest.raises(AssertionError, match=r"_add: epoch is specialised on; .*do_not_specialize"):
        CompiledKernel(kernel, {}, {}).check(torch.zeros(8), torch.zeros(8), 1, 7)


def test_the_interpreter_checks_every_launch() -> None:
    form, aligned = CompiledKernel(_KERNELS["interpreted"], {}, {}), torch.zeros(8)
    form(1, (), aligned, aligned, 3, 1.0)
    with pytest.raises(AssertionError, match="begins 4 bytes"):
        form(1, (), aligned[1:], aligned, 3, 1.0)
