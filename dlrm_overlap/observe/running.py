"""NE, calibration and AUROC of the samples that a run trains on: over the steps since the last log line, and all steps.

They are those of the predictions of each step, before its update. The device only adds up: nothing waits for it before
a log line does.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import binary_cross_entropy_with_logits

_BINS, _LEAST, _PER_UNIT = 4096, -16.0, 128  # of logits, from -16 to 16; AUROC takes those of one bin for equal
_LOSS, _PREDICTED = 2 * _BINS, 2 * _BINS + 1  # columns behind the histograms
_HELD_PREDICTIONS = 1 << 20


class RunningMetrics:
    """Adds up the predictions of a rank's steps; `take` and `state` are collectives.

    A label's sums are a row of float64: histograms of the logits of its negative and positive samples, the sum of their
    losses, and that of the predicted probabilities.
    """

    def __init__(self, names: Sequence[str], samples: int, steps: int, device: torch.device) -> None:
        """Take the names of L labels, the samples of a rank and step, and the steps between two log lines."""
        self._names, labels = names, len(names)
        # Copies of some steps' predictions, so that a step costs two copies, and not the kernels of the sums.
        held = max(1, min(steps, _HELD_PREDICTIONS // (samples * labels)))
        self._held, self._count = torch.empty(held, 2, samples, labels, device=device), 0
        self._window = torch.zeros(labels, 2 * _BINS + 2, dtype=torch.float64, device=device)
        self._lifetime = self._window.to("cpu", copy=True)

    def add(self, logits: torch.Tensor, labels: torch.Tensor) -> None:
        """Add the logits and labels of a step, each [b] or [b, L]; enqueues copies on the current stream."""
        for copy, each in zip(self._held[self._count], (logits, labels), strict=True):
            copy.copy_(each.view(copy.shape))
        self._count += 1
        if self._count == len(self._held):
            self._fold()

    def _fold(self) -> None:
        """Add the held predictions to the sums."""
        logits, labels = self._held[: self._count].transpose(0, 1).flatten(1, 2).transpose(1, 2)  # [L, samples] each
        self._count = 0
        losses = binary_cross_entropy_with_logits(logits, labels, reduction="none")
        bins = ((logits.nan_to_num() - _LEAST) * _PER_UNIT).clamp(0, _BINS - 1).long() + _BINS * labels.long()
        self._window.scatter_add_(1, bins, torch.ones_like(bins, dtype=torch.float64))
        self._window[:, _LOSS] += losses.sum(1, dtype=torch.float64)
        self._window[:, _PREDICTED] += logits.sigmoid().sum(1, dtype=torch.float64)

    def take(self) -> dict[str, float]:
        """Return the metrics of all ranks' steps since the last call, and as lifetime_* those of all steps."""
        window = self._of_all_ranks()
        self._window.zero_()
        self._lifetime += window
        return self._named(window) | {f"lifetime_{key}": value for key, value in self.lifetime().items()}

    def _of_all_ranks(self) -> torch.Tensor:
        """Return all ranks' sums since the last `take`, on the CPU."""
        if self._count:
            self._fold()
        found = self._window.clone()
        dist.all_reduce(found)
        return found.cpu()

    def lifetime(self) -> dict[str, float]:
        """Return the metrics of all steps that `take` has seen."""
        return self._named(self._lifetime)

    def _named(self, sums: torch.Tensor) -> dict[str, float]:
        return by_label(dict(zip(self._names, map(_metrics_of, sums), strict=True)))

    def state(self) -> list[tuple[int, float]]:
        """Return the sums of all steps so far, those since the last `take` too, where not 0, as JSON can have them."""
        flat = (self._lifetime + self._of_all_ranks()).flatten()
        where = flat.nonzero()[:, 0]
        return list(zip(where.tolist(), flat[where].tolist(), strict=True))

    def load(self, state: Sequence[Sequence[Any]]) -> None:
        """Go on from what `state` has returned."""
        self._lifetime.zero_()
        for place, value in state:
            self._lifetime.view(-1)[int(place)] = value


def _metrics_of(sums: torch.Tensor) -> dict[str, float]:
    """Return the metrics of a label's sums; those that are not defined are NaN."""
    negative, positive = sums[:_LOSS].view(2, _BINS)
    negatives, positives = negative.sum().item(), positive.sum().item()
    losses, predicted = sums[_LOSS:].tolist()
    below = negative.cumsum(0) - negative / 2
    auroc = (positive @ below).item() / (positives * negatives) if positives and negatives else math.nan
    count = positives + negatives
    return {
        "auroc": auroc,
        "ne": normalised_entropy(losses / count, positives / count) if count else math.nan,
        "calibration": predicted / positives if positives else math.nan,
    }


def normalised_entropy(loss: float, rate: float) -> float:
    """Return the mean log loss over the entropy of the labels' mean `rate`, NaN where that is 0.

    It is that of He et al., Practical lessons from predicting clicks on ads at Facebook, 2014, section 2: below 1 is
    better than always predicting the click rate.
    """
    if rate in (0.0, 1.0):
        return math.nan
    return loss / -(rate * math.log(rate) + (1 - rate) * math.log(1 - rate))


def by_label(found: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Return the means of the labels' metrics and, where there are several labels, each as METRIC/LABEL."""
    each = list(found.values())
    values = {key: sum(metrics[key] for metrics in each) / len(each) for key in each[0]}
    if len(found) > 1:
        values |= {f"{key}/{name}": value for name, metrics in found.items() for key, value in metrics.items()}
    return values
