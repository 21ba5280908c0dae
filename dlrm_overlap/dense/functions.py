"""Helpers of the dense part."""

from collections.abc import Callable
from importlib import import_module
from typing import Any, NamedTuple

import torch

from dlrm_overlap.config import EmbeddingConfig
from dlrm_overlap.kernels import reference

Write = Callable[[list[torch.Tensor]], None]
"""writes the gradients of some parameters to contiguous tensors, one per parameter, possibly float32"""


class StoreOptions(NamedTuple):
    programs: int = 16
    """number of programs of the reduction kernel, of 32 warps each"""
    piece_elements: int = 4 << 20
    """approximate number of gradient elements per piece; the weights of a reduced piece are updated while the next
    piece is sent"""
    wait_timeout_s: float = EmbeddingConfig.wait_timeout_s


def store_options(
    dense_reduce: str, device: torch.device, reaches_all: bool, wait_timeout_s: float
) -> StoreOptions | None:
    """Return how dense gradients are averaged by stores, None for a collective.

    `reaches_all` says whether this rank can store into the memory of all ranks; see `train.dense_reduce`.
    """
    if device.type == "cpu" or dense_reduce == "collective":
        return None
    return StoreOptions(wait_timeout_s=wait_timeout_s) if reaches_all or dense_reduce == "stores" else None


def kernels_on(device: torch.device, name: str) -> Any:
    """Return module `name` of `kernels.dense` for a GPU, or the reference functions for a CPU."""
    return import_module(f"dlrm_overlap.kernels.dense.{name}") if device.type == "cuda" else reference


def product_into(out: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """Write left @ right to `out`, which may be float32; all are matrices or all batches. Sums are float32."""
    product = torch.mm if out.dim() == 2 else torch.bmm
    if out.dtype == left.dtype:
        product(left, right, out=out)
    elif out.is_cuda:
        product(left, right, out_dtype=out.dtype, out=out)
    else:  # on CPUs a product's output has the inputs' dtype
        product(left.to(out.dtype), right.to(out.dtype), out=out)
