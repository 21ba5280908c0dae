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
add it up from the p_k costs 18 backward, and to add up dx_0 in a pass of its own 20. The backward keeps du of all
layers, so that the weights' gradients of all layers are one batched product. What it reads is stacked from the last
layer to the first, as the flat gradient has the layers.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from dlrm_overlap.dense.functions import kernels_on, product_into
from dlrm_overlap.kernels.dense.arguments import GROUP, CrossGradient, stack


class CrossLayer(NamedTuple):
    """The parameters of a layer, or tensors for their gradients; rank R, width N."""

    w: torch.Tensor
    """[N, R]"""
    v: torch.Tensor
    """[R, N]"""
    bias: torch.Tensor
    """[N] float32"""


Write = Callable[[list[torch.Tensor]], None]
"""writes the gradients of one parameter of all layers to contiguous tensors, which may be float32 where it is not"""
Later = Callable[[str, Write], None]
"""takes one of `CrossLayer`'s names, and what writes its gradients"""


def cross(x0: torch.Tensor, layers: Sequence[CrossLayer], later: Later) -> torch.Tensor:
    """Return the network's output [b, N], in the type of x0.

    Every layer computes x_{l+1} = x_0 * (W_l (V_l x_l) + b_l) + x_l (Wang et al., DCN V2, arXiv 2008.13535, sections
    3.2 and 3.3). Differentiable once.

    Args:
        x0: [b, N] bfloat16 or another float type, contiguous, which requires a gradient where one is recorded. Its
            content must stay until the backward.
        layers: at least one; w and v have the type of x0.
        later: called in the backward for bias, v and w with a function that writes their gradients, to be called once,
            on the backward's stream: so x0's gradient is there before they are computed. Autograd sees nothing of the
            parameters. The products of v come before those of w, since they leave some of a GPU's multiprocessors to
            the kernel that sends x0's gradient; the product of w would keep it back.
    """
    assert x0.requires_grad or not torch.is_grad_enabled(), "no backward would come, and write the gradients"
    return _Cross.apply(x0, later, *(tensor.detach() for layer in layers for tensor in layer))  # type: ignore[no-any-return]


class _Cross(torch.autograd.Function):
    """Forward and backward of all layers; products are torch's, on the current stream."""

    @staticmethod
    def forward(ctx: Any, x0: torch.Tensor, later: Later, *parameters: torch.Tensor) -> torch.Tensor:
        layers = _layers(parameters)
        kernels = kernels_on(x0.device, "cross")
        inputs, products = stack(len(layers) - 1, x0), stack(len(layers), x0)  # x_{L-1} .. x_1, w_0 ..
        narrow = x0.new_empty(len(layers), len(x0), len(layers[0].v))
        output = torch.empty_like(x0)
        x = x0
        for index, layer in enumerate(layers):
            left = len(layers) - 1 - index
            torch.mm(x, layer.v.t(), out=narrow[left])  # `out` also keeps autocast from looking at it
            torch.mm(narrow[left], layer.w.t(), out=products[index])
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
        through, du = stack(len(layers) - 1, x0), stack(len(layers), x0)  # p_1 .., du_{L-1} .. du_0
        dx, dv = torch.empty_like(x0), torch.empty_like(narrow)
        bias = torch.stack([layer.bias for layer in layers])
        sums = bias.new_empty(len(layers), -(-len(x0) // GROUP), x0.shape[1])
        gradient = gradients[0].contiguous()
        for turn, index in enumerate(reversed(range(len(layers)))):
            tensors = CrossGradient(gradient, through, x0, products, bias, du[turn], dx, sums[index])
            kernels.gradient_of_layer(tensors, index, len(layers))
            torch.mm(du[turn], layers[index].w, out=dv[turn])
            if index > 0:
                torch.mm(dv[turn], layers[index].v, out=through[index - 1])
            else:
                dx.addmm_(dv[turn], layers[0].v)

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
    """Write the products of left [n, N, b] and right [n, b, R] to the n tensors `out`, added up in float32.

    They are one batched product where `out` is equally apart in memory: one of them alone has too few blocks for a
    GPU's multiprocessors. `out` may be float32 where the factors are not.
    """
    together = _together(out)
    if together is None:
        for index, each in enumerate(out):
            _products_into([each], left[index : index + 1], right[index : index + 1])
    else:
        product_into(together, left, right)


def _together(tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Return contiguous tensors of one shape as one view, if they lie equally apart in one storage."""
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
