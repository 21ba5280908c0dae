"""The dense kernels in plain PyTorch: what they are held against, and what CPUs run."""

from collections.abc import Sequence

import torch

from dlrm_overlap.kernels.dense.arguments import GROUP, LINE, CrossGradient, FlatUpdate


def average_share(shares: Sequence[torch.Tensor]) -> None:
    """Store the mean of one rank's share, as each rank has it, over all of them; float32 sums in the ranks' order.

    Example: shares [1, 2] and [5, 6]: both become [3, 4].
    """
    total = shares[0].float()
    for share in shares[1:]:
        total = total + share
    mean = (total * (1 / len(shares))).to(shares[0].dtype)
    for share in shares:
        share.copy_(mean)


def begin_update(update: FlatUpdate) -> None:
    """Count an update, before its first range: Adam's corrections depend on the number."""
    update.step.add_(1)


def update_range(update: FlatUpdate, begin: int, end: int) -> None:
    """Update the flat weights [begin, end), once the update is counted, by the operators that torch.optim uses.

    Their order is torch.optim's, too, so that the bits are the same.

    Example: adagrad with learning rate 1, sum 9 and gradient 4. The sum becomes 9 + 16 = 25, the weight loses 4 / 5.
    """
    if update.rows is None:
        _update_row(update, 0, slice(begin, end))
    else:
        rows, lines = torch.unique_consecutive(update.rows[begin // LINE : end // LINE], return_counts=True)
        ends = (begin + lines.cumsum(0) * LINE).tolist()
        for row, first, last in zip(rows.tolist(), [begin, *ends], ends, strict=False):
            if row >= 0:
                _update_row(update, row, slice(first, last))
    if update.shadow is not None:
        update.shadow[begin:end].copy_(update.weights[begin:end])


def _update_row(update: FlatUpdate, row: int, part: slice) -> None:
    """Update a part of the flat weights by one row of the numbers."""
    weights, gradients = update.weights[part], update.gradients[part]
    states = [state[part] for state in update.states]
    lr, eps, first, second, nesterov, l2, decoupled = update.numbers[row].tolist()
    steps = update.step[row].item()
    if decoupled:
        weights.mul_(1 - lr * decoupled)
    if l2:
        gradients = gradients.add(weights, alpha=l2)
    if update.kind == "sgd":
        weights.add_(gradients, alpha=-lr)
    elif update.kind == "momentum":
        states[0].mul_(first).add_(gradients, alpha=1 if steps == 1 else 1 - second)
        weights.add_(gradients.add(states[0], alpha=first) if nesterov else states[0], alpha=-lr)
    elif update.kind == "adagrad":
        states[0].addcmul_(gradients, gradients)
        weights.addcdiv_(gradients, states[0].sqrt().add_(eps), value=-lr / (1 + (steps - 1) * first))
    else:
        states[0].lerp_(gradients, 1 - first)
        states[1].mul_(second).addcmul_(gradients, gradients, value=1 - second)
        root = (states[1].sqrt() / (1 - second**steps) ** 0.5).add_(eps)
        weights.addcdiv_(states[0], root, value=-lr / (1 - first**steps))


def add_layer(x0: torch.Tensor, x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor, out: torch.Tensor) -> None:
    """Write out = x0 * (w + bias) + x, calculated in float32; see the kernel of this name."""
    out.copy_(x0.float() * (w.float() + bias) + x.float())


def gradient_of_layer(tensors: CrossGradient, layer: int, layers: int) -> None:
    """Write du and its sums, for layer 0 also dx, calculated in float32; see the kernel of this name."""
    reaching, through = tensors.gradient.float(), torch.zeros_like(tensors.x0, dtype=torch.float32)
    for k in range(layers - 1, layer - 1, -1):
        if k < layers - 1:
            reaching = reaching + tensors.later[k].float()  # p_{k+1}
        if layer == 0:
            through += reaching * (tensors.w[k].float() + tensors.bias[k])
    change = reaching * tensors.x0.float()
    tensors.du.copy_(change)
    for group, part in enumerate(change.split(GROUP)):
        tensors.sums[group] = part.sum(0)
    if layer == 0:
        tensors.dx.copy_(through + reaching)
