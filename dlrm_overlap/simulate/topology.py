"""Which links a transfer between two GPUs takes: an NVLink switch, a rail-optimised fat tree, a 2-D torus.

Every link is one direction of a wire, with a rate of its own. A topology numbers its links from 0 and gives, for a
source, the links to all destinations at once, each with the share of the bytes that takes it.
"""

from typing import NamedTuple, Protocol

import numpy as np


class Routes(NamedTuple):
    """The links from one source to all other ranks; the three arrays have one entry for each link of each route."""

    destination: np.ndarray
    """[N] int64, the rank that the route leads to"""
    link: np.ndarray
    """[N] int64"""
    share: np.ndarray
    """[N] float64, the part of the bytes for the destination that this link carries"""


class Topology(Protocol):
    """GPUs of hosts, and links between them."""

    world_size: int
    gpus_per_host: int
    rates: np.ndarray
    """[L] float64, of each link the bytes a second"""

    def routes(self, source: int) -> Routes:
        """Return the routes from `source` to every other rank."""
        ...

    def hops(self, source: int) -> np.ndarray:
        """Return [W] int64: the network's latencies on the way to each rank; 0 within the host."""
        ...


class Switch:
    """One NVLink domain: a rank has one way out and one way in, and the switch between never fills."""

    def __init__(self, world_size: int, link_bytes_per_s: float) -> None:
        self.world_size = self.gpus_per_host = world_size
        self.rates = np.full(2 * world_size, link_bytes_per_s)

    def routes(self, source: int) -> Routes:
        """Return the routes from `source` to every other rank: its way out, then the destination's way in."""
        return _star(source, _others(source, 0, self.world_size), 0, self.world_size)

    def hops(self, source: int) -> np.ndarray:
        """Return [W] zeros."""
        return np.zeros(self.world_size, np.int64)


class FatTree:
    """Hosts of GPUs with an NVLink switch in each, a NIC a GPU, and a leaf switch a rail.

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
        self.hosts, self.gpus_per_host, self.hosts_per_leaf = hosts, gpus_per_host, hosts_per_leaf
        self.world_size = world_size = hosts * gpus_per_host
        self._leaves = -(-hosts // hosts_per_leaf)
        up = nic_bytes_per_s * min(hosts, hosts_per_leaf) / oversubscription
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


class Torus:
    """Hosts in a 2-D torus of `x` by `y`, each with a link to its four neighbours that its GPUs share.

    Routes go along x, then along y, by the shorter way around; where both ways are as long, half of the bytes takes
    each. Within a host there is an NVLink switch.
    """

    def __init__(self, x: int, y: int, gpus_per_host: int, link_bytes_per_s: float, hop_bytes_per_s: float) -> None:
        self.x, self.y, self.gpus_per_host = x, y, gpus_per_host
        self.world_size = x * y * gpus_per_host
        self.rates = np.concatenate(
            [np.full(2 * self.world_size, link_bytes_per_s), np.full(4 * x * y, hop_bytes_per_s)]
        )

    def _turns(self, source_host: int) -> tuple[np.ndarray, np.ndarray]:
        """Return how far each host is to the right and upwards of `source_host`, modulo the torus."""
        host = np.arange(self.x * self.y)
        return (host % self.x - source_host % self.x) % self.x, (host // self.x - source_host // self.x) % self.y

    def routes(self, source: int) -> Routes:
        """Return the routes from `source` to every other rank."""
        g, W = self.gpus_per_host, self.world_size
        here = source // g
        inside = _star(source, _others(source, here * g, here * g + g), 0, W)
        parts = [(np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0))]  # all there are on a torus of one host
        host = np.arange(self.x * self.y)
        right, up = self._turns(here)
        for axis, (turns, length) in enumerate(((right, self.x), (up, self.y))):
            for sign, ways in ((1, turns), (-1, (length - turns) % length)):
                share = np.where(2 * ways < length, 1.0, np.where(2 * ways == length, 0.5, 0.0))
                for hop in range(length // 2):
                    taken = (ways > hop) & (share > 0)
                    if axis == 0:
                        at = np.full(taken.sum(), here // self.x * self.x + (here % self.x + sign * hop) % self.x)
                    else:
                        at = (here // self.x + sign * hop) % self.y * self.x + host[taken] % self.x
                    parts.append((host[taken], 2 * W + 4 * at + 2 * axis + (sign < 0), share[taken]))
        hosts, links, shares = (np.concatenate(column) for column in zip(*parts, strict=True))
        destinations = (hosts[:, None] * g + np.arange(g)).ravel()
        return Routes(
            np.concatenate([inside.destination, destinations]),
            np.concatenate([inside.link, np.repeat(links, g)]),
            np.concatenate([inside.share, np.repeat(shares, g)]),
        )

    def hops(self, source: int) -> np.ndarray:
        """Return [W] int64: the links between the hosts on the way to each rank."""
        right, up = self._turns(source // self.gpus_per_host)
        ways = np.minimum(right, self.x - right) + np.minimum(up, self.y - up)
        return np.repeat(ways, self.gpus_per_host)


def _others(source: int, first: int, end: int) -> np.ndarray:
    """Return the ranks from `first` up to `end` without `source`."""
    ranks = np.arange(first, end)
    return ranks[ranks != source]


def _star(source: int, destinations: np.ndarray, first_link: int, world_size: int) -> Routes:
    """Return routes by the source's way out and the destinations' ways in, which are numbered behind the ways out."""
    out = np.full(len(destinations), first_link + source)
    links = np.concatenate([out, first_link + world_size + destinations])
    return Routes(np.concatenate([destinations, destinations]), links, np.ones(len(links)))
