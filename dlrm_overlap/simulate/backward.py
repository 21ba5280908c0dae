"""The embedding stage's backward as activities: gradients travel to the owners of their rows, which are updated.

**push.** Gradients travel in parts of a rank's tables, the first half as long as the others; the rows of a part are
updated while the next one travels. The ids have been sorted beside the forward. Updates and products of the dense part
each fill the multiprocessors, so beside each other they take turns.

**collective.** Gradients are packed, sent by a collective, the ids sorted, and all rows updated by FBGEMM.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from dlrm_overlap.simulate import stage
from dlrm_overlap.simulate.config import SimulateConfig
from dlrm_overlap.simulate.engine import Engine
from dlrm_overlap.simulate.gpu_config import UpdateConfig
from dlrm_overlap.simulate.network import Cluster
from dlrm_overlap.simulate.workload import Workload

_PART_BYTES, _MOST_PARTS = 32 << 20, 6  # as `embedding.protocol.gradients` cuts a rank's window


class Backward(NamedTuple):
    """For each rank, the activities with whose ends all gradients have come, and all rows are updated."""

    arrived: list[int]
    updated: list[int]


def collective_backward(config: SimulateConfig) -> bool:
    """Return whether gradients travel by a collective; else they are pushed."""
    exchange = config.exchange
    return exchange.backward == "collective" or (exchange.backward == "auto" and exchange.backend == "torchrec")


def _rates(config: SimulateConfig) -> UpdateConfig:
    return config.gpu.baseline_update if config.exchange.backend == "torchrec" else config.gpu.update


class Sort(NamedTuple):
    """How long a rank's ids take to be sorted, in seconds."""

    busy_s: float
    """in which nothing else has the multiprocessors"""
    least_s: float
    """altogether, where nothing holds it up"""


def sort_of(config: SimulateConfig, work: Workload, rank: int) -> Sort:
    """Return the sort of a rank's ids."""
    rates = _rates(config)
    busy_s = work.ids * float(work.shares.ids[rank]) * rates.sort_ns / 1e9
    return Sort(busy_s, busy_s + rates.sort_us / 1e6)


def rows_s(config: SimulateConfig, work: Workload) -> float:
    """Return how long the rows of the mean rank take to be updated, in seconds, all at once."""
    rates = _rates(config)
    once = rates.sgd_gb_per_s if config.work.optimizer == "sgd" else rates.adagrad_gb_per_s
    update = work.update
    demands = (
        (update.compulsory - update.exchanged - update.gradients, once),
        (update.gradients, rates.gradients_gb_per_s or once),
        (update.exchanged, rates.exchanged_gb_per_s or once),
        (update.hbm - update.compulsory, rates.repeated_gb_per_s),
    )
    return sum(nbytes / gb_per_s / 1e9 for nbytes, gb_per_s in demands) + rates.us / 1e6


def gradient_parts(config: SimulateConfig, work: Workload) -> list[float]:
    """Return the share of each part in which gradients are pushed; all together are 1.

    Example: a window of 100 MB is cut into 2, of which the first is half as long: [1 / 3, 2 / 3].
    """
    window_bytes = work.pair_bytes * work.world_size
    count = max(1, min(_MOST_PARTS, int(window_bytes) // _PART_BYTES)) if work.world_size > 1 else 1
    return [(0.5 if part == 0 else 1.0) / (count - 0.5) if count > 1 else 1.0 for part in range(count)]


def add_backward(
    engine: Engine,
    cluster: Cluster,
    config: SimulateConfig,
    work: Workload,
    after: Sequence[Sequence[int]],
    sorted_ids: Sequence[Sequence[int]],
) -> Backward:
    """Add the backward of all ranks.

    Args:
        engine: gets the activities.
        cluster: its ranks.
        config: says how gradients travel.
        work: of a rank.
        after: for each rank, what ends when its gradient is there.
        sorted_ids: for each rank, what ends when its ids are sorted; the collective sorts them itself.
    """
    gpu, ranks, several = config.gpu, range(cluster.world_size), cluster.world_size > 1
    received = work.pair_bytes * work.shares.links

    def memory(name: str, seconds: np.ndarray, begins: Sequence[Sequence[int]], alone: bool = False) -> list[int]:
        numbers = []
        for r, taken in enumerate(seconds.tolist()):
            # What goes on alone leaves the products no multiprocessor, and they leave it none.
            demands = {cluster.memory(r): taken} | ({cluster.products(r): taken} if alone else {})
            numbers.append(
                engine.add(
                    name, demands, max(taken, 1e-12), begins[r], rank=r, lane="memory", delay_s=gpu.kernel_us / 1e6
                )
            )
        return numbers

    if collective_backward(config):
        pack_s = np.full(cluster.world_size, 2 * work.pooled_bytes / gpu.copy_gb_per_s / 1e9)
        begun = memory("pack", pack_s, after) if several else None
        gradients = [[number] for number in begun] if begun else after
        arrived = gradients
        if several:
            numbers = stage.send_all(engine, cluster, config, received, gradients, "push", collective=True)
            arrived = [[number] for number in numbers]
        sorts_s = np.array([sort_of(config, work, r).least_s for r in ranks])
        seconds = sorts_s + rows_s(config, work) * work.shares.memory
        return Backward(_joined(engine, arrived), memory("rows", seconds, arrived))
    sent, rows = [list(each) for each in after], [list(each) for each in sorted_ids]
    for share in gradient_parts(config, work):
        if several:
            numbers = stage.send_all(engine, cluster, config, received * share, sent, "push", collective=False)
            sent = [[number] for number in numbers]
        begins = [[*sent[r], *rows[r]] for r in ranks]
        seconds = rows_s(config, work) * work.shares.memory * share
        rows = [[number] for number in memory("rows", seconds, begins, alone=True)]
    return Backward(_joined(engine, sent), [number for (number,) in rows])


def _joined(engine: Engine, after: Sequence[Sequence[int]]) -> list[int]:
    return [
        each[0] if len(each) == 1 else engine.add("gradients are there", {}, after=each, rank=rank)
        for rank, each in enumerate(after)
    ]
