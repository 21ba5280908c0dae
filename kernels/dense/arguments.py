"""What the update of the dense parameters is given, by kernel and twin alike."""

from typing import NamedTuple

import torch

BLOCK = 1024
"""elements a program updates; flat tensors have a multiple of it, so that the kernel needs no mask"""

LINE = 64
"""elements in whose multiples flat tensors are cut and parameters placed: 256 bytes of float32, what cuBLAS and NCCL
like best, and 16 bytes a lane for every type"""

STATES: dict[str, tuple[str, ...]] = {"sgd": (), "adagrad": ("sum",), "adam": ("exp_avg", "exp_avg_sq")}
"""kind -> the names that torch.optim has for the optimizer's state"""


class FlatUpdate(NamedTuple):
    """The tensors of an update, all on one device. n is a multiple of `BLOCK`; flat tensors are of one layout.

    Every number that may change between updates is read from a tensor, so a CUDA graph that holds the update follows
    it. An update reads `numbers`, and writes all others but `gradients`.
    """

    kind: str
    """sgd | adagrad | adam"""
    weights: torch.Tensor
    """[n] float32"""
    gradients: torch.Tensor
    """[n] float32"""
    states: tuple[torch.Tensor, ...]
    """[n] float32 each, those of `STATES` in their order"""
    shadow: torch.Tensor | None
    """[n] float16 or bfloat16, which takes the updated weights, rounded to the nearest; None without one"""
    step: torch.Tensor
    """[1] float32, the number of updates so far"""
    numbers: torch.Tensor
    """[4] float64: learning rate, epsilon, beta1, beta2; float64 as in torch.optim, whose numbers are Python's"""
    factors: torch.Tensor
    """[6] float32, scratch of the kernel, which the twin leaves alone"""
