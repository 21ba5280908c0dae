"""Collectives as activities, and the closed forms that they are held against.

Each function adds a collective of all ranks to an engine and returns, for each rank, the number of the activity with
whose end the rank has all that it receives. `nbytes` is a rank's whole buffer: what an all-to-all sends, its own part
included; what an all-reduce sums; what an all-gather has in the end, and a reduce-scatter at first.
"""

from collections.abc import Sequence

import numpy as np

from dlrm_overlap.simulate.cluster import Cluster
from dlrm_overlap.simulate.engine import Engine
from dlrm_overlap.simulate.topology import FatTree, Switch, Topology, Torus

_MOST_ROUNDS = 16  # of a ring: more make many events and change nothing, since all rounds of a ring are alike


def all_to_all(
    engine: Engine, cluster: Cluster, nbytes: float, after: Sequence[Sequence[int]], name: str = "all-to-all"
) -> list[int]:
    """Send 1 / W of the buffer to every rank at once, in equal progress; all links are used for the whole time."""
    W = cluster.world_size
    return exchange(engine, cluster, np.full((W, W), nbytes / W), after, name)


def exchange(
    engine: Engine, cluster: Cluster, bytes_to: np.ndarray, after: Sequence[Sequence[int]], name: str
) -> list[int]:
    """Send `bytes_to[r, d]` from each rank r to each rank d; a rank is done when all that comes to it has come."""
    W = cluster.world_size
    sends = [
        engine.add(
            name,
            cluster.sent(rank, bytes_to[rank]),
            float(max(bytes_to[rank].sum(), 1.0)),
            after[rank],
            rank=rank,
            lane="links",
        )
        for rank in range(W)
    ]
    return arrivals(engine, cluster, sends, name)


def arrivals(engine: Engine, cluster: Cluster, sends: Sequence[int], name: str) -> list[int]:
    """Return for each rank an activity that ends when all of `sends`, one a rank, have ended and arrived."""
    W, every = cluster.world_size, np.arange(cluster.world_size)
    sent = engine.add(f"{name}: all sent", {}, after=sends, lane="flags")
    return [
        engine.add(
            f"{name}: arrived", {}, after=[sent], rank=rank, lane="flags", delay_s=cluster.latency_s(rank, every)
        )
        for rank in range(W)
    ]


def pairwise_all_to_all(
    engine: Engine, cluster: Cluster, nbytes: float, after: Sequence[Sequence[int]], name: str = "all-to-all"
) -> list[int]:
    """Send to rank + 1, then to rank + 2, .., one peer after the other, a latency after each."""
    W = cluster.world_size
    last = [list(each) for each in after]
    for turn in range(1, W):
        begun = [_send(engine, cluster, rank, (rank + turn) % W, nbytes / W, last[rank], name) for rank in range(W)]
        last = [[begun[rank], begun[(rank - turn) % W]] for rank in range(W)]
    every = np.arange(W)
    return [
        engine.add(f"{name}: here", {}, after=last[r], rank=r, lane="flags", delay_s=cluster.latency_s(r, every))
        for r in range(W)
    ]


def _send(
    engine: Engine, cluster: Cluster, source: int, to: int, nbytes: float, after: Sequence[int], name: str,
    delay_s: float | None = None,
) -> int:  # fmt: skip
    """Send from one rank to one other; it begins a latency after what it waits for, which came over the network."""
    bytes_to = np.zeros(cluster.world_size)
    bytes_to[to] = nbytes
    if delay_s is None:
        delay_s = cluster.latency_s(source, [to])
    return engine.add(
        name, cluster.sent(source, bytes_to), max(nbytes, 1.0), after, rank=source, lane="links", delay_s=delay_s
    )


def ring(
    engine: Engine,
    cluster: Cluster,
    sent_bytes: float,
    steps: int,
    groups: Sequence[Sequence[int]],
    after: Sequence[Sequence[int]],
    name: str,
) -> list[int]:
    """Send `sent_bytes` a rank to the next of its group, in `steps` steps, each waiting for the one before at both.

    More than 16 steps are taken as 16, each of which costs the latencies of those that it stands for.
    """
    if steps == 0:
        return [engine.add(name, {}, after=after[rank], rank=rank) for rank in range(cluster.world_size)]
    rounds = min(steps, _MOST_ROUNDS)
    last = [list(each) for each in after]
    following = {rank: group[(i + 1) % len(group)] for group in groups for i, rank in enumerate(group)}
    before = {to: rank for rank, to in following.items()}
    for _ in range(rounds):
        begun = {
            rank: _send(
                engine, cluster, rank, to, sent_bytes / rounds, last[rank], name,
                delay_s=cluster.latency_s(rank, [to]) * steps / rounds,
            )
            for rank, to in following.items()
        }  # fmt: skip
        last = [[begun[rank], begun[before[rank]]] for rank in range(cluster.world_size)]
    return [engine.add(f"{name}: done", {}, after=last[r], rank=r, lane="flags") for r in range(cluster.world_size)]


def ring_all_reduce(
    engine: Engine, cluster: Cluster, nbytes: float, after: Sequence[Sequence[int]], name: str = "all-reduce"
) -> list[int]:
    """Sum over all ranks by a ring: each rank sends 2 (W - 1) / W of the buffer in 2 (W - 1) steps."""
    W = cluster.world_size
    return ring(engine, cluster, 2 * (W - 1) / W * nbytes, 2 * (W - 1), [range(W)], after, name)


def ring_all_gather(
    engine: Engine, cluster: Cluster, nbytes: float, after: Sequence[Sequence[int]], name: str = "all-gather"
) -> list[int]:
    """Gather, or scatter sums, by a ring: each rank sends (W - 1) / W of the buffer in W - 1 steps."""
    W = cluster.world_size
    return ring(engine, cluster, (W - 1) / W * nbytes, W - 1, [range(W)], after, name)


def hierarchical_all_reduce(
    engine: Engine, cluster: Cluster, nbytes: float, after: Sequence[Sequence[int]], name: str = "all-reduce"
) -> list[int]:
    """Scatter sums within each host, sum the parts over the hosts, rail by rail, and gather within the host."""
    W, g = cluster.world_size, cluster.topology.gpus_per_host
    hosts, rails = [range(h, h + g) for h in range(0, W, g)], [range(j, W, g) for j in range(g)]
    H = W // g
    inside = (g - 1) / g * nbytes
    first = ring(engine, cluster, inside, g - 1, hosts, after, name)
    across = ring(engine, cluster, 2 * (H - 1) / H * nbytes / g, 2 * (H - 1), rails, [[n] for n in first], name)
    return ring(engine, cluster, inside, g - 1, hosts, [[n] for n in across], name)


def hierarchical_all_to_all(
    engine: Engine, cluster: Cluster, nbytes: float, after: Sequence[Sequence[int]], name: str = "all-to-all"
) -> list[int]:
    """Bring what is for GPU j of any host to GPU j of the own host, then send it along rail j."""
    W, g = cluster.world_size, cluster.topology.gpus_per_host
    ranks = np.arange(W)
    inside = np.where(ranks[:, None] // g == ranks // g, nbytes / g, 0.0)
    first = exchange(engine, cluster, inside, after, name)
    across = np.where(ranks[:, None] % g == ranks % g, nbytes / (W // g), 0.0)
    return exchange(engine, cluster, across, [[n] for n in first], name)


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


def hierarchical_all_reduce_s(topology: FatTree, nbytes: float) -> float:
    """Return the time of the three parts of a hierarchical all-reduce, without latencies."""
    g, H, W = topology.gpus_per_host, topology.hosts, topology.world_size
    inside = 2 * (g - 1) / g * nbytes / topology.rates[0]
    return inside + 2 * (H - 1) / H * nbytes / g / topology.rates[2 * W]
