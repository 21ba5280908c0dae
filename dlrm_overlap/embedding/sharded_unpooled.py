"""The sharded module of unpooled tables."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torchrec.distributed.types import Awaitable, LazyAwaitable
from torchrec.modules.embedding_modules import get_embedding_names_by_table
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from dlrm_overlap.embedding.distinct import DistinctIds, NamedSequence
from dlrm_overlap.embedding.exchanging_module import Deferred, ExchangingModule
from dlrm_overlap.embedding.id_layout import BatchCapacity
from dlrm_overlap.embedding.shardings import table_names
from dlrm_overlap.embedding.steps import padded
from dlrm_overlap.embedding.unpooled import UnpooledExchange, UnpooledIdSender
from dlrm_overlap.embedding.variable_batch import with_bags_of_samples
from dlrm_overlap.torchrec_private import (
    EmbeddingCollectionContext,
    KJTList,
    ShardedEmbeddingCollection,
    maybe_td_to_kjt,
)


class OverlapShardedEmbeddingCollection(ExchangingModule[UnpooledExchange], ShardedEmbeddingCollection):
    """TorchRec's sharded module of unpooled tables with its shards exchanged by an `UnpooledExchange`.

    Only steps of `GraphTrainPipeline` are exchanged.
    """

    _kind = "unpooled tables"
    _exchange_type = UnpooledExchange

    def _set_up(self) -> None:
        super()._set_up()
        self.unpooled_features = {name for config in self._embedding_configs for name in config.feature_names}

    def _names_in_output(self, numbers: Sequence[int]) -> dict[str, str]:
        found = table_names([self._shardings[i] for i in numbers])
        return {config.name: config.name for config in self._embedding_configs if config.name in found}

    def _take_ids(self, keys: Sequence[str], capacity: BatchCapacity, weighted: bool) -> None:
        assert self.exchange is not None
        about = self._layout(self._ours), self._replicated_tables
        self.sender = UnpooledIdSender(self.exchange, self.counted()[1], capacity, *about, self.mixes)

    def counted(self) -> tuple[list[str], DistinctIds]:
        """Return the tables, or row ranges, whose distinct ids captured steps count, and what counts them."""
        layout, every = self._layout(self._looked_up_in_step), self._embedding_configs
        ranges = layout.row_ranges(self.exchange is not None and self.exchange.has_rows_apart)
        names = dict(zip([config.name for config in every], get_embedding_names_by_table(every), strict=True))
        configs = {config.name: config for config in every}
        sequences = [
            NamedSequence(name, feature, number)
            for number, table in enumerate(layout.names)
            for name, feature in zip(names[table], configs[table].feature_names, strict=True)
        ]
        any_id = self.id_map is not None
        units = {table: self.id_map.rules[table].size if any_id else 1 for table in layout.names}  # rows of a bucket
        rows = [configs[table].num_embeddings // units[table] for table in layout.names]
        firsts = [
            [each.first // units[table] for each in ranges.values() if each.table == table] for table in layout.names
        ]
        return list(ranges), DistinctIds(sequences, rows, self._device, firsts, any_id, self.mixes)

    def forward(self, *input: Any, **kwargs: Any) -> LazyAwaitable[dict[str, JaggedTensor]]:
        """After `take_ids`, send the ids of the batch unless `sender` has sent them before."""
        if not self.takes_ids:
            return super().forward(*input, **kwargs)
        (features,) = (*input, *kwargs.values())
        features = with_bags_of_samples(maybe_td_to_kjt(features, self._ids_keys))
        assert isinstance(self.sender, UnpooledIdSender)
        sent = padded(features)
        rows, capacities = self.sender.start_rows(sent), self.sender.capacities_of(sent)
        return Deferred(lambda: self._sequences(features, capacities, rows()))

    def _sequences(
        self, features: KeyedJaggedTensor, capacities: Sequence[int], rows: torch.Tensor
    ) -> dict[str, JaggedTensor]:
        """Return the output, from rows [P, D] padded to `capacities`; in captured steps it stays padded."""
        assert isinstance(self.sender, UnpooledIdSender)
        distinct, keys, sent = self.sender.distinct, features.keys(), padded(features)
        lengths = features.lengths().view(len(keys), features.stride())
        ids: Sequence[torch.Tensor | None] = [None] * len(capacities)
        if self._need_indices:
            ids = distinct.padded(sent, capacities).split(list(capacities))
        # The backward of a split copies gradients to one tensor; a single sequence needs no split.
        each: Sequence[torch.Tensor] = rows.split(list(capacities)) if len(capacities) > 1 else [rows]
        if sent is not features:
            counts = self.sender.capacities_of(features)
            each = [values[:count] for values, count in zip(each, counts, strict=True)]
            ids = [None if of is None else of[:count] for of, count in zip(ids, counts, strict=True)]
        found = {
            sequence.name: JaggedTensor(values, weights, lengths=lengths[keys.index(sequence.feature)])
            for sequence, values, weights in zip(distinct.sequences, each, ids, strict=True)
        }
        return {name: found[name] for names in self._embedding_names_per_sharding for name in names}

    def input_dist(self, ctx: EmbeddingCollectionContext, features: Any) -> Awaitable[Awaitable[KJTList]]:
        """Send the ids by TorchRec; in a variable batch the ids of a bag are repeated for each of its samples."""
        if self.exchange is not None and isinstance(features, KeyedJaggedTensor):
            features = with_bags_of_samples(features)
        return super().input_dist(ctx, features)

    def compute_and_output_dist(
        self, ctx: EmbeddingCollectionContext, input: KJTList
    ) -> LazyAwaitable[dict[str, JaggedTensor]]:
        if self.exchange is not None:
            self._tell_once("steps stay with TorchRec: only GraphTrainPipeline exchanges unpooled tables")
        return self._look_up_by_torchrec(partial(super().compute_and_output_dist, ctx, input))
