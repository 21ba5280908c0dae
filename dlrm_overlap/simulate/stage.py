"""The embedding stage and its backward in closed form: when all ranks have what they pool, send and receive.

A phase takes as long as the fullest of what it uses at once: of a rank its memory, each direction of its links within
the host and of its NIC, and the issuing of its puts. An exchange ends on all ranks when it has ended on the last one.

**pgas and fused.** A rank pools while it stores to peers and puts to other hosts, and the ids of the next batch travel
over the same links. Sums of tables that are cut by rows over a host's ranks are put when these have pooled all.
Gradients travel in parts of a rank's tables, the first half as long as the others; the rows of a part are updated while
the next one travels. The ids have been sorted beside the forward.

**torchrec.** FBGEMM's lookup, a copy of the output into the send buffer, a collective, and the pass that unpacks. The
gradients are packed and sent by a collective, the ids sorted, and all rows updated by FBGEMM.
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
    """Return [4, W], how long each rank's ways out and in are busy: of its link within the host, and of its NIC.

    Each rank sends `near_bytes`, [W], to each other rank of its host, and `away_bytes` to each rank of another host.
    What goes back the same ways, as gradients do, takes the same times with out and in exchanged.

    Example: 2 hosts of 2 ranks, near [1, 0, 0, 0] and away [0, 0, 3, 0] bytes at 1 byte a second: rank 0's link is busy
    for 1 s out and rank 1's for 1 s in, rank 2's NIC for 6 s out, and those of ranks 0 and 1 for 3 s in.
    """
    W, G, gpu = config.network.world_size, config.network.gpus_per_host, config.gpu
    of_host_near, of_host_away = (each.reshape(-1, G).sum(1).repeat(G) for each in (near_bytes, away_bytes))
    link = 1e9 * (gpu.collective_gb_per_s if config.is_collective else gpu.link_gb_per_s)
    nic = 1e9 / 8 * config.network.nic_gbit_per_s
    return np.stack(
        [
            near_bytes * (G - 1) / link,
            (of_host_near - near_bytes) / link,
            away_bytes * (W - G) / nic,
            (away_bytes.sum() - of_host_away) / nic,
        ]
    )


def arrival_s(config: SimulateConfig, sent_s: np.ndarray) -> float:
    """Return when all has arrived that each rank has sent and received by `sent_s`, [W]."""
    network = config.network
    return float(sent_s.max()) + config.gpu.peer_us / 1e6 + (network.hosts > 1) * network.latency_ns / 1e9


def all_reduce_s(config: SimulateConfig, nbytes: float) -> float:
    """Return how long the ranks sum buffers of so many bytes: a ring within each host, and between hosts rail by rail.

    Sums are scattered within each host, their parts summed over the hosts, which halve and double, and gathered.
    """
    gpu, network, G, H = config.gpu, config.network, config.network.gpus_per_host, config.network.hosts
    within_s = (G - 1) / G * nbytes / gpu.link_gb_per_s / 1e9 + (G - 1) * gpu.peer_us / 1e6
    between_s = (H - 1) / H * nbytes / G / network.nic_gbit_per_s * 8 / 1e9
    steps_s = (H - 1).bit_length() * (gpu.peer_us / 1e6 + network.latency_ns / 1e9)
    return 2 * (within_s + between_s + steps_s)


def pooled_seconds(config: SimulateConfig, work: SimulatedWorkload) -> np.ndarray:
    """Return [W], how long the links are busy with pooled embeddings, or with their gradients."""
    return link_seconds(config, work.pair_bytes * work.shares.near, work.pair_bytes * work.shares.away).max(0)


def has_few_bags(work: SimulatedWorkload) -> bool:
    """Return whether a persistent kernel takes tasks of one group of bags, as `backends.fused` cuts them."""
    return work.bags < _MANY_BAGS and work.ids > work.bags


def pooling_s(lookup: LookupConfig, work: SimulatedWorkload) -> np.ndarray:
    """Return [W]: how long each rank pools if nothing holds it up, after `lookup.us`.

    Tables are read one after the other. Each takes as long as the memory needs for rows that are not in the cache, or
    as the cache needs for all of its rows, whichever is longer.
    """
    through_cache_s = work.read_bytes / lookup.cached_gb_per_s
    rows_s = np.maximum(work.missed_bytes / lookup.gb_per_s, through_cache_s).sum() / 1e9
    bag_ns = lookup.bag_ns + lookup.few_bag_ns * has_few_bags(work)
    other_s = (work.hbm_bytes - work.read_bytes.sum()) / lookup.gb_per_s / 1e9 + work.bags * bag_ns / 1e9
    return rows_s * work.shares.memory + other_s * work.shares.links


def put_bytes(config: SimulateConfig, work: SimulatedWorkload) -> float:
    """Return the bytes of a rank's put to another host, by the exchange's own rule (`kernels.grouping`).

    It is at least a pooled embedding under pgas and a slice under fused, at most all that the host gets.
    """
    embedding = config.embedding
    bags = embedding.slice_bags if embedding.backend == "fused" else 1
    each = min(work.pair_bytes, bags * config.model.dim * config.wire_bytes)
    every = math.ceil(work.pair_bytes * config.network.gpus_per_host / each)
    return each * min(every, group_rows(math.ceil(each), embedding.aggregate_bytes))


def forward(config: SimulateConfig, work: SimulatedWorkload, begin_s: float) -> float:
    """Return when the embeddings of all ranks are there, of a stage that begins at `begin_s`."""
    gpu, network, shares = config.gpu, config.network, work.shares
    lookup = gpu.baseline if config.is_collective else gpu.fused if config.embedding.backend == "fused" else gpu.pgas
    begun, pool_s = begin_s + lookup.us / 1e6, pooling_s(lookup, work)
    if work.world_size == 1:  # one rank's output is neither sent nor copied
        return begun + float(pool_s[0])
    received = work.id_bytes / (work.world_size - 1) * shares.ids * (config.what == "step")
    ids_s = link_seconds(config, received, received)[[1, 0, 3, 2]]  # of the next batch's, beside this one's
    if config.is_collective:
        copied = begun + pool_s + 2 * work.pair_bytes * shares.links * work.world_size / gpu.copy_gb_per_s / 1e9
        sent = np.maximum(copied, begin_s + ids_s.max(0)) + gpu.collective_us / 1e6
        here = arrival_s(config, sent + pooled_seconds(config, work))
        return here + 2 * work.pooled_bytes / gpu.copy_gb_per_s / 1e9
    put = put_bytes(config, work)

    def sent_s(near: np.ndarray, away: np.ndarray, beside_s: np.ndarray | float = 0.0) -> np.ndarray:
        puts = away * work.pair_bytes * (work.world_size - network.gpus_per_host) / put
        links_s = link_seconds(config, work.pair_bytes * near, work.pair_bytes * away) + beside_s
        return np.maximum(links_s.max(0), puts * network.message_ns / 1e9)

    sent = begun + np.maximum(pool_s, sent_s(shares.near, shares.away - shares.sums, ids_s))
    if shares.sums.any():
        gathered = sent.reshape(network.hosts, -1).max(1).repeat(network.gpus_per_host) + gpu.peer_us / 1e6
        sent = gathered + sent_s(np.zeros_like(shares.sums), shares.sums)
    return arrival_s(config, sent)


def sort_s(rates: UpdateConfig, work: SimulatedWorkload) -> np.ndarray:
    """Return the seconds [W] in which each rank's sort of its ids has the multiprocessors alone."""
    return work.ids * work.shares.ids * rates.sort_ns / 1e9


def rows_s(rates: UpdateConfig, work: SimulatedWorkload) -> np.ndarray:
    """Return [W], how long the rows of each rank take to be updated alone, in seconds, all at once."""
    return (work.update_bytes / rates.gb_per_s / 1e9 + rates.us / 1e6) * work.shares.memory


class BackwardTimes(NamedTuple):
    """When the parts of a backward end, in seconds."""

    arrived_s: float
    """all gradients are with the owners of their rows"""
    updated_s: np.ndarray
    """[W] each rank's rows are updated"""
    updates_s: np.ndarray
    """[W] that a rank's updates run, with products beside them"""
    products_s: np.ndarray
    """[W] the products beside it have ended"""


def backward(
    config: SimulateConfig, work: SimulatedWorkload, begin_s: np.ndarray, sorted_s: np.ndarray, products_s: np.ndarray
) -> BackwardTimes:
    """Return when gradients have arrived and rows are updated.

    A rank has its gradient at `begin_s`, [W], and its ids are sorted at `sorted_s`, the collective's once the gradients
    are there. The products beside it end at `products_s`, if nothing is beside them.
    """
    gpu, kernel_s, alone_s = config.gpu, config.gpu.kernel_us / 1e6, rows_s(config.update_rates, work)
    arrived, links_s = float(begin_s.max()), pooled_seconds(config, work)
    if config.is_collective:
        if work.world_size > 1:
            pack_s = kernel_s + 2 * work.pooled_bytes / gpu.copy_gb_per_s / 1e9
            arrived = arrival_s(config, begin_s + pack_s + gpu.collective_us / 1e6 + links_s)
        ready = arrived + kernel_s + sort_s(gpu.baseline_update, work) + gpu.baseline_update.sort_us / 1e6
        return BackwardTimes(arrived, ready + alone_s, alone_s, products_s)
    issue_s = (work.world_size - config.network.gpus_per_host) * config.network.message_ns / 1e9
    updated, first = sorted_s, np.full_like(sorted_s, np.inf)
    parts = max(1, min(_MOST_PARTS, int(work.pair_bytes * work.world_size) // _PART_BYTES))
    for length in (0.5, *[1.0] * (parts - 1)):
        share = length / (parts - 0.5)
        if work.world_size > 1:
            arrived = arrival_s(config, arrived + np.maximum(links_s * share, issue_s))
        begun = np.maximum(arrived, updated) + kernel_s
        first, updated = np.minimum(first, begun), begun + alone_s * share
    # Updates and products leave each other half of the multiprocessors: both take longer by what the shorter one needs.
    shared = np.clip(products_s - first, 0.0, alone_s)
    return BackwardTimes(arrived, updated + shared, alone_s + shared, products_s + shared)
