"""Step times as every figure reports them: mean and quantiles, each of the slowest rank."""

from dataclasses import dataclass

import torch
import torch.distributed as dist

from dlrm_overlap.comm.turns import greatest
from dlrm_overlap.observe.metrics import quantile


@dataclass(frozen=True)
class StepTimes:
    """Step times in ms: the mean and quantiles, each the maximum over the ranks."""

    mean_ms: float
    p10_ms: float
    median_ms: float
    p90_ms: float


def slowest_rank(step_ms: list[float], device: torch.device, group: dist.ProcessGroup | None = None) -> StepTimes:
    """Return the mean and quantiles of the ranks' step times, each the maximum over the ranks of `group`.

    All ranks of the group call this; without a group all ranks do.
    """
    mine = [sum(step_ms) / len(step_ms), *(quantile(step_ms, q) for q in (0.1, 0.5, 0.9))]
    return StepTimes(*greatest(mine, device, group))


def gather(values: list[float], device: torch.device, group: dist.ProcessGroup) -> list[list[float]]:
    """Return the `values` of every rank of `group`, in the order of the ranks. They all call this."""
    mine = torch.tensor(values, dtype=torch.float64, device=device)
    all_values = mine.new_empty(group.size(), mine.numel())
    dist.all_gather(list(all_values.unbind()), mine, group=group)
    return all_values.tolist()


def fraction_of_ideal(computation_ms: float, communication_ms: float, together_ms: float) -> dict[str, float]:
    """Return ideal, speedup over one after the other, and (speedup - 1) / (ideal - 1), the fraction of ideal.

    Example: 3 ms and 1 ms alone, 3.5 ms together: ideal 4 / 3, speedup 4 / 3.5, fraction (8/7 - 1) / (1/3) = 3 / 7.
    """
    both = computation_ms + communication_ms
    ideal, speedup = both / max(computation_ms, communication_ms), both / together_ms
    return {"ideal": ideal, "speedup": speedup, "fraction_of_ideal": (speedup - 1) / (ideal - 1)}
