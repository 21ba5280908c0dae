"""What one rank has to do in a step on average, counted by `dlrm_overlap.traffic` as the figures of `bench` count."""

from dataclasses import dataclass
from functools import cache

import numpy as np

from dlrm_overlap.config import ModelConfig, parse_multi_hot
from dlrm_overlap.simulate.config import WorkConfig
from dlrm_overlap.traffic import ShardTraffic, UpdateBytes, pooling_bytes, update_bytes

_EXACT_RANKS, _BIN = 4096, 1.01  # the first so many rows one by one, then rows together up to 1% more


@dataclass(frozen=True)
class Workload:
    """One rank's step of W, where all ranks have equal parts of every table's columns and ids."""

    world_size: int
    samples: int
    """of a rank, b"""
    bags: float
    """that a rank pools: those of its tables, all ranks' samples"""
    features: float
    """tables of a rank, T / W, which may be a part of one"""
    hbm_bytes: float
    """of the forward, as `bench.harness.limits.count_bytes` counts"""
    link_bytes: float
    """out to peers in the forward"""
    pair_bytes: float
    """of pooled embeddings from one rank to one other"""
    pooled_bytes: float
    """of a rank's samples, all tables: what it has after the exchange"""
    update: UpdateBytes
    """of the backward"""
    id_bytes: float
    """of ids and offsets that a rank sends to others"""
    ids: float
    """that a rank looks up"""


def build_workload(model: ModelConfig, work: WorkConfig, world_size: int) -> Workload:
    """Return the work of the mean rank.

    Tables are divided as if each could be cut into as many parts as there are ranks, which the plan of a run
    approximates where there are enough of them.
    """
    tables = work.tables_per_rank * world_size if work.tables_per_rank is not None else work.tables
    samples = work.global_batch // world_size if work.global_batch is not None else work.samples
    batch, dim = samples * world_size, model.dim
    every_rows = work.rows if isinstance(work.rows, list) else [work.rows] * tables
    every_hot = work.multi_hot if isinstance(work.multi_hot, list) else [work.multi_hot] * tables
    shards = []
    for rows, spec in zip(every_rows, every_hot, strict=True):
        least, most = parse_multi_hot(spec)
        ids = batch * (least + most) / 2
        touched = expected_rows(min(rows, work.max_rows or rows), work.zipf_alpha, ids)
        filled = batch * (1.0 if least else most / (most + 1))
        # The rank's part of a table counts as a shard of all its columns and of a part of its rows and bags.
        shards.append(ShardTraffic(ids / world_size, touched / world_size, filled / world_size, dim, work.row_bytes))
    total_dim, owner_dim = tables * dim, tables * dim / world_size
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
    bags = batch * tables / world_size
    own_ids = sum(shard.ids for shard in shards)
    return Workload(
        world_size=world_size,
        samples=samples,
        bags=bags,
        features=tables / world_size,
        hbm_bytes=hbm + (bags + 1) * work.id_bytes,
        link_bytes=link,
        pair_bytes=samples * owner_dim * work.wire_bytes,
        pooled_bytes=samples * total_dim * work.wire_bytes,
        update=update,
        id_bytes=(own_ids + bags) * work.id_bytes * (world_size - 1) / world_size,
        ids=own_ids,
    )


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
