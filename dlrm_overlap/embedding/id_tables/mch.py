"""TorchRec's sharded MCH modules, with the exchange of their tables.

The way of the data, in TorchRec's pipelines:

1. TorchRec sends each id to the rank that has its share of `input_hash_size`.
2. `compute_and_output_dist` calls TorchRec's module, which appends the ids to its history, evicts ids at the end of an
   interval, and maps the step's ids to rows. Rows of evicted ids get their initial values.
3. The exchange of the tables' module looks up the rows.
"""

from typing import Any

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torchrec.distributed.types import NoWait
from torchrec.modules.mc_modules import MCHManagedCollisionModule

from dlrm_overlap.embedding.sharded_module import OverlapShardedEmbeddingBagCollection
from dlrm_overlap.torchrec_private import (
    KJTList,
    ShardedManagedCollisionCollection,
    ShardedManagedCollisionEmbeddingBagCollection,
)
from dlrm_overlap.torchrec_private.attributes import collision_modules_of, table_configs_of


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
        self._embedding_module.stay_uncaptured(self, "tables with MCHManagedCollisionModule")

    @property
    def leading_columns(self) -> int:
        return self._embedding_module.leading_columns

    @property
    def exchanging(self) -> OverlapShardedEmbeddingBagCollection:
        """The module of the tables."""
        return self._embedding_module

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
