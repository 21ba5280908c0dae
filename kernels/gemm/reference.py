"""The products with communication inside, in plain PyTorch, for the tests."""

import torch


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


def reduce_windows(window: torch.Tensor, bias: torch.Tensor | None, activation: str) -> torch.Tensor:
    """Return activation(window[0] + .. + window[W - 1] + bias) as float32, added up in that order.

    Args:
        window: [W, M / W, N] of a float type.
        bias: [N] or None.
        activation: none | relu.
    """
    total = window[0].float()
    for part in window[1:]:
        total = total + part.float()
    if bias is not None:
        total = total + bias.float()
    return total.relu() if activation == "relu" else total
