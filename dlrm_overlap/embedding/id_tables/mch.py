"""TorchRec's sharded MCH modules, with the exchange of their tables.

The flow of data in TorchRec's pipelines:

1. TorchRec sends each id to the rank that has its share of `input_hash_size`.
2. `compute_and_output_dist` calls TorchRec's module, which appends the ids to its history, evicts ids at the end of an
   interval, and maps the step's ids to rows. Rows of evicted ids get their initial values.
3. The exchange of the tables' module looks up the rows.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torchrec.distributed.types import NoWait
from torchrec.modules.mc_modules import MCHManagedCollisionModule

from dlrm_overlap.embedding.id_tables.mch_tables import MchSender, MchTables, ShareOfRange
from dlrm_overlap.embedding.sharded_module import OverlapShardedEmbeddingBagCollection
from dlrm_overlap.embedding.shardings import exchanging_group
from dlrm_overlap.embedding.variable_batch import gathering, with_even_batches
from dlrm_overlap.torchrec_private import (
    KJTList,
    ShardedManagedCollisionCollection,
    ShardedManagedCollisionEmbeddingBagCollection,
    maybe_td_to_kjt,
)
from dlrm_overlap.torchrec_private.attributes import (
    collision_modules_of,
    features_by_sharding,
    sharded_mch_tables,
    table_configs_of,
)
from dlrm_overlap.torchrec_private.mch import MchMap, why_host_records


def has_mch(module: Any) -> bool:
    """Return whether all tables of an unsharded managed collision collection have TorchRec's MCH module."""
    return all(type(each) is MCHManagedCollisionModule for each, _, _ in collision_modules_of(module).values())


class OverlapShardedMchEmbeddingBagCollection(ShardedManagedCollisionEmbeddingBagCollection):
    """TorchRec's sharded module of pooled tables with MCH, with the exchange of its tables' module."""

    _managed_collision_collection: ShardedManagedCollisionCollection
    _embedding_module: OverlapShardedEmbeddingBagCollection

    def __init__(self, module: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(module, *args, **kwargs)
        self._configs = {each.name: each for each in table_configs_of(module)}
        tables, modules = self._embedding_module, sharded_mch_tables(self._managed_collision_collection)
        group = exchanging_group(self._env)
        shares = {name: ShareOfRange.of(each.input_size(), group.size()) for name, (_, each) in modules.items()}
        uncaptured = "a collection returns remapped features" if self._return_remapped_features else None
        uncaptured = uncaptured or next(self._why_not_captured(modules, shares, group.size()), None)
        if uncaptured is not None:
            tables.stay_uncaptured(self, uncaptured)
            return
        collection = self._managed_collision_collection
        maps = {name: MchMap(each, first) for name, (first, each) in modules.items()}
        by_feature = {name: shares[table] for of in features_by_sharding(collection) for table, name in of}

        def evict() -> None:
            self._evict(collection.evict())

        collection.register_load_state_dict_post_hook(lambda *_: tables.note_load())
        tables.own_ids(
            self,
            None,
            dict.fromkeys(maps, group.size()),
            False,
            lambda exchange: MchTables(maps, shares, exchange, group.rank(), evict, lambda: self.training),
            change_ids=MchSender(by_feature, group.size()),
        )

    def _why_not_captured(
        self, modules: Mapping[str, Any], shares: Mapping[str, ShareOfRange], ranks: int
    ) -> Iterator[str]:
        for name, (_, module) in modules.items():
            if self._configs[name].num_embeddings % ranks:
                yield f"table {name} has {self._configs[name].num_embeddings} rows, no multiple of {ranks} ranks"
            if (reason := why_host_records(module) or shares[name].why_not) is not None:
                yield f"table {name} has {reason}"

    @property
    def leading_columns(self) -> int:
        return self._embedding_module.leading_columns

    @property
    def exchanging(self) -> OverlapShardedEmbeddingBagCollection:
        """The module of the tables."""
        return self._embedding_module

    def forward(self, *input: Any, **kwargs: Any) -> Any:
        """In steps of `GraphTrainPipeline`, look up by the tables' module, which sends the ids itself."""
        if self._embedding_module.takes_ids:
            return self._embedding_module(*input, **kwargs), NoWait(None)
        return super().forward(*input, **kwargs)

    def input_dist(self, ctx: Any, features: Any) -> Any:
        """Send the ids by TorchRec; a variable batch is first padded to one bag for each sample."""
        features = maybe_td_to_kjt(features, None)
        # TorchRec refuses to return remapped features of a variable batch.
        if self._embedding_module.exchange is not None and not self._return_remapped_features:
            features = with_even_batches(features)
        awaitable = super().input_dist(ctx, features)
        if not features.variable_stride_per_key():
            ctx.inverse_indices = gathering(features)
        return awaitable

    def compute_and_output_dist(self, ctx: Any, input: KJTList) -> Any:
        if self._embedding_module.exchange is None:
            return super().compute_and_output_dist(ctx, input)
        collection = self._managed_collision_collection
        ctx.remapped_kjt = collection.compute(ctx, input)
        ctx.evictions_per_table = collection.evict()
        self._evict(ctx.evictions_per_table)
        pooled = self._embedding_module.compute_and_output_dist(ctx, ctx.remapped_kjt)
        if not self._return_remapped_features:
            return pooled, NoWait(None)
        return pooled, collection.output_dist(ctx, ctx.remapped_kjt)

    @torch.no_grad()
    def _evict(self, evictions_per_table: dict[str, torch.Tensor | None]) -> None:
        """Give evicted rows, by table [N] int64, their initial values, and row-wise Adagrad's state 0, as TorchRec."""
        exchange = self._embedding_module.exchange
        if exchange is None:
            super()._evict(evictions_per_table)
            return
        for name, rows in evictions_per_table.items():
            if rows is None:
                continue
            tables = exchange.tables
            weights, *states = tables.tensors_of(name)
            initial = weights[rows]
            if tables.lookups[tables.numbers_of[name][0]].optimizer == EmbOptimType.EXACT_ROWWISE_ADAGRAD:
                initial.zero_()
                states[0][rows] = 0
            init_fn: Any = self._configs[name].init_fn
            weights[rows] = init_fn(initial)
