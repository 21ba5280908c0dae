"""The drop-in's sharded module of an unpooled collection: TorchRec's own, whose shards an `UnpooledExchange` serves."""

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import torch
from torchrec.distributed.embedding import EmbeddingCollectionContext, ShardedEmbeddingCollection
from torchrec.distributed.embedding_types import KJTList
from torchrec.distributed.types import LazyAwaitable
from torchrec.modules.embedding_modules import get_embedding_names_by_table
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from dlrm_overlap.embedding.distinct import DistinctIds, NamedSequence
from dlrm_overlap.embedding.exchanging_module import ExchangingModule
from dlrm_overlap.embedding.id_layout import BatchBound
from dlrm_overlap.embedding.layout import RowRange
from dlrm_overlap.embedding.own_batches import with_bags_of_samples
from dlrm_overlap.embedding.shardings import table_names
from dlrm_overlap.embedding.unpooled import UnpooledExchange

_WORTH = 0.9  # share of a batch's ids that are distinct, up to which they are found under dedup auto


class SequencesAwaitable(LazyAwaitable[dict[str, JaggedTensor]]):
    """The output of an unpooled collection: a jagged tensor of rows by name, which `make` waits for."""

    def __init__(self, make: Callable[[], dict[str, JaggedTensor]]) -> None:
        super().__init__()
        self._make = make

    def _wait_impl(self) -> dict[str, JaggedTensor]:
        return self._make()


class OverlapShardedEmbeddingCollection(ExchangingModule[UnpooledExchange], ShardedEmbeddingCollection):
    """TorchRec's sharded module of unpooled tables, whose shards exchange through an `UnpooledExchange`.

    It does so in the steps of `GraphTrainPipeline`; those of TorchRec's pipelines stay with TorchRec. The output is
    TorchRec's.
    """

    _kind = "unpooled tables"
    _exchange_type = UnpooledExchange

    def __init__(self, *args: Any, dedup: bool | str, **kwargs: Any) -> None:
        """Take the arguments of `ExchangingModule`, and whether each distinct id travels once."""
        self.dedup = dedup
        """True, False or auto; of an exchange that takes ids True or False"""
        super().__init__(*args, **kwargs)

    def _set_up(self) -> None:
        self._configs = {config.name: config for config in self._embedding_configs}
        names = get_embedding_names_by_table(self._embedding_configs)
        self._names = dict(zip(self._configs, names, strict=True))
        super()._set_up()
        if self.exchange is not None and self.exchange.has_rows_apart:
            self.dedup = True  # which brings the ids of each host's rows together

    @property
    def _shardings(self) -> list[Any]:
        """TorchRec's shardings, by number."""
        return list(self._sharding_type_to_sharding.values())

    def _names_in_output(self, numbers: Sequence[int]) -> dict[str, str]:
        found = table_names([self._shardings[i] for i in numbers])
        return {name: name for name in self._configs if name in found}

    def _distinct_of(self, tables: Sequence[str], ranges: Collection[RowRange]) -> DistinctIds:
        """Return the finder of the distinct ids of ranges of the rows of some tables."""
        sequences = [
            NamedSequence(name, feature, number)
            for number, table in enumerate(tables)
            for name, feature in zip(self._names[table], self._configs[table].feature_names, strict=True)
        ]
        rows = [self._configs[table].num_embeddings for table in tables]
        firsts = [[each.first for each in ranges if each.table == table] for table in tables]
        return DistinctIds(sequences, rows, self._device, firsts)

    def _take_ids(self, keys: Sequence[str], bound: BatchBound, weighted: bool) -> None:
        assert self.exchange is not None
        layout = self._layout(self._ours)
        ranges = layout.row_ranges(self.exchange.has_rows_apart)
        distinct = self._distinct_of(layout.names, ranges.values())
        if self.dedup == "auto":  # by numbers that all ranks agree on
            self.dedup = self._is_worth(bound)
        self.exchange.take_distinct(distinct, bound, layout, self._replicated_tables, bool(self.dedup))

    def _is_worth(self, bound: BatchBound) -> bool:
        """Return whether batches of a bound have few enough distinct ids to be found."""
        ids = distinct = 0
        for table in self._names_in_output(self._ours):
            most = sum(bound.capacity(self._configs[table].feature_names))
            ids, distinct = ids + most, distinct + min(most, bound.distinct.get(table, most))
        return distinct <= _WORTH * ids

    def counted(self) -> tuple[list[str], DistinctIds] | None:
        """Return of whose distinct ids captured steps need a bound, and what counts them; None without.

        They are tables, or ranges of their rows, see `UnpooledExchange.row_ranges`.
        """
        if self.dedup is False:
            return None
        layout = self._layout(self._looked_up_in_step)
        ranges = layout.row_ranges(self.exchange is not None and self.exchange.has_rows_apart)
        return list(ranges), self._distinct_of(layout.names, ranges.values())

    def forward(self, *input: Any, **kwargs: Any) -> LazyAwaitable[dict[str, JaggedTensor]]:
        """Look up and exchange, as TorchRec's sharded module does; where ids are taken, they are sent here at last."""
        if not self.takes_ids:
            return super().forward(*input, **kwargs)
        features = with_bags_of_samples(*input, **kwargs)
        assert self.exchange is not None
        rows, rooms = self.exchange.start_sent_rows(features), self.exchange.rooms_of(features)
        return SequencesAwaitable(lambda: self._sequences(features, rooms, rows()))

    def _sequences(
        self, features: KeyedJaggedTensor, rooms: Sequence[int], rows: torch.Tensor
    ) -> dict[str, JaggedTensor]:
        """Return the output by name in TorchRec's order, of the rows [P, D] of all ids of a batch.

        Args:
            rooms: for the ids of each sequence, P in all.
            rows: with room behind those of each sequence.
        """
        assert self.exchange is not None
        distinct, keys = self.exchange.distinct, features.keys()
        lengths = features.lengths().view(len(keys), features.stride())
        ids: Sequence[torch.Tensor | None] = [None] * len(rooms)
        if self._need_indices:
            ids = distinct.padded(features, rooms).split(list(rooms))
        # The backward of a split copies gradients to one tensor, which that of a single sequence is.
        each = rows.split(list(rooms)) if len(rooms) > 1 else [rows]
        found = {
            sequence.name: JaggedTensor(values, weights, lengths=lengths[keys.index(sequence.feature)])
            for sequence, values, weights in zip(distinct.sequences, each, ids, strict=True)
        }
        return {name: found[name] for names in self._embedding_names_per_sharding for name in names}

    def compute_and_output_dist(
        self, ctx: EmbeddingCollectionContext, input: KJTList
    ) -> LazyAwaitable[dict[str, JaggedTensor]]:
        """Look up and send as TorchRec does, in a step that stays with it."""
        if self.exchange is not None:
            self._tell_once("steps stay with TorchRec: GraphTrainPipeline alone exchanges unpooled tables")
        return self._at_home(partial(super().compute_and_output_dist, ctx, input))
