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
from torchrec.distributed.types import CacheParams, ModuleSharder, ShardingPlan
from torchrec.modules.embedding_configs import BaseEmbeddingConfig, data_type_to_dtype
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection

from dlrm_overlap.config import EmbeddingConfig, InputError, in_one_line
from dlrm_overlap.data.batch import table_keys
from dlrm_overlap.embedding.balance import TableLoad, balance
from dlrm_overlap.kernels.arguments import looks_at_rows, state_bytes

log = logging.getLogger("dlrm_overlap")

_RESERVED = 0.2  # of a device's memory: all but tables

_FUSED = EmbeddingComputeKernel.FUSED.value
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
            compute_kernels=[_FUSED],
            min_partition=_LEAST_COLUMNS,
            pooling_factors=[(bag_sizes or {}).get(feature, 1.0) for feature in config.feature_names],
        )
        for _, configs in _collections(model).values()
        for config in configs
    }


def build_topology(device: torch.device, world_size: int, local_world_size: int) -> Topology:
    """Describe the machine to TorchRec's planner: all memory of this device, since nothing is allocated yet."""
    if device.type == "cpu":
        room: dict[str, Any] = {"ddr_cap": psutil.virtual_memory().total // local_world_size}
    else:
        room = {"hbm_cap": torch.cuda.get_device_properties(device).total_memory}
    return Topology(world_size, device.type, local_world_size=local_world_size, **room)


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


class Unsharded:
    """The tables of a module that is not sharded, and what a configuration makes of them on these ranks."""

    def __init__(
        self,
        module: nn.Module,
        sharders: list[ModuleSharder[Any]],
        topology: Topology,
        config: EmbeddingConfig,
        pooling: Sequence[float],
        group: dist.ProcessGroup,
    ) -> None:
        """Take the tables and their ranks; a collective.

        Args:
            module: whose collections have the tables `table_keys`.
            sharders: of the collections.
            pooling: mean number of ids in a bag, per table.
            group: the ranks.

        Raises:
            InputError: see `cached_tables`.
        """
        self._module, self._sharders, self._topology = module, sharders, topology
        self._config, self._group = config, group
        self._collections, names = _collections(module), table_keys(len(pooling))
        by_name = {table.name: table for _, configs in self._collections.values() for table in configs}
        self.tables = [by_name[name] for name in names]
        """in the order of the ids"""
        self.pooling = dict(zip(names, pooling, strict=True))
        self.unpooled = {
            table.name
            for each, configs in self._collections.values()
            if isinstance(each, EmbeddingCollection)
            for table in configs
        }
        """those all of whose rows travel, rather than one sum of a bag"""
        self._on_gpu, self._world_size = topology.compute_device == "cuda", group.size()
        storage, capacities = topology.devices[group.rank()].storage, [0] * group.size()
        dist.all_gather_object(capacities, storage.hbm if self._on_gpu else storage.ddr, group)
        self._capacity = int(min(capacities) * (1 - _RESERVED))
        """bytes of a rank for tables"""
        self._cached = self.cached_tables(self._capacity * self._world_size if self._on_gpu else None)

    def plan(self, batch_size: int) -> ShardingPlan:
        """Return the plan of `config.plan` for so many samples a rank, the same on every rank; a collective.

        Raises:
            InputError: if the tables do not fit.
        """
        return self._balanced() if self._config.plan == "auto" else self.planned_by_torchrec(batch_size)

    def cached_tables(self, capacity_bytes: float | None) -> set[str]:
        """Return the tables that are cached, see `embedding.memory`.

        Under auto they are the largest, the least number of them that leaves room for the others and the caches.

        Args:
            capacity_bytes: the room for tables on all GPUs; None on CPUs, which have no other memory.

        Raises:
            InputError: if `embedding.memory` has not one value, nor one a table.
        """
        config, names = self._config, [table.name for table in self.tables]
        memory = [config.memory] * len(names) if isinstance(config.memory, str) else config.memory
        if len(memory) != len(names):
            raise InputError(
                f"embedding.memory: {len(memory)} values for {len(names)} tables; give one value, or one a table"
            )
        cached = {name for name, each in zip(names, memory, strict=True) if each == "cached"}
        if capacity_bytes is None:
            return cached
        sizes = {table.name: float(_table_bytes(table, config.optimizer)) for table in self.tables}
        held = {table.name: _held_share(table, config) for table in self.tables}
        needed = sum(sizes[name] * (held[name] if name in cached else 1.0) for name in names)
        may = [name for name, each in zip(names, memory, strict=True) if each == "auto"]
        for name in sorted(may, key=lambda each: (-sizes[each], each)):
            if needed <= capacity_bytes:
                break
            cached.add(name)
            needed -= sizes[name] * (1 - held[name])
        return cached

    def _cache_params(self) -> CacheParams:
        config = self._config
        return CacheParams(load_factor=config.cache_fraction, prefetch_pipeline=config.backend == "torchrec" or None)

    def _cache(self, tables: Any) -> None:
        """Have the cached ones of some tables of a plan, by name, cached."""
        for name in self._cached & tables.keys():
            tables[name].compute_kernel, tables[name].cache_params = _CACHING, self._cache_params()

    def planned_by_torchrec(self, batch_size: int) -> ShardingPlan:
        """Return the plan of TorchRec's planner, which rank 0 makes, with shards of the configured type."""
        kind, dim = self._config.plan, self.tables[0].embedding_dim
        # TorchRec never cuts columns below 128 of itself: where columns are asked for, every rank may have some.
        min_partition = max(4, dim // self._topology.world_size // 4 * 4) if kind == "column_wise" else None
        cached = self._cached if self._on_gpu else set()  # for CPUs the planner knows no other kernel
        constraints = {
            name: ParameterConstraints(
                sharding_types=None if kind == "torchrec" else [kind],
                compute_kernels=[_CACHING if name in cached else _FUSED],
                pooling_factors=[factor],
                min_partition=min_partition,
                cache_params=self._cache_params() if name in cached else None,
            )
            for name, factor in self.pooling.items()
        }
        planner = torchrecs_planner(self._topology, batch_size, constraints)
        try:
            plan = planner.collective_plan(self._module, self._sharders, self._group)
        except PlannerError as error:
            raise _does_not_fit(kind, in_one_line(error)) from None
        for tables in plan.plan.values():
            self._cache(tables)
        return plan

    def _balanced(self) -> ShardingPlan:
        """Return the shards of the tables placed by `balance`; all ranks do so alike."""
        config, local, world_size = self._config, self._topology.local_world_size, self._world_size
        loads = list[TableLoad]()
        for table in self.tables:
            row_bytes = table.embedding_dim * data_type_to_dtype(table.data_type).itemsize
            size, pooled = _table_bytes(table, config.optimizer), table.name not in self.unpooled
            if table.name in self._cached and self._on_gpu:
                size = round(size * _held_share(table, config))
            ids, rows = self.pooling[table.name], table.num_embeddings
            loads.append(TableLoad(ids, table.embedding_dim, row_bytes, size, rows, pooled))
        # FBGEMM updates each shard's columns apart, row-wise states and norms of rows included: where cuts of columns
        # depend on the number of ranks, so would the training, and losses would part on another number of them.
        cut_columns, host_size = not looks_at_rows(config.optimizer), local if world_size % local == 0 else None
        placed = balance(loads, world_size, self._capacity, cut_columns, host_size)
        if placed is None:
            held = sum(load.bytes for load in loads)
            text = f"{held} bytes of tables on {world_size} ranks with room for {self._capacity} each"
            raise _does_not_fit("auto", text)
        if self._group.rank() == 0:
            text = "plan: the fullest rank reads %.2f times the mean of rows, and sends %.2f times that of columns"
            log.info(text, placed.memory, placed.links)
        shardings = dict[str, ParameterShardingGenerator]()
        for number, (table, ranks) in enumerate(zip(self.tables, placed.ranks, strict=True)):
            if number in placed.by_rows:
                shardings[table.name] = row_wise() if len(ranks) == world_size else table_row_wise(ranks[0] // local)
            else:
                shardings[table.name] = table_wise(ranks[0]) if len(ranks) == 1 else column_wise(ranks)
        plan = ShardingPlan({})
        for path, (collection, configs) in self._collections.items():
            (sharder,) = [each for each in self._sharders if isinstance(collection, each.module_type)]
            own = {table.name: shardings[table.name] for table in configs}
            device_type = self._topology.compute_device
            made = construct_module_sharding_plan(collection, own, sharder, local, world_size, device_type)
            for name in own:
                made[name].compute_kernel = _FUSED
            self._cache(made)
            plan.plan[path] = made
        return plan


def _table_bytes(table: BaseEmbeddingConfig, optimizer: str) -> int:
    """Return the bytes of a table's rows and their optimizer's states."""
    row_bytes = table.embedding_dim * data_type_to_dtype(table.data_type).itemsize
    return round(table.num_embeddings * (row_bytes + state_bytes(optimizer, table.embedding_dim)))


def _held_share(table: BaseEmbeddingConfig, config: EmbeddingConfig) -> float:
    """Return the bytes that a cached table takes on the GPU over all of its own: its slots, and where each row is."""
    return min(1.0, config.cache_fraction + 4 * table.num_embeddings / _table_bytes(table, config.optimizer))


def _collections(module: nn.Module) -> dict[str, tuple[nn.Module, Sequence[BaseEmbeddingConfig]]]:
    """Return the collections of a module that is not sharded, and the configurations of their tables, by path."""
    found: dict[str, tuple[nn.Module, Sequence[BaseEmbeddingConfig]]] = {}
    for path, each in module.named_modules():
        if isinstance(each, EmbeddingBagCollection):
            found[path] = each, each.embedding_bag_configs()
        elif isinstance(each, EmbeddingCollection):
            found[path] = each, each.embedding_configs()
    return found


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
