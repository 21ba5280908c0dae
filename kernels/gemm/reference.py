"""The kernels of products with communication inside, in plain PyTorch, as tests compare them with."""

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


def product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str) -> torch.Tensor:
    """Return activation(x @ weight^T + bias), computed in float64, as float32.

    Args:
        x: [M, K].
        weight: [N, K].
        bias: [N] or None.
        activation: none | relu.
    """
    total = x.double() @ weight.double().t()
    if bias is not None:
        total = total + bias.double()
    return (total.relu() if activation == "relu" else total).float()
