"""One product, written where it belongs: what all ways issue, part by part."""

from typing import Literal, NamedTuple

import torch
from torch.nn import functional

Activation = Literal["none", "relu"]


class Layer(NamedTuple):
    """What maps rows x [m, k] to activation(x @ weight^T + bias) [m, n]; all of one type and on one device."""

    weight: torch.Tensor
    """[n, k], of any strides that a product takes, such as those of a transpose"""
    bias: torch.Tensor | None = None
    """[n]"""
    activation: Activation = "none"

    @property
    def columns(self) -> int:
        """Columns of what it gives, n."""
        return self.weight.shape[0]


def linear_into(out: torch.Tensor, x: torch.Tensor, layer: Layer) -> None:
    """Write what `layer` makes of `x` to `out`, on the current stream.

    On GPUs bias and relu are cuBLAS's own epilogue: one kernel, which rounds once. A relu without a bias has no such
    function in torch; there it is a second pass, in place.

    Args:
        out: [m, n], contiguous.
        x: [m, k].
        layer: from k to n columns.
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
