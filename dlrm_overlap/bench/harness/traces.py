"""Traced steps: the shares of a mean step, and the kernels and copies of a single one."""

import itertools
import re
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from dlrm_overlap.bench.harness.contenders import Contender
from dlrm_overlap.bench.harness.timing import begin_together
from dlrm_overlap.bench.harness.workload import Workload
from dlrm_overlap.observe.trace_summary import Span, Work, cut, gpu_work, length, read_events, shares, spans_by_kind

MARK = re.compile(r"\bspin_kernel\b")
"""matches the names of kernels that `mark_time` launches"""
LEAD_MS = 10.0
"""in which the CPU issues a step, the chunked ones too"""
_STEPS = 3  # under the profiler; the last one counts


def mark_time() -> None:
    """Launch a kernel on the current stream that only marks a position in a trace."""
    torch.cuda._sleep(1)


def mean_step_columns(path: Path) -> dict[str, Any]:
    """Return the columns of the mean step of a Chrome trace that `TrainingRun.trace` has written.

    They are its shares, in ms and as fractions, and the ms of each kind of work. A step is from one mark to the next.

    Raises:
        InputError: if the file cannot be read.
    """
    work = gpu_work(read_events(path))
    marks = sorted(each.span.begin for each in work if MARK.search(each.name))
    assert len(marks) > 1, f"{path}: {len(marks)} marks, but a step is between two"
    steps, window = len(marks) - 1, Span(marks[0], marks[-1])
    inside = cut((each for each in work if not MARK.search(each.name)), window)
    parts, us = shares(inside, window), window.end - window.begin
    kinds = {kind.replace("-", "_"): length(spans) for kind, spans in spans_by_kind(inside).items()}
    return {
        "traced_steps": steps,
        "step_ms": us / steps / 1e3,
        **{f"{name}_ms": value / steps / 1e3 for name, value in parts.items()},
        **{f"{name}_fraction": value / us for name, value in parts.items()},
        **{f"{kind}_kernels_ms": value / steps / 1e3 for kind, value in kinds.items()},
    }


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


def last_step(work: Iterable[Work]) -> list[Work]:
    """Return, by its begin, the work after the last mark.

    The gate's collective, which runs in front of the mark, is not part of it.
    """
    work = sorted(work, key=lambda each: each.span)
    begin = max(each.span.end for each in work if MARK.search(each.name))
    return [each for each in work if each.span.begin >= begin]
