"""The sharding plan: tables balanced over the ranks, or the plan of TorchRec's planner."""

import logging
from collections.abc import Mapping, Sequence
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
    row_wise,
    table_row_wise,
    table_wise,
)
from torchrec.distributed.types import CacheParams, ModuleSharder, ShardingPlan, ShardingType
from torchrec.modules.embedding_configs import BaseEmbeddingConfig, data_type_to_dtype
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.modules.mc_embedding_modules import (
    ManagedCollisionEmbeddingBagCollection,
    ManagedCollisionEmbeddingCollection,
)

from dlrm_overlap.comm.every_rank import gathered
from dlrm_overlap.comm.reach import find_nodes
from dlrm_overlap.config import EmbeddingConfig, InputError, in_one_line
from dlrm_overlap.data.schema import table_keys
from dlrm_overlap.embedding.balance import TableLoad, balance
from dlrm_overlap.embedding.id_tables.rules import map_bytes
from dlrm_overlap.kernels.ids.id_map import SEGMENT
from dlrm_overlap.kernels.optimizer_params import looks_at_rows, state_bytes
from dlrm_overlap.torchrec_private.attributes import table_configs_of

log = logging.getLogger("dlrm_overlap")

_RESERVED = 0.2  # share of a device's memory that is not for tables

_FUSED = EmbeddingComputeKernel.FUSED.value
_CACHING = EmbeddingComputeKernel.FUSED_UVM_CACHING.value

_OF_ANY_ID = ManagedCollisionEmbeddingBagCollection, ManagedCollisionEmbeddingCollection
_MIN_COLUMNS = 32  # of a shard; TorchRec's default is 128


def constraints(model: nn.Module, bag_sizes: Mapping[str, float] | None = None) -> dict[str, ParameterConstraints]:
    """Return constraints by table for TorchRec's planner, so that its plan can be exchanged and captured.

    All tables have compute kernel `fused`, and may be cut into shards of 32 columns instead of 128.

    Args:
        bag_sizes: feature -> mean ids of a bag or a sequence, by default 1.

    Raises:
        InputError: if no table has a feature of `bag_sizes`.

    Example:
        planner = EmbeddingShardingPlanner(constraints=constraints(model, {"clicks": 20}))
    """
    collections, given = _collections(model), bag_sizes or {}
    features = {name for _, configs in collections.values() for config in configs for name in config.feature_names}
    if unknown := sorted(given.keys() - features):
        raise InputError(f"bag_sizes: no table has {', '.join(unknown)}; give features of the model's tables")
    divided = _tables_of_any_id(collections)
    return {
        config.name: ParameterConstraints(
            sharding_types=[ShardingType.ROW_WISE.value] if config.name in divided else None,
            compute_kernels=[_FUSED],
            min_partition=_MIN_COLUMNS,
            pooling_factors=[given.get(feature, 1.0) for feature in config.feature_names],
        )
        for _, configs in collections.values()
        for config in configs
    }


def build_topology(device: torch.device, world_size: int, local_world_size: int) -> Topology:
    if device.type == "cpu":
        room: dict[str, Any] = {"ddr_cap": psutil.virtual_memory().total // local_world_size}
    else:
        room = {"hbm_cap": torch.cuda.get_device_properties(device).total_memory}
    return Topology(world_size, device.type, local_world_size=local_world_size, **room)


def torchrecs_planner(
    topology: Topology, batch_size: int, constraints: dict[str, ParameterConstraints]
) -> EmbeddingShardingPlanner:
    """Return TorchRec's planner, with a fifth of the memory reserved."""
    return EmbeddingShardingPlanner(
        topology=topology,
        batch_size=batch_size,
        constraints=constraints,
        storage_reservation=FixedPercentageStorageReservation(percentage=_RESERVED),
        debug=False,
    )


def make_plan(
    module: nn.Module,
    sharders: list[ModuleSharder[Any]],
    topology: Topology,
    config: EmbeddingConfig,
    pooling: Sequence[float],
    batch_size: int,
    group: dist.ProcessGroup,
) -> ShardingPlan:
    """Return the plan that `config.plan` names, the same on every rank; a collective.

    Args:
        module: not sharded yet, with tables named `table_keys`.
        pooling: mean ids of a bag, by table.
        batch_size: samples of a rank.

    Raises:
        InputError: if the tables do not fit, or `embedding.memory` has another number of values.
    """
    # What each table costs.
    collections, loads = _collections(module), dict[str, TableLoad]()
    of_any_id = _tables_of_any_id(collections)
    tables = {table.name: (each, table) for each, configs in collections.values() for table in configs}
    for name, ids in zip(table_keys(len(pooling)), pooling, strict=True):
        collection, table = tables[name]
        row_bytes = table.embedding_dim * data_type_to_dtype(table.data_type).itemsize
        size = round(table.num_embeddings * (row_bytes + state_bytes(config.optimizer, table.embedding_dim)))
        is_pooled = not isinstance(collection, EmbeddingCollection | ManagedCollisionEmbeddingCollection)
        maps = table.num_embeddings * map_bytes(config.id_tables) if name in of_any_id else 0
        loads[name] = TableLoad(ids, table.embedding_dim, row_bytes, size + maps, table.num_embeddings, is_pooled, maps)
    # Room for tables on each rank, and the tables that are cached for lack of it.
    on_gpu, storage = topology.compute_device == "cuda", topology.devices[group.rank()].storage
    capacity = int(min(gathered(storage.hbm if on_gpu else storage.ddr, group)) * (1 - _RESERVED))
    cached = cached_tables(loads, config, capacity * group.size() if on_gpu else None)
    if config.backend == "torchrec" and (both := sorted(cached & of_any_id)):
        raise InputError(
            f"embedding.memory: {both[0]} is to be cached, but with backend torchrec a table of any id has its rows in "
            f"GPU memory; take backend pgas or fused, or give it memory gpu and fewer rows"
        )
    if unpooled := sorted(name for name in cached & of_any_id if not loads[name].pooled):
        raise InputError(
            f"embedding.memory: {unpooled[0]} is to be cached, but a history of any id has its rows in GPU memory; "
            f"give it memory gpu"
        )
    params = CacheParams(load_factor=config.cache_fraction, prefetch_pipeline=config.backend == "torchrec" or None)
    if config.plan == "auto":
        if on_gpu:
            loads |= {name: loads[name]._replace(bytes=round(_held_bytes(loads[name], config))) for name in cached}
        plan = _balanced(collections, loads, sharders, topology, config, capacity, group)
    else:  # on CPUs TorchRec's planner has no caching kernel
        of_gpu = dict.fromkeys(cached if on_gpu else (), params)
        plan = _planned_by_torchrec(module, loads, sharders, topology, config.plan, of_gpu, batch_size, group)
    # Either plan has compute kernel `fused`; cached tables get their own.
    for by_name in plan.plan.values():
        sharded: Any = by_name
        for name in cached & sharded.keys():
            sharded[name].compute_kernel, sharded[name].cache_params = _CACHING, params
    return plan


def cached_tables(loads: Mapping[str, TableLoad], config: EmbeddingConfig, capacity_bytes: float | None) -> set[str]:
    """Return the names of cached tables; of tables with memory `auto`, the largest, until the others fit.

    Args:
        capacity_bytes: room for tables on all GPUs; None on CPUs, which have no other memory.
    """
    memory = [config.memory] * len(loads) if isinstance(config.memory, str) else config.memory
    if len(memory) != len(loads):
        raise InputError(
            f"embedding.memory: {len(memory)} values for {len(loads)} tables; give one value, or one a table"
        )
    asked = dict(zip(loads, memory, strict=True))
    cached = {name for name, each in asked.items() if each == "cached"}
    if capacity_bytes is None:
        return cached
    needed = sum(_held_bytes(load, config) if name in cached else load.bytes for name, load in loads.items())
    for name in sorted(loads, key=lambda each: (-loads[each].bytes, each)):
        if needed > capacity_bytes and asked[name] == "auto":
            cached.add(name)
            needed -= loads[name].bytes - _held_bytes(loads[name], config)
    return cached


def _held_bytes(load: TableLoad, config: EmbeddingConfig) -> float:
    """Return the bytes of a cached table on the GPU: its slots, 4 bytes for each row, and its map.

    Rows of a table of any id that are not trained have slots of their own, one in each bucket.
    """
    fraction = config.cache_fraction + (1 / SEGMENT if load.map_bytes else 0)
    return min(load.bytes, (load.bytes - load.map_bytes) * fraction + 4 * load.rows + load.map_bytes)


def _planned_by_torchrec(
    module: nn.Module,
    loads: Mapping[str, TableLoad],
    sharders: list[ModuleSharder[Any]],
    topology: Topology,
    kind: str,
    cached: Mapping[str, CacheParams],
    batch_size: int,
    group: dist.ProcessGroup,
) -> ShardingPlan:
    dim, divided = next(iter(loads.values())).dim, _tables_of_any_id(_collections(module))
    # By default TorchRec cuts no shard below 128 columns; here every rank may have some.
    min_partition = max(4, dim // topology.world_size // 4 * 4) if kind == "column_wise" else None
    constraints = {
        name: ParameterConstraints(
            sharding_types=[ShardingType.ROW_WISE.value] if name in divided else None if kind == "torchrec" else [kind],
            compute_kernels=[_CACHING if name in cached else _FUSED],
            pooling_factors=[load.pooling],
            min_partition=min_partition,
            cache_params=cached.get(name),
        )
        for name, load in loads.items()
    }
    try:
        return torchrecs_planner(topology, batch_size, constraints).collective_plan(module, sharders, group)
    except PlannerError as error:
        raise _does_not_fit(kind, in_one_line(error)) from None


def _balanced(
    collections: Mapping[str, tuple[nn.Module, Sequence[BaseEmbeddingConfig]]],
    loads: Mapping[str, TableLoad],
    sharders: list[ModuleSharder[Any]],
    topology: Topology,
    config: EmbeddingConfig,
    capacity: int,
    group: dist.ProcessGroup,
) -> ShardingPlan:
    local, world_size = topology.local_world_size, group.size()
    nodes, _ = find_nodes(group, torch.device(topology.compute_device))
    # FBGEMM updates each shard separately, with its own row-wise states and row norms. Cuts by columns would make the
    # losses depend on the number of ranks.
    cut_columns = not looks_at_rows(config.optimizer)
    # TorchRec cuts tables by rows over all ranks or, if all machines have the same number, over those of one machine.
    are_equal = set(gathered(local, group)) == {local} and world_size % local == 0
    machine_size = local if len(nodes) > 1 and are_equal else None
    # Tables of any id are cut by rows over all ranks, in whole buckets.
    divided = _tables_of_any_id(collections)
    held = sum(load.bytes for load in loads.values())
    capacity -= sum(loads[name].bytes for name in divided) // world_size
    placeable = {name: load for name, load in loads.items() if name not in divided}
    placed = balance(list(placeable.values()), world_size, capacity, cut_columns, machine_size) if placeable else None
    if capacity < 0 or (placed is None and placeable):
        raise _does_not_fit("auto", f"{held} bytes of tables on {world_size} ranks with room for {capacity} each")
    shardings = dict[str, ParameterShardingGenerator](dict.fromkeys(divided, row_wise()))
    if placed is not None and group.rank() == 0:
        text = "plan: the fullest rank reads %.2f times the mean row elements, and sends %.2f times the mean columns"
        log.info(text, placed.memory, placed.links)
    for number, (name, ranks) in enumerate(zip(placeable, placed.ranks if placed else [], strict=True)):
        if placed and number in placed.by_rows:
            shardings[name] = row_wise() if len(ranks) == world_size else table_row_wise(ranks[0] // local)
        else:
            shardings[name] = table_wise(ranks[0]) if len(ranks) == 1 else column_wise(ranks)
    plan = ShardingPlan({})
    for path, (collection, configs) in collections.items():
        (sharder,) = [each for each in sharders if isinstance(collection, each.module_type)]
        own, device_type = {table.name: shardings[table.name] for table in configs}, topology.compute_device
        made = construct_module_sharding_plan(collection, own, sharder, local, world_size, device_type)
        for name in own:
            made[name].compute_kernel = _FUSED
        plan.plan[path] = made
    return plan


def _collections(module: nn.Module) -> dict[str, tuple[nn.Module, Sequence[BaseEmbeddingConfig]]]:
    found: dict[str, tuple[nn.Module, Sequence[BaseEmbeddingConfig]]] = {}
    inside: set[nn.Module] = set()
    for path, each in module.named_modules():
        if isinstance(each, _OF_ANY_ID):
            found[path] = each, table_configs_of(each)
            inside.update(each.modules())
        elif each in inside:
            continue
        elif isinstance(each, EmbeddingBagCollection):
            found[path] = each, each.embedding_bag_configs()
        elif isinstance(each, EmbeddingCollection):
            found[path] = each, each.embedding_configs()
    return found


def _tables_of_any_id(collections: Mapping[str, tuple[nn.Module, Sequence[BaseEmbeddingConfig]]]) -> set[str]:
    found = [tables for each, tables in collections.values() if isinstance(each, _OF_ANY_ID)]
    return {table.name for tables in found for table in tables}


def _does_not_fit(kind: str, reason: str) -> InputError:
    return InputError(
        f"embedding.plan: no plan of kind {kind} fits ({reason:.200}...); cache tables with --embedding.memory auto, "
        f"cap them with --data.tables.max_rows, or use more ranks"
    )
