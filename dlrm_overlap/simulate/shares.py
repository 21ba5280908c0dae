"""How much of a step's work each rank has, by the plan of its tables: ours, or that of TorchRec's planner."""

import logging
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Literal, NamedTuple

import numpy as np

from dlrm_overlap.config import InputError, in_one_line
from dlrm_overlap.embedding.balance import TableLoad, balance
from dlrm_overlap.embedding.traffic import filled_share

_GPU_BYTES = 140 * 10**9  # an H200's memory
_CAPACITY_BYTES = _GPU_BYTES * 4 // 5  # of a rank's tables: `embedding.plan` reserves a fifth


class PlannedTable(NamedTuple):
    """A table as plans and work depend on it."""

    load: TableLoad
    rows: int
    bag_sizes: range
    """ids of a bag, any as often"""


class Placement(NamedTuple):
    """The ranks that share a table's work."""

    plan: Literal["auto", "torchrec"]
    world_size: int
    gpus_per_host: int
    samples: int
    """of a rank"""
    optimizer: Literal["sgd", "rowwise_adagrad", "adagrad"]


class Shard(NamedTuple):
    """Columns and rows of a table on a rank."""

    rank: int
    columns: int
    rows: float
    """part of the table's rows"""


class Shares(NamedTuple):
    """Of each rank, [W], its part of the work over the mean rank's, if no table were cut by rows."""

    memory: np.ndarray
    """row elements that it reads"""
    links: np.ndarray
    """columns that it pools for each sample"""
    ids: np.ndarray
    """ids that it looks up and sorts: a table that is cut by columns has all its ids at each shard"""
    near: np.ndarray
    """columns that it sends to a rank of its host for each of that one's samples, on average; their gradients return"""
    away: np.ndarray
    """the same for a rank of another host"""
    sums: np.ndarray
    """of `away` those of sums, which leave when the host's partial sums are gathered and added up"""
    gathered: np.ndarray
    """columns that it reads and writes for each of its samples to make these, over the output's"""
    added: np.ndarray
    """the same to add up what has come for its own samples"""

    @staticmethod
    def even(world_size: int) -> "Shares":
        """Return those of ranks with alike work, without a table that is cut by rows."""
        one, none = np.ones(world_size), np.zeros(world_size)
        return Shares(one, one, one, one, one, none, none, none)


@lru_cache(maxsize=32)
def planned_shares(tables: tuple[PlannedTable, ...], placement: Placement, dense: bool) -> Shares:
    """Return the ranks' shares by the plan of these tables; equal ones if every rank gets as many alike.

    Raises:
        InputError: if the plan has no room for the tables.
    """
    W, ours = placement.world_size, placement.plan == "auto"
    if W == 1 or (ours and len(set(tables)) == 1 and len(tables) % W == 0):
        return Shares.even(W)
    plan = _ours(tables, placement) if ours else _torchrecs(tables, placement)
    return shares_of(tables, list(plan), W, min(placement.gpus_per_host, W), dense)


def shares_of(
    tables: Sequence[PlannedTable], plan: Sequence[Sequence[Shard]], world_size: int, gpus_per_host: int, dense: bool
) -> Shares:
    """Return the ranks' shares where `plan` has the shards of each table.

    Of a table that is cut by rows, the exchange sends within a host the partial sums of bags that have ids of a shard.
    For samples of other hosts it gathers all partial sums of a host, each of G ranks for one sample in G, adds them up
    and sends the sums. A `dense` collective does so for its own host's samples, too: of table-row-wise shards, and of
    others about, by rings.

    Example: 2 ranks of a host, a table of 2 ids a bag, 64 columns, cut by rows. Each rank reads a row a sample, and of
    memory, ids and all else but columns has 1. It pools 64 columns, where the mean of whole tables is 32: of `links` it
    has 2, of `near` 3/4 of that, since a fourth of the bags have no id of a rank's rows; a `dense` one has 2.
    """
    W, G = world_size, gpus_per_host
    found, made = np.zeros((6, W)), np.zeros((2, W))
    for table, shards in zip(tables, plan, strict=True):
        cut, ids = any(shard.rows < 1 for shard in shards), table.load.pooling
        for rank, columns, rows in shards:
            here = sum(shard.rank // G == rank // G for shard in shards)
            near, away, sums = float(columns), float(columns), 0.0
            if cut and dense:
                near, away = columns * W / G, columns / G
            elif cut:
                near = columns * _filled(table, rows)
                if here > 1:
                    near += columns * (W - G) / G
                    away = sums = columns / here
            found[:, rank] += ids * columns * rows, columns, ids * rows, near, away, sums
        if cut and not dense:
            made += _added_up(table, shards, W, G)
    loads = [table.load for table in tables]
    columns, ids = sum(load.dim for load in loads), sum(load.pooling for load in loads)
    totals = [sum(load.pooling * load.dim for load in loads), columns, ids, columns, columns, columns]
    memory, links, ids, near, away, sums = found * (W / np.array(totals))[:, None]
    return Shares(memory, links, ids, near, away, sums, *made / columns)


def _added_up(table: PlannedTable, shards: Sequence[Shard], world_size: int, gpus_per_host: int) -> np.ndarray:
    """Return [2, W]: the columns that each rank reads and writes to add up partial sums of a table that is cut by rows.

    First for samples of other hosts, then for its own, by each of its samples.
    """
    W, G, made = world_size, gpus_per_host, np.zeros((2, world_size))
    for host in range(0, W, G):
        here = [shard for shard in shards if shard.rank // G == host // G]
        if not here:
            continue
        columns, own = here[0].columns, np.arange(W) // G == host // G
        partial = columns * sum(_filled(table, shard.rows) for shard in here)
        if len(here) > 1:  # the sum is written, and copied into a message
            made[0, own] += (W - G) / G * columns * (len(here) + 3)
        if (rows := sum(shard.rows for shard in here)) > 0.999:  # no other host has these columns
            made[1, own] += partial + columns
        else:
            made[1] += np.where(own, partial, columns if len(here) > 1 else partial) + columns * rows
    return made


def _filled(table: PlannedTable, rows: float) -> float:
    """Return the share of a table's bags that have an id of a part of its rows."""
    return sum(filled_share(ids, rows) for ids in table.bag_sizes) / len(table.bag_sizes)


def _ours(tables: Sequence[PlannedTable], placement: Placement) -> Iterator[list[Shard]]:
    """Yield the shards of each table by `embedding.plan: auto`."""
    loads, cut = [table.load for table in tables], placement.optimizer != "rowwise_adagrad"
    host_size = min(placement.gpus_per_host, placement.world_size)
    placed = balance(loads, placement.world_size, _CAPACITY_BYTES, cut, host_size=host_size)
    if placed is None:
        raise _no_room(tables, placement, f"{_CAPACITY_BYTES / 1e9:.0f} GB each")
    for number, (load, ranks) in enumerate(zip(loads, placed.ranks, strict=True)):
        by_rows = number in placed.by_rows
        cut = (load.dim, 1 / len(ranks)) if by_rows else (load.dim // len(ranks), 1.0)
        yield [Shard(rank, *cut) for rank in ranks]


def _torchrecs(tables: Sequence[PlannedTable], placement: Placement) -> Iterator[list[Shard]]:
    """Yield the shards of each table by TorchRec's planner, which takes the fused lookup and knows the ids a bag."""
    import torch
    from torchrec.distributed.planner import ParameterConstraints, Topology
    from torchrec.distributed.planner.types import PlannerError
    from torchrec.distributed.types import ShardingType
    from torchrec.modules.embedding_configs import DataType, EmbeddingBagConfig
    from torchrec.modules.embedding_modules import EmbeddingBagCollection

    from dlrm_overlap.config import EmbeddingConfig
    from dlrm_overlap.embedding.plan import torchrecs_planner
    from dlrm_overlap.embedding.sharder import build_sharders

    configs = [
        EmbeddingBagConfig(
            num_embeddings=rows,
            embedding_dim=load.dim,
            name=f"t{number}",
            feature_names=[f"f{number}"],
            data_type=DataType.FP16 if load.row_bytes == 2 * load.dim else DataType.FP32,
        )
        for number, (load, rows, _) in enumerate(tables)
    ]
    collection = EmbeddingBagCollection(configs, device=torch.device("meta"))
    types = [each.value for each in ShardingType if each != ShardingType.DATA_PARALLEL]  # which has no fused lookup
    constraints = {
        config.name: ParameterConstraints(types, compute_kernels=["fused"], pooling_factors=[table.load.pooling])
        for config, table in zip(configs, tables, strict=True)
    }
    logging.getLogger("torchrec").setLevel(logging.ERROR)  # it warns of the ways to describe hardware
    local_size = min(placement.gpus_per_host, placement.world_size)
    topology = Topology(placement.world_size, "cuda", hbm_cap=_GPU_BYTES, local_world_size=local_size)
    planner = torchrecs_planner(topology, placement.samples, constraints)
    sharders = build_sharders(EmbeddingConfig(backend="pgas", optimizer=placement.optimizer), "fp32", 0)
    try:
        (plan,) = planner.plan(torch.nn.Sequential(collection), sharders).plan.values()
    except PlannerError as error:
        raise _no_room(tables, placement, f"a plan ({in_one_line(error):.200}...)") from None
    for config in configs:
        shards = plan[config.name].sharding_spec.shards  # type: ignore[index]
        yield [Shard(s.placement.rank(), s.shard_sizes[1], s.shard_sizes[0] / config.num_embeddings) for s in shards]


def _no_room(tables: Sequence[PlannedTable], placement: Placement, what: str) -> InputError:
    return InputError(
        f"work: tables of {sum(table.load.bytes for table in tables) / 1e9:.0f} GB, of which {placement.world_size} "
        f"ranks have no room for {what}; set work.max_rows, or take more ranks"
    )
