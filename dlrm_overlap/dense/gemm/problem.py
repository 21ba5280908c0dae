"""A product and the communication at its one end: the layer that it computes, and its sizes on all ranks."""

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch.nn import functional

Activation = Literal["none", "relu"]

Finish = Callable[[], torch.Tensor]
"""makes the current stream wait for a reduce-scatter that has begun, and returns its output; called once, on the stream
on which it began"""


class Layer(NamedTuple):
    """Maps rows x [m, k] to activation(x @ weight^T + bias) [m, n]; all of one type and on one device."""

    weight: torch.Tensor
    """[n, k], of any strides that a product takes, such as those of a transpose"""
    bias: torch.Tensor | None = None
    """[n]"""
    activation: Activation = "none"

    @property
    def columns(self) -> int:
        """Columns of the output, n."""
        return self.weight.shape[0]


class Problem(NamedTuple):
    """A product and its communication, alike on all ranks."""

    operator: str
    """all_gather | reduce_scatter"""
    rows: int
    """of the product, those of all ranks, M"""
    columns: int
    """of the product on this rank, N"""
    inner: int
    """over which the product sums on this rank, K"""
    dtype: torch.dtype
    bias: bool
    activation: str
    keep: bool = False
    """whether an all-gather returns the gathered rows, too"""

    @property
    def call(self) -> str:
        """The function of `operators` that asks for it."""
        return "all_gather_matmul" if self.operator == "all_gather" else "matmul_reduce_scatter"

    def __str__(self) -> str:
        """Return the problem as one of its ranks would write it."""
        sizes, bias = f"M {self.rows}, N {self.columns}, K {self.inner}", ", bias" if self.bias else ""
        kept = ", rows kept" if self.keep else ""
        return f"{self.call}({sizes}, {self.dtype}{bias}, {self.activation}{kept})"


def linear_into(out: torch.Tensor, x: torch.Tensor, layer: Layer) -> None:
    """Write the layer's output for the rows `x` [m, k] to `out` [m, n], contiguous, on the current stream.

    On GPUs bias and relu are cuBLAS's own epilogue: one kernel, which rounds once. A relu without a bias has no such
    function in torch; there it is a second pass, in place.
    """
    weight, bias, activation = layer
    turned = weight.t()
    if bias is None:
        torch.mm(x, turned, out=out)
    elif activation == "relu":
        torch.ops.aten._addmm_activation.out(bias, x, turned, out=out)
        return
    else:
        torch.addmm(bias, x, turned, out=out)
    if activation == "relu":
        functional.relu_(out)


def activate(out: torch.Tensor, layer: Layer) -> torch.Tensor:
    """Add the layer's bias to its product `out` and apply the activation, in place; return `out`."""
    if layer.bias is not None:
        out.add_(layer.bias)
    return functional.relu_(out) if layer.activation == "relu" else out
