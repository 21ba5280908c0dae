"""Profiles the training steps of this rank: of `profile_steps`, or of a program that `dlrm-overlap profile` started."""

import atexit
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import ProfilerActivity, profile, schedule

from dlrm_overlap.launching import process_group
from dlrm_overlap.observe.profile import Profile, RankProfile, step_parts
from dlrm_overlap.observe.trace_summary import read_events
from dlrm_overlap.train.explain import explain


class StepProfiler:
    """Skips `after` steps, times `steps` by the clock, skips one and has torch.profiler trace as many."""

    def __init__(self, folder: str | Path, steps: int, after: int) -> None:
        """`folder` takes the trace `trace_rank_<R>.json.gz`."""
        self._folder, self._steps, self._after = Path(folder), steps, after
        self._folder.mkdir(parents=True, exist_ok=True)  # on another host than the command's it is new
        self._done, self._since, self._step_ms = 0, 0.0, 0.0
        self._profiler: profile | None = None
        self._parts_ms: dict[str, float] | None = None

    def count_step(self) -> bool:
        """Count a step that was issued; return whether it was the last."""
        self._done += 1
        if self._done == self._after:
            self._since = _time_s()
        elif self._done == self._after + self._steps:
            self._step_ms = 1e3 * (_time_s() - self._since) / self._steps
            activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * torch.cuda.is_available()
            turns = schedule(wait=0, warmup=1, active=self._steps, repeat=1)
            self._profiler = profile(activities=activities, schedule=turns, on_trace_ready=self._read)
            self._profiler.start()
            atexit.register(self._profiler.stop)  # a process that ends while it is traced would crash
        elif self._profiler is not None:
            self._profiler.step()
            if self._parts_ms is not None:
                self._profiler.stop()
                atexit.unregister(self._profiler.stop)
                self._profiler = None
                return True
        return False

    def _read(self, profiler: profile) -> None:
        path = self._folder / f"trace_rank_{_rank()}.json.gz"
        profiler.export_chrome_trace(str(path))
        self._parts_ms = step_parts(read_events(path), self._steps, self._step_ms)

    def result(self, model: nn.Module | None) -> RankProfile:
        """Return the profile of this rank, after the last step; with the tables of `model` on rank 0."""
        assert self._parts_ms is not None
        rank, world_size = _rank(), dist.get_world_size() if dist.is_initialized() else 1
        device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
        tables = None
        if rank == 0 and model is not None:
            try:
                tables = str(explain(model))
            except Exception as error:  # the times hold without it
                tables = f"explain: {error}"
        return RankProfile(rank, world_size, device, self._steps, self._parts_ms, tables)


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _time_s() -> float:
    """Return the time once the GPU has done all that was issued."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def profile_steps(
    step: Callable[[], object], model: nn.Module | None = None, *, steps: int = 10, after: int = 10
) -> Profile:
    """Take after + 2 steps + 1 training steps and return where their time goes, on all ranks; a collective.

    Args:
        step: takes one training step; all ranks give one.
        model: a sharded model, whose tables the report explains.
        steps: number of steps to time by the clock, and to trace.
        after: number of steps before these, at least 1.

    Example:
        print(profile_steps(lambda: pipeline.progress(batches), model))
    """
    with tempfile.TemporaryDirectory() as folder:
        profiler = StepProfiler(folder, steps, after)
        step()
        while not profiler.count_step():
            step()
    own = profiler.result(model)
    found: list[Any] = [own] * own.world_size
    if own.world_size > 1:
        dist.all_gather_object(found, own)
    return Profile(tuple(found))


class CountedProgram:
    """Profiles the steps of the program that this process runs, writes a file of the rank, and ends the process."""

    def __init__(self, folder: str, steps: int, after: int, to_end: bool) -> None:
        """With `to_end` the process goes on after the last step instead."""
        self._folder, self._to_end = Path(folder), to_end
        self._profiler: StepProfiler | None = StepProfiler(folder, steps, after)
        self._source: Any = None

    def count_step_of(self, source: Any, model: nn.Module | None = None) -> None:
        """Count a step of a pipeline, which has a model, or of an optimizer, if it is the first seen.

        The optimizer that a pipeline steps is seen first, so a pipeline takes the place of an optimizer.
        """
        if self._source is None or (model is not None and isinstance(self._source, torch.optim.Optimizer)):
            self._source = source
        if self._profiler is None or source is not self._source or not self._profiler.count_step():
            return
        found = self._profiler.result(model)
        self._profiler = None
        (self._folder / f"rank_{found.rank}.json").write_text(json.dumps(asdict(found)))
        if not self._to_end:
            if dist.is_initialized():
                dist.barrier()  # else rank 0 would take the store away from ranks that still read their traces
            process_group.finalise_mpi()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)
