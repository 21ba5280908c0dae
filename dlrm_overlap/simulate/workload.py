"""Work per step: the mean rank's, counted as in `bench`, and each rank's share of it."""

from functools import cache
from typing import Any, NamedTuple

import numpy as np

from dlrm_overlap.config import CRITEO_TABLES, parse_multi_hot
from dlrm_overlap.embedding.balance import TableLoad
from dlrm_overlap.embedding.traffic import ShardTraffic, pooling_bytes, update_bytes
from dlrm_overlap.kernels.optimizer_params import state_bytes
from dlrm_overlap.simulate.config import SimulateConfig
from dlrm_overlap.simulate.shares import SimulatedShares, plan_tables, shares_of

_EXACT_RANKS, _BIN = 4096, 1.01  # rows counted one by one; width of the bins of later rows
CACHE_BYTES = 25e6  # half of an H200's L2: each half caches what its own multiprocessors read


class SimulatedWorkload(NamedTuple):
    """One step of the mean rank of W, and the ranks' shares of it."""

    world_size: int
    samples: int
    """per rank, b"""
    tables: int
    bags: int
    """bags that a rank pools: of its tables, for the samples of all ranks"""
    hbm_bytes: float
    """memory traffic of the forward, as `bench.harness.limits` counts it"""
    read_bytes: np.ndarray
    """[T] part of `hbm_bytes`: reads of rows, per table"""
    missed_bytes: np.ndarray
    """[T] part of `read_bytes` that misses the cache"""
    link_bytes: float
    """bytes that a rank sends to peers in the forward, if no table is cut by rows"""
    pair_bytes: float
    """bytes of pooled embeddings that a rank sends to one other rank, if no table is cut by rows"""
    pooled_bytes: float
    """bytes of the pooled embeddings of all tables that a rank has after the exchange"""
    update_bytes: float
    id_bytes: float
    ids: float
    shares: SimulatedShares


def build_workload(config: SimulateConfig) -> SimulatedWorkload:
    """Count the work of one step. Raises `InputError` if tables do not fit or ranks cannot share the batch evenly."""
    tables, embedding, world_size = config.data.tables, config.embedding, config.network.world_size
    number, dim = tables.number(CRITEO_TABLES), config.model.dim
    samples = config.train.samples_per_rank(world_size)
    batch, element_bytes = samples * world_size, 2 if embedding.weight_dtype == "fp16" else 4

    def each(value: Any) -> list[Any]:
        per_table = value if isinstance(value, list) else [value] * number
        return per_table * (world_size if config.tables_per_rank else 1)

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
        # The mean rank has a shard with all columns of the table and 1/W of its rows and bags.
        shards.append(ShardTraffic(ids / world_size, touched / world_size, filled / world_size, dim, element_bytes))
    bags, own_ids = len(loads) * samples, sum(shard.ids for shard in shards)
    total_dim, wire = len(loads) * dim, config.wire_bytes
    sizes = batch, samples, total_dim, total_dim / world_size
    hbm, link = pooling_bytes(shards, *sizes, config.id_bytes, wire)
    update = update_bytes(shards, *sizes, wire, wire, embedding.optimizer)
    plan = plan_tables(tuple(loads), embedding.plan, embedding.optimizer, config.network, samples)
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
        shares=shares_of(loads, plan, config.network, config.is_collective),
    )


@cache
def misses(rows: int, alpha: float, ids: float, cached_rows: float) -> float:
    """Return how many of `ids` independent ids miss an LRU cache of `cached_rows` rows.

    Misses are cold until `cached_rows` distinct rows fill the cache. From then on the miss rate is the rate at which
    further ids would name new rows (Denning & Schwartz 1972).

    Example: of 1000 equally likely rows 100 are cached. 105 ids fill the cache, and 9 of 10 later ids miss.
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
    """Return the expected number of distinct rows among `ids` independent ids, with P(k-th row) ~ 1 / k^alpha."""
    edges = np.arange(1, min(rows, _EXACT_RANKS) + 2, dtype=np.float64)
    if rows > _EXACT_RANKS:
        count = int(np.ceil(np.log((rows + 1) / edges[-1]) / np.log(_BIN)))
        edges = np.concatenate([edges, np.unique(np.geomspace(edges[-1], rows + 1, count + 1).round())[1:]])
    widths = np.diff(edges)
    weight = ((edges[:-1] + edges[1:] - 1) / 2) ** -alpha
    chance = np.minimum(weight / (weight * widths).sum(), 1.0)
    with np.errstate(divide="ignore"):
        return float((-np.expm1(ids * np.log1p(-chance)) * widths).sum())
