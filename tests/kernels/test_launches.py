"""What a `Launch` gives the GPU, and that calls change what they name and nothing else."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from dlrm_overlap.kernels import launches
from dlrm_overlap.kernels.compiled import CompiledKernel
from dlrm_overlap.kernels.launches import Launch
from tests.kernels.emulation import interpreted

pytestmark = interpreted


@triton.jit(do_not_specialize=["count", "epoch"])
def _store(into, values, count, factor, epoch, BLOCK: tl.constexpr):
    tl.store(into, tl.load(values) * factor)
    tl.store(into + 1, count + epoch)


def _kernel() -> CompiledKernel:
    return CompiledKernel(_store, {"BLOCK": 4}, num_warps=2)


def test_a_call_changes_what_it_names() -> None:
    into, first, second = torch.zeros(4), torch.full((4,), 2.0), torch.full((4,), 3.0)
    launch = Launch(_kernel(), 1, (), (into, first, 10, 0.5, 0), changing=("values", "epoch"))
    assert into.tolist() == [0, 0, 0, 0], "nothing is launched before the first call"
    launch(second, 4)
    assert into.tolist() == [1.5, 14, 0, 0]
    launch(first, 5)
    assert into.tolist() == [1, 15, 0, 0]


def test_a_tensor_of_another_type_is_refused() -> None:
    into, values = torch.zeros(4), torch.zeros(4)
    launch = Launch(_kernel(), 1, (), (into, values, 10, 0.5, 0), changing=("values",))
    with pytest.raises(AssertionError, match=r"\[torch\.float64\] are given to a launch of \[torch\.float32\]"):
        launch(values.double())


def test_the_gpu_is_given_addresses_and_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[tuple[Any, ...]] = []
    made = SimpleNamespace(function=77, packed_metadata=(2, 1), run=lambda *given: launched.append(given))
    monkeypatch.setattr(launches, "INTERPRETED", False)
    monkeypatch.setattr(CompiledKernel, "compiled", lambda *_: made)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 9, raising=False)
    into, first, second = torch.zeros(4), torch.zeros(4), torch.zeros(4)
    launch = Launch(_kernel(), None, (), (into, first, 10, 0.5, 0), changing=("values", "epoch"))
    for values, epoch, programs in ((second, 2**40, 3), (first, -1, 5), (first, 7, 0)):
        launch(values, epoch, programs=programs)
    expected = [(3, second, 2**40), (5, first, -1)]  # of no programs nothing is launched
    assert launched == [
        (programs, 1, 1, 9, 77, (2, 1), None, None, None, into.data_ptr(), values.data_ptr(), 10, 0.5, epoch, 4)
        for programs, values, epoch in expected
    ]
    with pytest.raises(AssertionError, match="of how many programs"):
        launch(first, 1)
