"""A check, and what it is given: the rank that runs it."""

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
    """A test that all ranks run together, and that raises on a rank where it fails."""

    run: Callable[["Place"], None]
    timeout_s: float = 90.0
    gpu_only: bool = False
    alone: bool = False  # runs in new processes, since it breaks its CUDA context or ends its peers


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

    Names are `name` and the values, or their keys where an axis is a mapping, joined by underscores:
    every("losses", f, optimizer=("sgd", "adagrad"), known={"ranges": False}) has the names losses_sgd_ranges and
    losses_adagrad_ranges.
    """
    values = [axis if isinstance(axis, Mapping) else {str(value): value for value in axis} for axis in axes.values()]
    found = {}
    for chosen in itertools.product(*(axis.items() for axis in values)):
        arguments = dict(zip(axes, (value for _, value in chosen), strict=True))
        full = "_".join([name, *(key for key, _ in chosen)])
        found[full] = Check(partial(run, **arguments), timeout_s, gpu_only, alone)
    return found


class Report(NamedTuple):
    """The result of a check on a rank."""

    error: str | None  # a traceback
    is_last: bool = True  # whether the rank is ready for the next check


@dataclass
class Place:
    """One of the ranks that run a check."""

    world: World
    group: dist.ProcessGroup
    device: torch.device
    folder: Path  # the same on all ranks
    parent: Connection  # receives the reports
    name: str = ""  # of the current check
    # The `check` method of each exchange of the current check, which raises the errors that kernels recorded.
    recorded: "list[weakref.WeakMethod[Callable[[], None]]]" = field(default_factory=list)

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
        """Number of ranks on this rank's GPU, itself included."""
        return self.world_size // self.world.local_world_size

    def steps(self, count: int) -> int:
        """Return `count` or, where ranks share a GPU, a fifth: there a wait lasts until the GPU runs the peer."""
        return count // (1 if self.ranks_per_gpu == 1 else 5)

    def synchronize(self) -> None:
        """Wait for the GPU, if there is one."""
        if self.on_gpu:
            torch.cuda.synchronize(self.device)

    def meet(self) -> None:
        """Wait for all ranks, their GPUs included."""
        self.synchronize()
        dist.all_reduce(torch.zeros(1), group=self.group)  # a CPU tensor: by gloo, on any device

    def close(self, *owners: Any) -> None:
        """Close exchanges, trainers or others that own windows, once no rank uses them."""
        self.meet()
        for owner in owners:
            owner.close()

    def generator(self, seed: int) -> torch.Generator:
        """Return a generator on the device, with the same numbers on all ranks that pass the same seed."""
        return torch.Generator(self.device).manual_seed(seed)

    def why(self, error: BaseException) -> BaseException:
        """Return the error that a kernel has recorded, if `error` is of the GPU that it stopped; else `error`."""
        for reference in self.recorded if isinstance(error, RuntimeError) else ():
            try:
                if (check := reference()) is not None:
                    check()
            except Exception as recorded:
                recorded.__cause__ = error
                return recorded
        return error

    def report(self, error: BaseException | None) -> None:
        """Report the result of the check on this rank to the parent."""
        self.parent.send(Report("".join(traceback.format_exception(error)) if error else None))

    def report_failing(self, error: BaseException) -> None:
        """Report an error before a wait for the GPU, which may wait for a peer; `report` follows."""
        self.parent.send(Report("".join(traceback.format_exception(error)), is_last=False))

    def leave(self) -> NoReturn:
        """Report success and end this process at once, as if killed: nothing is closed or destroyed."""
        self.report(None)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
