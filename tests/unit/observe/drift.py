"""Trains many copies of one small DLRM whose updates differ by noise, to show how runs diverge by rounding alone.

As on a GPU, all copies see the same samples and start from the same weights. In every step the gradient of each row is
multiplied by 1 + noise * N(0, 1), drawn for each copy. Float64 keeps the machine's own rounding far below the noise.
"""

from dataclasses import dataclass

import torch
from torch.nn.functional import binary_cross_entropy_with_logits, gelu

ROWS, DIM, DENSE, HIDDEN, SAMPLES = (1500, 400, 100), 4, 4, 16, 64
FAULTS = ("scaled", "faster", "lost", "dropped", "stale")
"""gradients of the tables times 1.01; their learning rate 2% higher; their update left out in one of 50 steps; one
table never updated; in one of 20 steps, the pooled embeddings of the batch before"""
LOG_EVERY = 5
EPS = 1e-4  # of Adagrad: with less, a row's first update jumps with its sign, and copies diverge by single events


@dataclass(frozen=True)
class Regime:
    """How fast copies diverge: a higher learning rate amplifies `noise` more."""

    optimizer: str
    learning_rate: float
    noise: float


CALM = Regime("sgd", 6.0, 1e-7)
"""copies stay together to 1e-7"""
CHAOTIC = Regime("adagrad", 1.0, 1e-7)
"""copies diverge from 1e-8 to about 1e-3 within 150 steps"""


def train_copies(
    copies: int, seed: int, regime: Regime, fault: str | None = None, steps: int = 150
) -> list[dict[int, float]]:
    """Return for each copy its logged losses, step -> mean loss of the last `LOG_EVERY` steps.

    Args:
        copies: copies of the model.
        seed: of weights, samples and labels.
        regime: optimizer, learning rate and noise.
        fault: one of `FAULTS`, or None. Its copies draw other noise than those without it.
        steps: training steps.
    """
    generator = torch.Generator().manual_seed(seed)
    chance = torch.Generator().manual_seed(1000 * seed + (1 + FAULTS.index(fault) if fault else 0))
    interacting = DIM + (len(ROWS) + 1) * len(ROWS) // 2
    shapes = [(n, DIM) for n in ROWS] + [(DENSE, DIM), (interacting, HIDDEN), (1, HIDDEN), (HIDDEN, 1)]
    scales = [0.1] * len(ROWS) + [0.5, 0.45, 0.0, 0.25]
    drawn = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    start = [scale * each for scale, each in zip(scales, drawn, strict=True)]
    weights = [each.expand(copies, *each.shape).clone().requires_grad_() for each in start]
    squares = [torch.zeros_like(each) for each in weights]
    teacher = [torch.randn(n, generator=generator, dtype=torch.float64) for n in ROWS]
    pairs = torch.triu_indices(len(ROWS) + 1, len(ROWS) + 1, offset=1)
    losses, before = [], []
    for step in range(1, steps + 1):
        ids = [(torch.rand(SAMPLES, generator=generator) ** 3 * n).long() for n in ROWS]
        dense = torch.randn(SAMPLES, DENSE, generator=generator, dtype=torch.float64)
        effects = [effect[i] for effect, i in zip(teacher, ids, strict=True)]
        chances = torch.sigmoid(sum(effects, dense[:, 0]) + effects[0] * effects[1])
        labels = (torch.rand(SAMPLES, generator=generator) < chances).double()
        looked_up = before if fault == "stale" and step % 20 == 0 else ids
        before = ids

        bottom = gelu(dense @ weights[3])
        pooled = [table[:, i] for table, i in zip(weights, looked_up, strict=False)]
        each = torch.stack([bottom, *pooled], 2)
        products = (each @ each.transpose(2, 3))[:, :, pairs[0], pairs[1]]
        hidden = gelu(torch.cat([bottom, products], 2) @ weights[4] + weights[5])
        logits = (hidden @ weights[6]).squeeze(2)
        loss = binary_cross_entropy_with_logits(logits, labels.expand(copies, -1), reduction="none").mean(1)
        losses.append(loss.detach())
        gradients = torch.autograd.grad(loss.sum(), weights)
        with torch.no_grad():
            for k, (weight, gradient, square) in enumerate(zip(weights, gradients, squares, strict=True)):
                rate = regime.learning_rate
                if k < len(ROWS):
                    drawn = torch.randn(copies, len(weight[0]), 1, generator=chance, dtype=torch.float64)
                    gradient = gradient * (1 + regime.noise * drawn) * (1.01 if fault == "scaled" else 1)
                    rate *= 1.02 if fault == "faster" else 1
                    if (fault == "lost" and step % 50 == 0) or (fault == "dropped" and k == 1):
                        continue
                if regime.optimizer == "adagrad":
                    square += gradient * gradient
                    gradient = gradient / (square.sqrt() + EPS)
                weight -= rate * gradient
    means = torch.stack(losses, 1).view(copies, -1, LOG_EVERY).mean(2).tolist()
    return [{(i + 1) * LOG_EVERY: loss for i, loss in enumerate(copy)} for copy in means]
