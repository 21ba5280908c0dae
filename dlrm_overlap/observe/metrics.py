"""Measurements of a run: AUROC, normalised entropy, calibration, step times, memory."""

import contextlib
import itertools
import math
import resource
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.profiler import ProfilerActivity, profile, schedule

WARMUP_STEPS = 10  # excluded from throughput and step times: slowed by allocation, autotuning and NCCL's first calls
_BINS, _LEAST, _PER_UNIT = 4096, -16.0, 128  # bins for logits from -16 to 16; AUROC treats the logits of a bin as equal
_LOSS, _PREDICTED = 2 * _BINS, 2 * _BINS + 1  # columns after the histograms
_MAX_BUFFERED = 1 << 20


def evaluation_metrics(
    logits: torch.Tensor, labels: torch.Tensor, names: Sequence[str] = ("label",), weights: Sequence[float] = (1.0,)
) -> dict[str, float]:
    """Return metrics of `logits`, [n] or [n, L] float32, and equally shaped `labels`, 0 or 1.

    Calibration is the sum of predicted probabilities over the sum of labels; accuracy uses the threshold 0.5. AUROC and
    NE are NaN if all labels are equal, calibration if all are 0, every metric if a logit is NaN. With L labels, metrics
    are means over labels, the loss is weighted by `weights`, and METRIC/NAME is the metric of one label.
    """
    columns = (each.double().view(len(each), -1).unbind(1) for each in (logits, labels))
    values = by_label({name: _of_label(*each) for name, *each in zip(names, *columns, strict=True)})
    losses = [values[f"loss/{name}"] for name in names] if len(names) > 1 else [values["loss"]]
    return values | {"loss": sum(weight * loss for weight, loss in zip(weights, losses, strict=True))}


def _of_label(logits: torch.Tensor, labels: torch.Tensor) -> dict[str, float]:
    # Imported late: it also imports `transformers` if installed, which would slow every start by seconds.
    from torchmetrics.functional.classification import binary_auroc

    loss = binary_cross_entropy_with_logits(logits, labels).item()
    rate, predicted = labels.mean().item(), logits.sigmoid().mean().item()
    has_nan = logits.isnan().any().item()
    undefined = rate in (0.0, 1.0) or has_nan
    return {
        "loss": loss,
        "auroc": math.nan if undefined else binary_auroc(logits.sigmoid(), labels.int()).item(),
        "ne": normalised_entropy(loss, rate),
        "calibration": predicted / rate if rate else math.nan,
        "accuracy": math.nan if has_nan else ((logits > 0) == (labels > 0)).double().mean().item(),
    }


def gather_predictions(
    logits: torch.Tensor, labels: torch.Tensor, batch_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gather all ranks' logits and labels in the order of the data set, [steps * W * b, ..]; a collective.

    `logits` and `labels` are [steps * b] or [steps * b, L], for a batch size b, with the same shape on every rank. Of
    each global batch of W * b samples, rank r has samples [r * b, (r + 1) * b).
    """
    local = torch.stack((logits, labels))
    gathered = local.new_empty((dist.get_world_size(), *local.shape))
    dist.all_gather(list(gathered.unbind()), local)
    by_step = gathered.unflatten(2, (-1, batch_size)).movedim(0, 2)  # [2, steps, W, b, ..]
    logits, labels = by_step.flatten(1, 3)
    return logits, labels


class RunningMetrics:
    """Accumulates the predictions of a rank's training steps; `take` and `state` are collectives.

    Each label has a row of float64 sums on the device: histograms of the logits of negative and positive samples, the
    losses, and the predicted probabilities.
    """

    def __init__(self, names: Sequence[str], samples: int, steps: int, device: torch.device) -> None:
        """`samples` are per rank and step; `steps` is the number of steps between two log lines."""
        self._names, labels = names, len(names)
        # Predictions are buffered over several steps, so that most steps only pay for two copies.
        buffered = max(1, min(steps, _MAX_BUFFERED // (samples * labels)))
        self._buffer, self._count = torch.empty(buffered, 2, samples, labels, device=device), 0
        self._window = torch.zeros(labels, 2 * _BINS + 2, dtype=torch.float64, device=device)
        self._lifetime = self._window.to("cpu", copy=True)

    def add(self, logits: torch.Tensor, labels: torch.Tensor) -> None:
        """Enqueue copies of a step's logits and labels, each [b] or [b, L], on the current stream."""
        for copy, each in zip(self._buffer[self._count], (logits, labels), strict=True):
            copy.copy_(each.view(copy.shape))
        self._count += 1
        if self._count == len(self._buffer):
            self._accumulate_buffer()

    def _accumulate_buffer(self) -> None:
        logits, labels = self._buffer[: self._count].transpose(0, 1).flatten(1, 2).transpose(1, 2)  # [L, samples] each
        self._count = 0
        losses = binary_cross_entropy_with_logits(logits, labels, reduction="none")
        bins = ((logits.nan_to_num() - _LEAST) * _PER_UNIT).clamp(0, _BINS - 1).long() + _BINS * labels.long()
        self._window.scatter_add_(1, bins, torch.ones_like(bins, dtype=torch.float64))
        self._window[:, _LOSS] += losses.sum(1, dtype=torch.float64)
        self._window[:, _PREDICTED] += logits.sigmoid().sum(1, dtype=torch.float64)

    def take(self) -> dict[str, float]:
        """Return the metrics of the samples of all ranks since the last call; a collective.

        Keys with the prefix lifetime_ have the metrics since the first step of the run, across resumes.
        """
        window = self._of_all_ranks()
        self._window.zero_()
        self._lifetime += window
        return self._named(window) | {f"lifetime_{key}": value for key, value in self.lifetime().items()}

    def _of_all_ranks(self) -> torch.Tensor:
        if self._count:
            self._accumulate_buffer()
        found = self._window.clone()
        dist.all_reduce(found)
        return found.cpu()

    def lifetime(self) -> dict[str, float]:
        return self._named(self._lifetime)

    def _named(self, sums: torch.Tensor) -> dict[str, float]:
        return by_label(dict(zip(self._names, map(_metrics_of, sums), strict=True)))

    def state(self) -> list[tuple[int, float]]:
        """Return the nonzero sums over all steps and ranks, as (index, sum) pairs for JSON."""
        flat = (self._lifetime + self._of_all_ranks()).flatten()
        where = flat.nonzero()[:, 0]
        return list(zip(where.tolist(), flat[where].tolist(), strict=True))

    def load(self, state: Sequence[Sequence[Any]]) -> None:
        """Continue from a result of the method `state`; if it is malformed, reset all sums and raise a ValueError."""
        self._lifetime.zero_()
        sums = self._lifetime.clone().view(-1)
        try:
            for index, value in state:
                if type(index) is not int or index < 0 or not math.isfinite(value):
                    raise ValueError(f"{value!r:.40} at {index!r:.40}")
                sums[index] = value
        except (TypeError, ValueError, LookupError, OverflowError, RuntimeError) as error:
            raise ValueError(f"no sums of metrics: {error}") from None
        self._lifetime += sums.view_as(self._lifetime)


def _metrics_of(sums: torch.Tensor) -> dict[str, float]:
    negative, positive = sums[:_LOSS].view(2, _BINS)
    negatives, positives = negative.sum().item(), positive.sum().item()
    losses, predicted = sums[_LOSS:].tolist()
    below = negative.cumsum(0) - negative / 2
    undefined = not (positives and negatives) or math.isnan(predicted)  # a logit that is NaN is in a bin, too
    count = positives + negatives
    return {
        "auroc": math.nan if undefined else (positive @ below).item() / (positives * negatives),
        "ne": normalised_entropy(losses / count, positives / count) if count else math.nan,
        "calibration": predicted / positives if positives else math.nan,
    }


def normalised_entropy(loss: float, rate: float) -> float:
    """Return the mean log loss divided by the entropy of `rate`, the mean label; NaN if the entropy is 0.

    Source: He et al., Practical lessons from predicting clicks on ads at Facebook, 2014, section 2.
    """
    if rate in (0.0, 1.0):
        return math.nan
    return loss / -(rate * math.log(rate) + (1 - rate) * math.log(1 - rate))


def by_label(found: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Take label -> metrics. Return the means over labels and, if there are several, METRIC/LABEL for each label."""
    each = list(found.values())
    values = {key: sum(metrics[key] for metrics in each) / len(each) for key in each[0]}
    if len(found) > 1:
        values |= {f"{key}/{name}": value for name, metrics in found.items() for key, value in metrics.items()}
    return values


class StepTimer:
    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        self._marks: list[Any] = []

    def mark(self) -> None:
        if self.cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append(event)
        else:
            self._marks.append(time.perf_counter())

    def take_ms(self) -> list[float]:
        """Return the ms between successive marks since the last call; on a GPU, waits for the last mark."""
        marks = self._marks
        self._marks = marks[-1:]
        if not self.cuda:
            return [(b - a) * 1e3 for a, b in itertools.pairwise(marks)]
        if marks:
            marks[-1].synchronize()
        return [a.elapsed_time(b) for a, b in itertools.pairwise(marks)]


def make_tracer(path: Path, before: int, steps: int) -> profile:
    """Return a profiler that skips `before` steps, then traces `steps` steps; call its `step` after each step.

    `step` and `stop` raise an OSError if `path` cannot be written, which then does not exist.
    """

    def write(profiler: profile) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(path))
        except OSError:
            with contextlib.suppress(OSError):
                path.unlink()
            raise

    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * torch.cuda.is_available()
    when = schedule(skip_first=max(0, before - 1), wait=0, warmup=min(1, before), active=steps, repeat=1)
    return profile(activities=activities, schedule=when, on_trace_ready=write)


def memory_bytes(device: torch.device) -> int:
    """Return this process's peak memory in bytes: allocated by torch on a GPU, or resident memory on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def quantile(values: list[float], q: float) -> float:
    return torch.tensor(values, dtype=torch.float64).quantile(q).item() if values else math.nan
