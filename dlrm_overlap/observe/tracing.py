"""Traces of training steps: the calls of the CPU and the kernels of the GPU."""

from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from dlrm_overlap.config import LogConfig


class StepTracer:
    """Has torch.profiler trace the steps `log.traced` of a run into a file of this rank.

    The file is a Chrome trace, for ui.perfetto.dev or Meta's Holistic Trace Analysis. The profiler is set up during the
    step before the first traced one, and writes the file during the step after the last.
    """

    def __init__(self, config: LogConfig, folder: Path, rank: int, device: torch.device, start: int) -> None:
        """`start` is the last step before the run begins; from the first step to trace on, nothing is traced."""
        traced = config.traced
        self._profiler: profile | None = None
        self.path: Path | None = None
        """the file, written in the step after the last traced one; None if nothing is traced"""
        if start >= traced.start or not traced:
            return
        self.path = folder / "traces" / f"steps_{traced[0]}_{traced[-1]}_rank_{rank}.json.gz"
        activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device.type == "cuda")
        before = traced.start - 1 - start
        steps = schedule(skip_first=max(0, before - 1), wait=0, warmup=min(1, before), active=len(traced), repeat=1)
        self._profiler = profile(activities=activities, schedule=steps, on_trace_ready=self._write)

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
