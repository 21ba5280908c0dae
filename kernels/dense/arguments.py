"""The arguments of the dense kernels and of their reference implementations."""

from itertools import pairwise
from typing import NamedTuple

import torch

from dlrm_overlap.kernels.tuning import power_of_2

BLOCK = 1024
"""elements of a program; flat tensors are multiples of it, so kernels need no mask"""

LINE = 64
"""elements at whose multiples parameters begin in flat tensors: 256 bytes of float32, as cuBLAS and NCCL prefer"""

STATES: dict[str, tuple[str, ...]] = {
    "sgd": (),
    "momentum": ("momentum_buffer",),
    "adagrad": ("sum",),
    "adam": ("exp_avg", "exp_avg_sq"),
}
"""kind -> torch.optim's names of the states"""

LR, EPS, FIRST, SECOND, NESTEROV, L2, DECOUPLED = range(7)
"""columns of `FlatUpdate.numbers`. FIRST: beta1, momentum, or Adagrad's lr_decay; SECOND: beta2, or dampening; L2,
DECOUPLED: weight decay that is added to the gradient, or shrinks the weight"""

FACTORS = 8
"""columns of `FlatUpdate.factors`"""


class FlatUpdate(NamedTuple):
    """An update of flat tensors of the same layout, for R parameters; n is a multiple of `BLOCK`.

    It writes weights, states, shadow, step and factors. What may change between updates is in tensors, so a CUDA graph
    can hold it.
    """

    kind: str
    """a key of `STATES`"""
    decays: bool
    weights: torch.Tensor
    """[n] float32"""
    gradients: torch.Tensor
    """[n] float32"""
    states: tuple[torch.Tensor, ...]
    """[n] float32 each"""
    shadow: torch.Tensor | None
    """[n] float16 or bfloat16: the updated weights, rounded to nearest"""
    rows: torch.Tensor
    """[n / LINE] int32: row of `numbers` of each line; -1: not updated"""
    step: torch.Tensor
    """[R] float32: number of updates"""
    numbers: torch.Tensor
    """[R, 7] float64, as in torch.optim; columns `LR` .. `DECOUPLED`"""
    factors: torch.Tensor
    """[R, FACTORS] float32, scratch of the kernel"""


class SharedWeights(NamedTuple):
    """Where the flat tensors of W ranks are, and which weights every rank has in float32."""

    gradients: torch.Tensor
    """[W] int64: address of each rank's flat gradient, a multiple of 16"""
    weights: torch.Tensor
    """[W] int64: of its weights"""
    shadows: torch.Tensor
    """[W] int64: of its shadow"""
    float32_lines: torch.Tensor
    """[n / LINE] int32: 1 for lines whose float32 weights are stored at all ranks, else 0"""


GROUP = 64
"""rows that kernels add up into one row of `sums`"""

STACKED = 64
"""elements at whose multiples layers of a stack begin, to be read 16 bytes at a time"""


class CrossGradient(NamedTuple):
    """The gradient of one layer of a cross network of L layers, b samples, width N.

    All tensors are contiguous and have one dtype except `bias` and `sums`.
    """

    gradient: torch.Tensor
    """[b, N]: g_L"""
    later: torch.Tensor
    """stack [L - 1, b, N]: p_1 .. p_{L-1}"""
    x0: torch.Tensor
    w: torch.Tensor
    """stack [L, b, N]: the products; read for layer 0"""
    bias: torch.Tensor
    """[L, N] float32; read for layer 0"""
    du: torch.Tensor
    """[b, N], written"""
    dx: torch.Tensor
    """[b, N], written for layer 0: dx_0 - p_0"""
    sums: torch.Tensor
    """[ceil(b / GROUP), N] float32, written: sums of du, before it is rounded"""


MLP_LAYERS, MLP_WIDTH = 4, 128
"""the largest MLP that its kernel takes: layers, and columns of a layer"""

MLP_SAMPLES = 16
"""samples of a program of the MLP's kernel"""


class MLPShape(NamedTuple):
    """The layers of a small MLP in float32."""

    widths: tuple[int, ...]
    """columns of the input, then of each layer's output"""
    gelu: bool
    """the activation is GELU (exact, by the error function), else ReLU"""
    ends_linear: bool
    """the last layer has no activation"""

    @property
    def layers(self) -> int:
        return len(self.widths) - 1

    @property
    def activated(self) -> int:
        """Number of columns of all layers with an activation."""
        return sum(self.widths[1 : len(self.widths) - self.ends_linear])

    @property
    def parameters(self) -> int:
        return sum(wide * (before + 1) for before, wide in pairwise(self.widths))

    def fits(self) -> bool:
        return 1 <= self.layers <= MLP_LAYERS and max(self.widths) <= MLP_WIDTH


def product_block(size: int) -> int:
    return max(16, power_of_2(size))


def stack(layers: int, like: torch.Tensor) -> torch.Tensor:
    """Return an uninitialised stack [layers, *shape] of tensors like `like`, each contiguous.

    Example: two layers like [3, 50] begin at elements 0 and 192 of 384.
    """
    apart = -(-like.numel() // STACKED) * STACKED
    flat = like.new_empty(max(1, layers) * apart)
    return flat.as_strided((layers, *like.shape), (apart, *like.stride()))
