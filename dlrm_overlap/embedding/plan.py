"""The sharding plan: TorchRec's planner, given the bandwidths and the memory of this machine."""

from collections.abc import Sequence
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
from torchrec.distributed.planner.types import PlannerError
from torchrec.distributed.types import ModuleSharder, ShardingPlan

from dlrm_overlap.config import EmbeddingConfig, InputError
from dlrm_overlap.data.batch import table_keys

_SHARDING_TYPES = {
    "auto": ["table_wise", "column_wise"],
    "table_wise": ["table_wise"],
    "column_wise": ["column_wise"],
    "row_wise": ["row_wise"],
}
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


def build_topology(device: torch.device, world_size: int, local_world_size: int) -> Topology:
    """Describe the machine to the planner: memory of this device, and bandwidths in bytes/ms as the planner wants them.

    GPUs that the table does not know keep the planner's own bandwidths. Memory is what the device has in all, since
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
    sharder: ModuleSharder,
    topology: Topology,
    config: EmbeddingConfig,
    dim: int,
    pooling: Sequence[float],
    batch_size: int,
    group: dist.ProcessGroup,
) -> ShardingPlan:
    """Plan on rank 0 and give every rank of `group` the same plan.

    Args:
        dim: embedding dimension D.
        pooling: mean number of ids in a bag, per table.
        batch_size: samples a rank.
    """
    # TorchRec never cuts columns below 128 of itself: where columns are asked for, every rank may have some.
    min_partition = max(4, dim // topology.world_size // 4 * 4) if config.plan == "column_wise" else None
    constraints = {
        key: ParameterConstraints(
            sharding_types=_SHARDING_TYPES[config.plan],
            compute_kernels=[EmbeddingComputeKernel.FUSED.value],
            pooling_factors=[factor],
            min_partition=min_partition,
        )
        for key, factor in zip(table_keys(len(pooling)), pooling, strict=True)
    }
    planner = EmbeddingShardingPlanner(
        topology=topology,
        batch_size=batch_size,
        constraints=constraints,
        storage_reservation=FixedPercentageStorageReservation(percentage=0.2),
        debug=False,
    )
    try:
        return planner.collective_plan(module, [sharder], group)
    except PlannerError as error:
        reason = " ".join(str(error).split())
        raise InputError(
            f"embedding.plan: no plan of kind {config.plan} fits ({reason:.200}...); cap the tables with "
            f"--data.tables.max_rows, or use more ranks"
        ) from None


def describe_plan(plan: ShardingPlan) -> str:
    """Return the plan as a Markdown table: table, sharding type, ranks of its shards and their sizes."""
    lines = ["| table | sharding | ranks | shards |", "|---|---|---|---|"]
    for module in plan.plan.values():
        for table, sharding in sorted(module.items()):  # type: ignore[attr-defined]
            shards = " ".join("x".join(map(str, shard.shard_sizes)) for shard in sharding.sharding_spec.shards)
            ranks = " ".join(map(str, sharding.ranks))
            lines.append(f"| {table} | {sharding.sharding_type} | {ranks} | {shards} |")
    return "\n".join(lines)
