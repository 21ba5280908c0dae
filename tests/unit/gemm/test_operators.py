"""The state that an operator's backward leaves after an exception."""

from typing import Any

import pytest
import torch

from dlrm_overlap.dense.gemm.operators import all_gather_matmul
from dlrm_overlap.dense.gemm.problem import Layer


class _Products:
    """Gathers rows whose product with any gradient fails, as where no memory is left, and counts the ends."""

    def __init__(self) -> None:
        self.ended = 0

    def all_gather_matmul(self, x: torch.Tensor, layer: Layer, way: str, keep: bool) -> Any:
        return x @ layer.weight.t(), torch.ones(len(x) + 1, x.shape[1])

    def begin_reduce_scatter(self, x: torch.Tensor, layer: Layer, way: str) -> Any:
        def finish() -> torch.Tensor:
            self.ended += 1
            return x @ layer.weight.t()

        return finish


def test_a_reduce_scatter_ends_though_the_weights_gradient_fails() -> None:
    """Peers wait for its end, and the next call would be refused."""
    products: Any = _Products()
    x, weight = torch.ones(4, 3, requires_grad=True), torch.ones(2, 3, requires_grad=True)
    out = all_gather_matmul(x, weight, products=products)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        out.sum().backward()
    assert products.ended == 1
