"""A product and the communication at its one end: the layer that it computes, its sizes, and how its rows are cut."""

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch.nn import functional

Activation = Literal["none", "relu"]

_FINE, _COARSE = 8, 256  # rows: 16 bytes divide 8 of two bytes each; cuBLAS's tiles divide 256

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


def halve(rows: int, parts: int) -> list[tuple[int, int]]:
    """Cut the rows of a rank into at most `parts` ranges, each half of the rest, the last as large as that before.

    Each range costs a copy and a product of its own, so only the rows of the peers at both ends of a call are cut. The
    product of a range ends before the next range is there, if it takes less than half as long; so only the product of
    the last, small range is seen. Ranges begin at multiples of 256, or 8.

    Example: 8192 rows in 4: 0 .. 4096, 4096 .. 6144, 6144 .. 7168, 7168 .. 8192.
    """
    step = _COARSE if rows >= _COARSE << parts else _FINE
    ranges, begin = [], 0
    while len(ranges) < parts - 1 and rows - begin > step:
        end = begin + -(-(rows - begin) // (2 * step)) * step
        ranges.append((begin, end))
        begin = end
    return [*ranges, (begin, rows)]


def double(rows: int, parts: int) -> list[tuple[int, int]]:
    """Cut the rows of a rank as `halve` does, but the small ranges first: each is multiplied while the last is sent.

    Example: 8192 rows in 4: 0 .. 1024, 1024 .. 2048, 2048 .. 4096, 4096 .. 8192.
    """
    sizes = [end - begin for begin, end in halve(rows, parts)][::-1]
    step = _COARSE if sizes[0] >= _COARSE else _FINE
    ends = [min(rows, -(-sum(sizes[: count + 1]) // step) * step) for count in range(len(sizes))]
    return [(begin, end) for begin, end in zip([0, *ends], ends, strict=False) if begin < end]
