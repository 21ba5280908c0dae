"""The registry of the figures: which there are, and their options.

To add a figure, write its file in `figures/`, with a function `run(request, ranks)` that all ranks call and that
returns the exit code, add the class of its options to `request`, and a line to FIGURES. This module loads neither torch
nor a figure before one is asked for.
"""

from collections.abc import Callable
from importlib import import_module
from typing import Any, NamedTuple

from dlrm_overlap.bench import request


class Figure(NamedTuple):
    """A figure as the command line needs it, before any of its code is loaded."""

    file: str
    """the module in `figures/` whose `run` measures it"""
    request: type[request.Request]
    """its options"""

    @property
    def summary(self) -> str:
        """What is measured, in a line."""
        first = (self.request.__doc__ or "").partition("\n")[0]
        return first[:1].lower() + first[1:].rstrip(".")

    def load(self) -> Callable[[Any, Any], int]:
        """Import the figure's file and return its `run`, which takes the request and this rank's `Ranks`."""
        return import_module(f"dlrm_overlap.bench.figures.{self.file}").run


FIGURES = {
    "input": Figure("input", request.InputRequest),
    "step": Figure("step", request.StepRequest),
    "ablation": Figure("ablation", request.AblationRequest),
    "timeline": Figure("timeline", request.TimelineRequest),
    "stage": Figure("stage", request.EveryoneRequest),
    "weak": Figure("scaling", request.WeakRequest),
    "strong": Figure("scaling", request.StrongRequest),
    "sweep": Figure("sweep", request.SweepRequest),
    "grid": Figure("sweep", request.GridRequest),
    "slice": Figure("slice", request.SliceRequest),
    "occupancy": Figure("occupancy", request.OccupancyRequest),
    "programs": Figure("programs", request.ProgramsRequest),
    "volume": Figure("volume", request.VolumeRequest),
    "partial_sums": Figure("partial_sums", request.PartialSumsRequest),
    "schedule": Figure("schedule", request.ScheduleRequest),
    "backward": Figure("backward", request.BackwardRequest),
    "collectives": Figure("collectives", request.CollectivesRequest),
    "concurrent": Figure("concurrent", request.ConcurrentRequest),
    "gemm": Figure("gemm", request.GemmRequest),
}
