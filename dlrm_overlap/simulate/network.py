"""The links between GPUs, the demands of a transfer over them, and collectives.

Hosts of GPUs have an NVLink switch each, and a NIC a GPU. A rank has one way out and one way in within its host, and
one of each to other hosts; no switch between ever fills, as in a fat tree without oversubscription.

A collective adds activities of all ranks to an engine and returns, for each rank, the number of the activity with whose
end the rank has all that it receives. `nbytes` is a rank's whole buffer.
"""

from collections.abc import Callable, Sequence

import numpy as np

from dlrm_overlap.simulate.engine import Engine

_MOST_ROUNDS = 16  # of a ring: more make many events and change nothing, since all rounds of a ring are alike
Demands = tuple[np.ndarray, np.ndarray]
"""resources, and the amount of each"""


class Cluster:
    """GPUs and their links, as resources of an engine, to which activities are added.

    There are seven of each rank, numbered kind by kind: its products, its memory and its issuing of puts, in seconds of
    work at full rates; then its ways out and in within the host and its NIC's ways out and in, in bytes. A kernel that
    needs a memory for 1 ms demands 1e-3 of it; two such kernels together take 2 ms.
    """

    def __init__(
        self,
        hosts: int,
        gpus_per_host: int,
        link_bytes_per_s: float,
        nic_bytes_per_s: float,
        network_latency_s: float = 0.0,
        peer_latency_s: float = 0.0,
    ) -> None:
        self.hosts, self.gpus_per_host = hosts, gpus_per_host
        self.world_size = W = hosts * gpus_per_host
        self.network_latency_s, self.peer_latency_s = network_latency_s, peer_latency_s
        self._host = np.arange(W) // gpus_per_host
        self.engine = Engine(np.repeat([1.0, 1.0, 1.0, *[link_bytes_per_s] * 2, *[nic_bytes_per_s] * 2], W))

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
        return self._host == self._host[source]

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
        near = self.same_host(source)
        amounts = np.zeros((7, self.world_size))
        if memory_s is not None:
            amounts[1] = memory_s
        amounts[1, source], amounts[2, source] = own_s, issue_s
        for out, reached, factor in ((3, near, peer_factor), (5, ~near, 1.0)):
            carried = np.where(reached, bytes_to * factor, 0.0)
            carried[source] = 0.0
            amounts[out, source], amounts[out + 1] = carried.sum(), carried
        used = np.flatnonzero(amounts)
        return used, amounts.ravel()[used]

    def latency_s(self, source: int, destinations: np.ndarray | Sequence[int]) -> float:
        """Return the longest latency from `source` to any of `destinations`."""
        others = [self._host[each] for each in destinations if each != source]
        away = any(host != self._host[source] for host in others)
        return self.peer_latency_s + away * self.network_latency_s if others else 0.0


def arrivals(cluster: Cluster, sends: Sequence[int], name: str) -> list[int]:
    """Return for each rank an activity that ends when all of `sends`, one a rank, have ended and arrived."""
    sent = cluster.engine.add(f"{name}: all sent", {}, after=sends, lane="flags")
    latency_s = cluster.latency_s(0, range(cluster.world_size))  # all ranks are alike
    return [
        cluster.engine.add(f"{name}: arrived", {}, after=[sent], rank=rank, lane="flags", delay_s=latency_s)
        for rank in range(cluster.world_size)
    ]


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
    W, engine = cluster.world_size, cluster.engine
    if steps == 0:
        return [engine.add(name, {}, after=after[rank], rank=rank) for rank in range(W)]
    rounds = min(steps, _MOST_ROUNDS)
    last = [list(each) for each in after]
    near = {rank: (group[(i + 1) % len(group)], group[i - 1]) for group in groups for i, rank in enumerate(group)}
    # All rounds are alike, so the demands of a send are found once.
    takes = {
        rank: (
            cluster.sent(rank, np.where(np.arange(W) == to, sent_bytes / rounds, 0.0)),
            cluster.latency_s(rank, [to]),
        )
        for rank, (to, _) in near.items()
    }
    size = max(sent_bytes / rounds, 1.0)
    for _ in range(rounds):
        begun = {
            rank: engine.add(
                name, demands, size, last[rank], rank=rank, lane="links", delay_s=latency_s * (steps / rounds)
            )
            for rank, (demands, latency_s) in takes.items()
        }
        last = [[begun[rank], *(begun[each] for each in near[rank])] for rank in range(W)]
    return [engine.add(f"{name}: done", {}, after=last[r], rank=r, lane="flags") for r in range(W)]


def ring_all_reduce(cluster: Cluster, nbytes: float, after: Sequence[Sequence[int]]) -> list[int]:
    """Sum over all ranks by a ring: each rank sends 2 (W - 1) / W of the buffer in 2 (W - 1) steps."""
    W = cluster.world_size
    return ring(cluster, 2 * (W - 1) / W * nbytes, 2 * (W - 1), [range(W)], after, "all-reduce")


def hierarchical_all_reduce(cluster: Cluster, nbytes: float, after: Sequence[Sequence[int]]) -> list[int]:
    """Scatter sums within each host, sum the parts over the hosts, rail by rail, and gather within the host.

    The hosts halve and double, in 2 log2 H steps that send the bytes of a ring: each rank's partner is as near as any.
    """
    W, g, H = cluster.world_size, cluster.gpus_per_host, cluster.hosts
    hosts, rails = [range(h, h + g) for h in range(0, W, g)], [range(j, W, g) for j in range(g)]

    def within(before: Sequence[Sequence[int]]) -> list[int]:  # a gather takes as long as a scatter
        return ring(cluster, (g - 1) / g * nbytes, g - 1, hosts, before, "all-reduce")

    scattered = [[number] for number in within(after)]
    summed = ring(cluster, 2 * (H - 1) / H * nbytes / g, 2 * (H - 1).bit_length(), rails, scattered, "all-reduce")
    return within([[number] for number in summed])
