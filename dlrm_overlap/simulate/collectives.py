"""Collectives as activities, and the closed forms that they are held against.

Each function adds a collective of all ranks to an engine and returns, for each rank, the number of the activity with
whose end the rank has all that it receives. `nbytes` is a rank's whole buffer: what an all-to-all sends, its own part
included; what an all-reduce sums; what an all-gather has in the end, and a reduce-scatter at first.
"""

from collections.abc import Sequence

import numpy as np

from dlrm_overlap.simulate.cluster import Cluster, Demands
from dlrm_overlap.simulate.engine import Engine
from dlrm_overlap.simulate.topology import FatTree, Switch, Topology, Torus

_MOST_ROUNDS = 16  # of a ring: more make many events and change nothing, since all rounds of a ring are alike


def all_to_all(
    engine: Engine, cluster: Cluster, nbytes: float, after: Sequence[Sequence[int]], name: str = "all-to-all"
) -> list[int]:
    """Send 1 / W of the buffer to every rank at once, in equal progress; all links are used for the whole time."""
    W = cluster.world_size
    sends = []
    for rank in range(W):
        demands = cluster.sent(rank, np.full(W, nbytes / W))
        sends.append(engine.add(name, demands, nbytes, after[rank], rank=rank, lane="links"))
    return arrivals(engine, cluster, sends, name)


def arrivals(engine: Engine, cluster: Cluster, sends: Sequence[int], name: str) -> list[int]:
    """Return for each rank an activity that ends when all of `sends`, one a rank, have ended and arrived."""
    sent = engine.add(f"{name}: all sent", {}, after=sends, lane="flags")
    return [arrival(engine, cluster, rank, [sent], name) for rank in range(cluster.world_size)]


def arrival(engine: Engine, cluster: Cluster, rank: int, sends: Sequence[int], name: str) -> int:
    """Return an activity that ends when `sends`, of any ranks, have ended and arrived at `rank`."""
    latency_s = cluster.latency_s(rank, np.arange(cluster.world_size))
    return engine.add(f"{name}: arrived", {}, after=sends, rank=rank, lane="flags", delay_s=latency_s)


def _demands(cluster: Cluster, source: int, to: Sequence[int], nbytes: float) -> tuple[Demands, float]:
    """Return what it takes to send to others in equal parts, and the longest latency."""
    bytes_to = np.zeros(cluster.world_size)
    np.add.at(bytes_to, list(to), nbytes / len(to))
    return cluster.sent(source, bytes_to), cluster.latency_s(source, to)


def ring(
    engine: Engine,
    cluster: Cluster,
    sent_bytes: float,
    steps: int,
    groups: Sequence[Sequence[int]],
    after: Sequence[Sequence[int]],
    name: str,
    both_ways: bool = False,
) -> list[int]:
    """Send `sent_bytes` a rank to the next of its group, in `steps` steps, each waiting for the one before at both.

    More than 16 steps are taken as 16, each of which costs the latencies of those that it stands for. `both_ways` sends
    half to the next rank and half to the one before, as two rings do that run against each other.
    """
    if steps == 0:
        return [engine.add(name, {}, after=after[rank], rank=rank) for rank in range(cluster.world_size)]
    rounds = min(steps, _MOST_ROUNDS)
    last = [list(each) for each in after]
    near = {rank: (group[(i + 1) % len(group)], group[i - 1]) for group in groups for i, rank in enumerate(group)}
    to = {rank: near[rank] if both_ways else near[rank][:1] for rank in near}
    # All rounds are alike, so that what a send takes is found once.
    takes = {rank: _demands(cluster, rank, to[rank], sent_bytes / rounds) for rank in near}
    size = max(sent_bytes / rounds, 1.0)
    for _ in range(rounds):
        begun = {
            rank: engine.add(
                name, demands, size, last[rank], rank=rank, lane="links", delay_s=latency_s * (steps / rounds)
            )
            for rank, (demands, latency_s) in takes.items()
        }
        last = [[begun[rank], *(begun[each] for each in near[rank])] for rank in range(cluster.world_size)]
    return [engine.add(f"{name}: done", {}, after=last[r], rank=r, lane="flags") for r in range(cluster.world_size)]


def ring_all_reduce(
    engine: Engine, cluster: Cluster, nbytes: float, after: Sequence[Sequence[int]], name: str = "all-reduce"
) -> list[int]:
    """Sum over all ranks by a ring: each rank sends 2 (W - 1) / W of the buffer in 2 (W - 1) steps."""
    W = cluster.world_size
    return ring(engine, cluster, 2 * (W - 1) / W * nbytes, 2 * (W - 1), [range(W)], after, name)


def hierarchical_all_reduce(
    engine: Engine, cluster: Cluster, nbytes: float, after: Sequence[Sequence[int]], name: str = "all-reduce"
) -> list[int]:
    """Scatter sums within each host, sum the parts over the hosts, rail by rail, and gather within the host.

    Over a tree the hosts halve and double, in 2 log2 H steps that send the bytes of a ring: each rank's partner is as
    near as any. On a torus sums are scattered along x, summed along y, and gathered along x, by rings both ways.
    """
    W, g, topology = cluster.world_size, cluster.topology.gpus_per_host, cluster.topology
    hosts, rails = [range(h, h + g) for h in range(0, W, g)], [range(j, W, g) for j in range(g)]

    def scatter(part: float, groups: Sequence[Sequence[int]], before: list[list[int]], both: bool) -> list[list[int]]:
        k = len(groups[0])  # a gather takes as long, and is taken by the same sends
        numbers = ring(engine, cluster, (k - 1) / k * part, k - 1, groups, before, name, both)
        return [[number] for number in numbers]

    began = scatter(nbytes, hosts, [list(each) for each in after], False)
    if isinstance(topology, Torus):
        row = topology.x * g
        rows = [range(first + j, first + row, g) for first in range(0, W, row) for j in range(g)]
        columns = [range(first, W, row) for first in range(row)]
        began = scatter(nbytes / g, rows, began, True)
        sent = 2 * (topology.y - 1) / topology.y * nbytes / g / topology.x
        summed = ring(engine, cluster, sent, 2 * (topology.y - 1), columns, began, name, both_ways=True)
        gathered = scatter(nbytes / g, rows, [[number] for number in summed], True)
    else:
        H = W // g
        steps = 2 * (H - 1).bit_length()
        summed = ring(engine, cluster, 2 * (H - 1) / H * nbytes / g, steps, rails, began, name)
        gathered = [[number] for number in summed]
    return [number for (number,) in scatter(nbytes, hosts, gathered, False)]


def all_to_all_s(topology: Topology, nbytes: float) -> float:
    """Return how long an all-to-all must take without latencies, by the fullest link; for even hosts of a torus.

    On a ring of X hosts, X even, a host's bytes for the ring's hosts take X^2 / 4 hops altogether, over two links.
    Each host of g GPUs sends m = g^2 * nbytes / W to each host, and along x for each of the Y rows.

    Raises:
        NotImplementedError: for a tree whose spine carries less than its NICs; there is no closed form here.
    """
    W, g = topology.world_size, topology.gpus_per_host
    if isinstance(topology, Switch):
        return (W - 1) / W * nbytes / topology.rates[0]
    inside_s = (g - 1) / W * nbytes / topology.rates[0]
    if isinstance(topology, FatTree):
        if topology.rates[-1] < topology.rates[2 * W] * min(topology.hosts, topology.hosts_per_leaf) * (1 - 1e-9):
            raise NotImplementedError("an oversubscribed tree has no closed form here")
        return max(inside_s, (W - g) / W * nbytes / topology.rates[2 * W])
    assert isinstance(topology, Torus)
    x, y = topology.x, topology.y
    pair = g * g * nbytes / W
    longest = max(_ring_hops(x) * y, _ring_hops(y) * x)
    return max(inside_s, pair * longest / 2 / topology.rates[-1])


def _ring_hops(length: int) -> float:
    """Return the sum of the distances from one host of a ring to all of it."""
    return float(sum(min(i, length - i) for i in range(length)))


def ring_all_reduce_s(cluster: Cluster, nbytes: float, slowest_bytes_per_s: float) -> float:
    """Return the bytes over the slowest link's rate, and 2 (W - 1) of the longest of the ring's latencies."""
    W = cluster.world_size
    latency = max(cluster.latency_s(rank, [(rank + 1) % W]) for rank in range(W))
    return 2 * (W - 1) / W * nbytes / slowest_bytes_per_s + 2 * (W - 1) * latency


def hierarchical_all_reduce_s(topology: FatTree | Torus, nbytes: float) -> float:
    """Return the time of the parts of a hierarchical all-reduce, without latencies; both sides of a torus 3 or more."""
    g, W = topology.gpus_per_host, topology.world_size
    inside = 2 * (g - 1) / g * nbytes / topology.rates[0]
    if isinstance(topology, Torus):  # g rails share a host's links, of which each ring has two
        x, y = topology.x, topology.y
        along_x = 2 * (x - 1) / x * nbytes
        return inside + (along_x + 2 * (y - 1) / y * nbytes / x) / 2 / topology.rates[-1]
    H = topology.hosts
    return inside + 2 * (H - 1) / H * nbytes / g / topology.rates[2 * W]
