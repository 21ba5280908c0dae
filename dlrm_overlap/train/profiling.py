"""Profiles training steps of any program whose ranks call `profile_steps`."""

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import ProfilerActivity, profile, schedule

from dlrm_overlap.observe.profile import Profile, RankProfile, step_parts
from dlrm_overlap.observe.trace_summary import read_events
from dlrm_overlap.train.explain import explain


def profile_steps(
    step: Callable[[], object], model: nn.Module | None = None, *, steps: int = 10, after: int = 10
) -> Profile:
    """Take after + 2 steps + 1 training steps and return where their time goes, on all ranks; a collective.

    The first `after` are skipped, `steps` are timed by the clock, one is skipped, and torch.profiler traces as many.

    Args:
        step: takes one training step; all ranks give one.
        model: a sharded model, whose tables the report explains.
        steps: number of steps to time by the clock, and to trace.
        after: number of steps before these.

    Raises:
        InputError: if the tables of `model` cannot be explained.

    Example:
        print(profile_steps(lambda: pipeline.progress(batches), model))
    """
    tables = None if model is None else str(explain(model))
    for _ in range(after):
        step()
    began = _time_s()
    for _ in range(steps):
        step()
    step_ms = 1e3 * (_time_s() - began) / steps
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * torch.cuda.is_available()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json.gz"
        with profile(
            activities=activities,
            schedule=schedule(wait=0, warmup=1, active=steps, repeat=1),
            on_trace_ready=lambda profiler: profiler.export_chrome_trace(str(path)),
        ) as profiler:
            for _ in range(1 + steps):
                step()
                profiler.step()
        parts_ms = step_parts(read_events(path), steps, step_ms)
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    own = RankProfile(rank, world_size, device, steps, parts_ms, tables)
    found: list[Any] = [own] * world_size
    if world_size > 1:
        dist.all_gather_object(found, own)
    return Profile(tuple(found))


def _time_s() -> float:
    """Return the time once the GPU has done all that was issued."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()
