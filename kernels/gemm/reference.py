"""The sum of partial products in plain PyTorch, for tests and CPUs."""

import torch


def sum_parts(parts: torch.Tensor, bias: torch.Tensor | None, relu: bool) -> torch.Tensor:
    """Return the sum of `parts` [W, rows, columns] in the order of the ranks, in float32, rounded to their dtype."""
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    if bias is not None:
        total = total + bias.float()
    return (total.relu() if relu else total).to(parts.dtype)
