"""Each rank's share of a step's work under a sharding plan: ours, or TorchRec's planner's."""

import logging
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from dlrm_overlap.config import EmbeddingConfig, InputError, in_one_line
from dlrm_overlap.embedding.balance import TableLoad, balance
from dlrm_overlap.kernels.optimizer_params import looks_at_rows
from dlrm_overlap.simulate.config import NetworkConfig

_GPU_BYTES = 140 * 10**9  # an H200's memory
_CAPACITY_BYTES = _GPU_BYTES * 4 // 5  # for a rank's tables: `embedding.plan` reserves a fifth


class SimulatedShard(NamedTuple):
    rank: int
    columns: int
    rows: float
    """fraction of the table's rows that the shard has"""


class SimulatedShares(NamedTuple):
    """Each rank's work [W], divided by the mean over ranks if no table were cut by rows."""

    memory: np.ndarray
    """row elements read"""
    links: np.ndarray
    """columns pooled per sample"""
    ids: np.ndarray
    """ids looked up and sorted; each shard of a table cut by columns counts all ids of the table"""
    near: np.ndarray
    """columns sent to another rank of the node per sample of the receiving rank, on average over these ranks"""
    away: np.ndarray
    """columns sent to a rank of another node per sample of the receiving rank, on average over these ranks"""
    sums: np.ndarray
    """the part of `away` that is sent once the node's partial sums are gathered and added up"""


def shares_of(
    loads: Sequence[TableLoad],
    plan: Sequence[Sequence[SimulatedShard]],
    network: NetworkConfig,
    dense: bool,
) -> SimulatedShares:
    """Return the ranks' shares of `loads` under `plan`, the shards of each table.

    For a table that is cut by rows, a shard sends partial sums within the node only for bags that have ids of the
    shard. For samples of other nodes, the G ranks of a node gather all partial sums of the node, each rank for one
    sample in G, and send the sums. If `dense`, collectives add up the partial sums of a machine first, for samples of
    all ranks (exact for table-row-wise shards).

    Example: 2 ranks of a node share a table of 2 ids per bag and 64 columns by rows. Each has 1 of `memory` and `ids`,
    2 of `links` (64 columns, while the mean of whole tables is 32), and 1.5 of `near`, since a fourth of the bags have
    no id of its rows; with `dense` it has 2.
    """
    W, G, M = network.world_size, network.gpus_per_node, network.machine_size
    found = np.zeros((6, W))
    for load, shards in zip(loads, plan, strict=True):
        nodes = [shard.rank // G for shard in shards]
        for rank, columns, rows in shards:
            near, away, sums = float(columns), float(columns), 0.0
            if rows < 1 and dense:
                # Partial sums go to the M - 1 other ranks of the machine, then sums to ranks of other machines.
                near = (columns * W / M * (M - 1) + columns / M * (G - M)) / max(1, G - 1)
                away = columns / M
            elif rows < 1:
                near = columns * (1 - (1 - rows) ** load.pooling)  # bags that have an id of these rows
                if (here := nodes.count(rank // G)) > 1:
                    near += columns * (W - G) / G
                    away = sums = columns / here
            found[:, rank] += load.pooling * columns * rows, columns, load.pooling * rows, near, away, sums
    elements, ids = sum(load.pooling * load.dim for load in loads), sum(load.pooling for load in loads)
    columns = sum(load.dim for load in loads)
    return SimulatedShares(*(found * (W / np.array([elements, columns, ids, columns, columns, columns]))[:, None]))


@lru_cache(maxsize=32)
def plan_tables(
    loads: tuple[TableLoad, ...], plan: str, optimizer: Any, network: NetworkConfig, samples: int
) -> list[list[SimulatedShard]]:
    world_size = network.world_size
    if plan != "auto":
        return _torchrecs(loads, plan, optimizer, network, samples)
    if len(set(loads)) == 1 and len(loads) % world_size == 0:  # an equal number for each rank
        if len(loads) // world_size * loads[0].bytes > _CAPACITY_BYTES:
            raise _no_room(loads, world_size, "they have no room")
        return [[SimulatedShard(number % world_size, load.dim, 1.0)] for number, load in enumerate(loads)]
    cut_columns, machine_size = not looks_at_rows(optimizer), network.machine_size if network.nodes > 1 else None
    placed = balance(loads, world_size, _CAPACITY_BYTES, cut_columns, machine_size)
    if placed is None:
        raise _no_room(loads, world_size, "they have no room")
    found = []
    for number, (load, ranks) in enumerate(zip(loads, placed.ranks, strict=True)):
        by_rows = number in placed.by_rows
        part = (load.dim, 1 / len(ranks)) if by_rows else (load.dim // len(ranks), 1.0)
        found.append([SimulatedShard(rank, *part) for rank in ranks])
    return found


def _torchrecs(
    loads: Sequence[TableLoad], plan: str, optimizer: Any, network: NetworkConfig, samples: int
) -> list[list[SimulatedShard]]:
    import torch
    from torchrec.distributed.planner import ParameterConstraints, Topology
    from torchrec.distributed.planner.types import PlannerError
    from torchrec.distributed.types import ShardingType
    from torchrec.modules.embedding_configs import DataType, EmbeddingBagConfig
    from torchrec.modules.embedding_modules import EmbeddingBagCollection

    from dlrm_overlap.embedding.configured_sharders import build_sharders
    from dlrm_overlap.embedding.plan import torchrecs_planner

    configs = [
        EmbeddingBagConfig(
            num_embeddings=load.rows,
            embedding_dim=load.dim,
            name=f"t{number}",
            feature_names=[f"f{number}"],
            data_type=DataType.FP16 if load.row_bytes == 2 * load.dim else DataType.FP32,
        )
        for number, load in enumerate(loads)
    ]
    collection = EmbeddingBagCollection(configs, device=torch.device("meta"))
    types = [plan]
    if plan == "torchrec":
        types = [each.value for each in ShardingType if each != ShardingType.DATA_PARALLEL]  # has no fused lookup
    constraints = {
        config.name: ParameterConstraints(types, compute_kernels=["fused"], pooling_factors=[load.pooling])
        for config, load in zip(configs, loads, strict=True)
    }
    logging.getLogger("torchrec").setLevel(logging.ERROR)  # the planner warns about how hardware is described
    topology = Topology(network.world_size, "cuda", hbm_cap=_GPU_BYTES, local_world_size=network.machine_size)
    planner = torchrecs_planner(topology, samples, constraints)
    sharders = build_sharders(EmbeddingConfig(backend="pgas", optimizer=optimizer))
    try:
        (planned,) = planner.plan(torch.nn.Sequential(collection), sharders).plan.values()
    except PlannerError as error:
        raise _no_room(
            loads, network.world_size, f"TorchRec's planner has no plan ({in_one_line(error):.200}...)"
        ) from None
    found = []
    for config in configs:
        shards = planned[config.name].sharding_spec.shards  # type: ignore[index]
        rows = config.num_embeddings
        found.append([SimulatedShard(s.placement.rank(), s.shard_sizes[1], s.shard_sizes[0] / rows) for s in shards])
    return found


def _no_room(loads: Sequence[TableLoad], world_size: int, why: str) -> InputError:
    size = sum(load.bytes for load in loads) / 1e9
    text = f"data.tables: {size:.0f} GB on {world_size} ranks: {why}; set data.tables.max_rows, or take more ranks"
    return InputError(text)
