"""The registry of the figures. `dlrm-overlap bench` reads from it which figures there are and what options they take.

To add a figure, write its file in `figures/`, with a function `run(request, ranks)` that all ranks call and that
returns the exit code, and add one line to FIGURES. A figure with options of its own also has a class in `request` or
beside it. This module loads neither torch nor a figure before one is asked for.
"""

from collections.abc import Callable
from importlib import import_module
from typing import Any, NamedTuple

from dlrm_overlap.bench.gemm_request import GemmRequest
from dlrm_overlap.bench.request import CollectivesRequest, ConcurrentRequest, InputRequest, Request
from dlrm_overlap.bench.stage_request import (
    BackwardRequest,
    EveryoneRequest,
    ForwardRequest,
    OccupancyRequest,
    ProgramsRequest,
    StrongRequest,
    VolumeRequest,
    WeakRequest,
)
from dlrm_overlap.bench.step_request import AblationRequest, StepRequest, TimelineRequest
from dlrm_overlap.bench.sweep_request import GridRequest, SweepRequest


class Figure(NamedTuple):
    """What the command line needs to know of a figure before any of its code is loaded."""

    summary: str
    """what is measured, in a line"""
    request: type[Request]
    """the options that the figure takes"""
    file: str
    """the module in `figures/` whose `run` measures it"""

    def load(self) -> Callable[[Any, Any], int]:
        """Import the figure's file and return its `run`, which takes the request and this rank's `Ranks`."""
        return import_module(f"dlrm_overlap.bench.figures.{self.file}").run


FIGURES = {
    "input": Figure("the step fed by the loader, against the step on one cached batch", InputRequest, "input"),
    "step": Figure("the whole training step under TorchRec and under our backends", StepRequest, "step"),
    "ablation": Figure("the whole step with one thing more or less", AblationRequest, "ablation"),
    "timeline": Figure(
        "what of a traced step is exposed communication, with a picture (GPU)", TimelineRequest, "timeline"
    ),
    "stage": Figure("the embedding stage's forward on one shape, all contenders", EveryoneRequest, "stage"),
    "weak": Figure(
        "the embedding stage on 1, 2, 4, .. ranks; tables of a rank and global batch stay", WeakRequest, "scaling"
    ),
    "strong": Figure(
        "the embedding stage on 1, 2, 4, .. ranks; tables in all and global batch stay", StrongRequest, "scaling"
    ),
    "sweep": Figure("where the embedding stage gains: a map over pooling factor, dim and batch", SweepRequest, "sweep"),
    "grid": Figure("where the embedding stage gains: a map over batch and tables of a rank", GridRequest, "sweep"),
    "slice": Figure("the embedding stage of fused by slice size, beside pgas", ForwardRequest, "slice"),
    "occupancy": Figure(
        "the embedding stage of fused by programs a multiprocessor (GPU)", OccupancyRequest, "occupancy"
    ),
    "programs": Figure(
        "when the persistent kernel's programs pool, put and wait, task by task (GPU)", ProgramsRequest, "programs"
    ),
    "volume": Figure("bytes on the links over time, of fused and of the baselines (GPU)", VolumeRequest, "volume"),
    "schedule": Figure(
        "the embedding stage of pgas and fused by order of the tasks, with the skew between ranks",
        ForwardRequest,
        "schedule",
    ),
    "backward": Figure(
        "the embedding stage's backward: push and atomic against the collective with FBGEMM's update",
        BackwardRequest,
        "backward",
    ),
    "collectives": Figure(
        "all-to-all and all-gather by copy engines and by stores, against NCCL's", CollectivesRequest, "collectives"
    ),
    "concurrent": Figure(
        "a computation beside a communication that does not depend on it, by each way to issue the two",
        ConcurrentRequest,
        "concurrent",
    ),
    "gemm": Figure(
        "products with their all-gather or reduce-scatter inside, by each way to do it", GemmRequest, "gemm"
    ),
}
