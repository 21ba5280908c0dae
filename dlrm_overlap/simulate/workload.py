"""The work of ranks in a step, counted by `embedding.traffic` as the figures of `bench` count: the mean rank's
work, and how much of it each rank has by the plan.
"""

from functools import cache
from typing import Any, NamedTuple

import numpy as np

from dlrm_overlap.config import CRITEO_TABLES, parse_multi_hot
from dlrm_overlap.embedding.balance import TableLoad
from dlrm_overlap.embedding.traffic import ShardTraffic, pooling_bytes, update_bytes
from dlrm_overlap.kernels.optimizer_params import state_bytes
from dlrm_overlap.simulate.config import SimulateConfig
from dlrm_overlap.simulate.shares import SimulatedShares, plan_tables, shares_of

_EXACT_RANKS, _BIN = 4096, 1.01  # the first so many rows one by one, then rows together up to 1% more
CACHE_BYTES = 25e6  # half of an H200's L2: either half keeps the rows that the multiprocessors beside it have read


class SimulatedWorkload(NamedTuple):
    """The mean rank's step of W, and the ranks' shares of it."""

    world_size: int
    samples: int
    """of a rank, b"""
    tables: int
    """of all ranks"""
    bags: int
    """that a rank pools: those of its tables, all ranks' samples"""
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
    update_bytes: float
    """of the backward, in a rank's memory"""
    id_bytes: float
    """of ids and offsets that a rank sends to others"""
    ids: float
    """that a rank looks up"""
    shares: SimulatedShares


def build_workload(config: SimulateConfig) -> SimulatedWorkload:
    """Return the work of the mean rank, and the ranks' shares of it by the plan.

    Raises:
        InputError: if the tables do not fit, or the ranks cannot share the global batch evenly.
    """
    tables, embedding, world_size = config.data.tables, config.embedding, config.network.world_size
    number, dim = tables.number(CRITEO_TABLES), config.model.dim
    samples = config.train.samples_per_rank(world_size)
    batch, element_bytes = samples * world_size, 2 if embedding.weight_dtype == "fp16" else 4

    def each(value: Any) -> list[Any]:
        """Return a value of each table."""
        of_rank = value if isinstance(value, list) else [value] * number
        return of_rank * (world_size if config.tables_per_rank else 1)

    shards, loads, read, missed = [], [], [], []
    for rows, spec, alpha in zip(each(tables.rows), each(tables.multi_hot), each(tables.zipf_alpha), strict=True):
        least, most = parse_multi_hot(spec)
        ids = batch * (least + most) / 2
        rows = min(rows, tables.max_rows or rows)
        row_bytes = dim * element_bytes
        size = round(rows * (row_bytes + state_bytes(embedding.optimizer, dim)))
        loads.append(TableLoad((least + most) / 2, dim, row_bytes, size, rows))
        touched, missing = expected_rows(rows, alpha, ids), misses(rows, alpha, ids, CACHE_BYTES / row_bytes)
        filled = batch * (1.0 if least else most / (most + 1))
        read.append(ids * row_bytes / world_size)
        missed.append(min(ids, missing) * row_bytes / world_size)
        # The rank's part of a table counts as a shard of all its columns and of a part of its rows and bags.
        shards.append(ShardTraffic(ids / world_size, touched / world_size, filled / world_size, dim, element_bytes))
    bags, own_ids = len(loads) * samples, sum(shard.ids for shard in shards)
    total_dim, wire = len(loads) * dim, config.wire_bytes
    sizes = batch, samples, total_dim, total_dim / world_size
    hbm, link = pooling_bytes(shards, *sizes, config.id_bytes, wire)
    update = update_bytes(shards, *sizes, wire, wire, embedding.optimizer)
    place = world_size, config.network.gpus_per_host
    plan = plan_tables(tuple(loads), embedding.plan, embedding.optimizer, *place, samples)
    return SimulatedWorkload(
        world_size=world_size,
        samples=samples,
        tables=len(loads),
        bags=bags,
        hbm_bytes=hbm + (bags + 1) * config.id_bytes,
        read_bytes=np.array(read),
        missed_bytes=np.array(missed),
        link_bytes=link,
        pair_bytes=samples * total_dim / world_size * wire,
        pooled_bytes=samples * total_dim * wire,
        update_bytes=update.hbm,
        id_bytes=(own_ids + bags) * config.id_bytes * (world_size - 1) / world_size,
        ids=own_ids,
        shares=shares_of(loads, plan, *place, config.is_collective),
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
    edges = np.arange(1, min(rows, _EXACT_RANKS) + 2, dtype=np.float64)
    if rows > _EXACT_RANKS:
        count = int(np.ceil(np.log((rows + 1) / edges[-1]) / np.log(_BIN)))
        edges = np.concatenate([edges, np.unique(np.geomspace(edges[-1], rows + 1, count + 1).round())[1:]])
    widths = np.diff(edges)
    weight = ((edges[:-1] + edges[1:] - 1) / 2) ** -alpha
    chance = np.minimum(weight / (weight * widths).sum(), 1.0)
    with np.errstate(divide="ignore"):
        return float((-np.expm1(ids * np.log1p(-chance)) * widths).sum())
