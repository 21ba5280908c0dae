"""Tensor-parallel pairs of layers between data-parallel samples, as in Megatron-LM (arXiv 1909.08053, section 3).

Rank r of W has rows [r N / W, (r + 1) N / W) of the first weight [N, K] and the same columns of the second [M, N]:

    x [b, K] of each rank --all-gather, product--> y [B, N / W] --product, reduce-scatter--> z [b, M] of each rank

A divided weight's gradient is a sum over all samples, where the mean over ranks is needed. So the gradient of z is
divided by W. The gradients of x and of the second layer's bias, which is later averaged over the ranks, are multiplied
by W. Both are exact if W is a power of two.
"""

from typing import NamedTuple

import torch
from torch import nn
from torchrec.modules.mlp import MLP, Perceptron

from dlrm_overlap.dense.gemm.layer import Activation
from dlrm_overlap.dense.gemm.operators import all_gather_matmul, matmul_reduce_scatter
from dlrm_overlap.dense.gemm.products import ParallelProducts
from dlrm_overlap.torchrec_private.attributes import activation_of, layers_of, linear_of, set_layers


class Shard(NamedTuple):
    """Elements [offsets, offsets + its own shape) of a parameter of shape `shape`."""

    shape: tuple[int, ...]
    offsets: tuple[int, ...]


class DividedPerceptron(nn.Module):
    """One layer of a pair, with the parameter names of `Perceptron`.

    The weight of the first layer is divided by neurons, the weight of the second layer by inputs.
    """

    def __init__(self, whole: Perceptron, products: ParallelProducts, is_first: bool) -> None:
        super().__init__()
        self.products = products
        self.shards: dict[str, Shard] = {}
        """parameter name -> this rank's shard, for divided parameters"""
        self._is_first, linear = is_first, linear_of(whole)
        has_bias = linear.bias is not None
        self._linear = nn.Linear(linear.in_features, linear.out_features, has_bias, device="meta")
        self._linear.weight = self._part("_linear.weight", linear.weight, 0 if is_first else 1)
        if has_bias:
            self._linear.bias = self._part("_linear.bias", linear.bias, 0 if is_first else None)
        # The product's epilogue supports ReLU only; other activations follow it.
        activation = activation_of(whole)
        self._epilogue: Activation = "relu" if activation is torch.relu else "none"
        self._rest = nn.Identity() if self._epilogue == "relu" else activation

    def _part(self, name: str, whole: torch.Tensor, dim: int | None) -> nn.Parameter:
        if dim is None:
            return nn.Parameter(whole.detach().clone(), whole.requires_grad)
        size = whole.shape[dim] // self.products.world_size
        first = self.products.rank * size
        self.shards[name] = Shard(tuple(whole.shape), tuple(first if i == dim else 0 for i in range(whole.dim())))
        return nn.Parameter(whole.detach().narrow(dim, first, size).clone(), whole.requires_grad)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Map [b, K] to [B, N / W] (first layer), or [B, N / W] to [b, M] (second layer)."""
        products, weight, bias = self.products, self._linear.weight, self._linear.bias
        if self._is_first:
            input = _scale_gradient(input, products.world_size)
            return self._rest(all_gather_matmul(input, weight, bias, self._epilogue, products=products))
        if bias is not None:  # its gradient is over this rank's samples, and averaged as any whole parameter's
            bias = _scale_gradient(bias, products.world_size)
        output = self._rest(matmul_reduce_scatter(input, weight, bias, self._epilogue, products=products))
        return _scale_gradient(output, 1 / products.world_size)


def _scale_gradient(tensor: torch.Tensor, factor: float) -> torch.Tensor:
    same = tensor.view_as(tensor)
    if same.requires_grad:
        same.register_hook(lambda gradient: gradient * factor)
    return same


def divide_pairs(mlp: MLP, products: ParallelProducts) -> list[tuple[int, int]]:
    """Divide layers 0 and 1, 2 and 3, .. of `mlp` in place; return the indices of each divided pair.

    `mlp` must have the same layers and weights on all ranks.

    A pair stays whole if its inner width is not divisible by the number of ranks, or its activations have parameters.
    Other activations must be elementwise. Checkpoints of whole and divided layers are interchangeable.
    """
    layers = layers_of(mlp)
    pairs = []
    for first in range(0, len(layers) - 1, 2):
        pair = layers[first : first + 2]
        activations = [activation for each in pair if isinstance(activation := activation_of(each), nn.Module)]
        learnt = any(True for each in activations for _ in each.parameters())
        if linear_of(layers[first]).out_features % products.world_size == 0 and not learnt:
            for number in (first, first + 1):
                layers[number] = DividedPerceptron(layers[number], products, is_first=number == first)
            pairs.append((first, first + 1))
    set_layers(mlp, layers)
    return pairs


def divided_layers(model: nn.Module) -> list[DividedPerceptron]:
    return [module for module in model.modules() if isinstance(module, DividedPerceptron)]


def products_of(model: nn.Module) -> list[ParallelProducts]:
    return list(dict.fromkeys(layer.products for layer in divided_layers(model)))


def shards_of(model: nn.Module) -> dict[str, Shard]:
    """Return parameter name -> this rank's shard."""
    shards = {
        layer.get_parameter(name): shard for layer in divided_layers(model) for name, shard in layer.shards.items()
    }
    return {name: shards[parameter] for name, parameter in model.named_parameters() if parameter in shards}
