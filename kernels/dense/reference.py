"""The kernels of the dense parameters in plain PyTorch: what those are held against, and what CPUs run."""

from collections.abc import Sequence

import torch

from dlrm_overlap.kernels.dense.arguments import FlatUpdate


def average_share(sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> None:
    """Store the mean of the sources, added up in float32 in their order, to all targets; all of one type.

    Example: sources [1, 2] and [5, 6], of which each rank's is its target, too: both become [3, 4].
    """
    total = sources[0].float()
    for source in sources[1:]:
        total = total + source
    mean = (total * (1 / len(sources))).to(targets[0].dtype)
    for target in targets:
        target.copy_(mean)


def begin_update(update: FlatUpdate) -> None:
    """Count an update."""
    update.step.add_(1)


def update_range(update: FlatUpdate, begin: int, end: int) -> None:
    """Update the flat weights [begin, end), once the update is counted, by the operators that torch.optim uses.

    Their order is torch.optim's, too, so that the bits are the same.

    Example: adagrad with learning rate 1, sum 9 and gradient 4. The sum becomes 9 + 16 = 25, the weight loses 4 / 5.
    """
    weights, gradients = update.weights[begin:end], update.gradients[begin:end]
    states = [state[begin:end] for state in update.states]
    lr, eps, beta1, beta2 = update.numbers.tolist()
    if update.kind == "sgd":
        weights.add_(gradients, alpha=-lr)
    elif update.kind == "adagrad":
        states[0].addcmul_(gradients, gradients)
        weights.addcdiv_(gradients, states[0].sqrt().add_(eps), value=-lr)
    else:
        steps = update.step.item()
        states[0].lerp_(gradients, 1 - beta1)
        states[1].mul_(beta2).addcmul_(gradients, gradients, value=1 - beta2)
        root = (states[1].sqrt() / (1 - beta2**steps) ** 0.5).add_(eps)
        weights.addcdiv_(states[0], root, value=-lr / (1 - beta1**steps))
    if update.shadow is not None:
        update.shadow[begin:end].copy_(weights)


def update_parameters(update: FlatUpdate) -> None:
    """Update all weights."""
    begin_update(update)
    update_range(update, 0, update.weights.numel())
