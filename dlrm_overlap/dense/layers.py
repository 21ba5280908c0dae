"""The interaction of all pairs, and layers with ReLU, each as one autograd function.

The dot products of all pairs of embeddings are one kernel, in place of a batched product and a gather. Layers have
cuBLAS's epilogues forward, and one elementwise pass a layer backward.

torch.compile computes a layer's product, and ReLU in a pass of its own. Backward it masks the gradient in a pass, sums
it up for the bias in two more, and leaves the gradients in bfloat16, to be cast. Here bias and ReLU are the product's
epilogue, one pass masks the gradient and sums it up, and the weights' products write float32 where the optimizer reads.
A last layer of one output is a pass each way.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from dlrm_overlap.dense.functions import kernels_on, product_into
from dlrm_overlap.kernels.dense.arguments import GROUP, product_block

_MOST_FEATURES, _MOST_ELEMENTS = 128, 1 << 15
"""of a sample, whose embeddings and products a kernel's program holds; elements are those of its blocks"""


class Layer(NamedTuple):
    """The parameters of a layer, or tensors for their gradients."""

    weight: torch.Tensor
    """[N, K]"""
    bias: torch.Tensor
    """[N]"""


def relu_layers(
    x: torch.Tensor, layers: Sequence[Layer], places: Callable[[], Sequence[Layer]], anchor: torch.Tensor
) -> torch.Tensor:
    """Return what x becomes by relu(x @ weight^T + bias), layer after layer [b, N of the last]. Differentiable once.

    A last layer of one output has no ReLU, and gives [b]. Autograd sees nothing of the parameters: the backward writes
    their gradients.

    Args:
        x: [b, K] contiguous.
        layers: at least one with ReLU, of the type of `x`, contiguous.
        places: called once in the backward, returns where the gradients are written, on the backward's stream:
            contiguous tensors, float32. The first weight's may have fewer columns than the weight, whose last ones are
            then of no parameter.
        anchor: a tensor that requires a gradient, and gets none: it stands for the parameters, since `x` may need none.
    """
    return _ReluLayers.apply(x, [Layer(*(each.detach() for each in layer)) for layer in layers], places, anchor)  # type: ignore[no-any-return]


class _ReluLayers(torch.autograd.Function):
    """Products are torch's, on the current stream."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, layers: list[Layer], places: Callable[[], Sequence[Layer]], anchor: torch.Tensor
    ) -> torch.Tensor:
        hidden, last = (layers[:-1], layers[-1]) if len(layers[-1].bias) == 1 else (layers, None)
        outputs: list[torch.Tensor] = []
        for layer in hidden:
            before = outputs[-1] if outputs else x
            outputs.append(torch.ops.aten._addmm_activation(layer.bias, before, layer.weight.t()))
        ctx.places, ctx.ends_in_logits = places, last is not None
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
        places, kernels = ctx.places(), kernels_on(x.device, "layers")
        gradient: torch.Tensor | None = gradients[0].contiguous()
        # Sums of all biases' gradients, and of the last weight's, lie side by side, so that one pass adds them up.
        summed = [place.bias for place in places]
        if ctx.ends_in_logits:
            summed.insert(-1, places[-1].weight.flatten())
        widths = [each.numel() for each in summed]
        sums = x.new_empty(-(-len(x) // GROUP), sum(widths), dtype=torch.float32)
        parts = sums.split(widths, dim=1)
        for index in reversed(range(len(outputs))):
            assert gradient is not None
            masked = torch.empty_like(outputs[index])
            if ctx.ends_in_logits and index == len(outputs) - 1:
                last = sums[:, -2 * widths[-2] - 1 :]
                kernels.gradient_of_logits(gradient, outputs[index], weights[-1], masked, last)
            else:
                kernels.mask_and_sum(gradient, outputs[index], masked, parts[index])
            _columns_into(places[index].weight, masked.t(), outputs[index - 1] if index > 0 else x)
            needed = index > 0 or ctx.needs_input_grad[0]
            gradient = torch.mm(masked, weights[index]) if needed else None
        torch._foreach_copy_(summed, list(sums.sum(0).split(widths)))  # type: ignore[no-untyped-call]
        return gradient, None, None, None


def _columns_into(out: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """Write left @ right to `out`, or its first columns where `right` has more, to have rows of whole 16 bytes."""
    if right.shape[1] == out.shape[1]:
        product_into(out, left, right)
        return
    wide = out.new_empty(len(out), right.shape[1])
    product_into(wide, left, right)
    out.copy_(wide[:, : out.shape[1]])


def fits(features: int, dim: int) -> bool:
    """Return whether `interact` takes so many embeddings of that dim; more are left to torch.compile."""
    return features <= _MOST_FEATURES and product_block(features) * product_block(dim) <= _MOST_ELEMENTS


def interact(embeddings: torch.Tensor, features: int, width: int) -> torch.Tensor:
    """Return the first embedding of each sample, and the dot products of all pairs [b, width].

    They are what `train.model.DotInteraction` returns, and after them zeros: a product of matrices reads rows whose
    length is a multiple of 16 bytes three times as fast. Differentiable once.

    Args:
        embeddings: [b, F * D], contiguous. Its content must stay until the backward.
        features: F.
        width: N, at least D + F * (F - 1) / 2 and at most 16 more.
    """
    return _Interact.apply(embeddings, features, width)  # type: ignore[no-any-return]


class _Interact(torch.autograd.Function):
    """The kernels on a GPU, their twins on a CPU."""

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
