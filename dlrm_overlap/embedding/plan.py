"""The sharding plan: tables balanced over the ranks, or TorchRec's planner with this machine's figures."""

import logging
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
from torchrec.distributed.planner.types import PlannerError
from torchrec.distributed.sharding_plan import (
    ParameterShardingGenerator,
    column_wise,
    construct_module_sharding_plan,
    data_parallel,
    row_wise,
    table_row_wise,
    table_wise,
)
from torchrec.distributed.types import CacheParams, ModuleSharder, ParameterSharding, ShardingPlan, ShardingType
from torchrec.modules.embedding_configs import BaseEmbeddingConfig, data_type_to_dtype
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection

from dlrm_overlap.config import EmbeddingConfig, InputError, in_one_line
from dlrm_overlap.data.batch import table_keys
from dlrm_overlap.embedding.balance import TableLoad, balance
from dlrm_overlap.embedding.traffic import partial_sums
from dlrm_overlap.kernels.arguments import looks_at_rows, state_bytes

log = logging.getLogger("dlrm_overlap")

# Datasheet figures, bytes/s: (memory, links out of one GPU to its peers). Looked up rather than measured at start,
# so that two runs of one configuration get one plan.
_GPU_BYTES_PER_S = {
    "B200": (8.0e12, 900e9),
    "H200": (4.8e12, 450e9),
    "H100": (3.35e12, 450e9),
    "A100": (2.0e12, 300e9),
    "V100": (0.9e12, 150e9),
}
_PCIE_BYTES_PER_S = 25e9
_NETWORK_BYTES_PER_S = 50e9  # a 400 Gb/s adapter a GPU
_RESERVED = 0.2  # of a device's memory: all but tables
_REPLICATED_BYTES = 4 * 4  # of an element of a data-parallel table: weight, gradient, up to two states of the optimizer

_CACHING = EmbeddingComputeKernel.FUSED_UVM_CACHING.value

_LEAST_COLUMNS = 32  # of a shard by `constraints`, a quarter of the usual 128, of which TorchRec's planner cuts none


def constraints(model: nn.Module, bag_sizes: Mapping[str, float] | None = None) -> dict[str, ParameterConstraints]:
    """Return constraints by table, under which the plan of TorchRec's planner is exchanged and captured.

    All lookups have compute kernel `fused`. Tables may be cut by columns down to shards of 32, instead of 128.

    Args:
        model: not sharded yet.
        bag_sizes: feature -> mean number of ids in a bag or a sequence, which the planner otherwise takes for 1.

    Example:
        planner = EmbeddingShardingPlanner(constraints=constraints(model, {"clicks": 20}))
    """
    return {
        config.name: ParameterConstraints(
            compute_kernels=[EmbeddingComputeKernel.FUSED.value],
            min_partition=_LEAST_COLUMNS,
            pooling_factors=[(bag_sizes or {}).get(feature, 1.0) for feature in config.feature_names],
        )
        for _, configs in _collections(model).values()
        for config in configs
    }


def build_topology(device: torch.device, world_size: int, local_world_size: int) -> Topology:
    """Describe the machine to the planner: memory of this device, and bandwidths in bytes/ms as the planner wants them.

    GPUs that the table does not know keep the planner's own bandwidths. Memory is all of the device's, since
    the planner runs before anything is allocated.
    """
    if device.type == "cpu":
        return Topology(
            world_size,
            "cpu",
            ddr_cap=psutil.virtual_memory().total // local_world_size,
            local_world_size=local_world_size,
        )
    bandwidths: dict[str, Any] = {"inter_host_bw": _NETWORK_BYTES_PER_S / 1e3}
    name = torch.cuda.get_device_name(device)
    for gpu, (memory, links) in _GPU_BYTES_PER_S.items():
        if gpu in name:
            reachable = all(
                torch.cuda.can_device_access_peer(device.index or 0, peer)
                for peer in range(local_world_size)
                if peer != (device.index or 0)
            )
            bandwidths["hbm_mem_bw"] = memory / 1e3
            bandwidths["intra_host_bw"] = (links if reachable else _PCIE_BYTES_PER_S) / 1e3
    return Topology(
        world_size,
        "cuda",
        hbm_cap=torch.cuda.get_device_properties(device).total_memory,
        local_world_size=local_world_size,
        **bandwidths,
    )


def build_plan(
    module: nn.Module,
    sharders: list[ModuleSharder[Any]],
    topology: Topology,
    config: EmbeddingConfig,
    dim: int,
    pooling: Sequence[float],
    batch_size: int,
    group: dist.ProcessGroup,
) -> ShardingPlan:
    """Return the plan of `config.plan`, the same on every rank of `group`; a collective.

    Args:
        module: whose collections have the tables `table_keys`.
        sharders: of the collections.
        dim: embedding dimension D.
        pooling: mean number of ids in a bag, per table.
        batch_size: samples a rank.

    Raises:
        InputError: if the tables do not fit.
    """
    if config.plan == "auto":
        plan = _balanced_plan(module, sharders, topology, config, pooling, group)
    else:
        plan = _planners_plan(module, sharders, topology, config, dim, pooling, batch_size, group)
    by_table = dict(zip(table_keys(len(pooling)), pooling, strict=True))
    memory, links = fullest_rank(plan, by_table, group.size(), _unpooled_tables(module))
    if group.rank() == 0:
        kinds = [s.sharding_type for tables in plan.plan.values() for s in tables.values()]  # type: ignore[attr-defined]
        whole = kinds.count(ShardingType.DATA_PARALLEL.value)
        log.info(
            "plan: no rank reads more than %.2f times the mean of rows, nor has more than %.2f times that of columns%s",
            memory,
            links,
            f"; {whole} tables are on every rank" if whole else "",
        )
    return plan


def torchrecs_planner(
    topology: Topology, batch_size: int, constraints: dict[str, ParameterConstraints]
) -> EmbeddingShardingPlanner:
    """Return TorchRec's planner, which leaves a fifth of the memory to all but tables, for batches of a rank."""
    return EmbeddingShardingPlanner(
        topology=topology,
        batch_size=batch_size,
        constraints=constraints,
        storage_reservation=FixedPercentageStorageReservation(percentage=_RESERVED),
        debug=False,
    )


def _planners_plan(
    module: nn.Module,
    sharders: list[ModuleSharder[Any]],
    topology: Topology,
    config: EmbeddingConfig,
    dim: int,
    pooling: Sequence[float],
    batch_size: int,
    group: dist.ProcessGroup,
) -> ShardingPlan:
    """Return the plan of TorchRec's planner, which rank 0 makes, with shards of the configured type."""
    # TorchRec never cuts columns below 128 of itself: where columns are asked for, every rank may have some.
    min_partition = max(4, dim // topology.world_size // 4 * 4) if config.plan == "column_wise" else None
    names, on_gpu = table_keys(len(pooling)), topology.compute_device == "cuda"
    capacity = min(_capacities(topology, group)) * (1 - _RESERVED) * group.size() if on_gpu else None
    cached = cached_tables(module, config, names, capacity)
    _require_host_memory(module, cached, config, topology)
    constraints = {
        key: ParameterConstraints(
            sharding_types=None if config.plan == "torchrec" else [config.plan],
            # For CPUs the planner knows no other kernel.
            compute_kernels=[_CACHING if key in cached and on_gpu else EmbeddingComputeKernel.FUSED.value],
            pooling_factors=[factor],
            min_partition=min_partition,
            cache_params=_cache_params(config) if key in cached and on_gpu else None,
        )
        for key, factor in zip(names, pooling, strict=True)
    }
    try:
        plan = torchrecs_planner(topology, batch_size, constraints).collective_plan(module, sharders, group)
    except PlannerError as error:
        raise _does_not_fit(config.plan, in_one_line(error)) from None
    for tables in plan.plan.values():
        for name in cached & tables.keys():  # type: ignore[attr-defined]
            _cache(tables[name], config)  # type: ignore[index]
    return plan


def _capacities(topology: Topology, group: dist.ProcessGroup) -> list[int]:
    """Return the memory of each rank for tables, in bytes; a collective."""
    storage, capacities = topology.devices[group.rank()].storage, [0] * group.size()
    dist.all_gather_object(capacities, storage.hbm if topology.compute_device == "cuda" else storage.ddr, group)
    return capacities


def _cache_params(config: EmbeddingConfig) -> CacheParams:
    return CacheParams(load_factor=config.cache_fraction, prefetch_pipeline=config.backend == "torchrec" or None)


def _cache(sharding: ParameterSharding, config: EmbeddingConfig) -> None:
    """Have a table of a plan cached."""
    sharding.compute_kernel, sharding.cache_params = _CACHING, _cache_params(config)


def cached_tables(
    module: nn.Module, config: EmbeddingConfig, names: Sequence[str], capacity_bytes: float | None
) -> set[str]:
    """Return the tables that a plan of `config` caches, see `embedding.memory`.

    Under auto they are the largest, the least number of them that leaves room for the others and the caches.

    Args:
        module: that is not sharded.
        config: of the embedding stage.
        names: of the tables, in the order of `embedding.memory`.
        capacity_bytes: the room for tables on all GPUs; None on CPUs, which have no other memory.

    Raises:
        InputError: if `embedding.memory` has not one value, nor one a table, or one of a table that cannot be cached.
    """
    memory = [config.memory] * len(names) if isinstance(config.memory, str) else config.memory
    if len(memory) != len(names):
        raise InputError(
            f"embedding.memory: {len(memory)} values for {len(names)} tables; give one value, or one a table"
        )
    by_name = {table.name: table for _, configs in _collections(module).values() for table in configs}
    every, unpooled = [by_name[name] for name in names], _unpooled_tables(module)
    whole = {name for name, each in zip(names, memory, strict=True) if each == "cached"}
    if refused := sorted(whole & unpooled) if isinstance(config.memory, list) else []:
        raise InputError(
            f"embedding.memory: cached for table {refused[0]}, whose rows are not pooled, and only pooled tables are "
            f"cached; set gpu for it"
        )
    kept = [names.index(name) for name in unpooled]
    small = data_parallel_tables(config, [table.num_embeddings for table in every], kept)
    left_out = unpooled | {names[index] for index in small}
    cached = whole - left_out
    if capacity_bytes is None:
        return cached
    sizes = {table.name: float(_table_bytes(table, config.optimizer)) for table in every}
    needed = sum(sizes[name] * (_held_share(by_name[name], config) if name in cached else 1.0) for name in names)
    may = [name for name, each in zip(names, memory, strict=True) if each == "auto" and name not in left_out]
    for name in sorted(may, key=lambda each: (-sizes[each], each)):
        if needed <= capacity_bytes:
            break
        cached.add(name)
        needed -= sizes[name] * (1 - _held_share(by_name[name], config))
    return cached


def _table_bytes(table: BaseEmbeddingConfig, optimizer: str) -> int:
    """Return the bytes of a table's rows and their optimizer's states."""
    row_bytes = table.embedding_dim * data_type_to_dtype(table.data_type).itemsize
    return round(table.num_embeddings * (row_bytes + state_bytes(optimizer, table.embedding_dim)))


def _held_share(table: BaseEmbeddingConfig, config: EmbeddingConfig) -> float:
    """Return the bytes that a cached table takes on the GPU over all of its own: its slots, and where each row is."""
    return min(1.0, config.cache_fraction + 4 * table.num_embeddings / _table_bytes(table, config.optimizer))


def _require_host_memory(module: nn.Module, cached: set[str], config: EmbeddingConfig, topology: Topology) -> None:
    """Check that this host has memory for its share of the cached tables of a module that is not sharded.

    Raises:
        InputError: if it has not.
    """
    tables = [table for _, configs in _collections(module).values() for table in configs if table.name in cached]
    held = sum(_table_bytes(table, config.optimizer) for table in tables)
    here = held * topology.local_world_size // topology.world_size
    if here > (room := psutil.virtual_memory().available):
        raise InputError(
            f"embedding.memory: cached tables take {here / 1e9:.1f} GB of a host's memory, and {room / 1e9:.1f} GB are "
            f"there; cache fewer, use more hosts, or cap them by data.tables.max_rows"
        )


def _balanced_plan(
    module: nn.Module,
    sharders: list[ModuleSharder[Any]],
    topology: Topology,
    config: EmbeddingConfig,
    pooling: Sequence[float],
    group: dist.ProcessGroup,
) -> ShardingPlan:
    """Return data-parallel tables, and the shards of the others placed by `balance`; all ranks do so alike."""
    collections = _collections(module)
    world_size, device_type = group.size(), topology.compute_device
    room = min(_capacities(topology, group)) * (1 - _RESERVED)
    by_name = {table.name: table for _, configs in collections.values() for table in configs}
    names = table_keys(len(pooling))
    every, unpooled = [by_name[name] for name in names], _unpooled_tables(module)
    sequences = [names.index(name) for name in unpooled]
    small = data_parallel_tables(config, [table.num_embeddings for table in every], sequences)
    replicated = {names[index] for index in small}
    whole = sum(table.num_embeddings * table.embedding_dim for table in every if table.name in replicated)
    capacity = int(room) - whole * _REPLICATED_BYTES
    cached = cached_tables(module, config, names, capacity * world_size if device_type == "cuda" else None)
    _require_host_memory(module, cached, config, topology)
    loads: dict[str, TableLoad] = {}
    for table, ids in zip(every, pooling, strict=True):
        row_bytes = table.embedding_dim * data_type_to_dtype(table.data_type).itemsize
        size = _table_bytes(table, config.optimizer)
        if table.name in cached and device_type == "cuda":
            size = round(size * _held_share(table, config))
        pooled = table.name not in unpooled
        loads[table.name] = TableLoad(ids, table.embedding_dim, row_bytes, size, table.num_embeddings, pooled)
    divided = [load for name, load in loads.items() if name not in replicated]
    everywhere = [load for name, load in loads.items() if name in replicated]
    # FBGEMM updates each shard's columns apart, row-wise states and norms of rows included: where cuts of columns
    # depend on the number of ranks, so would the training, and losses would part on another number of them.
    local = topology.local_world_size
    host_size = local if world_size % local == 0 else None
    placed = balance(divided, world_size, capacity, not looks_at_rows(config.optimizer), everywhere, host_size)
    if placed is None:
        held = sum(load.bytes for load in divided)
        raise _does_not_fit("auto", f"{held} bytes of tables on {world_size} ranks with room for {capacity} each")
    shardings: dict[str, ParameterShardingGenerator] = {name: data_parallel() for name in sorted(replicated)}
    names = [name for name in loads if name not in replicated]
    for number, (name, ranks) in enumerate(zip(names, placed.ranks, strict=True)):
        if number in placed.by_rows:
            shardings[name] = row_wise() if len(ranks) == world_size else table_row_wise(ranks[0] // local)
        elif len(ranks) == 1:
            shardings[name] = table_wise(rank=ranks[0])
        else:
            shardings[name] = column_wise(ranks=ranks)
    plan = ShardingPlan({})
    for path, (tables, configs) in collections.items():
        (sharder,) = [each for each in sharders if isinstance(tables, each.module_type)]
        own = {table.name: shardings[table.name] for table in configs}
        made = construct_module_sharding_plan(tables, own, sharder, local, world_size, device_type)
        for name in own.keys() - replicated:
            made[name].compute_kernel = EmbeddingComputeKernel.FUSED.value
            if name in cached:
                _cache(made[name], config)
        plan.plan[path] = made
    return plan


def _collections(module: nn.Module) -> dict[str, tuple[nn.Module, Sequence[BaseEmbeddingConfig]]]:
    """Return the collections of a module that is not sharded, and the configurations of their tables, by path."""
    found: dict[str, tuple[nn.Module, Sequence[BaseEmbeddingConfig]]] = {}
    for path, each in module.named_modules():
        if isinstance(each, EmbeddingBagCollection):
            found[path] = each, each.embedding_bag_configs()
        elif isinstance(each, EmbeddingCollection):
            found[path] = each, each.embedding_configs()
    return found


def _unpooled_tables(module: nn.Module) -> set[str]:
    """Return the tables of a module that is not sharded all of whose rows travel, rather than one sum of a bag."""
    found = _collections(module).values()
    return {table.name for each, configs in found if isinstance(each, EmbeddingCollection) for table in configs}


def data_parallel_tables(config: EmbeddingConfig, rows: Sequence[int], unpooled: Collection[int] = ()) -> list[int]:
    """Return the numbers of the tables, which have `rows`, that a plan of `config` makes data-parallel.

    Those that are not pooled are none of them.

    On every number of ranks they are the same, one included, since the dense optimizer trains them and holds their
    state: otherwise training would depend on the number of ranks, and a checkpoint would load on no other number.
    Where all tables are so small none is, since a module without an exchange is left to TorchRec's pipeline.
    """
    if config.plan != "auto" or config.weight_dtype != "fp32":
        return []
    pooled = [index for index in range(len(rows)) if index not in unpooled]
    small = [index for index in pooled if rows[index] <= config.data_parallel_rows]
    return small if len(small) < len(pooled) else []


def fullest_rank(
    plan: ShardingPlan, pooling: Mapping[str, float], world_size: int, unpooled: Collection[str] = ()
) -> tuple[float, float]:
    """Return the row elements that the fullest rank reads, and the columns it sends, each over the mean of the ranks.

    The mean of columns is that of whole tables, to which partial sums of tables cut by rows only add. Data-parallel
    tables, which are work to all ranks alike, are left out.

    Args:
        pooling: mean number of ids in a bag, by table.
        unpooled: the tables all of whose rows travel.

    Example: 2 ranks, tables of 16 columns, one of 3 ids a bag on rank 0, one of 1 id on rank 1: (1.5, 1.0). The first
    cut by rows: rank 0 reads 24 elements, rank 1 40; rank 0 sends 14 columns, rank 1 30, where the mean is 16.
    """
    memory, links, columns = [0.0] * world_size, [0.0] * world_size, 0
    for tables in plan.plan.values():
        for table, sharding in tables.items():  # type: ignore[attr-defined]
            if sharding.sharding_type == ShardingType.DATA_PARALLEL.value:
                continue
            shards = [shard for shard in sharding.sharding_spec.shards if shard.shard_sizes[0]]
            cut = [shard for shard in shards if shard.shard_offsets[1] == 0]
            rows = sum(shard.shard_sizes[0] for shard in cut)
            ids, travels = pooling[table], pooling[table] if table in unpooled else 1.0
            sent = ids if table in unpooled else partial_sums(ids, len(cut))
            columns += travels * sum(shard.shard_sizes[1] for shard in shards if shard.shard_offsets[0] == 0)
            for shard in shards:
                rank = shard.placement.rank()
                memory[rank] += ids * shard.shard_sizes[1] * shard.shard_sizes[0] / rows
                links[rank] += shard.shard_sizes[1] * sent / len(cut)
    return max(memory) * world_size / (sum(memory) or 1.0), max(links) * world_size / (columns or 1)


def _does_not_fit(kind: str, reason: str) -> InputError:
    return InputError(
        f"embedding.plan: no plan of kind {kind} fits ({reason:.200}...); cache tables with --embedding.memory auto, "
        f"cap them with --data.tables.max_rows, or use more ranks"
    )


def plan_record(plan: ShardingPlan) -> dict[str, Any]:
    """Return a checkpoint's record of the plan: of each table the sharding, and rank, offsets and sizes of shards."""
    return {
        table: {"sharding": sharding.sharding_type}
        | {
            "shards": [
                {"rank": s.placement.rank(), "offsets": list(s.shard_offsets), "sizes": list(s.shard_sizes)}
                for s in (sharding.sharding_spec.shards if sharding.sharding_spec else [])
            ]
        }
        for module in plan.plan.values()
        for table, sharding in sorted(module.items())  # type: ignore[attr-defined]
    }


def describe_plan(plan: ShardingPlan) -> str:
    """Return the plan as a Markdown table: table, sharding type, ranks of its shards and their sizes."""
    lines = ["| table | sharding | ranks | shards |", "|---|---|---|---|"]
    for module in plan.plan.values():
        for table, sharding in sorted(module.items()):  # type: ignore[attr-defined]
            if sharding.sharding_type == ShardingType.DATA_PARALLEL.value:
                lines.append(f"| {table} | {sharding.sharding_type} | all | whole |")
                continue
            shards = " ".join("x".join(map(str, shard.shard_sizes)) for shard in sharding.sharding_spec.shards)
            ranks = " ".join(map(str, sharding.ranks))
            lines.append(f"| {table} | {sharding.sharding_type} | {ranks} | {shards} |")
    return "\n".join(lines)
