"""The work of ranks in a step, counted by `embedding.traffic` as the figures of `bench` count: the mean rank's
work, and how much of it each rank has by the plan.
"""

from dataclasses import dataclass
from functools import cache

import numpy as np

from dlrm_overlap.config import ModelConfig, parse_multi_hot
from dlrm_overlap.embedding.balance import TableLoad
from dlrm_overlap.embedding.traffic import ShardTraffic, UpdateBytes, pooling_bytes, update_bytes
from dlrm_overlap.kernels.arguments import state_bytes
from dlrm_overlap.simulate.config import WorkConfig
from dlrm_overlap.simulate.shares import Placement, PlannedTable, Shares, planned_shares

_EXACT_RANKS, _BIN = 4096, 1.01  # the first so many rows one by one, then rows together up to 1% more
CACHE_BYTES = 25e6  # half of an H200's L2: either half keeps the rows that the multiprocessors beside it have read


@dataclass(frozen=True)
class Workload:
    """The mean rank's step of W, and the ranks' shares of it."""

    world_size: int
    samples: int
    """of a rank, b"""
    bags: float
    """that a rank pools: those of its tables, all ranks' samples"""
    features: float
    """tables of a rank, T / W, which may be a part of one"""
    hbm_bytes: float
    """of the forward, as `bench.harness.limits` counts"""
    read_bytes: np.ndarray
    """[T] of them the rows of each table"""
    missed_bytes: np.ndarray
    """[T] of these the rows that are not in the cache"""
    link_bytes: float
    """out to peers in the forward, if no table is cut by rows"""
    pair_bytes: float
    """of pooled embeddings from one rank to one other, if no table is cut by rows"""
    pooled_bytes: float
    """of a rank's samples, all tables, after the exchange"""
    update: UpdateBytes
    """of the backward"""
    id_bytes: float
    """of ids and offsets that a rank sends to others"""
    ids: float
    """that a rank looks up"""
    shares: Shares


def build_workload(
    model: ModelConfig, work: WorkConfig, world_size: int, gpus_per_host: int | None = None, dense: bool = False
) -> Workload:
    """Return the work of the mean rank, and the ranks' shares of it by the plan.

    Args:
        model: gives the dim.
        work: tables and batch.
        world_size: number of ranks.
        gpus_per_host: ranks of a host; None: all.
        dense: whether a collective carries partial sums, see `planned_shares`.

    Raises:
        InputError: if the plan has no room for the tables.
    """
    tables = work.number_of_tables(world_size)
    samples = work.global_batch // world_size if work.global_batch is not None else work.samples
    batch, dim = samples * world_size, model.dim
    every_rows = work.rows if isinstance(work.rows, list) else [work.rows] * tables
    every_hot = work.multi_hot if isinstance(work.multi_hot, list) else [work.multi_hot] * tables
    every_alpha = work.zipf_alpha if isinstance(work.zipf_alpha, list) else [work.zipf_alpha] * tables
    shards, planned, read, missed = [], [], [], []
    total_dim = tables * dim
    for rows, spec, alpha in zip(every_rows, every_hot, every_alpha, strict=True):
        least, most = parse_multi_hot(spec)
        ids = batch * (least + most) / 2
        rows = min(rows, work.max_rows or rows)
        row_bytes = dim * work.row_bytes
        size = round(rows * (row_bytes + state_bytes(work.optimizer, dim)))
        load = TableLoad((least + most) / 2, dim, row_bytes, size, rows)
        touched, missing = expected_rows(rows, alpha, ids), misses(rows, alpha, ids, CACHE_BYTES / row_bytes)
        filled = batch * (1.0 if least else most / (most + 1))
        planned.append(PlannedTable(load, rows, range(least, most + 1)))
        read.append(ids * row_bytes / world_size)
        missed.append(min(ids, missing) * row_bytes / world_size)
        # The rank's part of a table counts as a shard of all its columns and of a part of its rows and bags.
        shards.append(ShardTraffic(ids / world_size, touched / world_size, filled / world_size, dim, work.row_bytes))
    owner_dim, bags = total_dim / world_size, tables * samples
    hbm, link = pooling_bytes(shards, batch, samples, total_dim, owner_dim, work.id_bytes, work.wire_bytes)
    update = update_bytes(
        shards,
        samples=batch,
        own_samples=samples,
        total_dim=total_dim,
        owner_dim=owner_dim,
        wire_bytes=work.wire_bytes,
        gradient_bytes=work.wire_bytes,
        optimizer=work.optimizer,
    )
    placement = Placement(work.plan, world_size, gpus_per_host or world_size, samples, work.optimizer)
    shares = planned_shares(tuple(planned), placement, dense)
    own_ids = sum(shard.ids for shard in shards)
    return Workload(
        world_size=world_size,
        samples=samples,
        bags=bags,
        features=tables / world_size,
        hbm_bytes=hbm + (bags + 1) * work.id_bytes,
        read_bytes=np.array(read),
        missed_bytes=np.array(missed),
        link_bytes=link,
        pair_bytes=samples * owner_dim * work.wire_bytes,
        pooled_bytes=samples * total_dim * work.wire_bytes,
        update=update,
        id_bytes=(own_ids + bags) * work.id_bytes * (world_size - 1) / world_size,
        ids=own_ids,
        shares=shares,
    )


@cache
def misses(rows: int, alpha: float, ids: float, cached_rows: float) -> float:
    """Return how many of `ids` independent ids name a row that none of the last ids name that fill the cache.

    So many ids as name `cached_rows` rows fill it. After these an id is missed as often as one more id names a row
    that so many have not named (Denning & Schwartz 1972).

    Example: 1000 rows, all alike, 100 of which stay: 105 ids name 100, and 9 of 10 ids after these are missed.
    """
    if expected_rows(rows, alpha, ids) <= cached_rows:
        return expected_rows(rows, alpha, ids)
    filled, more = cached_rows, ids
    while more - filled > 1e-6 * ids:
        between = (filled + more) / 2
        filled, more = (between, more) if expected_rows(rows, alpha, between) < cached_rows else (filled, between)
    step = max(1.0, 1e-3 * filled)
    new = (expected_rows(rows, alpha, filled + step) - expected_rows(rows, alpha, filled)) / step
    return cached_rows + (ids - filled) * new


@cache
def expected_rows(rows: int, alpha: float, ids: float) -> float:
    """Return how many distinct rows `ids` independent ids name on average, with P(k-th row) ~ 1 / k^alpha."""
    if alpha == 0:
        return -rows * np.expm1(ids * np.log1p(-1 / rows)) if rows > 1 else 1.0
    edges = np.arange(1, min(rows, _EXACT_RANKS) + 2, dtype=np.float64)
    if rows > _EXACT_RANKS:
        count = int(np.ceil(np.log((rows + 1) / edges[-1]) / np.log(_BIN)))
        edges = np.concatenate([edges, np.unique(np.geomspace(edges[-1], rows + 1, count + 1).round())[1:]])
    widths = np.diff(edges)
    weight = ((edges[:-1] + edges[1:] - 1) / 2) ** -alpha
    chance = np.minimum(weight / (weight * widths).sum(), 1.0)
    with np.errstate(divide="ignore"):
        return float((-np.expm1(ids * np.log1p(-chance)) * widths).sum())
