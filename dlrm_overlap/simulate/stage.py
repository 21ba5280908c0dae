"""The embedding stage and its backward in closed form (docs/simulator.md).

A phase takes as long as the most loaded resource that it uses: on each rank the memory, each direction of the links
within the node and of the NIC, and the issue of puts. An exchange ends on all ranks when it ends on the last one.
"""

import math
from typing import NamedTuple

import numpy as np

from dlrm_overlap.kernels.grouping import group_rows
from dlrm_overlap.simulate.config import LookupConfig, SimulateConfig, UpdateConfig
from dlrm_overlap.simulate.workload import SimulatedWorkload

_MANY_BAGS = 1 << 17
_PART_BYTES, _MOST_PARTS = 32 << 20, 6  # as `embedding.gradient_layout` cuts a rank's window


def link_seconds(config: SimulateConfig, near_bytes: np.ndarray, away_bytes: np.ndarray) -> np.ndarray:
    """Return [4, W] seconds in which each rank's links out and in, and its NIC out and in, are busy.

    Each rank sends `near_bytes`, [W], to each other rank of its node, and `away_bytes`, [W], to each rank of another
    node.

    Example: 2 nodes of 2 ranks, near [1, 0, 0, 0] and away [0, 0, 3, 0] bytes at 1 byte a second: rank 0's link is busy
    for 1 s out and rank 1's for 1 s in, rank 2's NIC for 6 s out, and the NICs of ranks 0 and 1 for 3 s in.
    """
    W, G, gpu = config.network.world_size, config.network.gpus_per_node, config.gpu
    # [W]: sums over the ranks of each rank's node
    node_near, node_away = (each.reshape(-1, G).sum(1).repeat(G) for each in (near_bytes, away_bytes))
    link = 1e9 * (gpu.collective_gb_per_s if config.is_collective else gpu.link_gb_per_s)
    nic = 1e9 / 8 * config.network.nic_gbit_per_s
    return np.stack(
        [
            near_bytes * (G - 1) / link,
            (node_near - near_bytes) / link,
            away_bytes * (W - G) / nic,
            (away_bytes.sum() - node_away) / nic,
        ]
    )


def arrival_s(config: SimulateConfig, sent_s: np.ndarray) -> float:
    """Return the time at which all data has arrived, if each rank's links and NIC have sent it by `sent_s`, [W]."""
    network = config.network
    return float(sent_s.max()) + config.gpu.peer_us / 1e6 + (network.nodes > 1) * network.latency_ns / 1e9


def all_reduce_s(config: SimulateConfig, nbytes: float) -> float:
    """Return the seconds of an all-reduce of `nbytes` over all ranks.

    It is a ring reduce-scatter within nodes, recursive halving and doubling between nodes, and a ring all-gather.
    """
    gpu, network, G, N = config.gpu, config.network, config.network.gpus_per_node, config.network.nodes
    within_s = (G - 1) / G * nbytes / gpu.link_gb_per_s / 1e9 + (G - 1) * gpu.peer_us / 1e6
    between_s = (N - 1) / N * nbytes / G / network.nic_gbit_per_s * 8 / 1e9
    steps_s = (N - 1).bit_length() * (gpu.peer_us / 1e6 + network.latency_ns / 1e9)
    return 2 * (within_s + between_s + steps_s)


def pooled_seconds(config: SimulateConfig, work: SimulatedWorkload) -> np.ndarray:
    """Return [W] seconds of each rank's busiest link for pooled embeddings, or for gradients in the other direction."""
    return link_seconds(config, work.pair_bytes * work.shares.near, work.pair_bytes * work.shares.away).max(0)


def has_few_bags(work: SimulatedWorkload) -> bool:
    """Whether a task of the backend fused pools a single group of bags; the same rule as in `backends.fused`."""
    return work.bags < _MANY_BAGS and work.ids > work.bags


def pooling_s(lookup: LookupConfig, work: SimulatedWorkload) -> np.ndarray:
    """Return [W] seconds that each rank needs to pool its bags, without `lookup.us`, if nothing delays it.

    Tables are pooled one after the other. A table takes as long as memory needs for rows that miss the cache, or the
    cache for all rows, whichever is longer.
    """
    through_cache_s = work.read_bytes / lookup.cached_gb_per_s
    rows_s = np.maximum(work.missed_bytes / lookup.gb_per_s, through_cache_s).sum() / 1e9
    bag_ns = lookup.bag_ns + lookup.few_bag_ns * has_few_bags(work)
    other_s = (work.hbm_bytes - work.read_bytes.sum()) / lookup.gb_per_s / 1e9 + work.bags * bag_ns / 1e9
    return rows_s * work.shares.memory + other_s * work.shares.links


def put_bytes(config: SimulateConfig, work: SimulatedWorkload) -> float:
    """Return the bytes of one put to another node, as `kernels.grouping` groups rows.

    A put has at least a pooled embedding (pgas) or a slice (fused), and at most all that the node receives.
    """
    embedding = config.embedding
    bags = embedding.slice_bags if embedding.backend == "fused" else 1
    each = min(work.pair_bytes, bags * config.model.dim * config.wire_bytes)
    every = math.ceil(work.pair_bytes * config.network.gpus_per_node / each)
    return each * min(every, group_rows(math.ceil(each), embedding.aggregate_bytes))


def forward(config: SimulateConfig, work: SimulatedWorkload, begin_s: float) -> float:
    gpu, network, shares = config.gpu, config.network, work.shares
    lookup = gpu.baseline if config.is_collective else gpu.fused if config.embedding.backend == "fused" else gpu.pgas
    begun, pool_s = begin_s + lookup.us / 1e6, pooling_s(lookup, work)
    if work.world_size == 1:  # a single rank neither sends nor copies its output
        return begun + float(pool_s[0])
    # The next batch's ids use the links meanwhile. A rank receives ids in the way that it sends embeddings.
    received = work.id_bytes / (work.world_size - 1) * shares.ids * (config.what == "step")
    ids_s = link_seconds(config, received, received)[[1, 0, 3, 2]]
    # torchrec: lookup, copy into the send buffer, collective, unpack
    if config.is_collective:
        copied = begun + pool_s + 2 * work.pair_bytes * shares.links * work.world_size / gpu.copy_gb_per_s / 1e9
        sent = np.maximum(copied, begin_s + ids_s.max(0)) + gpu.collective_us / 1e6
        here = arrival_s(config, sent + pooled_seconds(config, work))
        return here + 2 * work.pooled_bytes / gpu.copy_gb_per_s / 1e9
    put = put_bytes(config, work)

    def sent_s(near: np.ndarray, away: np.ndarray, other_s: np.ndarray | float = 0.0) -> np.ndarray:
        puts = away * work.pair_bytes * (work.world_size - network.gpus_per_node) / put
        links_s = link_seconds(config, work.pair_bytes * near, work.pair_bytes * away) + other_s
        return np.maximum(links_s.max(0), puts * network.message_ns / 1e9)

    # pgas, fused: pooling overlaps stores and puts; sums of a node's partial sums follow
    sent = begun + np.maximum(pool_s, sent_s(shares.near, shares.away - shares.sums, ids_s))
    if shares.sums.any():
        gathered = sent.reshape(network.nodes, -1).max(1).repeat(network.gpus_per_node) + gpu.peer_us / 1e6
        sent = gathered + sent_s(np.zeros_like(shares.sums), shares.sums)
    return arrival_s(config, sent)


def sort_s(rates: UpdateConfig, work: SimulatedWorkload) -> np.ndarray:
    """Return [W] seconds in which each rank's sort of ids needs all multiprocessors."""
    return work.ids * work.shares.ids * rates.sort_ns / 1e9


def rows_s(rates: UpdateConfig, work: SimulatedWorkload) -> np.ndarray:
    """Return [W] seconds of each rank's update of its rows if nothing else runs on the GPU."""
    return (work.update_bytes / rates.gb_per_s / 1e9 + rates.us / 1e6) * work.shares.memory


class BackwardTimes(NamedTuple):
    arrived_s: float
    """time at which the owners of rows have received all gradients"""
    updated_s: np.ndarray
    """[W] time at which each rank has updated its rows"""
    updates_s: np.ndarray
    """[W] duration of the row updates while matrix products share the GPU"""
    products_s: np.ndarray
    """[W] time at which these products end"""


def backward(
    config: SimulateConfig, work: SimulatedWorkload, begin_s: np.ndarray, sorted_s: np.ndarray, products_s: np.ndarray
) -> BackwardTimes:
    """Return the times at which gradients arrive and rows are updated, in seconds.

    A rank has the gradient of its embeddings at `begin_s`, [W], and its ids are sorted at `sorted_s`, [W]; the
    collective backward sorts ids after the gradients arrive. Concurrent matrix products would end at `products_s`, [W],
    if they ran alone.
    """
    gpu, kernel_s, alone_s = config.gpu, config.gpu.kernel_us / 1e6, rows_s(config.update_rates, work)
    arrived, links_s = float(begin_s.max()), pooled_seconds(config, work)
    # torchrec: pack, collective, sort, update
    if config.is_collective:
        if work.world_size > 1:
            pack_s = kernel_s + 2 * work.pooled_bytes / gpu.copy_gb_per_s / 1e9
            arrived = arrival_s(config, begin_s + pack_s + gpu.collective_us / 1e6 + links_s)
        ready = arrived + kernel_s + sort_s(gpu.baseline_update, work) + gpu.baseline_update.sort_us / 1e6
        return BackwardTimes(arrived, ready + alone_s, alone_s, products_s)
    # pgas, fused: one part's rows are updated while the next part's gradients are sent
    issue_s = (work.world_size - config.network.gpus_per_node) * config.network.message_ns / 1e9
    updated, first = sorted_s, np.full_like(sorted_s, np.inf)
    parts = max(1, min(_MOST_PARTS, int(work.pair_bytes * work.world_size) // _PART_BYTES))
    for length in (0.5, *[1.0] * (parts - 1)):
        share = length / (parts - 0.5)
        if work.world_size > 1:
            arrived = arrival_s(config, arrived + np.maximum(links_s * share, issue_s))
        begun = np.maximum(arrived, updated) + kernel_s
        first, updated = np.minimum(first, begun), begun + alone_s * share
    # Updates and products each get half of the multiprocessors, so both take longer by the time of the shorter one.
    shared = np.clip(products_s - first, 0.0, alone_s)
    return BackwardTimes(arrived, updated + shared, alone_s + shared, products_s + shared)
