"""Shared by the functions of the dense part: the place of their kernels, and products that write float32."""

from importlib import import_module
from typing import Any

import torch

from dlrm_overlap.kernels import reference


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
