"""The layer that a product computes."""

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch.nn import functional

Activation = Literal["none", "relu"]

Finish = Callable[[], torch.Tensor]
"""makes the current stream wait for a reduce-scatter and returns its output; called once, on the same stream"""


class ProductLayer(NamedTuple):
    """Maps rows x [m, k] to activation(x @ weight^T + bias) [m, n]; all of one dtype and device."""

    weight: torch.Tensor
    """[n, k], of any strides"""
    bias: torch.Tensor | None = None
    """[n], contiguous"""
    activation: Activation = "none"


def linear_into(out: torch.Tensor, x: torch.Tensor, layer: ProductLayer) -> None:
    """Write the layer's output for the rows `x` [m, k] to `out` [m, n], contiguous, on the current stream.

    On GPUs bias and relu are cuBLAS's epilogue, which rounds once; relu without a bias is a second pass.
    """
    weight, bias, activation = layer
    transposed = weight.t()
    if bias is None:
        torch.mm(x, transposed, out=out)
    elif activation == "relu":
        torch.ops.aten._addmm_activation.out(bias, x, transposed, out=out)
        return
    else:
        torch.addmm(bias, x, transposed, out=out)
    if activation == "relu":
        functional.relu_(out)


def cut(rows: int, parts: int, small_first: bool = False) -> list[tuple[int, int]]:
    """Cut a rank's rows into one range if `parts` is 1, else into four: a half, a quarter and two eighths.

    The last ranges are small, to leave little to multiply when the last one arrives. With `small_first` the first
    ranges are small, so that sending begins early. Ranges begin at multiples of 256, cuBLAS's tiles, or, below 4096
    rows, of 8 (16 bytes).

    Example: 8192 rows: 0 .. 4096, 4096 .. 6144, 6144 .. 7168, 7168 .. 8192.
    """
    step = 256 if rows >= 4096 else 8
    eighths = (8,) if parts == 1 else (1, 2, 4, 8) if small_first else (4, 6, 7, 8)
    ends = [min(rows, -(-rows * each // (8 * step)) * step) for each in eighths]
    return [(begin, end) for begin, end in zip([0, *ends], ends, strict=False) if begin < end]
