"""The low-rank cross network as one autograd function: cuBLAS's products, and one kernel a layer between them.

Under autocast TorchRec's `LowRankCrossNet` has float32 biases, so the x_l that it adds up are float32, and bfloat16
copies of them are written for the products. Here every activation is bfloat16, rounded once where it is stored. What an
elementwise pass reads and writes, in activations of [b, N], for three layers:

| pass | reads | writes |
|---|---|---|
| forward, layers 0, 1, 2 | x_0 w, x_0 x_1 w, x_0 x_2 w | x_1, x_2, x_3 |
| backward, layer 2 | g_3 x_0 | du |
| backward, layer 1 | g_3 p_2 x_0 | du |
| backward, layer 0 | g_3 p_2 p_1 x_0 w_0 w_1 w_2 | du dx_0 |

These are 11 forward and 16 backward; the last product reads dx_0 once more, to add p_0 to it. To write g_l rather than
add it up from the p_k costs 18 backward, and to add up dx_0 in a pass of its own 20.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from dlrm_overlap.kernels.dense import reference
from dlrm_overlap.kernels.dense.arguments import GROUP, CrossGradient, stack


class CrossLayer(NamedTuple):
    """The parameters of a layer, or tensors for their gradients; rank R, width N."""

    w: torch.Tensor
    """[N, R]"""
    v: torch.Tensor
    """[R, N]"""
    bias: torch.Tensor
    """[N] float32"""


def cross(
    x0: torch.Tensor, layers: Sequence[CrossLayer], gradients: Callable[[], Sequence[CrossLayer]] | None = None
) -> torch.Tensor:
    """Return the network's output [b, N], in the type of x0.

    Every layer computes x_{l+1} = x_0 * (W_l (V_l x_l) + b_l) + x_l (Wang et al., DCN V2, arXiv 2008.13535, sections
    3.2 and 3.3). Differentiable once.

    Args:
        x0: [b, N] bfloat16 or another float type, contiguous. What it holds must stay until the backward.
        layers: at least one; w and v have the type of x0.
        gradients: asked in the backward for contiguous float32 tensors, to which the gradients of the parameters are
            written; they are rounded nowhere else. Autograd then sees nothing of the parameters, and x0 must require a
            gradient. None leaves the gradients to autograd, in the parameters' types.
    """
    assert x0.is_contiguous(), "pass contiguous rows"
    assert layers, "a cross network has at least one layer"
    parameters = [tensor for layer in layers for tensor in layer]
    if gradients is not None:
        assert x0.requires_grad or not torch.is_grad_enabled(), "no backward would come, and write the gradients"
        parameters = [tensor.detach() for tensor in parameters]
    return _Cross.apply(x0, gradients, *parameters)  # type: ignore[no-any-return]


class _Cross(torch.autograd.Function):
    """Forward and backward of all layers; products are matrix products of torch, on the current stream."""

    @staticmethod
    def forward(
        ctx: Any, x0: torch.Tensor, gradients: Callable[[], Sequence[CrossLayer]] | None, *parameters: torch.Tensor
    ) -> torch.Tensor:
        layers = _layers(parameters)
        kernels = _kernels_on(x0.device)
        inputs = stack(len(layers) - 1, x0)[1]  # x_1 ..
        products, each_product = stack(len(layers), x0)
        output, narrow = torch.empty_like(x0), []
        x = x0
        for index, (layer, product) in enumerate(zip(layers, each_product, strict=True)):
            narrow.append(x.new_empty(len(x), len(layer.v)))
            torch.mm(x, layer.v.t(), out=narrow[-1])  # `out` also keeps autocast from looking at it
            torch.mm(narrow[-1], layer.w.t(), out=product)
            after = inputs[index] if index < len(inputs) else output
            kernels.add_layer(x0, x, product, layer.bias, after)
            x = after
        ctx.gradients, ctx.layers = gradients, len(layers)
        ctx.save_for_backward(x0, products, *inputs, *narrow, *parameters)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        count = ctx.layers
        x0, products, *rest = ctx.saved_tensors
        inputs, narrow, layers = (
            [x0, *rest[: count - 1]],
            rest[count - 1 : 2 * count - 1],
            _layers(rest[2 * count - 1 :]),
        )
        kernels = _kernels_on(x0.device)
        into = _layers(_new_gradients(layers)) if ctx.gradients is None else ctx.gradients()
        through, each_through = stack(count - 1, x0)  # p_1 ..
        bias = torch.stack([layer.bias for layer in layers])
        sums = bias.new_empty(count, -(-len(x0) // GROUP), x0.shape[1])
        du, dx, dv = torch.empty_like(x0), torch.empty_like(x0), torch.empty_like(narrow[0])
        gradient = gradients[0].contiguous()
        for index in reversed(range(count)):
            tensors = CrossGradient(gradient, through, x0, products, bias, du, dx, sums[index])
            kernels.gradient_of_layer(tensors, index, count)
            torch.mm(du, layers[index].w, out=dv)
            _product_into(into[index].w, du.t(), narrow[index])
            _product_into(into[index].v, dv.t(), inputs[index])
            if index > 0:
                torch.mm(dv, layers[index].v, out=each_through[index - 1])
            else:
                dx.addmm_(dv, layers[0].v)
        torch._foreach_copy_([layer.bias for layer in into], list(sums.sum(1)))  # type: ignore[no-untyped-call]
        if ctx.gradients is not None:
            return dx, None, *(None for layer in layers for _ in layer)
        return dx, None, *(tensor for layer in into for tensor in layer)


def _layers(tensors: Sequence[torch.Tensor]) -> list[CrossLayer]:
    return [CrossLayer(*tensors[first : first + 3]) for first in range(0, len(tensors), 3)]


def _new_gradients(layers: Sequence[CrossLayer]) -> list[torch.Tensor]:
    return [torch.empty_like(tensor) for layer in layers for tensor in layer]


def _product_into(out: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """Write a product to `out`, which may be float32 where its factors are not; it is added up in float32."""
    if out.dtype == left.dtype:
        torch.mm(left, right, out=out)
    elif out.is_cuda:
        torch.mm(left, right, out_dtype=out.dtype, out=out)
    else:  # CPUs have no product with an output of another type
        torch.mm(left.to(out.dtype), right.to(out.dtype), out=out)


def _kernels_on(device: torch.device) -> Any:
    """Return the module of the kernels for a GPU, and for a CPU that of their twins."""
    if device.type != "cuda":
        return reference
    from dlrm_overlap.kernels.dense import cross as kernels  # a CPU needs no Triton

    return kernels
