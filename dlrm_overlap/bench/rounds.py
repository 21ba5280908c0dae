"""Do the contenders agree, and how long does each take? All meet the same ids, and every drift of the machine."""

import itertools
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from dlrm_overlap.bench.contenders import Baseline, Contender, Ids, Workload
from dlrm_overlap.bench.limits import Limit, count_bytes, measure_ceilings
from dlrm_overlap.bench.timing import StepTimes, gather, greatest, slowest_rank
from dlrm_overlap.metrics import StepTimer, quantile

_ROUNDS = 4  # contenders take turns
_WARMUP_STEPS = 5

# Greatest difference from the baseline, relative to its greatest element: sums of a hundred rows in another order, or
# one unit in the last place of the wire's type.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}


@dataclass(frozen=True)
class Agreement:
    """A contender's outputs against the baseline's, over all batches and ranks."""

    equal: bool
    """bit for bit"""
    max_abs_difference: float
    tolerance: float
    """greatest difference that agrees"""

    @property
    def agrees(self) -> bool:
        """False where a difference exceeds the tolerance, or is not finite."""
        return self.max_abs_difference <= self.tolerance


@dataclass(frozen=True)
class Timing:
    """A contender's steps, back to back."""

    times: StepTimes
    host_ms: float
    """median time for the host to issue a step, the slowest rank's"""
    steps: int


@torch.no_grad()
def check_agreement(contenders: Sequence[Contender], workload: Workload) -> list[Agreement]:
    """Compare every contender's outputs with those of the first, on every batch and rank."""
    differences = [0.0] * len(contenders)
    unequal = [0.0] * len(contenders)
    scale = 0.0
    for ids in workload.batches:
        expected = contenders[0].step(ids).clone()
        scale = max(scale, expected.abs().max().item())
        for i, contender in enumerate(contenders):
            output = contender.step(ids)
            difference = (output - expected).abs().max().item()
            differences[i] = max(differences[i], difference if math.isfinite(difference) else math.inf)
            unequal[i] = max(unequal[i], float(not torch.equal(output, expected)))
            del output  # its window must be free before the next step
    device, group = workload.device, workload.group
    tolerance = TOLERANCE[workload.wire_dtype] * greatest([scale], device, group)[0]
    return [
        Agreement(not differs, difference, tolerance)
        for differs, difference in zip(
            greatest(unequal, device, group), greatest(differences, device, group), strict=True
        )
    ]


@torch.no_grad()
def time_contenders(contenders: Sequence[Contender], workload: Workload, steps: int) -> list[Timing]:
    """Time at least `steps` steps of each contender, in rounds."""
    per_round = math.ceil(steps / _ROUNDS)
    step_ms: list[list[float]] = [[] for _ in contenders]
    host_ms: list[list[float]] = [[] for _ in contenders]
    for _ in range(_ROUNDS):
        for i, contender in enumerate(contenders):
            batches, timer = _warm_up(contender, workload)
            for _ in range(per_round):
                began = time.perf_counter()
                contender.step(next(batches))
                host_ms[i].append((time.perf_counter() - began) * 1e3)
                timer.mark()
            step_ms[i] += timer.take_ms()
    device, group = workload.device, workload.group
    host = greatest([quantile(times, 0.5) for times in host_ms], device, group)
    return [
        Timing(slowest_rank(times, device, group), host_time, len(times))
        for times, host_time in zip(step_ms, host, strict=True)
    ]


@torch.no_grad()
def time_parts(baseline: Baseline, workload: Workload, steps: int) -> tuple[float, float, float]:
    """Return the medians in ms of the baseline's lookup, All-to-All and unpacking, the slowest rank's each."""
    batches, timer = _warm_up(baseline, workload)
    for _ in range(steps):
        baseline.step(next(batches), timer.mark)
        timer.mark()
    times = timer.take_ms()
    lookup, all_to_all, unpack = greatest(
        [quantile(times[part::3], 0.5) for part in range(3)], workload.device, workload.group
    )
    return lookup, all_to_all, unpack


def _warm_up(contender: Contender, workload: Workload) -> tuple[Iterator[Ids], StepTimer]:
    """Take the first steps of a block together with all ranks; return the batches to go on with and a timer begun."""
    batches = itertools.cycle(workload.batches)
    dist.barrier(workload.group)
    for _ in range(_WARMUP_STEPS):
        contender.step(next(batches))
    timer = StepTimer(workload.device)
    timer.mark()
    return batches, timer


def find_limit(workload: Workload) -> Limit:
    """Return the limit of the rank that has the greatest, its bytes the mean over the batches."""
    ceilings = measure_ceilings(workload.group, workload.device)
    counts = [
        count_bytes(workload.layout, workload.rank, workload.batch_sizes, list(ids.inputs), workload.wire_dtype)
        for ids in workload.batches
    ]
    means = [sum(column) / len(counts) for column in zip(*counts, strict=True)]
    by_rank = gather([*means, *ceilings], workload.device, workload.group)
    limits = [Limit(round(hbm), round(link), *rates) for hbm, link, *rates in by_rank]
    return max(limits, key=lambda limit: limit.ms)
