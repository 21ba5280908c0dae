"""The engine and the collectives: hand-computed cases, closed forms, bytes that are conserved."""

import numpy as np
import pytest

from dlrm_overlap.simulate.engine import Engine
from dlrm_overlap.simulate.network import Cluster, arrivals, hierarchical_all_reduce, ring_all_reduce

NBYTES, LINK, NIC = 64e6, 350e9, 50e9
HOSTS = [(1, 8), (8, 8), (4, 1)]  # and GPUs of each


def _all_to_all(cluster: Cluster, nbytes: float) -> None:
    """Send 1 / W of the buffer to every rank at once, in equal progress; all links are used for the whole time."""
    W = cluster.world_size
    sends = []
    for rank in range(W):
        demands = cluster.sent(rank, np.full(W, nbytes / W))
        sends.append(cluster.engine.add("all-to-all", demands, nbytes, rank=rank, lane="links"))
    arrivals(cluster, sends, "all-to-all")


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


@pytest.mark.parametrize("hosts", HOSTS)
def test_an_all_to_all_takes_what_its_fullest_link_takes(hosts: tuple[int, int]) -> None:
    cluster, (W, g) = Cluster(*hosts, LINK, NIC), (hosts[0] * hosts[1], hosts[1])
    _all_to_all(cluster, NBYTES)
    timeline = cluster.engine.run()
    slowest_s = max((g - 1) / W * NBYTES / LINK, (W - g) / W * NBYTES / NIC)
    assert timeline.seconds == pytest.approx(slowest_s, rel=0.01)
    out, into, nic_out, nic_in = timeline.carried[3 * W :].reshape(4, W)
    assert out == pytest.approx(into), "what goes out comes in"
    assert nic_out == pytest.approx(nic_in)
    assert out.sum() == pytest.approx((g - 1) * NBYTES)
    assert out.sum() + nic_out.sum() == pytest.approx((W - 1) * NBYTES)


@pytest.mark.parametrize(("hosts", "slowest"), [((1, 8), LINK), ((1, 64), LINK), ((4, 1), NIC)])
@pytest.mark.parametrize("latency_us", [0.0, 5.0])
def test_a_ring_sums_in_the_time_of_its_closed_form(hosts: tuple[int, int], slowest: float, latency_us: float) -> None:
    """2 (W - 1) / W of the bytes over the slowest link's rate, and 2 (W - 1) latencies, of 64 ranks as well."""
    cluster = Cluster(*hosts, LINK, NIC, peer_latency_s=latency_us / 1e6)
    W = cluster.world_size
    ring_all_reduce(cluster, NBYTES, [[]] * W)
    expected = 2 * (W - 1) / W * NBYTES / slowest + 2 * (W - 1) * latency_us / 1e6
    assert cluster.engine.run().seconds == pytest.approx(expected, rel=0.01)


def test_a_hierarchical_sum_takes_its_parts_and_gives_the_same_bits_again() -> None:
    ends = []
    for _ in range(2):
        cluster = Cluster(4, 8, LINK, NIC)
        hierarchical_all_reduce(cluster, NBYTES, [[]] * 32)
        ends.append(cluster.engine.run().end_s)
    assert ends[0].max() == pytest.approx(2 * 7 / 8 * NBYTES / LINK + 2 * 3 / 4 * NBYTES / 8 / NIC, rel=0.01)
    assert (ends[0] == ends[1]).all()
