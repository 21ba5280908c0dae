"""TorchRec's sharded managed collision modules, whose ids are mapped by an `IdMap`.

TorchRec's pipelines   TorchRec sends the ids; `compute_and_output_dist` maps them, then the tables' exchange begins,
                       or TorchRec's lookup of unpooled tables
GraphTrainPipeline     the `IdSender` of the tables' exchange sends them a step ahead; `activate` maps them then. For
                       unpooled tables it sends distinct ids in slots, and the owners map each id once for each rank
"""

from collections.abc import Mapping, Sequence
from typing import Any
from zlib import crc32

import torch
from torch import nn
from torchrec.distributed.types import NoWait, ShardingEnv
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dlrm_overlap.comm.every_rank import gathered
from dlrm_overlap.config import InputError
from dlrm_overlap.embedding.exchanging_module import ExchangingModule
from dlrm_overlap.embedding.id_tables.id_map import IdMap, MappedIds, pool_of, with_values
from dlrm_overlap.embedding.id_tables.module import IdTableModule
from dlrm_overlap.embedding.id_tables.rules import IdRules
from dlrm_overlap.embedding.sharded_module import OverlapShardedEmbeddingBagCollection
from dlrm_overlap.embedding.sharded_unpooled import OverlapShardedEmbeddingCollection
from dlrm_overlap.embedding.shardings import exchanging_group
from dlrm_overlap.embedding.tables import LocalTables
from dlrm_overlap.embedding.variable_batch import gathering, with_bags_of_samples, with_even_batches
from dlrm_overlap.kernels.ids.id_map import mix
from dlrm_overlap.torchrec_private import (
    KJTList,
    ShardedManagedCollisionCollection,
    ShardedManagedCollisionEmbeddingBagCollection,
    ShardedManagedCollisionEmbeddingCollection,
    maybe_td_to_kjt,
)
from dlrm_overlap.torchrec_private.attributes import (
    features_by_sharding,
    lookups_of,
    sharded_zch_tables,
    table_configs_of,
    use_state,
)


class OverlapShardedManagedCollisionCollection(ShardedManagedCollisionCollection):
    """TorchRec's sharded collection, whose tables' ids are in one map; state dicts have TorchRec's names."""

    def __init__(self, *args: Any, rules: Sequence[IdRules], **kwargs: Any) -> None:
        self._rules = rules
        super().__init__(*args, **kwargs)

    def _create_managed_collision_modules(self, module: Any) -> None:
        super()._create_managed_collision_modules(module)
        modules = sharded_zch_tables(self)
        shards = {name: (offset, offset + each.output_size()) for name, (offset, each) in modules.items()}
        self.id_map = IdMap(self._rules, shards, torch.device(self._device), lambda: self.training)
        # State dicts refer to the map's memory under TorchRec's names; our own modules have more columns.
        state, shard = self.id_map.state, self.id_map.shard
        for name, (_, each) in modules.items():
            seen = state.times if state.times.numel() else state.used_at
            use_state(each, shard(state.ids, name), shard(seen, name))
            if isinstance(each, IdTableModule):
                columns = {key: getattr(state, key) for key in ("used_at", "times", "counts", "sketch")}
                each.use_state({key: shard(column, name) for key, column in columns.items() if column.numel()})
                self.register_buffer("_clock", state.clock)
        self.register_load_state_dict_post_hook(lambda *_: self.id_map.rebuild())

    def compute(self, ctx: Any, dist_input: KJTList) -> KJTList:
        remapped = []
        for features, context, names in zip(dist_input, ctx.sharding_contexts, features_by_sharding(self), strict=True):
            if not features.variable_stride_per_key():
                context.lengths_after_input_dist = features.lengths().view(-1, features.stride())
            remapped.append(self.id_map.remap(features, names))
        return KJTList(remapped)

    def register_post_lookup_tracker_fn(self, record_fn: Any) -> None:
        raise InputError(
            f"{', '.join(each.name for each in self._rules)}: a tracker of raw ids was registered, but our kernels map "
            f"them and call no tracker; shard this collection by TorchRec's sharder"
        )

    def evict(self) -> dict[str, torch.Tensor | None]:
        return {}  # rows of new ids were filled when these got their slots


class _MapsIds(nn.Module):
    """A sharded module of tables of any id; a subclass also inherits from TorchRec's module."""

    _managed_collision_collection: OverlapShardedManagedCollisionCollection
    _embedding_module: Any
    """the `ExchangingModule` of the tables"""
    _env: ShardingEnv
    _device: torch.device
    _return_remapped_features: bool

    def __init__(self, module: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(module, *args, **kwargs)
        tables, id_map = self._embedding_module, self._managed_collision_collection.id_map
        self._mixes = any(each.mixes for each in id_map.rules.values())
        group, configs = exchanging_group(self._env), {each.name: each for each in table_configs_of(module)}
        features = {name: list(config.feature_names) for name, config in configs.items()}
        tables.own_ids(
            self,
            id_map,
            {name: each.buckets for name, each in id_map.rules.items()},
            self._mixes,
            lambda exchange: MappedIds(id_map, exchange, group.rank(), features),
            self._why_uncaptured(features),
        )
        self._managed_collision_collection.register_load_state_dict_post_hook(lambda *_: tables.note_load())
        if tables.exchange is None:
            _check_torchrec_updates(tables, id_map)
        seed, *_ = gathered(torch.initial_seed(), group)
        pools = {
            name: pool_of(rules.rows, configs[name], seed + crc32(name.encode())).to(self._device)
            for name, rules in id_map.rules.items()
            if not rules.frozen
        }
        rows = LocalTables.of(lookups_of(tables)) if tables.exchange is None else tables.exchange.tables
        id_map.bind(rows.tensors_of, pools)

    def _why_uncaptured(self, features: Mapping[str, Sequence[str]]) -> str | None:
        """Return why steps cannot be captured, if so; `features` has each table's features."""
        return "a collection returns remapped features" if self._return_remapped_features else None

    @property
    def exchanging(self) -> ExchangingModule[Any]:
        """The module of the tables."""
        return self._embedding_module

    def forward(self, *input: Any, **kwargs: Any) -> Any:
        """In steps of `GraphTrainPipeline`, look up by the tables' module, which sends the ids itself."""
        if self._embedding_module.takes_ids:
            return self._embedding_module(*input, **kwargs), NoWait(None)
        return super().forward(*input, **kwargs)

    def input_dist(self, ctx: Any, features: Any) -> Any:
        features = self._even(maybe_td_to_kjt(features, None))
        awaitable = super().input_dist(ctx, _mixed(features) if self._mixes else features)  # type: ignore[misc]
        if not features.variable_stride_per_key():
            ctx.inverse_indices = gathering(features)
        return awaitable

    def _even(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        return features

    def compute_and_output_dist(self, ctx: Any, input: KJTList) -> Any:
        if self._embedding_module.exchange is None:
            return super().compute_and_output_dist(ctx, input)  # type: ignore[misc]
        collection = self._managed_collision_collection
        self._embedding_module.note_writes()  # rows of new ids are filled in their tables
        ctx.remapped_kjt, ctx.evictions_per_table = collection.compute(ctx, input), {}
        found = self._embedding_module.compute_and_output_dist(ctx, ctx.remapped_kjt)
        if not self._return_remapped_features:
            return found, NoWait(None)
        return found, collection.output_dist(ctx, ctx.remapped_kjt)


class OverlapShardedManagedCollisionEmbeddingBagCollection(_MapsIds, ShardedManagedCollisionEmbeddingBagCollection):
    """TorchRec's sharded module of pooled tables of any id, with the exchange of its tables' module."""

    _embedding_module: OverlapShardedEmbeddingBagCollection

    @property
    def leading_columns(self) -> int:
        return self._embedding_module.leading_columns

    def _even(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        # TorchRec refuses to return remapped features of a variable batch.
        stays = self._embedding_module.exchange is None or self._return_remapped_features
        return features if stays else with_even_batches(features)


class OverlapShardedManagedCollisionEmbeddingCollection(_MapsIds, ShardedManagedCollisionEmbeddingCollection):
    """TorchRec's sharded module of unpooled tables of any id, with the exchange of its tables' module.

    Steps of `GraphTrainPipeline` send each distinct id of a table once, so all features of a table share its rules.
    """

    _embedding_module: OverlapShardedEmbeddingCollection

    def _why_uncaptured(self, features: Mapping[str, Sequence[str]]) -> str | None:
        for name, rules in self._managed_collision_collection.id_map.rules.items():
            of = {(each in rules.reading, rules.lifetimes.get(each, rules.lifetime)) for each in features[name]}
            if len(of) > 1:
                return f"features of unpooled table {name} have rules of their own"
        return super()._why_uncaptured(features)

    def _even(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        return with_bags_of_samples(features)

    def compute_and_output_dist(self, ctx: Any, input: KJTList) -> Any:
        """Look up by TorchRec, see `OverlapShardedEmbeddingCollection`.

        Raises:
            InputError: in training, if rows of reserved slots are not trained, since FBGEMM would train them.
        """
        rules = self._managed_collision_collection.id_map.rules.values()
        if torch.is_grad_enabled() and self.training and any(each.frozen for each in rules):
            raise InputError(
                f"{', '.join(each.name for each in rules)}: steps of TorchRec's pipelines look up unpooled tables by "
                f"FBGEMM, which would train the initial rows of tables of any id; set train.pipeline to graph"
            )
        return super().compute_and_output_dist(ctx, input)


def _check_torchrec_updates(tables: ExchangingModule[Any], id_map: IdMap) -> None:
    """Raise an InputError if rows that stay with TorchRec are cached or, in part, not trained."""
    reason = tables.why_not_exchanged
    if tables.cached:
        raise InputError(
            f"{', '.join(tables.cached)}: tables of any id in host memory must be exchanged, but stay with TorchRec: "
            f"{reason}; keep their rows in device memory, or take another setting"
        )
    if frozen := [each.name for each in id_map.rules.values() if each.frozen]:
        raise InputError(
            f"{', '.join(frozen)}: tables with initial rows that are not trained must be exchanged, since FBGEMM would "
            f"train these rows, but they stay with TorchRec: {reason}; take another setting"
        )


def _mixed(ids: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """Return ids that are replaced by a bijective hash."""
    return with_values(ids, mix(ids.values().long()))
