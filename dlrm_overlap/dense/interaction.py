"""The dot products of all pairs of embeddings as one autograd function, in place of a batched product and a gather."""

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from dlrm_overlap.dense.functions import kernels_on
from dlrm_overlap.kernels.dense.arguments import product_block

_MOST_FEATURES, _MOST_ELEMENTS = 128, 1 << 15
"""of a sample, whose embeddings and products a kernel's program holds; elements are those of its blocks"""


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
