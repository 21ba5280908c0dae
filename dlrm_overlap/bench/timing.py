"""Step times as every figure reports them: median with p10 and p90, the slowest rank."""

from dataclasses import dataclass

import torch
import torch.distributed as dist

from dlrm_overlap.metrics import quantile


@dataclass(frozen=True)
class StepTimes:
    """Step time in ms: mean and quantiles, each the maximum over ranks."""

    mean_ms: float
    p10_ms: float
    median_ms: float
    p90_ms: float


def slowest_rank(step_ms: list[float], device: torch.device) -> StepTimes:
    """Return the mean and quantiles of this rank's step times, maximised over all ranks, which all call this."""
    mine = [sum(step_ms) / len(step_ms), *(quantile(step_ms, q) for q in (0.1, 0.5, 0.9))]
    times = torch.tensor(mine, dtype=torch.float64, device=device)
    dist.all_reduce(times, dist.ReduceOp.MAX)
    return StepTimes(*times.tolist())
