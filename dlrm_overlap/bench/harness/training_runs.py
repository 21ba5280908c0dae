"""Trainers that train on the same batches: their losses, step times and traces."""

import itertools
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from dlrm_overlap.bench.harness.timing import time_steps
from dlrm_overlap.data.batch import Batch
from dlrm_overlap.observe.trace_summary import (
    GpuWork,
    Span,
    gpu_work,
    length,
    read_events,
    shares,
    spans_by_kind,
    union,
)
from dlrm_overlap.train.trainer import Trainer

_MARK = re.compile(r"\bspin_kernel\b")  # the name of a kernel that only marks a position in a trace
_WARMUP_STEPS = 10
AHEAD = 2  # batches that a pipeline prefetches; taken after the timed steps so that the last ones prefetch too


class TracedSteps(NamedTuple):
    columns: dict[str, float]
    """means over the steps, in ms: the `shares`, and `busy_ms`, the time in which the GPU is not idle"""
    timeline: list[tuple[str, float, float]]
    """the step of median length: kind of work, begin and end in us since the step began"""
    work: list[GpuWork]
    window: Span
    """of all steps"""
    steps: int

    def busy_ms(self, work: Sequence[GpuWork]) -> float:
        """Return the mean time of a step in which the GPU is not idle, if `work` is what it does."""
        return length(union([each.span for each in work], self.window)) / self.steps / 1e3


class TrainingRun:
    """A contender's trainer and batches. All ranks call the same methods, which finish all steps they begin.

    Timed steps cycle through all batches, from one call to the next: a cache could hold the rows of a few.
    """

    def __init__(self, name: str, trainer: Trainer, batches: Sequence[Batch]) -> None:
        self.name, self.trainer, self._batches = name, trainer, batches
        self._step = self._next = 0

    def _take_step(self, batches: Iterator[Batch]) -> torch.Tensor:
        self.trainer.learning_rate.set(self._step)
        self._step += 1
        return self.trainer.step(batches)

    def losses(self, steps: int) -> list[float]:
        """Train `steps` steps from the first batch; return their losses, means over all ranks. A collective."""
        self._next = 0
        segment = self._segment(steps)
        # Cloned, since a captured step returns the same tensor every time.
        losses = torch.stack([self._take_step(segment).detach().clone() for _ in range(steps)]).double()
        dist.all_reduce(losses)
        self._finish()
        return (losses / dist.get_world_size()).tolist()

    def time(self, steps: int, mark: Callable[[], object] = lambda: None) -> tuple[list[float], list[float]]:
        """Return the result of `time_steps` on this rank; the pipeline prefetches a batch in every timed step."""
        segment = self._segment(_WARMUP_STEPS + steps + AHEAD)
        step = partial(self._take_step, segment)
        dist.barrier()
        for _ in range(_WARMUP_STEPS):
            step()
        found = time_steps(step, steps, self.trainer.device, mark)
        for _ in range(AHEAD):
            step()
        self._finish()
        return found

    def traced(self, steps: int) -> TracedSteps:
        """Trace `steps` steps on the GPU; a kernel on the current stream marks the borders of steps.

        CPU activity is not traced, since that would slow down the steps.
        """
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            self.time(steps, lambda: torch.cuda._sleep(1))
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json.gz"
            profiler.export_chrome_trace(str(path))
            return traced_steps(path)

    def _segment(self, steps: int) -> Iterator[Batch]:
        self.trainer.pipeline.reset()
        begin, self._next = self._next, (self._next + steps) % len(self._batches)
        return itertools.islice(itertools.cycle(self._batches), begin, begin + steps)

    def _finish(self) -> None:
        if self.trainer.device.type == "cuda":
            torch.cuda.synchronize(self.trainer.device)
        self.trainer.check()  # raises the errors that kernels have recorded
        dist.barrier()


def read_batches(trainer: Trainer, count: int) -> list[Batch]:
    """Return this rank's first `count` batches.

    If the trainer uses a GPU, synthetic ones are in its memory, where they are made, and others in pinned memory.
    """
    samples, world = trainer.samples_per_rank, trainer.world
    firsts = [(step * world.world_size + world.rank) * samples for step in range(count)]
    batches = [trainer.train_data.read(first, samples) for first in firsts]
    if trainer.device.type == "cuda":
        torch.cuda.synchronize(trainer.device)  # batches made on the GPU are copied on another stream
        batches = [batch.pin_memory() for batch in batches]
    return batches


def traced_steps(path: Path) -> TracedSteps:
    """Return the times of the steps in a Chrome trace; a step is between two marks."""
    work = gpu_work(read_events(path))
    marks = sorted(each.span.begin for each in work if _MARK.search(each.name))
    assert len(marks) > 1, f"{path}: {len(marks)} marks, but a step is between two"
    work = [each for each in work if not _MARK.search(each.name)]
    window = Span(marks[0], marks[-1])
    us = shares(work, window)
    us |= {"busy": window.end - window.begin - us["idle"]}
    columns = {f"{name}_ms": value / (len(marks) - 1) / 1e3 for name, value in us.items()}
    steps = sorted(itertools.starmap(Span, itertools.pairwise(marks)), key=lambda step: step.end - step.begin)
    return TracedSteps(columns, _timeline(work, steps[len(steps) // 2]), work, window, len(steps))


def _timeline(work: Sequence[GpuWork], step: Span) -> list[tuple[str, float, float]]:
    return [
        (kind, round(span.begin - step.begin, 1), round(span.end - step.begin, 1))
        for kind, spans in spans_by_kind(work).items()
        for span in union(spans, step)
    ]
