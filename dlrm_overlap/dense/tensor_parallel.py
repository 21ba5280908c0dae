"""Layers whose weights are divided over the ranks, between samples that stay with their ranks.

Layers are divided in pairs, as in Megatron-LM (Shoeybi et al., arXiv 1909.08053, section 3). Rank r of W has rows
[r N / W, (r + 1) N / W) of the first weight [N, K] and the columns of the same numbers of the second one [M, N]:

    x [b, K] of each rank --all-gather, product--> y [B, N / W] --product, reduce-scatter--> z [b, M] of each rank

So an activation of b samples travels twice a pair, forward, and twice, backward, where data parallelism sends the sum
of the weights' gradients: 4 (W - 1) b times the width against 2 (W - 1) / W times the weights. With layers of N x N,
whose activations and gradients travel in one type, the pair sends fewer bytes while b < N / W.

**Gradients.** The loss of a rank is the mean over its own b samples, and the gradient to train by is the mean over the
ranks. The gradient of a divided weight is a sum over the samples of all ranks, so it must be divided by W, and be
reduced no more. It is not divided itself: the gradient of z is, which is small, and that of x is multiplied again. For
W of 2, 4 or 8 both are exact. The bias of a second layer is whole on all ranks and reduced like other whole parameters;
so its gradient, over a rank's own samples, is multiplied again, too.
"""

from typing import Any, NamedTuple

import torch
from torch import nn
from torchrec.modules.mlp import MLP, Perceptron

from dlrm_overlap.dense.gemm.layer import Activation
from dlrm_overlap.dense.gemm.operators import all_gather_matmul, matmul_reduce_scatter
from dlrm_overlap.dense.gemm.products import ParallelProducts


class Shard(NamedTuple):
    """Which part of a parameter of the whole model a rank holds: its elements [offsets, offsets + its own shape)."""

    shape: tuple[int, ...]
    """of the whole parameter"""
    offsets: tuple[int, ...]


class DividedPerceptron(nn.Module):
    """One of a pair of `Perceptron`s: the first has some neurons, the second some inputs of each neuron.

    Its parameters have the names that they have in the whole layer.
    """

    def __init__(self, whole: Perceptron, products: ParallelProducts, is_first: bool) -> None:
        super().__init__()
        self.products = products
        self.shards: dict[str, Shard] = {}
        """parameter -> which part of the whole it is, of those that are not all of it"""
        self._is_first, linear = is_first, whole._linear
        has_bias = linear.bias is not None
        self._linear = nn.Linear(linear.in_features, linear.out_features, has_bias, device="meta")
        self._linear.weight = self._part("_linear.weight", linear.weight, 0 if is_first else 1)
        if has_bias:
            self._linear.bias = self._part("_linear.bias", linear.bias, 0 if is_first else None)
        # The product's epilogue has no other activation; the rest comes after it.
        self._epilogue: Activation = "relu" if whole._activation_fn is torch.relu else "none"
        self._rest = nn.Identity() if self._epilogue == "relu" else whole._activation_fn

    def _part(self, name: str, whole: torch.Tensor, dim: int | None) -> nn.Parameter:
        """Return this rank's part of a parameter along `dim`, or, for None, a copy of all of it."""
        if dim is None:
            return nn.Parameter(whole.detach().clone(), whole.requires_grad)
        size = whole.shape[dim] // self.products.world_size
        first = self.products.rank * size
        self.shards[name] = Shard(tuple(whole.shape), tuple(first if i == dim else 0 for i in range(whole.dim())))
        return nn.Parameter(whole.detach().narrow(dim, first, size).clone(), whole.requires_grad)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Map this rank's samples to its neurons of all ranks' samples, or, the second one, from these to all neurons.

        The first one maps [b, K] to [B, N / W], rank r's samples from row r b on, the second one [B, N / W] to [b, M].
        """
        products, weight, bias = self.products, self._linear.weight, self._linear.bias
        if self._is_first:
            input = _scale_gradient(input, products.world_size)
            return self._rest(all_gather_matmul(input, weight, bias, self._epilogue, products=products))
        if bias is not None:  # its gradient is over this rank's samples alone, and reduced as any whole parameter's
            bias = _scale_gradient(bias, products.world_size)
        output = self._rest(matmul_reduce_scatter(input, weight, bias, self._epilogue, products=products))
        return _scale_gradient(output, 1 / products.world_size)


def _scale_gradient(tensor: torch.Tensor, factor: float) -> torch.Tensor:
    """Return the tensor as it is; its gradient is multiplied by a number."""
    same = tensor.view_as(tensor)
    if same.requires_grad:
        same.register_hook(lambda gradient: gradient * factor)
    return same


def divide_pairs(mlp: MLP, products: ParallelProducts) -> list[tuple[int, int]]:
    """Divide layers 0 and 1, 2 and 3, .. of `mlp` over the ranks of `products`, in place; all ranks do so alike.

    A pair whose inner width the number of ranks does not divide stays whole, and so does a last layer without a pair:
    they train as before, and a checkpoint of either loads into the other. So does a pair whose activations have
    parameters, which are of whole layers; other activations must treat each neuron by itself.

    Returns:
        The numbers of the layers of each pair that is divided.
    """
    layers: list[Any] = list(mlp._mlp)  # type: ignore[arg-type]
    pairs = []
    for first in range(0, len(layers) - 1, 2):
        pair = layers[first : first + 2]
        activations = [each._activation_fn for each in pair if isinstance(each._activation_fn, nn.Module)]
        learnt = any(True for each in activations for _ in each.parameters())
        if layers[first]._out_size % products.world_size == 0 and not learnt:
            for number in (first, first + 1):
                layers[number] = DividedPerceptron(layers[number], products, is_first=number == first)
            pairs.append((first, first + 1))
    mlp._mlp = nn.Sequential(*layers)
    return pairs


def divided_layers(model: nn.Module) -> list[DividedPerceptron]:
    """Return the layers of `model` that are divided over the ranks."""
    return [module for module in model.modules() if isinstance(module, DividedPerceptron)]


def products_of(model: nn.Module) -> list[ParallelProducts]:
    """Return the runners of the divided layers' products, to be checked and closed with the model."""
    return list(dict.fromkeys(layer.products for layer in divided_layers(model)))


def shards_of(model: nn.Module) -> dict[str, Shard]:
    """Return which part of the whole each parameter of `model` is, by name, of those that are divided."""
    shards = {
        layer.get_parameter(name): shard for layer in divided_layers(model) for name, shard in layer.shards.items()
    }
    return {name: shards[parameter] for name, parameter in model.named_parameters() if parameter in shards}
