"""The measurements of a run: AUROC, normalised entropy, calibration, step times, memory."""

import itertools
import math
import resource
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torchmetrics.functional.classification import binary_auroc

from dlrm_overlap.observe.running import by_label, normalised_entropy

WARMUP_STEPS = 10  # left out of throughput and step times: allocation, autotuning and NCCL's first calls slow them


def evaluation_metrics(
    logits: torch.Tensor, labels: torch.Tensor, names: Sequence[str] = ("label",), weights: Sequence[float] = (1.0,)
) -> dict[str, float]:
    """Return loss, AUROC, NE, calibration and accuracy of predictions gathered from all ranks.

    NE is that of `normalised_entropy`; calibration is the sum of the predicted probabilities over that of the labels.
    AUROC, NE and calibration are NaN where they are not defined: where all labels are alike, or a logit is NaN, which
    cannot be ranked. Accuracy is the share of samples whose predicted probability lies on the label's side of one half,
    NaN where a logit is.

    Of several labels each metric is their mean, but the loss, which is their weighted sum, and METRIC/NAME is that of
    one of them.

    Args:
        logits: [n] or [n, L] float32.
        labels: alike, each 0 or 1.
        names: of the labels.
        weights: of their losses.
    """
    columns = (each.double().view(len(each), -1).unbind(1) for each in (logits, labels))
    values = by_label({name: _of_label(*each) for name, *each in zip(names, *columns, strict=True)})
    losses = [values[f"loss/{name}"] for name in names] if len(names) > 1 else [values["loss"]]
    return values | {"loss": sum(weight * loss for weight, loss in zip(weights, losses, strict=True))}


def _of_label(logits: torch.Tensor, labels: torch.Tensor) -> dict[str, float]:
    loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, labels).item()
    rate, predicted = labels.mean().item(), logits.sigmoid().mean().item()
    has_nan = logits.isnan().any().item()
    alike = rate in (0.0, 1.0) or has_nan
    return {
        "loss": loss,
        "auroc": math.nan if alike else binary_auroc(logits.sigmoid(), labels.int()).item(),
        "ne": normalised_entropy(loss, rate),
        "calibration": predicted / rate if rate else math.nan,
        "accuracy": math.nan if has_nan else ((logits > 0) == (labels > 0)).double().mean().item(),
    }


def gather_predictions(
    logits: torch.Tensor, labels: torch.Tensor, batch_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gather the logits and labels of all ranks and put them in the data set's order; a collective.

    Of each global batch, rank r has the r-th `batch_size` samples. Two ranks with batches of one sample, for instance,
    hold the samples 0, 2, 4 and 1, 3, 5 after three steps.

    Args:
        logits: [steps * b] or [steps * b, L] float32, this rank's batches one after the other; as many on every rank.
        labels: alike.
        batch_size: samples of a rank and step, b.

    Returns:
        Logits and labels, each [steps * W * b] or [steps * W * b, L], the same on every rank.
    """
    local = torch.stack((logits, labels))
    gathered = local.new_empty((dist.get_world_size(), *local.shape))
    dist.all_gather(list(gathered.unbind()), local)
    by_step = gathered.unflatten(2, (-1, batch_size)).movedim(0, 2)  # [2, steps, W, b, ..]
    logits, labels = by_step.flatten(1, 3)
    return logits, labels


class StepTimer:
    """Times steps: on a GPU by events, for which the host waits in `take_ms` only, on a CPU by the host's clock."""

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        self._marks: list[Any] = []

    def mark(self) -> None:
        """Mark the border between two steps."""
        if self.cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append(event)
        else:
            self._marks.append(time.perf_counter())

    def take_ms(self) -> list[float]:
        """Return the times between the marks since the last call, in ms. The last mark is the first of the next call.

        On a GPU, the host waits for the last mark.
        """
        marks = self._marks
        self._marks = marks[-1:]
        if not self.cuda:
            return [(b - a) * 1e3 for a, b in itertools.pairwise(marks)]
        if marks:
            marks[-1].synchronize()
        return [a.elapsed_time(b) for a, b in itertools.pairwise(marks)]


def memory_bytes(device: torch.device) -> int:
    """Return the peak memory of this process so far, in bytes: allocated on its GPU, or resident on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def quantile(values: list[float], q: float) -> float:
    """Return the q-quantile of `values`, or NaN if there are none."""
    return torch.tensor(values, dtype=torch.float64).quantile(q).item() if values else math.nan
