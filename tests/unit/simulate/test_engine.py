"""The engine and the collectives: hand-computed cases, closed forms, bytes that are conserved."""

import numpy as np
import pytest

from dlrm_overlap.simulate.engine import Engine
from dlrm_overlap.simulate.network import (
    Cluster,
    FatTree,
    arrivals,
    hierarchical_all_reduce,
    ring_all_reduce,
)

NBYTES = 64e6
TOPOLOGIES = {
    "switch of 8": FatTree(1, 8, 350e9, 50e9),
    "tree of 8 x 8": FatTree(8, 8, 350e9, 50e9, hosts_per_leaf=4),
    "tree of 4 x 1": FatTree(4, 1, 350e9, 50e9),
}


def _all_to_all(cluster: Cluster, nbytes: float) -> None:
    """Send 1 / W of the buffer to every rank at once, in equal progress; all links are used for the whole time."""
    W = cluster.world_size
    sends = []
    for rank in range(W):
        demands = cluster.sent(rank, np.full(W, nbytes / W))
        sends.append(cluster.engine.add("all-to-all", demands, nbytes, rank=rank, lane="links"))
    arrivals(cluster, sends, "all-to-all")


def _all_to_all_s(topology: FatTree, nbytes: float) -> float:
    """Return how long an all-to-all must take without latencies, by the fullest link."""
    W, g = topology.world_size, topology.gpus_per_host
    inside_s = (g - 1) / W * nbytes / topology.rates[0]
    return max(inside_s, (W - g) / W * nbytes / topology.rates[2 * W])


def _ring_all_reduce_s(cluster: Cluster, nbytes: float, slowest_bytes_per_s: float) -> float:
    """Return the bytes over the slowest link's rate, and 2 (W - 1) of the longest of the ring's latencies."""
    W = cluster.world_size
    latency = max(cluster.latency_s(rank, [(rank + 1) % W]) for rank in range(W))
    return 2 * (W - 1) / W * nbytes / slowest_bytes_per_s + 2 * (W - 1) * latency


def _hierarchical_all_reduce_s(topology: FatTree, nbytes: float) -> float:
    """Return the time of the parts of a hierarchical all-reduce, without latencies."""
    g, H = topology.gpus_per_host, topology.hosts
    inside = 2 * (g - 1) / g * nbytes / topology.rates[0]
    return inside + 2 * (H - 1) / H * nbytes / g / topology.rates[2 * topology.world_size]


def test_two_that_share_a_link_and_one_that_does_not() -> None:
    """a and b share a link of 10; b also takes one of 3, so a gets 7. Behind a, with 1 s between, c has 7, then 10."""
    engine = Engine(np.array([10.0, 3.0]))
    a = engine.add("a", {0: 14.0}, size=14)
    b = engine.add("b", {0: 12.0, 1: 12.0}, size=12)
    c = engine.add("c", {0: 17.0}, size=17, after=[a], delay_s=1.0)
    timeline = engine.run()
    assert timeline.end_s[[a, b, c]] == pytest.approx([2.0, 4.0, 3.0 + 1.0 + 1.0])
    assert timeline.start_s[c] == pytest.approx(3.0)
    assert timeline.carried == pytest.approx([14 + 12 + 17, 12])


def test_a_least_time_and_an_activity_of_no_resource() -> None:
    engine = Engine(np.array([10.0]))
    slow = engine.add("slow", {0: 10.0}, size=10, least_s=4.0)
    fast = engine.add("fast", {0: 15.0}, size=15)
    end = engine.add("end", {}, after=[slow, fast], delay_s=0.5)
    timeline = engine.run()
    assert timeline.end_s[[slow, fast, end]] == pytest.approx([4.0, 2.0, 4.5])


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_an_all_to_all_takes_what_its_fullest_link_takes(name: str) -> None:
    topology = TOPOLOGIES[name]
    cluster, W = Cluster(topology, 0.0, 0.0), topology.world_size
    _all_to_all(cluster, NBYTES)
    timeline = cluster.engine.run()
    assert timeline.seconds == pytest.approx(_all_to_all_s(topology, NBYTES), rel=0.01)
    links = timeline.carried[3 * W :]
    g = topology.gpus_per_host
    assert links[:W].sum() >= W * (g - 1) / W * NBYTES * (1 - 1e-9)
    assert links[:W] == pytest.approx(links[W : 2 * W]), "what goes out comes in"
    assert links[:W].sum() + links[2 * W : 3 * W].sum() == pytest.approx((W - 1) * NBYTES)


@pytest.mark.parametrize("name", ["switch of 8", "tree of 4 x 1"])
@pytest.mark.parametrize("latency_us", [0.0, 5.0])
def test_a_ring_sums_in_the_time_of_its_closed_form(name: str, latency_us: float) -> None:
    topology = TOPOLOGIES[name]
    cluster = Cluster(topology, 0.0, latency_us / 1e6)
    ring_all_reduce(cluster, NBYTES, [[]] * topology.world_size)
    slowest = 350e9 if topology.gpus_per_host > 1 else 50e9
    expected = _ring_all_reduce_s(cluster, NBYTES, slowest)
    assert cluster.engine.run().seconds == pytest.approx(expected, rel=0.01)


def test_a_ring_of_many_ranks_has_all_its_latencies() -> None:
    cluster = Cluster(FatTree(1, 64, 350e9, 50e9), 0.0, 2e-6)
    ring_all_reduce(cluster, NBYTES, [[]] * 64)
    assert cluster.engine.run().seconds == pytest.approx(2 * (63 / 64 * NBYTES / 350e9 + 63 * 2e-6), rel=0.01)


def test_a_hierarchical_sum() -> None:
    topology = FatTree(4, 8, 350e9, 50e9)
    cluster = Cluster(topology, 0.0, 0.0)
    hierarchical_all_reduce(cluster, NBYTES, [[]] * topology.world_size)
    assert cluster.engine.run().seconds == pytest.approx(_hierarchical_all_reduce_s(topology, NBYTES), rel=0.01)


def test_an_oversubscribed_spine_slows_what_crosses_it() -> None:
    def seconds(topology: FatTree) -> float:
        cluster = Cluster(topology, 0.0, 0.0)
        _all_to_all(cluster, NBYTES)
        return cluster.engine.run().seconds

    full = FatTree(8, 2, 350e9, 50e9, hosts_per_leaf=4)
    thin = FatTree(8, 2, 350e9, 50e9, hosts_per_leaf=4, oversubscription=2.0)
    crossing = (16 - 5) / 16 * NBYTES  # all but the rank itself, its host's other and 3 of its rail on its leaf
    assert seconds(thin) == pytest.approx(crossing / (50e9 / 2), rel=0.01)
    assert seconds(thin) > seconds(full)


def test_the_same_graph_gives_the_same_bits() -> None:
    def ends() -> np.ndarray:
        cluster = Cluster(TOPOLOGIES["tree of 8 x 8"], 1e-6, 2e-6)
        hierarchical_all_reduce(cluster, NBYTES, [[]] * 64)
        return cluster.engine.run().end_s

    assert (ends() == ends()).all()
