"""A small MLP in float32 as one autograd function, whose forward and backward are one kernel each."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from dlrm_overlap.dense.functions import kernels_on
from dlrm_overlap.kernels.dense.arguments import MLP_SAMPLES, MLPShape

_IS_GELU: dict[Callable[..., Any], bool] = {torch.relu: False, nn.functional.gelu: True}
_MAX_SAMPLES = 1 << 14
"""the shares of the gradients, one for every 16 samples, stay below 300 MB"""


def small_mlp(
    layers: Sequence[nn.Linear], activation: Callable[..., Any], ends_linear: bool
) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """Return a function that applies layers to x [b, K] float32 and returns [b, N]; None if the kernel cannot.

    The function is differentiable once. Its results differ from those of separate products by rounding, and are the
    same bits in each call.

    Args:
        activation: of each layer, `torch.relu` or `torch.nn.functional.gelu`.
        ends_linear: whether the last layer has none.
    """
    widths = (layers[0].in_features, *(layer.out_features for layer in layers))
    tensors = [parameter for layer in layers for parameter in (layer.weight, layer.bias)]
    if activation not in _IS_GELU or any(each is None or each.dtype != torch.float32 for each in tensors):
        return None
    shape = MLPShape(widths, _IS_GELU[activation], ends_linear)
    if not shape.fits():
        return None
    return lambda x: _SmallMLP.apply(x.contiguous(), shape, *tensors)  # type: ignore[no-any-return]


def suits(samples: int) -> bool:
    """Return whether `small_mlp` is meant for batches of this size."""
    return samples <= _MAX_SAMPLES


class _SmallMLP(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, shape: MLPShape, *parameters: torch.Tensor) -> torch.Tensor:
        weights, biases = parameters[::2], parameters[1::2]
        z, output = x.new_empty(len(x), shape.activated), x.new_empty(len(x), shape.widths[-1])
        kernels_on(x.device, "mlp").mlp(x, weights, biases, shape, z, output)
        ctx.shape = shape
        ctx.save_for_backward(x, z, *weights)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, z, *weights = ctx.saved_tensors
        shape: MLPShape = ctx.shape
        shares = x.new_empty(-(-len(x) // MLP_SAMPLES), shape.parameters)
        output = torch.empty_like(x) if ctx.needs_input_grad[0] else None  # dense features need none
        kernels_on(x.device, "mlp").gradient_of_mlp(gradients[0].contiguous(), x, weights, shape, z, shares, output)
        pairs = list(pairwise(shape.widths))
        found = shares.sum(0).split([size for before, wide in pairs for size in (wide * before, wide)])
        weighted = [each.view(wide, before) for each, (before, wide) in zip(found[::2], pairs, strict=True)]
        return output, None, *(each for pair in zip(weighted, found[1::2], strict=True) for each in pair)
