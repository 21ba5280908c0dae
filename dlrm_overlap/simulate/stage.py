"""The embedding stage as activities: who pools when, and when pooled embeddings travel and arrive.

**pgas and fused.** A rank's tasks are taken in the order of `kernels.schedule`, cut into waves of equal numbers of
tasks. A wave is one activity: it takes the rank's memory to pool, and the links to peers in the host to store, in
proportion, so a full link holds the pooling up, as it does when programs store. The embeddings for other hosts are put
when the wave ends, and travel beside the next waves: a put is not waited for. Puts to the same ranks
follow one another, those to others share the links with them. Sums of tables that are cut by rows over a host's ranks
are put when the ranks of the host have pooled all. Waves of equal destinations, all within the host, count as one.

**torchrec.** FBGEMM's lookup, a copy of the output into the send buffer, a collective, and the pass that unpacks.

Rows of a history, which is not pooled, travel as bags of one id do, and are expanded to the ids that name them.
"""

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from dlrm_overlap.kernels.grouping import group_rows
from dlrm_overlap.kernels.schedule import TaskGrid
from dlrm_overlap.simulate.config import LookupConfig, SimulateConfig
from dlrm_overlap.simulate.network import Cluster, arrivals
from dlrm_overlap.simulate.workload import Workload, build_workload

_MANY_BAGS = 1 << 17
_WAVES = 16  # parts in which a rank's tasks are simulated; puts to other hosts leave at the end of each


class Simulation(NamedTuple):
    """A simulation: the functions here and in `backward` and `step` add its activities to the cluster's engine."""

    config: SimulateConfig
    cluster: Cluster
    work: Workload

    @staticmethod
    def of(config: SimulateConfig) -> "Simulation":
        """Return a simulation without an activity yet."""
        network, link, nic = config.network, config.gpu.link_gb_per_s * 1e9, config.network.nic_gbit_per_s / 8 * 1e9
        latencies_s = network.latency_ns / 1e9, config.gpu.peer_us / 1e6
        cluster = Cluster(network.hosts, network.gpus_per_host, link, nic, *latencies_s)
        where, dense = (cluster.world_size, config.network.gpus_per_host), config.exchange.backend == "torchrec"
        return Simulation(config, cluster, build_workload(config.model, config.work, *where, dense))

    def pair_bytes(self) -> np.ndarray:
        """Return [W, W]: the bytes of pooled embeddings from each rank, a row, to each other, a column."""
        shares = self.work.shares
        return self.work.pair_bytes * np.where(self.near(), shares.near[:, None], shares.away[:, None])

    def near(self) -> np.ndarray:
        """Return [W, W] bool: whether two ranks are of one host."""
        return np.stack([self.cluster.same_host(rank) for rank in range(self.cluster.world_size)])


@lru_cache(maxsize=8)
def _waves_of_rank_0(world_size: int, schedule: str, count: int) -> np.ndarray:
    grid = TaskGrid(0, world_size, features=1, samples=count, task_bags=1)
    order = np.fromiter((task.destination for task in grid.order(schedule)), np.int64, len(grid))
    each = [np.bincount(part, minlength=world_size) / count for part in np.array_split(order, count)]
    return np.stack(each)


def waves(rank: int, world_size: int, schedule: str, count: int) -> np.ndarray:
    """Return [count, W]: the part of the tasks for each destination that each wave of `rank` has.

    All ranks have one order, turned by their number, but for `linear`, which is the same on all.

    Example: rank 0 of 2, two waves, remote_first: [[0, 1], [1, 0]]; balanced: [[0.5, 0.5], [0.5, 0.5]].
    """
    first = _waves_of_rank_0(world_size, schedule, count)
    return first if schedule == "linear" else np.roll(first, rank, axis=1)


def has_few_bags(work: Workload) -> bool:
    """Return whether a persistent kernel takes tasks of one group of bags, as `backends.fused` cuts them."""
    return work.bags < _MANY_BAGS and work.ids > work.bags


def pooling_s(lookup: LookupConfig, work: Workload) -> np.ndarray:
    """Return [W]: how long each rank pools if nothing holds it up, after `lookup.us`.

    Tables are read one after the other. Each takes as long as the memory needs for rows that are not in the cache, or
    as the cache needs for all of its rows, whichever is longer.
    """
    from_memory = work.missed_bytes if lookup.cached_gb_per_s else work.read_bytes
    through_cache_s = work.read_bytes / (lookup.cached_gb_per_s or np.inf)
    with np.errstate(over="ignore"):  # the engine refuses such times
        rows_s = np.maximum(from_memory / lookup.gb_per_s, through_cache_s).sum() / 1e9
    bag_ns = lookup.bag_ns + lookup.few_bag_ns * has_few_bags(work)
    other_s = (work.hbm_bytes - work.read_bytes.sum()) / lookup.gb_per_s / 1e9 + work.bags * bag_ns / 1e9
    return rows_s * work.shares.memory + other_s * work.shares.links


def forward(sim: Simulation, after: Sequence[Sequence[int]], copies: bool = True) -> list[int]:
    """Add the stage, forward, of all ranks; return for each the activity that ends when its embeddings are there.

    `copies` is false where torchrec's lookup is not followed by a copy into the send buffer, as in `bench`'s baseline.
    """
    collective = sim.config.exchange.backend == "torchrec"
    here = _collective_forward(sim, after, copies) if collective else _fused_forward(sim, after)
    rows, ids = sim.work.history_rows, sim.work.history_ids
    if not ids or (collective and not sim.config.work.dedup):  # which unpacks a row for each id already
        return here
    return pass_over_rows(sim, "expand", rows + ids, each_alone(here))


def pass_over_rows(sim: Simulation, name: str, rows: float, after: Sequence[Sequence[int]]) -> list[int]:
    """Add a kernel of each rank that reads or writes so many rows of the history, which is not pooled."""
    seconds = rows * sim.config.model.dim * sim.config.work.wire_bytes / sim.config.gpu.memory_gb_per_s / 1e9
    delay_s = sim.config.gpu.kernel_us / 1e6
    return sim.cluster.add_each(name, [sim.cluster.memory], seconds, after, lane="memory", delay_s=delay_s)


def send_all(
    sim: Simulation,
    pair_bytes: np.ndarray,
    after: Sequence[Sequence[int]],
    name: str,
    collective: bool,
) -> list[int]:
    """Send `pair_bytes` from each rank to each other at once: by the collective library, or by stores and puts.

    `pair_bytes` is [W, W], a row a rank that sends, or [W], of the rank that receives.
    """
    config, cluster, _ = sim
    gpu, W = config.gpu, cluster.world_size
    factor = gpu.link_gb_per_s / gpu.collective_gb_per_s if collective else 1.0
    delay_s = gpu.collective_us / 1e6 if collective else 0.0
    sends = []
    for rank, bytes_to in enumerate(np.broadcast_to(pair_bytes, (W, W)).copy()):
        bytes_to[rank] = 0.0
        away = int((~cluster.same_host(rank)).sum())
        demands = cluster.sent(rank, bytes_to, issue_s=away * config.network.message_ns / 1e9, peer_factor=factor)
        number = cluster.engine.add(
            name, demands, max(float(bytes_to.sum()), 1.0), after[rank], rank=rank, lane="links", delay_s=delay_s
        )
        sends.append(number)
    return arrivals(cluster, sends, name)


def _collective_forward(sim: Simulation, after: Sequence[Sequence[int]], copies: bool) -> list[int]:
    config, cluster, work = sim
    gpu, several = config.gpu, cluster.world_size > 1

    def pass_s(nbytes: float | np.ndarray) -> float | np.ndarray:
        return 2 * nbytes / gpu.copy_gb_per_s / 1e9

    seconds = pooling_s(gpu.baseline, work)
    if several and copies:
        seconds = seconds + pass_s(work.pair_bytes * work.shares.links * cluster.world_size)
    looked_up = cluster.add_each(
        "lookup", [cluster.memory], seconds, after, lane="memory", size=work.hbm_bytes, delay_s=gpu.baseline.us / 1e6
    )
    if not several:  # one rank's output is neither sent nor copied
        return looked_up
    here = send_all(sim, sim.pair_bytes(), each_alone(looked_up), "all-to-all", collective=True)
    nbytes = work.pooled_bytes
    return cluster.add_each("unpack", [cluster.memory], pass_s(nbytes), each_alone(here), lane="memory", size=nbytes)


def each_alone(numbers: Sequence[int]) -> list[list[int]]:
    """Return for each rank a list of its one activity, as `after` takes it."""
    return [[number] for number in numbers]


class Puts(NamedTuple):
    """How pooled embeddings for another host leave a rank."""

    bytes: float
    """of a put"""
    wait_s: float
    """how long the first part of a put has been finished when it leaves"""


def puts_to_host(config: SimulateConfig, work: Workload, host_bytes_per_s: float) -> Puts:
    """Return the puts of a rank to another host, by the exchange's own rule (`kernels.grouping`).

    A put is a pooled embedding under pgas and a slice under fused, at most all that one rank gets. If they are
    gathered, they are finished at a constant rate, and the first group stands for all.

    Args:
        config: the exchange's keys.
        work: of a rank.
        host_bytes_per_s: at which a rank makes pooled embeddings for one other host.
    """
    exchange = config.exchange
    bags = exchange.slice_bags if exchange.backend == "fused" else 1
    each = min(work.pair_bytes, bags * config.model.dim * config.work.wire_bytes)
    if not exchange.aggregate_bytes:
        return Puts(each, 0.0)
    every = math.ceil(work.pair_bytes * config.network.gpus_per_host / each)
    gathered = min(every, group_rows(math.ceil(each), exchange.aggregate_bytes))
    return Puts(gathered * each, (gathered - 1) * each / host_bytes_per_s)


def _fused_forward(sim: Simulation, after: Sequence[Sequence[int]]) -> list[int]:
    config, cluster, work = sim
    engine, gpu, exchange, W = cluster.engine, config.gpu, config.exchange, cluster.world_size
    hosts = config.network.hosts
    lookup = gpu.fused if exchange.backend == "fused" else gpu.pgas
    schedule = exchange.schedule
    count = max(_WAVES, 4 * W) if hosts == 1 else _WAVES
    alone_s, pair_bytes = pooling_s(lookup, work), sim.pair_bytes()
    summed = np.where(sim.near(), 0.0, work.pair_bytes * work.shares.sums[:, None])
    direct = pair_bytes - summed
    to_host = work.pair_bytes * config.network.gpus_per_host
    # Unless destinations take turns, a rank pools for one host at a time.
    put = puts_to_host(config, work, to_host / alone_s.mean() * (1 if schedule == "balanced" else hosts))
    arriving_s = work.pair_bytes / gpu.memory_gb_per_s / 1e9  # of a peer's memory, for the stores of one rank
    ends = []
    for rank in range(W):
        near = cluster.same_host(rank)
        parts = waves(rank, W, schedule, count)
        if hosts == 1:
            parts = _merge(parts)
        last, puts = list(after[rank]), {}
        delay_s = lookup.us / 1e6
        for part in parts:
            inside = np.where(near, part, 0.0) * pair_bytes[rank]
            inside[rank] = 0.0
            own_s = part.sum() / W * alone_s[rank]  # `alone_s` counts stores of peers once, in all waves
            own_s -= part.sum() / W * (near.sum() - 1) * arriving_s if W > 1 else 0.0
            demands = cluster.sent(rank, inside, memory_s=inside / gpu.memory_gb_per_s / 1e9, own_s=max(own_s, 0.0))
            size = work.hbm_bytes * part.sum() / W
            last = [engine.add("pool", demands, size, last, rank=rank, lane="memory", delay_s=delay_s)]
            delay_s = 0.0
            away = np.where(near, 0.0, part) * direct[rank]
            if away.any():
                issue_s = away.sum() / put.bytes * config.network.message_ns / 1e9
                demands = cluster.sent(rank, away, issue_s=issue_s)
                ready = engine.add("gathered", {}, after=last, rank=rank, lane="flags", delay_s=put.wait_s)
                to_same, size = away.nonzero()[0].tobytes(), float(away.sum())
                before = [puts[to_same]] if to_same in puts else []
                puts[to_same] = engine.add("put", demands, size, [ready, *before], rank=rank, lane="network")
        ends.append(engine.add("sent", {}, after=[*last, *puts.values()], rank=rank, lane="flags"))
    if W == 1:
        return ends
    kernel = {"lane": "memory", "delay_s": gpu.kernel_us / 1e6}
    if summed.any():
        ends = _put_sums(sim, ends, summed, put, kernel)
    here = arrivals(cluster, ends, "embeddings")
    if not work.shares.added.any():
        return here
    seconds = work.pooled_bytes * work.shares.added / gpu.copy_gb_per_s / 1e9
    return cluster.add_each("partial sums", [cluster.memory], seconds, each_alone(here), **kernel)


def _put_sums(
    sim: Simulation, pooled: Sequence[int], summed: np.ndarray, put: Puts, kernel: Mapping[str, Any]
) -> list[int]:
    """Add up each host's partial sums once its ranks have `pooled`, and put the sums, [W, W] bytes, to other hosts."""
    config, cluster, work = sim
    engine, G = cluster.engine, config.network.gpus_per_host
    hosts = [pooled[first : first + G] for first in range(0, cluster.world_size, G)]
    latency_s = cluster.peer_latency_s
    here = [engine.add("gathered: here", {}, after=ranks, lane="flags", delay_s=latency_s) for ranks in hosts]
    after = [[here[rank // G]] for rank in range(cluster.world_size)]
    seconds = work.pooled_bytes * work.shares.gathered / config.gpu.copy_gb_per_s / 1e9
    made = cluster.add_each("sums", [cluster.memory], seconds, after, **kernel)
    sent = []
    for rank, number in enumerate(made):
        issue_s = summed[rank].sum() / put.bytes * config.network.message_ns / 1e9
        demands, size = cluster.sent(rank, summed[rank], issue_s=issue_s), max(float(summed[rank].sum()), 1.0)
        sent.append(engine.add("put sums", demands, size, [number], rank=rank, lane="network"))
    return sent


def _merge(parts: np.ndarray) -> list[np.ndarray]:
    """Return the waves with those that follow each other and have the same destinations, in equal parts, as one."""
    merged: list[np.ndarray] = []
    for part in parts:
        if merged and np.allclose(merged[-1] / merged[-1].sum(), part / part.sum()):
            merged[-1] = merged[-1] + part
        else:
            merged.append(part)
    return merged
