"""TorchRec's shardings of a module, and their layout for an exchange."""

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import SparseType
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.types import (
    ParameterSharding,
    ShardingEnv,
    ShardingEnv2D,
)
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType, data_type_to_dtype
from torchrec.modules.embedding_modules import get_embedding_names_by_table
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dlrm_overlap.config import EmbeddingConfig
from dlrm_overlap.embedding.layout import EVERY_RANK, FeatureShard, Layout, outputs_of, unique_names
from dlrm_overlap.torchrec_private import (
    CwPooledEmbeddingSharding,
    CwSequenceEmbeddingSharding,
    GridPooledEmbeddingSharding,
    RwPooledEmbeddingSharding,
    RwSequenceEmbeddingSharding,
    TwCwPooledEmbeddingSharding,
    TwPooledEmbeddingSharding,
    TwRwPooledEmbeddingSharding,
    TwSequenceEmbeddingSharding,
)
from dlrm_overlap.torchrec_private.attributes import groups_by_rank, ranks_of_a_node

UNPOOLED = TwSequenceEmbeddingSharding, CwSequenceEmbeddingSharding, RwSequenceEmbeddingSharding
TAKEN = (
    *UNPOOLED,
    TwPooledEmbeddingSharding,
    CwPooledEmbeddingSharding,
    TwCwPooledEmbeddingSharding,
    RwPooledEmbeddingSharding,
    TwRwPooledEmbeddingSharding,
    GridPooledEmbeddingSharding,
)
# TorchRec pools these to sums; for means it divides by the lengths of the whole bags after the exchange.
_CUT_BY_ROWS = (
    RwPooledEmbeddingSharding,
    TwRwPooledEmbeddingSharding,
    GridPooledEmbeddingSharding,
    RwSequenceEmbeddingSharding,
)
_CUT_BY_COLUMNS = (
    CwPooledEmbeddingSharding,
    TwCwPooledEmbeddingSharding,
    GridPooledEmbeddingSharding,
    CwSequenceEmbeddingSharding,
)
# TorchRec reduces the partial sums of these within a node first.
_BY_NODE = TwRwPooledEmbeddingSharding, GridPooledEmbeddingSharding


def exchanging_group(env: ShardingEnv) -> dist.ProcessGroup:
    """Return the group of ranks that exchange: under 2D parallelism the sharding group, else the module's group."""
    group = env.sharding_pg if isinstance(env, ShardingEnv2D) else env.process_group
    assert group is not None
    return group


def cached_shares(params: Mapping[str, ParameterSharding]) -> dict[str, float]:
    """Return table -> share of its rows that have cache slots, for tables with compute kernel `fused_uvm_caching`."""
    kernel = EmbeddingComputeKernel.FUSED_UVM_CACHING.value
    return {
        name: (each.cache_params and each.cache_params.load_factor) or EmbeddingConfig.cache_fraction
        for name, each in params.items()
        if each.compute_kernel == kernel
    }


def names_of(shardings: Sequence[Any]) -> dict[str, str]:
    return unique_names(name for sharding in shardings for name in sharding.embedding_names())


def groups_of(sharding: Any) -> list[Any]:
    return [group for groups in groups_by_rank(sharding) for group in groups]


def table_names(shardings: Sequence[Any]) -> set[str]:
    return {table.name for each in shardings for group in groups_of(each) for table in group.embedding_tables}


def output_types(sharding: Any) -> set[SparseType]:
    return {(group.fused_params or {}).get("output_dtype", SparseType.FP32) for group in groups_of(sharding)}


def in_rank_order(ids: KeyedJaggedTensor, sharding: Any, batch_sizes: tuple[int, ...]) -> KeyedJaggedTensor:
    """Return the ids of a sharding's input with rank 0's samples first, then rank 1's, and so on.

    TorchRec sorts the samples of some shardings by rank within the node. `batch_sizes` has the number of samples
    of each rank.

    Example: 2 nodes of 2 ranks, one sample each. Samples in the order of ranks 0, 2, 1, 3 become 0, 1, 2, 3.
    """
    local = ranks_of_a_node(sharding) if isinstance(sharding, _BY_NODE) else None
    if local is None:
        return ids
    order = _rank_order(len(ids.keys()), batch_sizes, local, ids.device())
    positions = torch.arange(ids.values().numel(), device=ids.device())
    lengths, positions, _ = torch.ops.fbgemm.permute_1D_sparse_data(order, ids.lengths(), positions, None)
    weights = ids.weights_or_none()
    weights = weights if weights is None else weights[positions]  # the operator would drop their gradient
    return KeyedJaggedTensor(ids.keys(), ids.values()[positions], weights, lengths=lengths, stride=sum(batch_sizes))


@lru_cache
def _rank_order(features: int, batch_sizes: tuple[int, ...], local: int, device: torch.device) -> torch.Tensor:
    """Return [features * B] int32: for each bag in rank order its position in TorchRec's order."""
    ranks = sorted(range(len(batch_sizes)), key=lambda rank: rank % local)
    samples = torch.arange(sum(batch_sizes)).split([batch_sizes[rank] for rank in ranks])
    bags = torch.cat([samples[ranks.index(rank)] for rank in range(len(batch_sizes))])
    return (torch.arange(features)[:, None] * len(bags) + bags).flatten().to(device, torch.int32)


def joined_inputs(inputs: Sequence[KeyedJaggedTensor], samples: int) -> KeyedJaggedTensor:
    """Return the ids of several inputs as those of one."""
    if len(inputs) == 1:
        return inputs[0]
    keys = [key for each in inputs for key in each.keys()]  # noqa: SIM118
    weights = [found for each in inputs if (found := each.weights_or_none()) is not None]
    return KeyedJaggedTensor(
        keys,
        torch.cat([each.values() for each in inputs]),
        torch.cat(weights) if weights else None,
        lengths=torch.cat([each.lengths() for each in inputs]),
        stride=samples,
    )


def model_order(tables: Sequence[EmbeddingBagConfig]) -> list[str]:
    return list(unique_names(name for names in get_embedding_names_by_table(list(tables)) for name in names))


def _names_and_columns(table: Any, cut_by_columns: bool) -> list[tuple[str, int]]:
    """Return for each feature of a shard the unique name of its pooled embedding, and its first column under that name.

    A table that lists a feature twice pools it twice, under two names. If the table is cut by columns, both have one
    name: TorchRec concatenates a shard's columns of both.

    Example: x twice, dim 8, cut in two. The second shard's columns begin at 8 and 12 of the 16 of x.
    """
    first = table.local_metadata.shard_offsets[1] if cut_by_columns else 0
    if not cut_by_columns or table.pooling == PoolingType.NONE:
        return [(name, first) for name, _ in outputs_of(table)]
    names = table.embedding_names
    return [
        (name, first * names.count(name) + names[:i].count(name) * table.local_cols) for i, name in enumerate(names)
    ]


def build_layout(
    shardings: Sequence[Any],
    names: Sequence[str],
    world_size: int,
    replicated: Sequence[Any] = (),
    buckets: Mapping[str, int] = MappingProxyType({}),
) -> Layout:
    """Return the layout of shardings, identical on every rank, for an output in the order of the unique `names`.

    Sharding i has its ids in input i of each rank. `replicated` has the data-parallel sharding, if any, and `buckets`
    the number of buckets of each table of any id.
    """
    shards: list[FeatureShard] = []
    row_shards: Counter[tuple[str, int]] = Counter()
    for owner in (*range(world_size), EVERY_RANK):
        lookup = 0
        for number, sharding in enumerate(replicated if owner == EVERY_RANK else shardings):
            feature, groups = 0, groups_by_rank(sharding)[owner]
            by_rows, by_columns = isinstance(sharding, _CUT_BY_ROWS), isinstance(sharding, _CUT_BY_COLUMNS)
            config: Any
            for config in groups:
                for index, table in enumerate(config.embedding_tables):
                    first_row = table.local_metadata.shard_offsets[0] if by_rows else 0
                    outputs = zip(_names_and_columns(table, by_columns), outputs_of(table), strict=True)
                    for columns, (_, feature_name) in outputs:
                        shard = FeatureShard(
                            name=columns[0],
                            owner=owner,
                            input=number,
                            feature=feature,
                            lookup=lookup,
                            table=index,
                            first_column=columns[1],
                            dim=table.local_cols,
                            mean=config.pooling == PoolingType.MEAN and not by_rows,
                            dtype=data_type_to_dtype(config.data_type),
                            feature_name=feature_name,
                            rows=(first_row, first_row + table.local_rows) if by_rows else (0, 0),
                            row_shard=row_shards[columns],
                            slots=config.pooling == PoolingType.NONE,
                            buckets=buckets.get(table.name, 0),
                        )
                        row_shards[columns] += 1
                        shards.append(shard)
                        feature += 1
                lookup += 1
    return Layout(shards, names, world_size)
