"""Helpers for commands on GPUs: steps as CUDA graphs, their times, and parts that run whatever fails before."""

import shlex
import statistics
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist


def capture(step: Callable[[], Any], warmup: int = 3) -> torch.cuda.CUDAGraph:
    """Return a graph of the step, after `warmup` eager steps."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(warmup):
            step()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph


def times_us(graphs: Sequence[torch.cuda.CUDAGraph], rounds: int = 15, replays: int = 4) -> list[float]:
    """Return the median time of a replay of each graph, in us; the graphs alternate."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    taken: list[list[float]] = [[] for _ in graphs]
    for _ in range(rounds):
        for graph, times in zip(graphs, taken, strict=True):
            graph.replay()
            begin.record()
            for _ in range(replays):
                graph.replay()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) * 1e3 / replays)
    return [statistics.median(times) for times in taken]


def run_parts(parts: Mapping[str, Callable[[], Any]]) -> int:
    """Run all parts, also after a failure, and return the number of failures."""
    failed = 0
    for name, part in parts.items():
        try:
            part()
            print(f"ok      {name}", flush=True)
        except Exception:
            failed += 1
            print(f"FAILED  {name}\n{traceback.format_exc()}", flush=True)
    return failed


def torchrun_line(module: str) -> str:
    """Return the command that started this process and the other ranks, as a user would type it."""
    return shlex.join(["torchrun", "--nproc-per-node", str(dist.get_world_size()), "-m", module, *sys.argv[1:]])
