"""The arguments of the dense kernels and their twins."""

from typing import NamedTuple

import torch

from dlrm_overlap.kernels.tuning import power_of_2

BLOCK = 1024
"""elements that a program updates; the size of a flat tensor is a multiple of it, so the kernel needs no mask"""

LINE = 64
"""elements in whose multiples flat tensors are cut and parameters aligned: 256 bytes of float32, as cuBLAS and NCCL
prefer"""

STATES: dict[str, tuple[str, ...]] = {
    "sgd": (),
    "momentum": ("momentum_buffer",),
    "adagrad": ("sum",),
    "adam": ("exp_avg", "exp_avg_sq"),
}
"""kind -> names of the optimizer's states in torch.optim"""

LR, EPS, FIRST, SECOND, NESTEROV, L2, DECOUPLED = range(7)
"""columns of `FlatUpdate.numbers`. FIRST: beta1, momentum, or Adagrad's lr_decay; SECOND: beta2, or dampening; L2,
DECOUPLED: weight decay that is added to the gradient, or shrinks the weight"""

FACTORS = 8
"""number of columns of `FlatUpdate.factors`"""


class FlatUpdate(NamedTuple):
    """The tensors of an update of flat tensors of the same layout; n is a multiple of `BLOCK`.

    Everything that may change between updates is in tensors, so a CUDA graph can hold the update. Each of R parameters
    has a row of numbers. An update writes weights, states, shadow, step and factors.
    """

    kind: str
    """a key of `STATES`: sgd | momentum (SGD with momentum) | adagrad | adam"""
    decays: bool
    """whether some L2 or DECOUPLED is not 0"""
    weights: torch.Tensor
    """[n] float32"""
    gradients: torch.Tensor
    """[n] float32"""
    states: tuple[torch.Tensor, ...]
    """[n] float32 each, in the order of `STATES`"""
    shadow: torch.Tensor | None
    """[n] float16 or bfloat16, receives the updated weights, rounded to nearest; or None"""
    rows: torch.Tensor
    """[n / LINE] int32: row of the numbers for each line of elements; -1: the line is not updated"""
    step: torch.Tensor
    """[R] float32: number of updates so far"""
    numbers: torch.Tensor
    """[R, 7] float64, as in torch.optim; columns `LR` .. `DECOUPLED`"""
    factors: torch.Tensor
    """[R, FACTORS] float32, scratch of the kernel; the twin does not use it"""


GROUP = 64
"""rows whose sums `gradient_of_layer` writes together"""

STACKED = 64
"""elements: a layer of a stack begins at a multiple of it, so that it can be read 16 bytes at a time"""


class CrossGradient(NamedTuple):
    """The inputs and outputs of the gradient of one layer of a cross network of L layers, b samples, width N.

    All tensors are contiguous and have one type except `bias` and `sums`.
    """

    gradient: torch.Tensor
    """[b, N]: g_L, the gradient of the network's output"""
    later: torch.Tensor
    """stack [L - 1, b, N]: p_1 .. p_{L-1}; a layer reads those of later layers"""
    x0: torch.Tensor
    """[b, N]: the network's input"""
    w: torch.Tensor
    """stack [L, b, N]: the products of all layers; read for layer 0"""
    bias: torch.Tensor
    """[L, N] float32; read for layer 0"""
    du: torch.Tensor
    """[b, N], written: the gradient of w_l"""
    dx: torch.Tensor
    """[b, N], written for layer 0: the gradient of x_0 without p_0"""
    sums: torch.Tensor
    """[ceil(b / GROUP), N] float32, written: sum of du, before it is rounded, over each `GROUP` rows"""


def product_block(size: int) -> int:
    """Return the rows or columns of the block that holds `size` of them in a program's product; at least 16."""
    return max(16, power_of_2(size))


def stack(layers: int, like: torch.Tensor) -> torch.Tensor:
    """Return an uninitialised stack [layers, *shape] of contiguous tensors, of the shape and type of `like`.

    Each begins at a multiple of `STACKED` elements. Example: two layers like [3, 50] begin at elements 0 and 192 of
    384.
    """
    apart = -(-like.numel() // STACKED) * STACKED
    flat = like.new_empty(max(1, layers) * apart)
    return flat.as_strided((layers, *like.shape), (apart, *like.stride()))
