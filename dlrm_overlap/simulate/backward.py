"""The embedding stage's backward as activities: gradients travel to the owners of their rows, which are updated.

**push.** Gradients travel in parts of a rank's tables, the first half as long as the others; the rows of a part are
updated while the next one travels. The ids have been sorted beside the forward. Updates and products of the dense part
each fill the multiprocessors, so beside each other they take turns.

**collective.** Gradients are packed, sent by a collective, the ids sorted, and all rows updated by FBGEMM.

Gradients of a history, which is not pooled, are summed by distinct id before they are sent.
"""

from collections.abc import Sequence

import numpy as np

from dlrm_overlap.simulate.config import SimulateConfig, UpdateConfig
from dlrm_overlap.simulate.stage import Simulation, each_alone, pass_over_rows, send_all
from dlrm_overlap.simulate.workload import Workload

_PART_BYTES, _MOST_PARTS = 32 << 20, 6  # as `embedding.layout` cuts a rank's window


def collective_backward(config: SimulateConfig) -> bool:
    """Return whether gradients travel by a collective; else they are pushed."""
    return config.exchange.backend == "torchrec"


def _rates(config: SimulateConfig) -> UpdateConfig:
    return config.gpu.baseline_update if config.exchange.backend == "torchrec" else config.gpu.update


def sort_s(config: SimulateConfig, work: Workload) -> tuple[np.ndarray, np.ndarray]:
    """Return the seconds [W] in which each rank's sort of its ids has the multiprocessors alone, and takes in all."""
    rates = _rates(config)
    busy_s = work.ids * work.shares.ids * rates.sort_ns / 1e9
    return busy_s, busy_s + rates.sort_us / 1e6


def rows_s(config: SimulateConfig, work: Workload) -> float:
    """Return how long the rows of the mean rank take to be updated, in seconds, all at once."""
    rates = _rates(config)
    return work.update.hbm / rates.gb_per_s / 1e9 + rates.us / 1e6


def gradient_parts(config: SimulateConfig, work: Workload) -> list[float]:
    """Return the share of each part in which gradients are pushed; all together are 1.

    Example: a window of 100 MB is cut into 2, of which the first is half as long: [1 / 3, 2 / 3].
    """
    window_bytes = work.pair_bytes * work.world_size
    count = max(1, min(_MOST_PARTS, int(window_bytes) // _PART_BYTES)) if work.world_size > 1 else 1
    return [(0.5 if part == 0 else 1.0) / (count - 0.5) if count > 1 else 1.0 for part in range(count)]


def add_backward(
    sim: Simulation, after: Sequence[Sequence[int]], sorted_ids: Sequence[Sequence[int]]
) -> tuple[list[list[int]], list[int]]:
    """Add the backward of all ranks; return for each the activities with whose ends all gradients have come, and that
    with which all rows are updated.

    Args:
        sim: gets the activities.
        after: for each rank, the activities that give its gradient.
        sorted_ids: for each rank, the activities that sort its ids; the collective sorts them itself.
    """
    config, cluster, work = sim
    received, several = sim.pair_bytes().T, cluster.world_size > 1  # gradients of what was sent
    kernel = {"lane": "memory", "delay_s": config.gpu.kernel_us / 1e6}
    seconds = rows_s(config, work) * work.shares.memory
    sent = [list(each) for each in after]
    if work.history_ids and (config.work.dedup or not collective_backward(config)):
        rows = work.history_ids + 2 * work.history_rows  # sums are set to zero before
        sent = each_alone(pass_over_rows(sim, "sum by id", rows, sent))
    if collective_backward(config):
        if several:
            pack_s = 2 * work.pooled_bytes / config.gpu.copy_gb_per_s / 1e9
            packed = cluster.add_each("pack", [cluster.memory], pack_s, sent, **kernel)
            sent = each_alone(send_all(sim, received, each_alone(packed), "push", collective=True))
        return sent, cluster.add_each("rows", [cluster.memory], sort_s(config, work)[1] + seconds, sent, **kernel)
    before = [list(each) for each in sorted_ids]
    for share in gradient_parts(config, work):
        if several:
            sent = each_alone(send_all(sim, received * share, sent, "push", collective=False))
        begins = [[*a, *b] for a, b in zip(sent, before, strict=True)]
        # An update leaves products no multiprocessor, and they leave it none.
        alone = [cluster.memory, cluster.products]
        before = each_alone(cluster.add_each("rows", alone, seconds * share, begins, **kernel))
    return sent, [number for (number,) in before]
