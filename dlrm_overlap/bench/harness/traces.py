"""The shares of a mean traced step."""

import re
from pathlib import Path
from typing import Any

import torch

from dlrm_overlap.observe.trace_summary import Span, cut, gpu_work, length, read_events, shares, spans_by_kind

MARK = re.compile(r"\bspin_kernel\b")
"""matches the names of kernels that `mark_time` launches"""


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
