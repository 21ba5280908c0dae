"""Traced steps: where each begins and ends on the GPU, and its kernels and copies."""

import itertools
import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from dlrm_overlap.bench.harness.contenders import Contender
from dlrm_overlap.bench.harness.turns import begin_together
from dlrm_overlap.bench.harness.workload import Workload
from dlrm_overlap.observe.trace_summary import Shares, Span, Work, gpu_work, length, read_events, share, spans_by_kind

MARK = re.compile(r"\bspin_kernel\b")
"""matches the names of kernels that `mark_time` launches"""
LEAD_MS = 10.0
"""in which the CPU issues a step, the chunked ones too"""
_STEPS = 3  # under the profiler; the last one counts


def mark_time() -> None:
    """Launch a kernel on the current stream that only marks a place in a trace."""
    torch.cuda._sleep(1)


@dataclass(frozen=True)
class TracedSteps:
    """The steps of a trace on one rank."""

    steps: Sequence[Span]
    """each from one mark to the next"""
    work: Sequence[Work]
    """all kernels and copies but the marks"""

    @property
    def shares(self) -> Shares:
        """The shares of all steps together."""
        return share(self.work, Span(self.steps[0].begin, self.steps[-1].end))

    @property
    def typical(self) -> Span:
        """The step of median length, of two the shorter one."""
        return sorted(self.steps, key=lambda step: step.end - step.begin)[(len(self.steps) - 1) // 2]

    def during(self, step: Span) -> list[Work]:
        """Return the work of one step, cut off at its begin and its end."""
        cut = [
            each._replace(span=Span(max(each.span.begin, step.begin), min(each.span.end, step.end)))
            for each in self.work
        ]
        return [each for each in cut if each.span.begin < each.span.end]

    def columns(self) -> dict[str, Any]:
        """Return the columns of a mean step: its shares, in ms and as fractions, and the ms of each kind of work."""
        shares, ms = self.shares, 1e-3 / len(self.steps)
        parts: Mapping[str, float] = {name: value for name, value in vars(shares).items() if name != "length"}
        kinds = spans_by_kind([each for step in self.steps for each in self.during(step)])
        return {
            "traced_steps": len(self.steps),
            "step_ms": shares.length * ms,
            **{f"{name}_ms": value * ms for name, value in parts.items()},
            **{f"{name}_fraction": value / shares.length for name, value in parts.items()},
            **{f"{kind.replace('-', '_')}_kernels_ms": length(spans) * ms for kind, spans in kinds.items()},
        }


def read_steps(path: Path) -> TracedSteps:
    """Return the steps of a Chrome trace that `TrainingRun.trace` has written.

    Raises:
        InputError: if the file cannot be read.
    """
    work = sorted(gpu_work(read_events(path)), key=lambda each: each.span)
    marks = [each.span.begin for each in work if MARK.search(each.name)]
    assert len(marks) > 1, f"{path}: {len(marks)} marks, but a step is between two"
    steps = [Span(begin, end) for begin, end in pairwise(marks)]
    return TracedSteps(steps, [each for each in work if not MARK.search(each.name)])


@torch.no_grad()
def record_step(contender: Contender, workload: Workload, warmup: int) -> list[Work]:
    """Return the work of a step of `contender` on this rank's GPU, by its begin. All ranks call this.

    Args:
        contender: whose steps are taken.
        workload: gives the batches, the group and the device.
        warmup: steps before the profiler is there.
    """
    following = itertools.cycle(workload.batches)
    for _ in range(warmup):
        contender.step(next(following))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(_STEPS):
            begin_together(workload.group, workload.device, LEAD_MS)
            mark_time()
            contender.step(next(following))
        torch.cuda.synchronize(workload.device)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return last_step(gpu_work(read_events(path)))


def last_step(work: list[Work]) -> list[Work]:
    """Return, by its begin, the work after the last mark, or all of it where there is none.

    The gate's collective, which runs in front of the mark, is not part of it.
    """
    begin = max((each.span.end for each in work if MARK.search(each.name)), default=float("-inf"))
    return sorted((each for each in work if each.span.begin >= begin), key=lambda each: each.span)
