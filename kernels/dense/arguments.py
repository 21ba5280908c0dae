"""What the dense kernels are given, by kernel and twin alike."""

from typing import NamedTuple

import torch

from dlrm_overlap.kernels.tuning import power_of_2

BLOCK = 1024
"""elements a program updates; flat tensors have a multiple of it, so that the kernel needs no mask"""

LINE = 64
"""elements in whose multiples flat tensors are cut and parameters placed: 256 bytes of float32, what cuBLAS and NCCL
like best, and 16 bytes a lane for every type"""

STATES: dict[str, tuple[str, ...]] = {
    "sgd": (),
    "momentum": ("momentum_buffer",),
    "adagrad": ("sum",),
    "adam": ("exp_avg", "exp_avg_sq"),
}
"""kind -> the names that torch.optim has for the optimizer's state"""

LR, EPS, FIRST, SECOND, NESTEROV, L2, DECOUPLED = range(7)
"""columns of `FlatUpdate.numbers`. FIRST: beta1, momentum, or the decay of Adagrad's learning rate; SECOND: beta2, or
dampening; NESTEROV: 0 or 1; L2 and DECOUPLED: weight decay, added to the gradient or shrinking the weight"""

FACTORS = 8
"""columns of `FlatUpdate.factors`"""


class FlatUpdate(NamedTuple):
    """The tensors of an update, all on one device. n is a multiple of `BLOCK`; flat tensors are of one layout.

    Every number that may change between updates is read from a tensor, so a CUDA graph that holds the update follows
    it. An update writes weights, states, shadow, step and factors. Each of R parameters has a row of numbers.
    """

    kind: str
    """one of `STATES`: sgd | momentum, which is SGD with it | adagrad | adam"""
    decays: bool
    """whether some L2 or DECOUPLED is not 0"""
    weights: torch.Tensor
    """[n] float32"""
    gradients: torch.Tensor
    """[n] float32"""
    states: tuple[torch.Tensor, ...]
    """[n] float32 each, those of `STATES` in their order"""
    shadow: torch.Tensor | None
    """[n] float16 or bfloat16, which takes the updated weights, rounded to the nearest; None without one"""
    rows: torch.Tensor
    """[n / LINE] int32, the row of the numbers for each line of elements, -1 for those that are left as they are"""
    step: torch.Tensor
    """[R] float32, the number of updates so far"""
    numbers: torch.Tensor
    """[R, 7] float64, in columns `LR` .. `DECOUPLED`; float64 as in torch.optim, whose numbers are Python's"""
    factors: torch.Tensor
    """[R, FACTORS] float32, scratch of the kernel, which the twin leaves alone"""


GROUP = 64
"""rows whose sums `gradient_of_layer` writes together"""

STACKED = 64
"""elements; a layer of a stack of activations begins at a multiple of it, so that it can be read 16 bytes at a time"""


class CrossGradient(NamedTuple):
    """What a layer's gradient in a cross network is computed from, and where it is written.

    b samples of width N; all tensors are on one device and, but for `bias` and `sums`, of one type. All are contiguous,
    and so is each layer of a stack, which begins at a multiple of `STACKED` elements (`stack`).
    """

    gradient: torch.Tensor
    """[b, N], of the network's output: g_L"""
    later: torch.Tensor
    """stack [L - 1, b, N]: p_1 .. p_{L-1}, of which the layer reads those of later layers than itself"""
    x0: torch.Tensor
    """[b, N], the network's input"""
    w: torch.Tensor
    """stack [L, b, N]: the products of all layers; read for layer 0"""
    bias: torch.Tensor
    """[L, N] float32; read for layer 0"""
    du: torch.Tensor
    """[b, N], written: the gradient of w_l"""
    dx: torch.Tensor
    """[b, N], written for layer 0: the gradient of x_0 without p_0"""
    sums: torch.Tensor
    """[ceil(b / GROUP), N] float32, written: du summed, before it is rounded, over each `GROUP` rows"""


def product_block(size: int) -> int:
    """Return the rows or columns of the block that has `size` of them in a program's product: 16 are the fewest."""
    return max(16, power_of_2(size))


def stack(layers: int, like: torch.Tensor) -> torch.Tensor:
    """Return a stack [layers, *shape], uninitialised: tensors of the shape and type of `like`, each contiguous.

    Example: two layers like [3, 50] begin at the elements 0 and 192 of 384.
    """
    apart = -(-like.numel() // STACKED) * STACKED
    flat = like.new_empty(max(1, layers) * apart)
    return flat.as_strided((layers, *like.shape), (apart, *like.stride()))
