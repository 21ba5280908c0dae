"""The links between GPUs, the demands of a transfer over them, and collectives.

Every link is one direction of a wire, with a rate of its own. A topology numbers its links from 0 and gives, for a
source, the links to all destinations at once, each with the share of the bytes that takes it.

A collective adds activities of all ranks to an engine and returns, for each rank, the number of the activity with whose
end the rank has all that it receives. `nbytes` is a rank's whole buffer.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple

import numpy as np

from dlrm_overlap.simulate.engine import Engine

_MOST_ROUNDS = 16  # of a ring: more make many events and change nothing, since all rounds of a ring are alike
Demands = tuple[np.ndarray, np.ndarray]
"""resources, and the amount of each"""


class Routes(NamedTuple):
    """The links from one source to all other ranks; the three arrays have one entry for each link of each route."""

    destination: np.ndarray
    """[N] int64, the rank that the route leads to"""
    link: np.ndarray
    """[N] int64"""
    share: np.ndarray
    """[N] float64, the part of the bytes for the destination that this link carries"""


class FatTree:
    """Hosts of GPUs with an NVLink switch in each, a NIC a GPU, and a leaf switch a rail; one host is its switch alone.

    Within a host a rank has one way out and one way in, and the switch between never fills.
    GPU j of every host has its NIC on rail j. A leaf switch joins the NICs of one rail of `hosts_per_leaf` hosts. What
    goes to another rail, or to hosts of another leaf, takes the leaf's ways up to the spine and down from it, which
    carry the sum of the NICs' rates over `oversubscription`. They count as one link each, as if every packet took the
    least loaded of the wires.
    """

    def __init__(
        self,
        hosts: int,
        gpus_per_host: int,
        link_bytes_per_s: float,
        nic_bytes_per_s: float,
        hosts_per_leaf: int = 32,
        oversubscription: float = 1.0,
    ) -> None:
        self.hosts, self.gpus_per_host, self.hosts_per_leaf = hosts, gpus_per_host, min(hosts, hosts_per_leaf)
        self.world_size = world_size = hosts * gpus_per_host
        self._leaves = -(-hosts // self.hosts_per_leaf)
        up = nic_bytes_per_s * self.hosts_per_leaf / oversubscription
        self.rates = np.concatenate(
            [
                np.full(2 * world_size, link_bytes_per_s),
                np.full(2 * world_size, nic_bytes_per_s),
                np.full(2 * self._leaves * gpus_per_host, up),
            ]
        )

    def _leaf(self, ranks: np.ndarray) -> np.ndarray:
        """Return the number of the leaf switch that each rank's NIC is on."""
        host, rail = ranks // self.gpus_per_host, ranks % self.gpus_per_host
        return host // self.hosts_per_leaf * self.gpus_per_host + rail

    def routes(self, source: int) -> Routes:
        """Return the routes from `source`: NVLink within the host, else NIC, leaf, spine where needed, leaf, NIC."""
        W, g = self.world_size, self.gpus_per_host
        first = source // g * g
        inside = _star(source, _others(source, first, first + g), 0, W)
        far = np.concatenate([np.arange(first), np.arange(first + g, W)])
        outside = _star(source, far, 2 * W, W)
        leaf, leaves = int(self._leaf(np.array([source]))[0]), self._leaf(far)
        over = far[leaves != leaf]
        spine = 4 * W
        ups = np.full(len(over), spine + leaf)
        downs = spine + self._leaves * g + leaves[leaves != leaf]
        return Routes(
            np.concatenate([inside.destination, outside.destination, over, over]),
            np.concatenate([inside.link, outside.link, ups, downs]),
            np.ones(len(inside.link) + len(outside.link) + 2 * len(over)),
        )

    def hops(self, source: int) -> np.ndarray:
        """Return [W] int64: 1 for ranks of other hosts, 0 within the host."""
        host = np.arange(self.world_size) // self.gpus_per_host
        return (host != source // self.gpus_per_host).astype(np.int64)


def _others(source: int, first: int, end: int) -> np.ndarray:
    """Return the ranks from `first` up to `end` without `source`."""
    ranks = np.arange(first, end)
    return ranks[ranks != source]


def _star(source: int, destinations: np.ndarray, first_link: int, world_size: int) -> Routes:
    """Return routes by the source's way out and the destinations' ways in, which are numbered after the ways out."""
    out = np.full(len(destinations), first_link + source)
    links = np.concatenate([out, first_link + world_size + destinations])
    return Routes(np.concatenate([destinations, destinations]), links, np.ones(len(links)))


class Cluster:
    """GPUs and their links, as resources of an engine, to which activities are added.

    First come, of each rank, its products, its memory and its issuing of puts, in seconds of work at full rates; then
    the links. A kernel that needs a memory for 1 ms demands 1e-3 of it; two such kernels together take 2 ms.
    """

    def __init__(self, topology: FatTree, network_latency_s: float, peer_latency_s: float) -> None:
        self.topology, self.world_size = topology, topology.world_size
        self.network_latency_s, self.peer_latency_s = network_latency_s, peer_latency_s
        self._first_link = 3 * self.world_size
        self.routes = cache(topology.routes)
        self.engine = Engine(np.concatenate([np.ones(3 * self.world_size), topology.rates]))

    def products(self, rank: int) -> int:
        """Return the number of the resource that is the rank's matrix products."""
        return rank

    def memory(self, rank: int) -> int:
        """Return the number of the resource that is the rank's memory."""
        return self.world_size + rank

    def issue(self, rank: int) -> int:
        """Return the number of the resource that is the rank's issuing of puts to the network."""
        return 2 * self.world_size + rank

    def add_each(
        self,
        name: str,
        of: Sequence[Callable[[int], int]],
        seconds: float | np.ndarray,
        after: Sequence[Sequence[int]],
        *,
        lane: str,
        size: float = 0.0,
        delay_s: float = 0.0,
        least_s: float | np.ndarray = 0.0,
    ) -> list[int]:
        """Add an activity of each rank that takes so many `seconds`, one number or [W], of its resources `of`.

        Without a `size` it shares them by these seconds. `after` has, for each rank, the activities that come before.
        """
        each_s, each_least_s = (np.broadcast_to(value, self.world_size).tolist() for value in (seconds, least_s))
        return [
            self.engine.add(
                name, {resource(rank): taken for resource in of}, size or max(taken, 1e-12), after[rank], rank=rank,
                lane=lane, delay_s=delay_s, least_s=each_least_s[rank],
            )
            for rank, taken in enumerate(each_s)
        ]  # fmt: skip

    def same_host(self, source: int) -> np.ndarray:
        """Return [W] bool: the ranks of the host of `source`, itself included."""
        host = np.arange(self.world_size) // self.topology.gpus_per_host
        return host == source // self.topology.gpus_per_host

    def sent(
        self,
        source: int,
        bytes_to: np.ndarray,
        memory_s: np.ndarray | None = None,
        own_s: float = 0.0,
        issue_s: float = 0.0,
        peer_factor: float = 1.0,
    ) -> Demands:
        """Return the demands of bringing bytes from `source` to every rank.

        Args:
            source: the rank that sends.
            bytes_to: [W] float64, for each rank; those for the source itself take no link.
            memory_s: [W] float64, the seconds of each rank's memory, the source's excepted.
            own_s: seconds of the source's own memory.
            issue_s: seconds of the source's issuing of puts.
            peer_factor: how much longer than at their rate the links within a host are taken.
        """
        routes = self.routes(source)
        carried = bytes_to[routes.destination] * routes.share
        links = np.bincount(routes.link, carried, minlength=len(self.topology.rates)).astype(np.float64)
        links[: 2 * self.world_size] *= peer_factor  # every topology has these first
        used = np.nonzero(links)[0]
        numbers, amounts = [self._first_link + used], [links[used]]
        if memory_s is not None:
            others = np.nonzero(memory_s)[0]
            others = others[others != source]
            numbers.append(self.world_size + others)
            amounts.append(memory_s[others])
        for number, seconds in ((self.memory(source), own_s), (self.issue(source), issue_s)):
            if seconds:
                numbers.append(np.array([number]))
                amounts.append(np.array([seconds]))
        return np.concatenate(numbers), np.concatenate(amounts)

    def latency_s(self, source: int, destinations: np.ndarray | Sequence[int]) -> float:
        """Return the longest latency from `source` to any of `destinations`."""
        destinations = np.asarray(destinations)
        destinations = destinations[destinations != source]
        if not len(destinations):
            return 0.0
        return self.peer_latency_s + float(self.topology.hops(source)[destinations].max()) * self.network_latency_s


def arrivals(cluster: Cluster, sends: Sequence[int], name: str) -> list[int]:
    """Return for each rank an activity that ends when all of `sends`, one a rank, have ended and arrived."""
    sent = cluster.engine.add(f"{name}: all sent", {}, after=sends, lane="flags")
    ranks = range(cluster.world_size)
    latencies_s = [cluster.latency_s(rank, ranks) for rank in ranks]
    return [
        cluster.engine.add(f"{name}: arrived", {}, after=[sent], rank=rank, lane="flags", delay_s=latency_s)
        for rank, latency_s in enumerate(latencies_s)
    ]


def _demands(cluster: Cluster, source: int, to: int, nbytes: float) -> tuple[Demands, float]:
    """Return the demands of sending to another rank, and the latency."""
    bytes_to = np.zeros(cluster.world_size)
    bytes_to[to] = nbytes
    return cluster.sent(source, bytes_to), cluster.latency_s(source, [to])


def ring(
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
        return [cluster.engine.add(name, {}, after=after[rank], rank=rank) for rank in range(cluster.world_size)]
    rounds = min(steps, _MOST_ROUNDS)
    last = [list(each) for each in after]
    near = {rank: (group[(i + 1) % len(group)], group[i - 1]) for group in groups for i, rank in enumerate(group)}
    # All rounds are alike, so the demands of a send are found once.
    takes = {rank: _demands(cluster, rank, near[rank][0], sent_bytes / rounds) for rank in near}
    size = max(sent_bytes / rounds, 1.0)
    for _ in range(rounds):
        begun = {
            rank: cluster.engine.add(
                name, demands, size, last[rank], rank=rank, lane="links", delay_s=latency_s * (steps / rounds)
            )
            for rank, (demands, latency_s) in takes.items()
        }
        last = [[begun[rank], *(begun[each] for each in near[rank])] for rank in range(cluster.world_size)]
    return [
        cluster.engine.add(f"{name}: done", {}, after=last[r], rank=r, lane="flags") for r in range(cluster.world_size)
    ]


def ring_all_reduce(
    cluster: Cluster, nbytes: float, after: Sequence[Sequence[int]], name: str = "all-reduce"
) -> list[int]:
    """Sum over all ranks by a ring: each rank sends 2 (W - 1) / W of the buffer in 2 (W - 1) steps."""
    W = cluster.world_size
    return ring(cluster, 2 * (W - 1) / W * nbytes, 2 * (W - 1), [range(W)], after, name)


def hierarchical_all_reduce(
    cluster: Cluster, nbytes: float, after: Sequence[Sequence[int]], name: str = "all-reduce"
) -> list[int]:
    """Scatter sums within each host, sum the parts over the hosts, rail by rail, and gather within the host.

    The hosts halve and double, in 2 log2 H steps that send the bytes of a ring: each rank's partner is as near as any.
    """
    W, g = cluster.world_size, cluster.topology.gpus_per_host
    H, hosts, rails = W // g, [range(h, h + g) for h in range(0, W, g)], [range(j, W, g) for j in range(g)]

    def within(before: Sequence[Sequence[int]]) -> list[int]:  # a gather takes as long as a scatter
        return ring(cluster, (g - 1) / g * nbytes, g - 1, hosts, before, name)

    scattered = [[number] for number in within(after)]
    summed = ring(cluster, 2 * (H - 1) / H * nbytes / g, 2 * (H - 1).bit_length(), rails, scattered, name)
    return within([[number] for number in summed])
