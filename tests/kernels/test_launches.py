import ctypes
import struct
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from dlrm_overlap.kernels import launches
from dlrm_overlap.kernels.compiled import CompiledKernel
from dlrm_overlap.kernels.launches import Launch, launches_of, prepared
from tests.kernels.emulation import interpreted

pytestmark = interpreted


@triton.jit(do_not_specialize=["count", "epoch"])
def _store(into, values, count, factor, epoch, BLOCK: tl.constexpr):
    tl.store(into, tl.load(values) * factor)
    tl.store(into + 1, count + epoch)


def _kernel() -> CompiledKernel:
    return CompiledKernel(_store, num_warps=2, BLOCK=4)


def test_a_call_changes_only_the_arguments_it_names() -> None:
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
    with pytest.raises(AssertionError, match=r"_store: torch\.float64, prepared for torch\.float32"):
        launch(values.double())


class _Scaled:
    """Prepares launches that store `values` times a factor."""

    def __init__(self) -> None:
        self.into, self.prepared = torch.zeros(4), 0

    @prepared
    def launch(self, tensors: Sequence[torch.Tensor], factor: float) -> Launch:
        self.prepared += 1
        dtypes = (tensors[0].dtype,)
        return Launch(_kernel(), 1, dtypes, (self.into, *tensors, 0, factor, 0), changing=("values",))


def test_a_launch_is_prepared_once_for_each_owner_type_and_argument() -> None:
    scaled, other, values = _Scaled(), _Scaled(), torch.full((4,), 2.0)
    for owner, tensor, factor, made in (
        (scaled, values, 0.5, 1),
        (scaled, values + 1, 0.5, 1),
        (scaled, values, 4.0, 2),
        (scaled, values.double(), 0.5, 3),
        (other, values, 0.5, 1),
        (scaled, values, 0.5, 3),
    ):
        owner.launch((tensor,), factor)(tensor)
        assert owner.into[0] == tensor[0] * factor
        assert owner.prepared == len(launches_of(owner)) == made
    launches_of(scaled).forget()
    scaled.launch((values,), 0.5)
    assert (scaled.prepared, other.prepared) == (4, 1)


_LAYOUT = ((0, 8), (8, 8), (16, 4), (20, 4), (24, 8), (32, 8), (40, 8))


class _Driver:
    """The driver's functions, for a kernel with the parameters of `_store` and Triton's two scratch pointers."""

    def __init__(self) -> None:
        self.launched: list[Any] = []
        self.status = 0

    def cuFuncGetParamInfo(self, function: Any, index: Any, offset: Any, size: Any) -> int:  # noqa: N802
        if index.value >= len(_LAYOUT):
            return 1
        offset._obj.value, size._obj.value = _LAYOUT[index.value]
        return 0

    def cuLaunchKernelEx(self, config: Any, function: Any, parameters: Any, extra: Any) -> int:  # noqa: N802
        words = (ctypes.c_void_p * 5).from_address(extra.value)
        assert (words[0], words[2], words[4], parameters) == (1, 2, None, None)
        size = ctypes.c_size_t.from_address(words[3] or 0).value
        given = struct.unpack("@QQifqQQ", ctypes.string_at(words[1] or 0, size))
        self.launched.append((function.value, struct.unpack("@7IxxxxQQI", ctypes.string_at(config.value, 52)), given))
        return self.status

    def cuGetErrorString(self, status: int, text: Any) -> int:  # noqa: N802
        text._obj.value = b"an illegal address"
        return 0


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> _Driver:
    fake = _Driver()
    names = ("global_scratch_size", "profile_scratch_size", "launch_cooperative_grid", "launch_pdl")
    metadata = SimpleNamespace(num_warps=2, shared=64, num_ctas=1, **dict.fromkeys(names, 0))
    compiled = SimpleNamespace(function=77, metadata=metadata)
    monkeypatch.setattr(launches, "INTERPRETED", False)
    monkeypatch.setattr(launches, "_driver", lambda: fake)
    monkeypatch.setattr(CompiledKernel, "compiled", lambda *_: compiled)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 9, raising=False)
    return fake


def test_each_argument_is_at_its_offset_in_the_parameters(driver: _Driver) -> None:
    into, first, second = torch.zeros(4), torch.zeros(4), torch.zeros(4)
    launch = Launch(_kernel(), 3, (), (into, first, 10, 0.5, 0), changing=("values", "epoch"))
    launch(second, 2**40)
    launch(first, -1)
    config = 3, 1, 1, 64, 1, 1, 64, 9, 0, 0  # programs, threads, shared bytes, stream; no attributes
    assert driver.launched == [
        (77, config, (into.data_ptr(), second.data_ptr(), 10, 0.5, 2**40, 0, 0)),
        (77, config, (into.data_ptr(), first.data_ptr(), 10, 0.5, -1, 0, 0)),
    ]


def test_a_launch_without_a_number_of_programs_takes_it_from_each_call(driver: _Driver) -> None:
    values = torch.zeros(4)
    launch = Launch(_kernel(), None, (), (values, values, 10, 0.5, 0), changing=("epoch",))
    for programs in (5, 0, 2):
        launch(1, programs=programs)
    assert [config[0] for _, config, _ in driver.launched] == [5, 2]
    with pytest.raises(AssertionError, match="_store: the number of programs is not given"):
        launch(1)


def test_a_refused_launch_names_the_kernel(driver: _Driver) -> None:
    values, driver.status = torch.zeros(4), 700
    launch = Launch(_kernel(), 1, (), (values, values, 10, 0.5, 0), changing=("epoch",))
    with pytest.raises(RuntimeError, match="_store: CUDA error 700: an illegal address"):
        launch(1)
