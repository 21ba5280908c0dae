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

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torchrec.modules.mlp import MLP, Perceptron

from dlrm_overlap.gemm.linear import Activation
from dlrm_overlap.gemm.operators import all_gather_matmul, matmul_reduce_scatter
from dlrm_overlap.gemm.products import ParallelProducts, parallel_products


class Shard(NamedTuple):
    """Which part of a parameter of the whole model a rank holds: its elements [offsets, offsets + its own shape)."""

    shape: tuple[int, ...]
    """of the whole parameter"""
    offsets: tuple[int, ...]


class LayerRanks:
    """The ranks over which layers are divided. A copy of a layer shares it, and so does what sets `order`."""

    def __init__(self, group: dist.ProcessGroup | None, rank: int, world_size: int) -> None:
        self.group, self.rank, self.world_size = group, rank, world_size
        self.order: AbstractContextManager[object] = nullcontext()
        """entered around all that goes between the ranks, to order it among what else a captured step exchanges"""
        self.way = "auto"
        """how products and their communication run, see `gemm.operators`; to be set before the first step"""

    def __deepcopy__(self, memo: dict[int, Any]) -> "LayerRanks":
        return self


class DividedPerceptron(nn.Module):
    """A `Perceptron` of which this rank has a part; its parameters have the names that they have in the whole one."""

    def __init__(self, whole: Perceptron, ranks: LayerRanks, dim: int) -> None:
        """Take this rank's part of the parameters of `whole`, along dimension `dim` of its weight."""
        super().__init__()
        self.ranks = ranks
        self.shards: dict[str, Shard] = {}
        """weight or bias -> which part of the whole it is, if it is not all of it"""
        linear = whole._linear
        self._linear = nn.Linear(linear.in_features, linear.out_features, device="meta")
        for name, parameter in linear.named_parameters():
            self._linear.register_parameter(name, self._part(name, parameter, dim))
        # The product's epilogue does what it can; the rest comes behind it.
        self._epilogue: Activation = "relu" if whole._activation_fn is torch.relu else "none"
        self._rest = nn.Identity() if self._epilogue == "relu" else whole._activation_fn

    def _part(self, name: str, parameter: nn.Parameter, dim: int) -> nn.Parameter:
        """Return this rank's part of a weight, or of a bias, which a layer divided by columns has whole."""
        if dim >= parameter.dim():
            return nn.Parameter(parameter.detach().clone())
        size = parameter.shape[dim] // self.ranks.world_size
        first = self.ranks.rank * size
        offsets = tuple(first if each == dim else 0 for each in range(parameter.dim()))
        self.shards[name] = Shard(tuple(parameter.shape), offsets)
        return nn.Parameter(parameter.detach().narrow(dim, first, size).clone())

    def parameter_shards(self) -> dict[nn.Parameter, Shard]:
        """Return which part of the whole each parameter is that is not all of it."""
        return {getattr(self._linear, name): shard for name, shard in self.shards.items()}


class GatheredPerceptron(DividedPerceptron):
    """The first of a pair: this rank's neurons, for the samples of all ranks."""

    def __init__(self, whole: Perceptron, ranks: LayerRanks) -> None:
        super().__init__(whole, ranks, dim=0)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Map this rank's samples [b, K] to [B, N / W], those of rank r in rows [r b, (r + 1) b)."""
        weight, bias, ranks = self._linear.weight, self._linear.bias, self.ranks
        input = _scale_gradient(input, ranks.world_size)
        output = all_gather_matmul(
            input, weight, bias, self._epilogue, group=ranks.group, way=ranks.way, order=ranks.order
        )
        return self._rest(output)


class ScatteredPerceptron(DividedPerceptron):
    """The second of a pair: all neurons, each a sum over the inputs of all ranks, for this rank's samples."""

    def __init__(self, whole: Perceptron, ranks: LayerRanks) -> None:
        super().__init__(whole, ranks, dim=1)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Map [B, N / W], this rank's inputs for the samples of all ranks, to [b, M] of this rank's samples."""
        weight, ranks = self._linear.weight, self.ranks
        # Its gradient is over this rank's samples alone, so it is reduced as that of any whole parameter.
        bias = _scale_gradient(self._linear.bias, ranks.world_size)
        output = matmul_reduce_scatter(
            input, weight, bias, self._epilogue, group=ranks.group, way=ranks.way, order=ranks.order
        )
        return _scale_gradient(self._rest(output), 1 / ranks.world_size)


class _ScaleGradient(torch.autograd.Function):
    """A tensor as it is; its gradient is multiplied by a number."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0] * ctx.factor, None


def _scale_gradient(tensor: torch.Tensor, factor: float) -> torch.Tensor:
    return _ScaleGradient.apply(tensor, factor)  # type: ignore[no-any-return]


def divide_pairs(mlp: MLP, ranks: LayerRanks) -> list[tuple[int, int]]:
    """Divide layers 0 and 1, 2 and 3, .. of `mlp` over the ranks, in place; all ranks do so alike.

    A pair whose inner width the number of ranks does not divide stays whole, and so does a last layer without a pair:
    they train as before, and a checkpoint of either loads into the other.

    Returns:
        The numbers of the layers of each pair that is divided.
    """
    layers: Sequence[Any] = list(mlp._mlp)  # type: ignore[arg-type]
    pairs = []
    for first in range(0, len(layers) - 1, 2):
        if layers[first]._out_size % ranks.world_size == 0:
            layers[first] = GatheredPerceptron(layers[first], ranks)
            layers[first + 1] = ScatteredPerceptron(layers[first + 1], ranks)
            pairs.append((first, first + 1))
    mlp._mlp = nn.Sequential(*layers)
    return pairs


def divided_layers(model: nn.Module) -> list[DividedPerceptron]:
    """Return the layers of `model` that are divided over the ranks."""
    return [module for module in model.modules() if isinstance(module, DividedPerceptron)]


def products_of(model: nn.Module) -> list[ParallelProducts]:
    """Return what runs the divided layers' products, to be checked and closed with the model; mostly one, or none."""
    found = {parallel_products(each.ranks.group, each._linear.weight.device) for each in divided_layers(model)}
    return list(found)


def shards_of(model: nn.Module) -> dict[str, Shard]:
    """Return which part of the whole each parameter of `model` is, by name, of those that are divided."""
    shards: dict[nn.Parameter, Shard] = {}
    for layer in divided_layers(model):
        shards |= layer.parameter_shards()
    return {name: shards[parameter] for name, parameter in model.named_parameters() if parameter in shards}
