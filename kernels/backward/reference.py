"""The row update's maths in plain PyTorch: the standard of the kernel's tests, and the arithmetic of CPUs."""

from collections.abc import Sequence

import torch

from dlrm_overlap.kernels.arguments import Numbers

Rows = torch.Tensor
States = list[torch.Tensor]


def update_rows(
    weight: torch.Tensor,
    states: Sequence[torch.Tensor],
    ids: torch.Tensor,
    gradient: torch.Tensor,
    optimizer: str,
    numbers: Numbers,
) -> None:
    """Update each row that `ids` name, once, by the sum of the gradients of its ids, in place.

    Args:
        weight: [rows, D], any float type.
        states: of the optimizer, each [rows, D] or [rows], as its update has them below; of gradient's type.
        ids: [n] int64, row ids, in any order.
        gradient: [n, D] float32 or float64, in which all is computed, of the bag that holds each id.
        optimizer: by FBGEMM's name, see `_UPDATES`.

    Example:
        ids [4, 9, 4] under sgd with lr 1: row 4 loses gradient[0] + gradient[2], row 9 loses gradient[1].
    """
    rows, which = ids.unique(return_inverse=True)
    total = gradient.new_zeros(rows.numel(), weight.shape[1])
    total.index_add_(0, which, gradient)
    row = weight[rows].to(total.dtype)
    step, updated = _UPDATES[optimizer](row, [state[rows] for state in states], total, numbers)
    for state, value in zip(states, updated, strict=True):
        state[rows] = value
    weight[rows] = (row - step).to(weight.dtype)


def _sgd(row: Rows, states: States, gradient: Rows, numbers: Numbers) -> tuple[Rows, States]:
    return numbers.lr * gradient, []


def _adagrad(row: Rows, states: States, gradient: Rows, numbers: Numbers) -> tuple[Rows, States]:
    """Of one state [rows, D], the sum of squares."""
    squares = states[0] + gradient.square()
    return gradient * (numbers.lr / (squares.sqrt() + numbers.eps)), [squares]


def _rowwise_adagrad(row: Rows, states: States, gradient: Rows, numbers: Numbers) -> tuple[Rows, States]:
    """Of one state [rows], the sum of mean squares; the row decays, and its norm is bounded."""
    gradient = gradient + numbers.l2 * row
    squares = states[0] + gradient.square().mean(1)
    step = gradient * (numbers.lr / (squares.sqrt() + numbers.eps))[:, None] + numbers.lr * numbers.decoupled * row
    after = row - step
    bounded = after * (numbers.most_norm / after.norm(dim=1, keepdim=True)).clamp(max=1)
    return torch.where(bounded == after, step, row - bounded), [squares]


def _rowwise_adagrad_with_counter(row: Rows, states: States, gradient: Rows, numbers: Numbers) -> tuple[Rows, States]:
    """Of three states [rows]: the sum of mean squares, the count of the row's last step, and its counter."""
    lr, halflife, decay = numbers.lr, numbers.halflife, numbers.decoupled
    past = torch.where(states[1] == 0, 1.0, numbers.count - states[1])
    if halflife == 0:
        counter = torch.ones_like(past)
    else:
        counter = 1 + (0.5 ** (past / halflife) if halflife > 0 else 1.0) * states[2]
    squares = states[0] + (gradient + numbers.l2 * row).square().mean(1)
    root, rate, kept = squares.sqrt() + numbers.eps, torch.full_like(past, lr), torch.ones_like(past)
    if numbers.count > numbers.decay_after and numbers.lazy:
        power = (1 - decay * lr) ** (past.clamp(max=numbers.count - numbers.decay_after) - 1)
        if halflife == -1:
            rate = lr * counter.sqrt()
        elif halflife == -2:
            rate = (lr * counter).clamp(max=numbers.most_rate)
        rate, kept = rate * power, (1 - decay * lr) * power
    elif numbers.count > numbers.decay_after:
        kept = 1 - halflife / counter * (decay * lr + numbers.l2 * lr / root)
    step = gradient * (rate / root)[:, None] + row * (1 - kept)[:, None]
    return step, [squares, torch.full_like(past, numbers.count), counter]


def _adam(row: Rows, states: States, gradient: Rows, numbers: Numbers) -> tuple[Rows, States]:
    """Of two states: the moving means of gradients, [rows, D], and of squares, [rows, D] or a row's mean [rows]."""
    squares = gradient.square() if states[1].dim() == 2 else gradient.square().mean(1)
    means = [
        beta * state + (1 - beta) * x
        for beta, state, x in zip((numbers.beta1, numbers.beta2), states, (gradient, squares), strict=True)
    ]
    root = (means[1] / (1 - numbers.beta2**numbers.count)).sqrt() + numbers.eps
    direction = means[0] / (1 - numbers.beta1**numbers.count) / (root if root.dim() == 2 else root[:, None])
    return numbers.lr * (direction + numbers.decoupled * row), means


def _lamb(row: Rows, states: States, gradient: Rows, numbers: Numbers) -> tuple[Rows, States]:
    """As Adam, with a step of the norm of lr times the row."""
    step, means = _adam(row, states, gradient, numbers)
    return step * (numbers.lr * row.norm(dim=1) / step.norm(dim=1))[:, None], means


_UPDATES = {
    "sgd": _sgd,
    "adagrad": _adagrad,
    "rowwise_adagrad": _rowwise_adagrad,
    "decaying_rowwise_adagrad": _rowwise_adagrad,
    "rowwise_adagrad_with_counter": _rowwise_adagrad_with_counter,
    "adam": _adam,
    "partial_rowwise_adam": _adam,
    "lamb": _lamb,
    "partial_rowwise_lamb": _lamb,
}
