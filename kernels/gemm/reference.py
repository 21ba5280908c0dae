"""The sum of partial products, in plain PyTorch, as CPUs run it and tests compare the kernel with."""

import torch


def sum_parts(parts: torch.Tensor, bias: torch.Tensor | None, relu: bool) -> torch.Tensor:
    """Return the sum over the ranks of `parts` [W, rows, columns], added up in float32 in their order, of its type.

    Example: parts [[[1, 2]], [[3, -9]]], bias [1, 1], relu: [[5, 0]].
    """
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    if bias is not None:
        total = total + bias.float()
    return (total.relu() if relu else total).to(parts.dtype)
