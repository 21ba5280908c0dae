"""Shared by the dense part: kernels, products with float32 outputs, and options."""

from importlib import import_module
from typing import Any, NamedTuple

import torch

from dlrm_overlap.config import EmbeddingConfig
from dlrm_overlap.kernels import reference


class StoreOptions(NamedTuple):
    """How gradients are reduced by stores to peers."""

    programs: int = 16
    """programs, of 32 warps, of the GPU's kernel"""
    piece_elements: int = 4 << 20
    """approximate elements that are reduced at once, and updated while the next are sent"""
    wait_timeout_s: float = EmbeddingConfig.wait_timeout_s


def kernels_on(device: torch.device, name: str) -> Any:
    """Return module `name` of `kernels.dense` for a GPU, or the reference functions for a CPU."""
    return import_module(f"dlrm_overlap.kernels.dense.{name}") if device.type == "cuda" else reference


def product_into(out: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """Write left @ right, of matrices or batches, to `out`, accumulated in float32.

    `out` may be float32 for inputs of another type.
    """
    product = torch.mm if out.dim() == 2 else torch.bmm
    if out.dtype == left.dtype:
        product(left, right, out=out)
    elif out.is_cuda:
        product(left, right, out_dtype=out.dtype, out=out)
    else:  # on CPUs a product's output has the inputs' dtype
        product(left.to(out.dtype), right.to(out.dtype), out=out)
