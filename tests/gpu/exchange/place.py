"""What a check is given: its rank's place among the others."""

import itertools
import os
import sys
import traceback
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist

from dlrm_overlap.launching.launcher import World


@dataclass(frozen=True)
class Check:
    """Something that all ranks do together and that raises on a rank where it does not hold."""

    run: Callable[["Place"], None]
    timeout_s: float = 90.0
    gpu_only: bool = False
    alone: bool = False
    """in processes of its own, since it ends its CUDA context or its peers"""


def every(
    name: str,
    run: Callable[..., None],
    /,
    *,
    timeout_s: float = 90.0,
    gpu_only: bool = False,
    alone: bool = False,
    **axes: Iterable[Any],
) -> dict[str, Check]:
    """Return a check `run` for each combination of values of its arguments `axes`.

    Its name is `name` with each value, or its key where an axis is a mapping, behind an underscore.

    Example: every("losses", f, optimizer=("sgd", "adagrad"), known={"ranges": False}) has the names
    losses_sgd_ranges and losses_adagrad_ranges.
    """
    values = [axis if isinstance(axis, Mapping) else {str(value): value for value in axis} for axis in axes.values()]
    found = {}
    for chosen in itertools.product(*(axis.items() for axis in values)):
        arguments = dict(zip(axes, (value for _, value in chosen), strict=True))
        full = "_".join([name, *(key for key, _ in chosen)])
        found[full] = Check(partial(run, **arguments), timeout_s, gpu_only, alone)
    return found


class Report(NamedTuple):
    """How a check went on a rank."""

    error: str | None
    """its traceback"""
    is_last: bool = True
    """whether the rank is ready for the next check"""


@dataclass
class Place:
    """This rank among those that run a check."""

    world: World
    group: dist.ProcessGroup
    device: torch.device
    folder: Path
    """of the check's set of ranks, the same for all"""
    parent: Connection
    """gets the reports"""
    name: str = ""
    """of the check under way"""
    recorded: "list[weakref.WeakMethod[Callable[[], None]]]" = field(default_factory=list)
    """of each exchange of that check that is still there, what raises what its kernels have recorded"""

    @property
    def rank(self) -> int:
        return self.world.rank

    @property
    def world_size(self) -> int:
        return self.world.world_size

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def ranks_per_gpu(self) -> int:
        """The ranks that share this one's GPU, itself among them."""
        return self.world_size // self.world.local_world_size

    def steps(self, count: int) -> int:
        """Return `count` or, where ranks share a GPU, a fifth: a wait lasts there until the GPU turns to the peer."""
        return count // (1 if self.ranks_per_gpu == 1 else 5)

    def synchronize(self) -> None:
        """Wait for the GPU, if there is one."""
        if self.on_gpu:
            torch.cuda.synchronize(self.device)

    def meet(self) -> None:
        """Wait for all ranks, their GPUs included."""
        self.synchronize()
        dist.all_reduce(torch.zeros(1), group=self.group)  # a CPU tensor: by gloo, on any device

    def generator(self, seed: int) -> torch.Generator:
        """Return a source of random numbers on the device, alike on all ranks that are given the same seed."""
        return torch.Generator(self.device).manual_seed(seed)

    def why(self, error: BaseException) -> BaseException:
        """Return what a kernel has recorded, if one has and `error` is the GPU's, which that kernel has stopped."""
        for reference in self.recorded if isinstance(error, RuntimeError) else ():
            try:
                if (check := reference()) is not None:
                    check()
            except Exception as told:
                told.__cause__ = error
                return told
        return error

    def report(self, error: BaseException | None) -> None:
        """Report to the parent how the check went on this rank."""
        self.parent.send(Report("".join(traceback.format_exception(error)) if error else None))

    def report_failing(self, error: BaseException) -> None:
        """Report an error before the GPU is waited for, which may wait for a peer; `report` follows."""
        self.parent.send(Report("".join(traceback.format_exception(error)), is_last=False))

    def leave(self) -> NoReturn:
        """Report that all is well and end this process at once, as if killed: nothing is closed or destroyed."""
        self.report(None)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
