from types import SimpleNamespace

import pytest
import torch

from dlrm_overlap.dense import cublas
from dlrm_overlap.dense.cublas import limited_products


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Stand in for cuBLAS, which refuses more than 132 multiprocessors; return the targets that are set."""
    targets = list[int]()

    def set_target(handle: object, target: int) -> int:
        targets.append(target)
        return 0 if target <= 132 else 7

    def load(name: str) -> SimpleNamespace:
        assert name == "libcublas.so.13"
        return SimpleNamespace(cublasSetSmCountTarget=set_target)

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "current_blas_handle", lambda: 1234)
    monkeypatch.setattr(cublas.ctypes, "CDLL", load)
    return targets


def test_products_are_limited_inside_the_context_alone(calls: list[int]) -> None:
    with limited_products(108):
        assert calls == [108]
    assert calls == [108, 0]
    with pytest.raises(ZeroDivisionError), limited_products(116):
        raise ZeroDivisionError
    assert calls == [108, 0, 116, 0], "an error leaves no limit behind"


def test_without_a_number_nothing_is_set(calls: list[int]) -> None:
    with limited_products(None):
        pass
    assert calls == []


def test_a_number_that_cublas_refuses_is_an_error(calls: list[int]) -> None:
    with pytest.raises(RuntimeError, match="cuBLAS refused 133 with status 7; give 1 up to"), limited_products(133):
        pytest.fail("the products were not limited")
