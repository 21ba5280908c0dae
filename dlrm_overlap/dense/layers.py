"""The interaction of all pairs, and layers with ReLU, each as one autograd function.

A layer's bias and ReLU are the epilogue of cuBLAS's product. Its backward masks the gradient and sums it for the bias
in one pass.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from dlrm_overlap.dense.functions import Write, kernels_on, product_into
from dlrm_overlap.kernels.dense.arguments import GROUP, product_block

# Limits of a sample, whose embeddings and products one program of the kernel holds in its blocks.
_MAX_FEATURES, _MAX_ELEMENTS = 128, 1 << 15


class Layer(NamedTuple):
    weight: torch.Tensor
    """[N, K]"""
    bias: torch.Tensor
    """[N]"""


Later = Callable[[Sequence[tuple[int, str]], Write], None]
"""takes parameters, each as a layer's index and a field name of `Layer`, and a `Write` for them"""


def relu_layers(x: torch.Tensor, layers: Sequence[Layer], later: Later, anchor: torch.Tensor) -> torch.Tensor:
    """Apply relu(x @ weight^T + bias) layer after layer, and return the last layer's output [b, N].

    A last layer of one output has no ReLU, and returns [b]. Differentiable once; autograd does not see the parameters.

    Args:
        x: [b, K] contiguous.
        layers: at least one with ReLU, contiguous, of the dtype of `x`.
        later: called in the backward: for the weight of each layer with ReLU, from the last layer to the first and
            before the gradient of the layer's input is computed; then for all other parameters together. Call the
            function that it gets once, at once or later, on the backward's stream or after it. The tensor for the
            first weight may lack the weight's last columns if these columns are padding.
        anchor: tensor that requires a gradient, so that the backward runs even if `x` needs none; gets no gradient.
    """
    return _ReluLayers.apply(x, [Layer(*(each.detach() for each in layer)) for layer in layers], later, anchor)  # type: ignore[no-any-return]


class _ReluLayers(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layers: list[Layer], later: Later, anchor: torch.Tensor) -> torch.Tensor:
        hidden, last = (layers[:-1], layers[-1]) if len(layers[-1].bias) == 1 else (layers, None)
        outputs: list[torch.Tensor] = []
        for layer in hidden:
            before = outputs[-1] if outputs else x
            outputs.append(torch.ops.aten._addmm_activation(layer.bias, before, layer.weight.t()))
        ctx.later, ctx.ends_in_logits = later, last is not None
        ctx.save_for_backward(x, *outputs, *(layer.weight for layer in layers))
        if last is None:
            return outputs[-1]
        logits = x.new_empty(len(x))
        kernels_on(x.device, "layers").logits(outputs[-1], *last, logits)
        return logits

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, None, None, None]:
        x, *saved = ctx.saved_tensors
        outputs, weights = saved[: len(saved) // 2], saved[len(saved) // 2 :]
        kernels = kernels_on(x.device, "layers")
        gradient: torch.Tensor | None = gradients[0].contiguous()
        # The gradients of all biases, and of the logits' weight, are columns of one tensor, summed by one pass.
        summed, widths = [(index, "bias") for index in range(len(weights))], [len(weight) for weight in weights]
        if ctx.ends_in_logits:
            summed.insert(-1, (len(outputs), "weight"))
            widths.insert(-1, weights[-1].numel())
        sums = x.new_empty(-(-len(x) // GROUP), sum(widths), dtype=torch.float32)
        parts = sums.split(widths, dim=1)  # of each layer [ceil(b / GROUP), N]
        for index in reversed(range(len(outputs))):
            assert gradient is not None
            # Gradient before the ReLU, and its sums over rows.
            masked = torch.empty_like(outputs[index])  # [b, N]
            if ctx.ends_in_logits and index == len(outputs) - 1:
                last = sums[:, -2 * widths[-2] - 1 :]
                kernels.gradient_of_logits(gradient, outputs[index], weights[-1], masked, last)
            else:
                kernels.mask_and_sum(gradient, outputs[index], masked, parts[index])
            # Gradients of the weight and of the layer's input.
            before = outputs[index - 1] if index > 0 else x
            ctx.later([(index, "weight")], partial(_write_product, masked.t(), before))
            needed = index > 0 or ctx.needs_input_grad[0]
            gradient = torch.mm(masked, weights[index]) if needed else None
        ctx.later(summed, partial(_write_sums, sums, widths))
        return gradient, None, None, None


@torch.no_grad()
def _write_sums(sums: torch.Tensor, widths: Sequence[int], into: Sequence[torch.Tensor]) -> None:
    columns = sums.sum(0).split(list(widths))
    torch._foreach_copy_([each.flatten() for each in into], list(columns))  # type: ignore[no-untyped-call]


@torch.no_grad()
def _write_product(left: torch.Tensor, right: torch.Tensor, into: Sequence[torch.Tensor]) -> None:
    """Write left @ right to the one tensor `into`, which may lack the last columns of `right` that are padding."""
    (out,) = into
    if right.shape[1] == out.shape[1]:
        product_into(out, left, right)
        return
    wide = out.new_empty(len(out), right.shape[1])
    product_into(wide, left, right)
    out.copy_(wide[:, : out.shape[1]])


def fits(features: int, dim: int) -> bool:
    return features <= _MAX_FEATURES and product_block(features) * product_block(dim) <= _MAX_ELEMENTS


def interact(embeddings: torch.Tensor, features: int, width: int) -> torch.Tensor:
    """Return [b, width]: each sample's first embedding and the dot products of all pairs of embeddings, then zeros.

    Differentiable once. The next product is faster if a row of the result has a multiple of 16 bytes.

    Args:
        embeddings: [b, F * D], contiguous, F embeddings per sample; must stay unchanged until the backward.
        width: D + F * (F - 1) / 2, or up to 16 more.
    """
    return _Interact.apply(embeddings, features, width)  # type: ignore[no-any-return]


class _Interact(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, embeddings: torch.Tensor, features: int, width: int) -> torch.Tensor:
        ctx.features = features
        ctx.save_for_backward(embeddings)
        output = embeddings.new_empty(len(embeddings), width)
        kernels_on(embeddings.device, "interaction").interact(embeddings, features, output)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (embeddings,) = ctx.saved_tensors
        output = torch.empty_like(embeddings)
        kernels = kernels_on(embeddings.device, "interaction")
        kernels.gradient_of_interaction(gradients[0].contiguous(), embeddings, ctx.features, output)
        return output, None, None
