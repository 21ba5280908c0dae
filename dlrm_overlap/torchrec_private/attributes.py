"""Reads and writes private attributes of TorchRec's objects. A test checks that `check` lists each under its class."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.distributed.types import Awaitable, ShardingEnv
from torchrec.modules.embedding_configs import BaseEmbeddingConfig
from torchrec.modules.mc_embedding_modules import BaseManagedCollisionEmbeddingCollection
from torchrec.modules.mc_modules import MCHManagedCollisionModule
from torchrec.modules.mlp import MLP, Perceptron
from torchrec.optim.clipping import GradientClippingOptimizer
from torchrec.optim.keyed import KeyedOptimizerWrapper, OptimizerWrapper
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dlrm_overlap.torchrec_private import (
    BatchedFusedEmbeddingBag,
    DpPooledEmbeddingSharding,
    EmbeddingBagCollectionContext,
    EmbeddingFusedOptimizer,
    EmbeddingShardingContext,
    FusedKJTListSplitsAwaitable,
    GridPooledEmbeddingSharding,
    GroupedEmbeddingConfig,
    GroupedPooledEmbeddingsLookup,
    KJTList,
    KJTListSplitsAwaitable,
    KJTSplitsAllToAllMeta,
    QuantizedCommCodec,
    ShardedEmbeddingBagCollection,
    ShardedEmbeddingCollection,
    ShardedManagedCollisionCollection,
    TableBatchedEmbeddingSlice,
    TwPooledEmbeddingSharding,
    TwRwPooledEmbeddingSharding,
)
from dlrm_overlap.torchrec_private.mpzch import (
    HashZchEvictionConfig,
    HashZchEvictionPolicyName,
    HashZchManagedCollisionModule,
)

# Sharded modules.


def shardings_by_type(module: ShardedEmbeddingBagCollection | ShardedEmbeddingCollection) -> dict[str, Any]:
    """Return sharding type -> `EmbeddingSharding` of a module, in the order of its lookups."""
    if isinstance(module, ShardedEmbeddingCollection):
        return dict(module._sharding_type_to_sharding)
    return dict(zip(module._sharding_types, module._embedding_shardings, strict=True))


def environment_of(module: ShardedEmbeddingBagCollection | ShardedEmbeddingCollection) -> ShardingEnv:
    return module._env


def lookups_of(module: ShardedEmbeddingBagCollection) -> Sequence[nn.Module]:
    return module._lookups


def names_in_output(module: ShardedEmbeddingBagCollection) -> list[str]:
    return module._embedding_names


def send_ids(
    module: ShardedEmbeddingBagCollection, numbers: Sequence[int], features: KeyedJaggedTensor
) -> tuple[list[Any], list[Any]]:
    """Do what the module's `input_dist` does, for the shardings `numbers` only; a collective.

    Returns an awaitable for each of these shardings, as `KJTListSplitsAwaitable` takes it, and an
    `EmbeddingShardingContext`.
    """
    if module._has_uninitialized_input_dist:
        module._create_input_dist(features.keys())
        module._has_uninitialized_input_dist = False
    contexts, awaitables = list[Any](), list[Any]()
    with torch.no_grad():
        if module._has_features_permute:
            order: Any = module._features_order_tensor
            features = features.permute(module._features_order, order)
        by_sharding = features.split(module._feature_splits)
        for number in numbers:
            ids = by_sharding[number]
            awaitables.append(module._input_dists[number](ids))
            contexts.append(EmbeddingShardingContext(batch_size_per_feature_pre_a2a=ids.stride_per_key()))
    return awaitables, contexts


def look_up(
    module: ShardedEmbeddingBagCollection, numbers: Sequence[int], features: KeyedJaggedTensor
) -> list[torch.Tensor]:
    """Return the pooled embeddings [b, D] of the shardings `numbers` of a module; a collective.

    Does what the module's `input_dist` and `compute_and_output_dist` do, for these shardings only.
    """
    awaitables, contexts = send_ids(module, numbers, features)
    with torch.no_grad():
        context = EmbeddingBagCollectionContext(sharding_contexts=contexts)
        arrived = KJTListSplitsAwaitable(awaitables, context).wait().wait()
    pooled = [
        module._output_dists[number](module._lookups[number](arrived[i]), contexts[i])
        for i, number in enumerate(numbers)
    ]
    return [each.wait() for each in pooled]


def first_wait(request: KJTListSplitsAwaitable[Any], context: EmbeddingBagCollectionContext) -> Awaitable[KJTList]:
    """Return `request.wait()`, also in pipelines that combine the collectives of several requests; a collective."""
    every: Any = request.awaitables
    group = next((_group_of(each) for each in every if isinstance(each, KJTSplitsAllToAllMeta)), None)
    (arriving,) = FusedKJTListSplitsAwaitable([request], [context], group).wait()
    return arriving


def _group_of(splits: KJTSplitsAllToAllMeta) -> Any:
    return splits.pg


# Shardings and lookups.


def groups_by_rank(sharding: TwPooledEmbeddingSharding) -> list[list[GroupedEmbeddingConfig]]:
    """Return, for each rank, the groups of tables of a sharding of any type; each group is one fused lookup."""
    return sharding._grouped_embedding_configs_per_rank


def own_groups(sharding: DpPooledEmbeddingSharding) -> list[GroupedEmbeddingConfig]:
    """Return the groups of data-parallel tables, the same on every rank."""
    return sharding._grouped_embedding_configs


def ranks_of_a_node(sharding: TwRwPooledEmbeddingSharding | GridPooledEmbeddingSharding) -> int | None:
    """Return the number of ranks of a node, None if all ranks are on one."""
    return sharding._local_size if sharding._world_size != sharding._local_size else None


def fused_lookups_of(lookup: GroupedPooledEmbeddingsLookup) -> list[tuple[GroupedEmbeddingConfig, Any]]:
    """Return each group of tables of a sharding's lookup, pooled or not, with FBGEMM's fused lookup (TBE) of it."""
    return [_group_and_tbe(module) for module in lookup._emb_modules]


def _group_and_tbe(module: Any | BatchedFusedEmbeddingBag) -> tuple[GroupedEmbeddingConfig, Any]:
    return module._config, module.emb_module


def precision_of(codec: QuantizedCommCodec) -> str:
    """Return the precision that a codec sends, such as "bf16"."""
    return codec._comm_precision.value


def loss_scale_of(codec: QuantizedCommCodec) -> float | None:
    return codec._loss_scale


# Managed collision modules.


class ZchSettings(NamedTuple):
    """The arguments of an MPZCH module."""

    segments: Sequence[int]
    """first slot of each bucket of all ranks, and the end"""
    max_probe: int
    opt_in_prob: int
    """percentage; -1 for none"""
    eviction: HashZchEvictionPolicyName | None
    eviction_config: HashZchEvictionConfig | None
    read_only_suffix: str | None
    """None unless features are looked up one by one"""
    disable_fallback: bool
    has_extras: bool
    """whether it keeps custom metadata, or logs"""


def zch_settings_of(module: HashZchManagedCollisionModule) -> ZchSettings:
    return ZchSettings(
        module._output_segments,
        module._max_probe,
        module._opt_in_prob,
        module._eviction_policy_name,
        module._eviction_config,
        # TorchRec 1.6 looks up all features at once, and keeps no metadata.
        getattr(module, "_read_only_suffix", None) if getattr(module, "_enable_per_feature_lookups", False) else None,
        module._disable_fallback,
        getattr(module, "_write_runtime_meta_dim", 0) > 0 or module._tb_logging_frequency > 0,
    )


def tables_inside(collection: BaseManagedCollisionEmbeddingCollection) -> nn.Module:
    """Return the collection of tables inside an unsharded managed collision collection."""
    return collection._embedding_module


def table_configs_of(collection: BaseManagedCollisionEmbeddingCollection) -> Sequence[BaseEmbeddingConfig]:
    return collection._managed_collision_collection.embedding_configs()


def collision_modules_of(
    collection: BaseManagedCollisionEmbeddingCollection,
) -> dict[str, tuple[nn.Module, int, list[str]]]:
    """Return the tables of an unsharded collection, each with its module, its rows and its features."""
    inner = collection._managed_collision_collection
    modules: Any = inner._managed_collision_modules
    return {
        config.name: (modules[config.name], config.num_embeddings, list(config.feature_names))
        for config in table_configs_of(collection)
    }


def sharded_zch_tables(
    collection: ShardedManagedCollisionCollection,
) -> dict[str, tuple[int, HashZchManagedCollisionModule]]:
    """Return the tables of a sharded collection, each with its first row on this rank and its module."""
    modules: Any = collection._managed_collision_modules
    return {name: (collection._table_to_offset[name], module) for name, module in modules.items()}


def sharded_mch_tables(
    collection: ShardedManagedCollisionCollection,
) -> dict[str, tuple[int, MCHManagedCollisionModule]]:
    """Return the tables of a sharded collection, each with its first row on this rank and its module."""
    modules: Any = collection._managed_collision_modules
    return {name: (collection._table_to_offset[name], module) for name, module in modules.items()}


def features_by_sharding(collection: ShardedManagedCollisionCollection) -> list[list[tuple[str, str]]]:
    """Return the features of each sharding's ids, in their order, each with its table."""
    tables = collection._feature_to_table
    return [[(tables[name], name) for name in names] for names in collection._sharding_features]


def use_state(module: HashZchManagedCollisionModule, ids: torch.Tensor, last_seen: torch.Tensor) -> None:
    """Let a module keep its ids [rows] int64, and when they were last seen [rows] int32, in the given memory."""
    module._hash_zch_identities.data = ids.view(-1, 1)
    if module._hash_zch_metadata is not None:
        module.register_buffer(module.METADATA_BUFFER, last_seen.view(-1, 1))


# Data-parallel tables.


def holder_of(parameter: nn.Parameter) -> nn.Parameter:
    """Return the parameter that holds the rows of a data-parallel table; other parameters hold themselves."""
    return _holder_of(parameter) if isinstance(parameter, TableBatchedEmbeddingSlice) else parameter


def _holder_of(table: TableBatchedEmbeddingSlice) -> nn.Parameter:
    return table._original_tensor  # type: ignore[return-value]


def first_element(table: TableBatchedEmbeddingSlice) -> int:
    """Return the index of the table's first element in `holder_of` it."""
    return table._start_offset


# The dense part.


def layers_of(mlp: MLP) -> list[Any]:
    return list(mlp._mlp)  # type: ignore[arg-type]


def set_layers(mlp: MLP, layers: Iterable[nn.Module]) -> None:
    mlp._mlp = nn.Sequential(*layers)


def linear_of(layer: Perceptron) -> nn.Linear:
    return layer._linear


def activation_of(layer: Perceptron) -> Any:
    """Return the activation, a module or a function."""
    return layer._activation_fn


# Optimizers, pipelines, DDP.


def tbe_of(optimizer: EmbeddingFusedOptimizer) -> Any:
    """Return the fused lookup (TBE) whose rows an optimizer of tables updates."""
    return optimizer._emb_module


def inner_optimizer(optimizer: OptimizerWrapper | KeyedOptimizerWrapper | Any) -> Any:
    """Return the optimizer inside a wrapper, of TorchRec or of a user; None if there is none."""
    return getattr(optimizer, "_optimizer", None)


def set_optimizer(outer: OptimizerWrapper | TrainPipelineSparseDist[Any, Any], optimizer: Any) -> None:
    """Replace the optimizer inside a wrapper or a pipeline."""
    outer._optimizer = optimizer


def adds_norms_over_ranks(optimizer: GradientClippingOptimizer) -> bool:
    return bool(optimizer._sharded_params)


def keeps_norms(optimizer: GradientClippingOptimizer) -> bool:
    return getattr(optimizer, "_track_grad_norm", False)  # not in all releases


_LEFT_DDP = "_dlrm_overlap_left_ddp"  # attribute of a model


def leave_ddp(model: DistributedModelParallel) -> None:
    """Take the model out of DDP, whose autograd nodes run on a stream that is not captured.

    `return_to_ddp` wraps it again.
    """
    if isinstance(model._dmp_wrapped_module, DistributedDataParallel):
        model._dmp_wrapped_module, model._ddp_wrapped = model.module, False
        setattr(model, _LEFT_DDP, True)


def has_left_ddp(model: DistributedModelParallel) -> bool:
    return getattr(model, _LEFT_DDP, False)


def return_to_ddp(model: DistributedModelParallel) -> None:
    """Wrap a model in DDP that `leave_ddp` took out of it; a collective."""
    if has_left_ddp(model):
        setattr(model, _LEFT_DDP, False)
        model.init_data_parallel()
