"""How evenly the ranks' own work is spread: each rank's time without its waits for others (arXiv 2305.06942)."""

import itertools
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from dlrm_overlap.bench.timing import gather, greatest
from dlrm_overlap.bench.workload import Workload
from dlrm_overlap.embedding.backends.base import Forward
from dlrm_overlap.embedding.halves import open_halves
from dlrm_overlap.embedding.options import ExchangeContext, ExchangeOptions
from dlrm_overlap.embedding.protocol.step import BatchSizes, Step
from dlrm_overlap.observe.metrics import StepTimer, quantile

_WARMUP_STEPS = 3
_LEAD_CYCLES = 2_000_000  # about a millisecond: the host issues a step in it


@dataclass(frozen=True)
class Skew:
    """Medians over steps."""

    own_ms: float
    """of the rank that works longest"""
    skew_ms: float
    """between the ranks that work longest and shortest"""
    skew_fraction: float
    """of the longest"""
    put_us: float | None = None
    """fused on GPUs: what a program spends on storing and putting, the mean over its rank's, the greatest rank's"""
    wait_us: float | None = None
    """likewise on waiting for peers at the end"""


@torch.no_grad()
def measure_skew(workload: Workload, options: ExchangeOptions, steps: int) -> Skew:
    """Run `steps` steps, each begun by all ranks together, and tell how their own work differs.

    Own work is pgas' kernel, or what a rank does before it waits on a CPU. The kernel of fused waits at its end: there
    it is the time from the first task's begin to the last one's end, from a trace that the kernel writes.
    """
    device, group = workload.device, workload.group
    traced = options.backend == "fused" and device.type == "cuda"
    options = replace(options, trace=traced, backward="collective")
    known = workload.layout, workload.tables, options, group, device
    halves = open_halves(ExchangeContext(*known, samples_per_rank=max(workload.batch_sizes)))
    forward = halves.forward
    own_ms: list[float] = []
    programs_us: list[tuple[float, float]] = []
    for ids in itertools.islice(itertools.cycle(workload.batches), _WARMUP_STEPS + steps):
        step = Step(list(ids.inputs), BatchSizes.of(workload.batch_sizes))
        timer = StepTimer(device)
        dist.barrier(group)
        if device.type == "cuda":
            torch.cuda._sleep(_LEAD_CYCLES)  # until all is issued: else the events would time the host
        timer.mark()
        forward.start(step)
        timer.mark()
        forward.finish(step)
        own_ms += timer.take_ms()
        if traced:
            own_ms[-1], put_us, wait_us = _read_trace(forward)
            programs_us.append((put_us, wait_us))
    dist.barrier(group)
    halves.close()
    by_rank = gather(own_ms[_WARMUP_STEPS:], device, group)
    longest = [max(times) for times in zip(*by_rank, strict=True)]
    skews = [most - min(times) for most, times in zip(longest, zip(*by_rank, strict=True), strict=True)]
    means = [quantile(list(column), 0.5) for column in zip(*programs_us[_WARMUP_STEPS:], strict=True)]
    return Skew(
        quantile(longest, 0.5),
        quantile(skews, 0.5),
        quantile([skew / most for skew, most in zip(skews, longest, strict=True)], 0.5),
        *(greatest(means, device, group) if traced else ()),
    )


def _read_trace(forward: Forward) -> tuple[float, float, float]:
    """Return this rank's own work in ms, and put and end wait in us a program, of the step before."""
    from dlrm_overlap.embedding.backends.sliced import SlicedForward
    from dlrm_overlap.kernels.forward.put_slices import TRACE_COLUMNS

    assert isinstance(forward, SlicedForward)
    trace = torch.cat(list(forward.traces.values()))
    column = {name: trace[:, i] for i, name in enumerate(TRACE_COLUMNS)}
    programs = column["program"].unique().numel()
    own_ns = column["end_ns"].max() - column["start_ns"].min()
    sums = (column["put_ns"].sum(), column["wait_ns"].sum())
    return own_ns.item() / 1e6, sums[0].item() / 1e3 / programs, sums[1].item() / 1e3 / programs
