"""Traces of training steps: the calls of the CPU and the kernels of the GPU."""

from pathlib import Path

import torch
from torch.profiler import ProfilerAction, ProfilerActivity, profile

from dlrm_overlap.config import LogConfig


class StepTracer:
    """Has torch.profiler trace the steps `log.traced` of a run into a file of this rank.

    The file is a Chrome trace, for ui.perfetto.dev or Meta's Holistic Trace Analysis. The profiler is set up during the
    step before the first traced one, and writes the file during the step after the last.
    """

    def __init__(self, config: LogConfig, folder: Path, rank: int, device: torch.device, start: int) -> None:
        """`start` is the last step before the run begins; from the first step to trace on, nothing is traced."""
        self._traced, self._start = config.traced, start
        self._profiler: profile | None = None
        self.path: Path | None = None
        """the file, written in the step after the last traced one; None if nothing is traced"""
        if start >= self._traced.start or not self._traced:
            return
        self.path = folder / "traces" / f"steps_{self._traced[0]}_{self._traced[-1]}_rank_{rank}.json.gz"
        activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device.type == "cuda")
        self._profiler = profile(activities=activities, schedule=self._action, on_trace_ready=self._write)

    def _action(self, steps_done: int) -> ProfilerAction:
        step = self._start + steps_done + 1
        if step in self._traced:
            return ProfilerAction.RECORD_AND_SAVE if step == self._traced[-1] else ProfilerAction.RECORD
        return ProfilerAction.WARMUP if step + 1 in self._traced else ProfilerAction.NONE

    def _write(self, profiler: profile) -> None:
        assert self.path is not None
        self.path.parent.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(self.path))

    def begin(self) -> None:
        """Begin, just before the first step."""
        if self._profiler:
            self._profiler.start()

    def advance(self) -> None:
        """Go on to the next step, at the end of one."""
        if self._profiler:
            self._profiler.step()

    def end(self) -> None:
        """End, after the last step."""
        if self._profiler:
            self._profiler.stop()
