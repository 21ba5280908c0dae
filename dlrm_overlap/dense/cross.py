"""The low-rank cross network as one autograd function: cuBLAS products, and one elementwise kernel per layer.

Notation is that of `kernels.dense.cross`. Tensors are stacked from the last layer to the first, as in the flat
gradient, so that the weight gradients of all layers are one batched product.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from dlrm_overlap.dense.functions import Write, kernels_on, product_into
from dlrm_overlap.kernels.dense.arguments import GROUP, CrossGradient, stack


class CrossLayer(NamedTuple):
    """Parameters of a layer of width N and rank R, or their gradients."""

    w: torch.Tensor
    """[N, R]"""
    v: torch.Tensor
    """[R, N]"""
    bias: torch.Tensor
    """[N] float32"""


Later = Callable[[str, Write], None]
"""takes a field name of `CrossLayer`, and a `Write` for this parameter of all layers"""


def cross(x0: torch.Tensor, layers: Sequence[CrossLayer], later: Later) -> torch.Tensor:
    """Return the cross network's output [b, N], in the dtype of x0; differentiable once.

    Layer l computes x_{l+1} = x_0 * (W_l (V_l x_l) + b_l) + x_l (Wang et al., DCN V2, arXiv 2008.13535, sections 3.2
    and 3.3).

    Args:
        x0: [b, N] floating point, contiguous; must require a gradient in training, and stay unchanged until the
            backward.
        layers: at least one; w and v have the dtype of x0. Autograd does not see the parameters.
        later: called in the backward for bias, v and w, in this order, with a function that writes the gradients. Call
            this function once, on the backward's stream. During the products for v, multiprocessors are free to send
            the gradient of x0, so v precedes w.
    """
    assert x0.requires_grad or not torch.is_grad_enabled(), "no backward would come, and write the gradients"
    return _Cross.apply(x0, later, *(tensor.detach() for layer in layers for tensor in layer))  # type: ignore[no-any-return]


class _Cross(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x0: torch.Tensor, later: Later, *parameters: torch.Tensor) -> torch.Tensor:
        layers = _layers(parameters)
        kernels = kernels_on(x0.device, "cross")
        inputs, products = stack(len(layers) - 1, x0), stack(len(layers), x0)  # x_{L-1} .. x_1; w_0 ..
        narrow = x0.new_empty(len(layers), len(x0), len(layers[0].v))
        output = torch.empty_like(x0)
        x = x0
        # x_{l+1} = x_0 * (W_l (V_l x_l) + b_l) + x_l
        for index, layer in enumerate(layers):
            left = len(layers) - 1 - index
            torch.mm(x, layer.v.t(), out=narrow[left])  # [b, R]; autocast ignores products with `out`
            torch.mm(narrow[left], layer.w.t(), out=products[index])  # [b, N]
            after = inputs[left - 1] if left > 0 else output
            kernels.add_layer(x0, x, products[index], layer.bias, after)
            x = after
        ctx.later = later
        ctx.save_for_backward(x0, inputs, products, narrow, *parameters)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x0, inputs, products, narrow, *parameters = ctx.saved_tensors
        layers = _layers(parameters)
        kernels = kernels_on(x0.device, "cross")
        through, du = stack(len(layers) - 1, x0), stack(len(layers), x0)  # p_1 ..; du_{L-1} .. du_0
        dx, dv = torch.empty_like(x0), torch.empty_like(narrow)
        bias = torch.stack([layer.bias for layer in layers])
        sums = bias.new_empty(len(layers), -(-len(x0) // GROUP), x0.shape[1])
        gradient = gradients[0].contiguous()
        # From the last layer to the first: gradients of the products, and dx at the first layer.
        for turn, index in enumerate(reversed(range(len(layers)))):
            tensors = CrossGradient(gradient, through, x0, products, bias, du[turn], dx, sums[index])
            kernels.gradient_of_layer(tensors, index, len(layers))
            torch.mm(du[turn], layers[index].w, out=dv[turn])  # [b, R]
            if index > 0:
                torch.mm(dv[turn], layers[index].v, out=through[index - 1])
            else:
                dx.addmm_(dv[turn], layers[0].v)

        # The products of the weight gradients, for the caller to run: bias, v, w.
        @torch.no_grad()
        def write_v(into: list[torch.Tensor]) -> None:
            _products_into(into[:0:-1], dv[:-1].transpose(1, 2), inputs)
            _products_into(into[:1], dv[-1:].transpose(1, 2), x0[None])

        @torch.no_grad()
        def write_w(into: list[torch.Tensor]) -> None:
            _products_into(into[::-1], du.transpose(1, 2), narrow)

        @torch.no_grad()
        def write_bias(into: list[torch.Tensor]) -> None:
            torch._foreach_copy_(into, list(sums.sum(1)))  # type: ignore[no-untyped-call]

        ctx.later("bias", write_bias)
        ctx.later("v", write_v)
        ctx.later("w", write_w)
        return dx, None, *(None for _ in parameters)


def _layers(tensors: Sequence[torch.Tensor]) -> list[CrossLayer]:
    return [CrossLayer(*tensors[first : first + 3]) for first in range(0, len(tensors), 3)]


def _products_into(out: Sequence[torch.Tensor], left: torch.Tensor, right: torch.Tensor) -> None:
    """Write left @ right, [n, N, b] and [n, b, R], to the n tensors `out`, accumulated in float32.

    If the tensors are a constant stride apart, one batched product is run, since a single product does not fill a GPU.
    """
    batch = _as_batch(out)
    if batch is None:
        for index, each in enumerate(out):
            _products_into([each], left[index : index + 1], right[index : index + 1])
    else:
        product_into(batch, left, right)


def _as_batch(tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
    if not tensors:
        return None
    first = tensors[0]
    offsets = [tensor.storage_offset() for tensor in tensors]
    apart = offsets[1] - offsets[0] if len(offsets) > 1 else first.numel()
    expected = list(range(offsets[0], offsets[0] + len(tensors) * apart, apart)) if apart >= first.numel() else []
    storages = {tensor.untyped_storage().data_ptr() for tensor in tensors}
    if len(storages) > 1 or offsets != expected:
        return None
    return first.as_strided((len(tensors), *first.shape), (apart, *first.stride()))
