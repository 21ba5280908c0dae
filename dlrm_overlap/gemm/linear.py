"""One product, written where it belongs: what all ways issue, part by part."""

from typing import Literal

import torch
from torch.nn import functional

Activation = Literal["none", "relu"]


def linear_into(
    out: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: Activation = "none",
) -> None:
    """Write activation(x @ weight^T + bias) to `out`, on the current stream.

    On GPUs bias and relu are cuBLAS's own epilogue: one kernel, which rounds once. A relu without a bias has no such
    function in torch; there it is a second pass, in place.

    Args:
        out: [m, n], contiguous.
        x: [m, k].
        weight: [n, k], of any strides that a product takes, such as those of a transpose.
        bias: [n], or None.
        activation: none | relu.
    """
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


def activate(out: torch.Tensor, bias: torch.Tensor | None, activation: Activation) -> torch.Tensor:
    """Add `bias` to `out` and apply the activation, in place; return `out`."""
    if bias is not None:
        out.add_(bias)
    return functional.relu_(out) if activation == "relu" else out
