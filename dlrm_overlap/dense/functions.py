"""Shared by the dense part: the place of its kernels, products that write float32, options of reductions by stores."""

from importlib import import_module
from typing import Any, NamedTuple

import torch

from dlrm_overlap.config import EmbeddingConfig
from dlrm_overlap.kernels import reference


class StoreOptions(NamedTuple):
    """How gradients are reduced by stores."""

    programs: int = 16
    """of 32 warps, of the kernel that fills the links, on GPUs"""
    piece_elements: int = 4 << 20
    """about so many are reduced at once, and updated while the next ones travel"""
    wait_timeout_s: float = EmbeddingConfig.wait_timeout_s
    """bound of a wait for a peer"""


def kernels_on(device: torch.device, name: str) -> Any:
    """Return the module `name` of `kernels.dense` for a GPU; for a CPU, which needs no Triton, that of the twins."""
    return import_module(f"dlrm_overlap.kernels.dense.{name}") if device.type == "cuda" else reference


def product_into(out: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """Write left @ right, of matrices or of batches of them, to `out`, which is float32 where the factors may not be.

    It is added up in float32.
    """
    product = torch.mm if out.dim() == 2 else torch.bmm
    if out.dtype == left.dtype:
        product(left, right, out=out)
    elif out.is_cuda:
        product(left, right, out_dtype=out.dtype, out=out)
    else:  # CPUs have no product with an output of another type
        product(left.to(out.dtype), right.to(out.dtype), out=out)
