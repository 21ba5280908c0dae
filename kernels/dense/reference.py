"""The update of the dense parameters in plain PyTorch: what the kernel is held against, and what CPUs run."""

from dlrm_overlap.kernels.dense.arguments import FlatUpdate


def update_parameters(update: FlatUpdate) -> None:
    """Update the flat weights by the operators that torch.optim uses, in its order, so that the bits are the same.

    Example: adagrad with learning rate 1, sum 9 and gradient 4. The sum becomes 9 + 16 = 25, the weight loses 4 / 5.
    """
    weights, gradients, states = update.weights, update.gradients, update.states
    lr, eps, beta1, beta2 = update.numbers.tolist()
    update.step.add_(1)
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
        update.shadow.copy_(weights)
