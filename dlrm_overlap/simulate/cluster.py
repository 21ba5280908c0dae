"""The GPUs of a run and what joins them, as resources of the engine."""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from dlrm_overlap.simulate.engine import Engine
from dlrm_overlap.simulate.topology import Routes, Topology

Demands = tuple[np.ndarray, np.ndarray]


class Cluster:
    """Of each rank its products, its memory and its issuing of puts, in seconds of work at full rates; then the links.

    A kernel that needs a memory for 1 ms demands 1e-3 of it; two such kernels beside each other take 2 ms.
    """

    def __init__(self, topology: Topology, network_latency_s: float, peer_latency_s: float) -> None:
        self.topology, self.world_size = topology, topology.world_size
        self.network_latency_s, self.peer_latency_s = network_latency_s, peer_latency_s
        self._first_link = 3 * self.world_size
        self.routes = lru_cache(maxsize=None)(self._routes)

    def engine(self) -> Engine:
        """Return an engine with these resources and no activity yet."""
        return Engine(np.concatenate([np.ones(3 * self.world_size), self.topology.rates]))

    def products(self, rank: int) -> int:
        """Return the number of the resource that is the rank's matrix products."""
        return rank

    def memory(self, rank: int) -> int:
        """Return the number of the resource that is the rank's memory."""
        return self.world_size + rank

    def issue(self, rank: int) -> int:
        """Return the number of the resource that is the rank's issuing of puts to the network."""
        return 2 * self.world_size + rank

    def _routes(self, source: int) -> Routes:
        return self.topology.routes(source)

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
        """Return what it takes to bring bytes from `source` to every rank.

        Args:
            source: the rank that sends.
            bytes_to: [W] float64, what each rank gets; that of the source itself takes no link.
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
