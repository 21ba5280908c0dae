"""The command: `python -m tests.gpu.all_reduce --nproc 2`: how long the dense gradients' reduction takes, alone.

Prints, for 16.8 M parameters, the reduction alone and the reduction with the update of the parameters (Adagrad with a
bfloat16 shadow), captured: by NCCL, then by stores for each number of programs, number of pieces, and type. Times are
medians over replays of the slowest rank's mean over a graph's steps. `tests/gpu/test_exchange.py` checks
that the sums are right.
"""

import statistics
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from dlrm_overlap.comm.order import CommunicationOrder
from dlrm_overlap.dense.flat import FlatParameters
from dlrm_overlap.dense.gradients import GradientBuckets
from dlrm_overlap.dense.optimizer import FlatOptimizer
from dlrm_overlap.dense.reduction import StoreOptions
from dlrm_overlap.launching.launcher import World
from tests.gpu.measuring import Say, measure_on_gpus

ELEMENTS = 16 << 20
PROGRAMS, PIECES = (8, 16, 32, 64), (1, 4, 8)
TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_STEPS, _REPLAYS, _WARM_UP = 10, 9, 3
_WAIT_S = 20.0


class Contender:
    """Parameters whose gradients are reduced in one way."""

    def __init__(self, device: torch.device, dtype: torch.dtype, stores: StoreOptions | None) -> None:
        assert dist.group.WORLD is not None
        self.device, self._order = device, CommunicationOrder()
        flat = FlatParameters({"weight": nn.Parameter(torch.randn(ELEMENTS, device=device))})
        flat.gradients.tensor.normal_()
        self.optimizer = FlatOptimizer(flat, "adagrad", 1e-3, shadow_dtype=torch.bfloat16)
        self.buckets = GradientBuckets(flat, dist.group.WORLD, dtype, 1 << 30, self._order, stores)

    def reduce(self) -> None:
        self.buckets.finish()

    def reduce_and_update(self) -> None:
        self.optimizer.step_in_ranges(self.buckets.finish_in_ranges())

    def time_us(self, step: Callable[[], Any]) -> float:
        """Return how long a captured `step` takes on the slowest rank."""
        for _ in range(2):
            step()  # compiles, and makes the memory that peers see
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize(self.device)
        with torch.cuda.graph(graph, stream=torch.cuda.current_stream(), capture_error_mode="thread_local"):
            for _ in range(_STEPS):
                for counters in self.buckets.counters:
                    counters.advance()
                self._order.begin()
                step()
                self._order.end()
        times = []
        for number in range(_WARM_UP + _REPLAYS):
            if number:  # the capture has counted the first replay
                for counters in self.buckets.counters:
                    for _ in range(_STEPS):
                        counters.count_step()
            torch.cuda.synchronize(self.device)
            dist.all_reduce(torch.zeros(1))  # by gloo: ranks begin together
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) * 1000 / _STEPS)
        self.buckets.check()
        slowest = torch.tensor(times[_WARM_UP:], dtype=torch.float64)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        return statistics.median(slowest.tolist())

    def close(self) -> None:
        torch.cuda.synchronize(self.device)
        dist.all_reduce(torch.zeros(1))
        self.buckets.close()


def _line(what: str, dtype: str, contender: Contender) -> str:
    alone, updated = contender.time_us(contender.reduce), contender.time_us(contender.reduce_and_update)
    ranks = dist.get_world_size()
    moved = 2 * (ranks - 1) / ranks * ELEMENTS * TYPES[dtype].itemsize
    return f"{what:32} {dtype}  {alone:8.1f}  {updated:12.1f}  {moved / alone / 1e3:8.0f}"


def measure(world: World, device: torch.device, say: Say) -> None:
    """Print the table."""
    say(f"{ELEMENTS} parameters, {dist.get_world_size()} x {torch.cuda.get_device_name(device)}, us a step:")
    say(f"{'':32} {'type'}  {'reduced':>8}  {'with update':>12}  {'GB/s':>8}")
    for dtype in TYPES:
        contender = Contender(device, TYPES[dtype], None)
        say(_line("nccl", dtype, contender))
        contender.close()
    for dtype in TYPES:
        for pieces in PIECES:
            stores = StoreOptions(PROGRAMS[0], ELEMENTS // pieces, _WAIT_S)
            contender = Contender(device, TYPES[dtype], stores)
            for programs in PROGRAMS:
                reduction: Any = contender.buckets._reduction
                reduction._options = stores._replace(programs=programs)
                say(_line(f"stores, {pieces} pieces, {programs} programs", dtype, contender))
            contender.close()


if __name__ == "__main__":
    sys.exit(measure_on_gpus("tests.gpu.all_reduce", __doc__, measure))
