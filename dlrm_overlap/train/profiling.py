"""Measures where the time of a training step goes, for any PyTorch program.

The length of a step is measured without the profiler, which slows the CPU. The times of kernels come from a trace.
"""

import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from dlrm_overlap.launching.text_table import count_of, format_table
from dlrm_overlap.observe.metrics import make_tracer
from dlrm_overlap.observe.trace_summary import gpu_work, issued_work, length, read_events, shares
from dlrm_overlap.train.explain import explain


@dataclass(frozen=True)
class Profile:
    """Where the time of a step goes on each rank; `str` formats a report."""

    device: str
    steps: int
    """number of steps that were timed, and the same number that were traced"""
    ranks: Sequence[dict[str, float]]
    """each rank's parts of a step in ms (`step_parts`)"""
    tables: str | None = None

    @property
    def captured_ms(self) -> tuple[float, float] | None:
        """Estimated (lower, upper) limits in ms of a captured step of the same kernels; None without GPU times.

        Both assume that the GPU never waits for the CPU. Communication is fully hidden for the lower limit, and exposed
        as now for the upper limit. Collectives count on the rank where they are shortest, since they include the wait
        for later ranks.
        """
        if not all("GPU busy" in parts for parts in self.ranks):
            return None
        computes = max(parts["  it computes"] for parts in self.ranks)
        return (
            max(computes, min(parts["collectives, hidden or not"] for parts in self.ranks)),
            max(computes, min(parts["GPU busy"] for parts in self.ranks)),
        )

    def __str__(self) -> str:
        lines = [["ms a step", "mean", "max", "on rank"]]
        for name in self.ranks[0]:
            ms = [parts.get(name, 0.0) for parts in self.ranks]
            lines.append([name, f"{sum(ms) / len(ms):.3f}", f"{max(ms):.3f}", str(ms.index(max(ms)))])
        steps = count_of(self.steps, "step")
        text = f"{steps} timed and {self.steps} traced, {count_of(len(self.ranks), 'rank')}, {self.device}\n"
        text += f"{format_table(lines)}\n\n"
        if self.captured_ms is None:
            text += "Nothing ran on a GPU, so there are no GPU times and no estimate of a captured step."
        else:
            lower, upper = self.captured_ms
            step = max(parts["step"] for parts in self.ranks)
            text += (
                "If the GPU never waited for the CPU, as in a captured step, these kernels would take an estimated\n"
                f"{lower:.3f} ms with all communication hidden, {step / lower:.1f} times as fast, or\n"
                f"{upper:.3f} ms with as much exposed as now, {step / upper:.1f} times as fast."
            )
        return text if self.tables is None else f"{text}\n\n{self.tables}"


def step_parts(events: Sequence[dict[str, Any]], steps: int, step_ms: float) -> dict[str, float]:
    """Return a step's parts in ms from the complete `events` of `steps` steps; `step_ms` is without the profiler."""
    work = gpu_work(issued_work(events))
    if not work:
        return {"step": step_ms}
    found = shares(work)
    busy = found["compute"] + found["exposed"] + found["copying"]
    us = {
        "GPU busy": busy,
        "  it computes": found["compute"],
        "  exposed communication": found["exposed"],
        "  it only copies": found["copying"],
        "GPU waits for the CPU": max(0.0, step_ms * 1e3 * steps - busy),
        "collectives, hidden or not": length(each.span for each in work if each.communicates),
    }
    return {"step": step_ms} | {name: value * 1e-3 / steps for name, value in us.items()}


def profile_steps(
    step: Callable[[], object], model: nn.Module | None = None, *, steps: int = 10, after: int = 10
) -> Profile:
    """Time and trace training steps on all ranks; a collective.

    `after` steps are skipped, `steps` are timed, one is skipped, and `steps` are traced. The report explains the tables
    of `model`, which must be sharded.
    """
    tables = None if model is None else str(explain(model))
    for _ in range(after):
        step()
    began = _time_after_gpu_s()
    for _ in range(steps):
        step()
    step_ms = 1e3 * (_time_after_gpu_s() - began) / steps
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json.gz"
        with make_tracer(path, 1, steps) as profiler:
            for _ in range(1 + steps):
                step()
                profiler.step()
        own = step_parts(read_events(path), steps, step_ms)
    ranks: list[Any] = [own]
    if dist.is_initialized():
        ranks *= dist.get_world_size()
        dist.all_gather_object(ranks, own)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    return Profile(device, steps, ranks, tables)


def _time_after_gpu_s() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()
