"""The sum of partial products in plain PyTorch: what tests compare the kernel with, and what CPUs run."""

import torch


def sum_parts(parts: torch.Tensor, bias: torch.Tensor | None, relu: bool) -> torch.Tensor:
    """Return the sum of `parts` [W, rows, columns] over the ranks in their order, in float32, rounded to their type."""
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    if bias is not None:
        total = total + bias.float()
    return (total.relu() if relu else total).to(parts.dtype)
