"""The registry of the figures: which there are, and their options.

To add a figure, write its file in `figures/`, with a function `run(request, ranks)` that all ranks call and that
returns the exit code, add the class of its options to `request`, and a line to FIGURES. This module loads neither torch
nor a figure before one is asked for.
"""

from collections.abc import Callable
from importlib import import_module
from typing import Any, NamedTuple

from dlrm_overlap.bench import request
from dlrm_overlap.bench.gemm_request import GemmRequest


class Figure(NamedTuple):
    """A figure as the command line needs it, before any of its code is loaded."""

    file: str
    """the module in `figures/` whose `run` measures it"""
    request: type[request.Request]
    """its options"""
    summary: str
    """the measurement in a line"""

    def load(self) -> Callable[[Any, Any], int]:
        """Import the figure's file and return its `run`, which takes the request and this rank's `Ranks`."""
        return import_module(f"dlrm_overlap.bench.figures.{self.file}").run


FIGURES = {
    "input": Figure("input", request.InputRequest, "the step fed by the loader, against the step on one cached batch"),
    "step": Figure("step", request.StepRequest, "the whole training step under TorchRec and under our backends"),
    "ablation": Figure("ablation", request.AblationRequest, "the whole step with one thing more or less"),
    "timeline": Figure(
        "timeline",
        request.TimelineRequest,
        "what of a traced step is exposed communication, with a picture (GPU)",
    ),
    "stage": Figure("stage", request.EveryoneRequest, "the embedding stage's forward on one shape, all contenders"),
    "weak": Figure(
        "scaling",
        request.WeakRequest,
        "the embedding stage on 1, 2, 4, .. ranks; tables of a rank and global batch stay",
    ),
    "strong": Figure(
        "scaling",
        request.StrongRequest,
        "the embedding stage on 1, 2, 4, .. ranks; tables in all and global batch stay",
    ),
    "sweep": Figure(
        "sweep",
        request.SweepRequest,
        "where the embedding stage gains: a map over pooling factor, dim and batch",
    ),
    "grid": Figure(
        "sweep", request.GridRequest, "where the embedding stage gains: a map over batch and tables of a rank"
    ),
    "slice": Figure("slice", request.ForwardRequest, "the embedding stage of fused by slice size, beside pgas"),
    "occupancy": Figure(
        "occupancy",
        request.OccupancyRequest,
        "the embedding stage of fused by programs a multiprocessor (GPU)",
    ),
    "programs": Figure(
        "programs",
        request.ProgramsRequest,
        "when the persistent kernel's programs pool, put and wait, task by task (GPU)",
    ),
    "volume": Figure(
        "volume", request.VolumeRequest, "bytes on the links over time, of fused and of the baselines (GPU)"
    ),
    "schedule": Figure(
        "schedule",
        request.ForwardRequest,
        "the embedding stage of pgas and fused by order of the tasks, with the skew between ranks",
    ),
    "backward": Figure(
        "backward",
        request.BackwardRequest,
        "the embedding stage's backward: push and atomic against the collective with FBGEMM's update",
    ),
    "collectives": Figure(
        "collectives",
        request.CollectivesRequest,
        "all-to-all and all-gather by copy engines and by stores, against NCCL's",
    ),
    "concurrent": Figure(
        "concurrent",
        request.ConcurrentRequest,
        "a computation beside a communication that does not depend on it, by each way to issue the two",
    ),
    "gemm": Figure(
        "gemm", GemmRequest, "products with their all-gather or reduce-scatter inside, by each way to do it"
    ),
}
