"""The drop-in's sharded module of an unpooled collection: TorchRec's own, whose shards an `UnpooledExchange` serves."""

from collections.abc import Collection, Mapping, Sequence
from functools import partial
from itertools import chain, pairwise
from typing import Any

import torch
from torchrec.distributed.embedding import (
    EmbeddingCollectionAwaitable,
    EmbeddingCollectionContext,
    ShardedEmbeddingCollection,
)
from torchrec.distributed.embedding_sharding import KJTListSplitsAwaitable
from torchrec.distributed.embedding_types import KJTList
from torchrec.distributed.sharding.sequence_sharding import SequenceShardingContext
from torchrec.distributed.types import Awaitable, LazyAwaitable
from torchrec.modules.embedding_modules import get_embedding_names_by_table
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from dlrm_overlap.comm.order import CommunicationOrder
from dlrm_overlap.config import InputError
from dlrm_overlap.embedding.distinct import Distinct, DistinctIds, NamedSequence, SlotBlocks
from dlrm_overlap.embedding.exchanging_module import ExchangingModule
from dlrm_overlap.embedding.id_layout import BatchBound
from dlrm_overlap.embedding.layout import RowRange
from dlrm_overlap.embedding.options import ExchangeOptions
from dlrm_overlap.embedding.own_batches import with_bags_of_samples
from dlrm_overlap.embedding.sequences import SequencesAwaitable, to_sequences
from dlrm_overlap.embedding.shardings import first_features, groups_of, tables_in_order
from dlrm_overlap.embedding.unpooled import UnpooledExchange

_WORTH = 0.9  # share of a batch's ids that are distinct, up to which they are found under dedup auto


class SlotsContext(EmbeddingCollectionContext):
    """TorchRec's context of a step, with what is known of the ids of exchanged tables; None where TorchRec has all."""

    def __init__(self) -> None:
        super().__init__()
        self.distinct: Distinct | None = None
        self.features: KeyedJaggedTensor | None = None
        self.rooms: list[int] = []
        """for the ids of each sequence"""

    def record_stream(self, stream: torch.Stream) -> None:
        """Note that `stream` uses the tensors."""
        super().record_stream(stream)
        if self.distinct is not None and self.features is not None:
            self.distinct.record_stream(stream)
            self.features.record_stream(stream)  # type: ignore[arg-type]


class OverlapShardedEmbeddingCollection(ExchangingModule[UnpooledExchange], ShardedEmbeddingCollection):
    """TorchRec's sharded module of unpooled tables, whose shards exchange through an `UnpooledExchange`.

    Shardings that an exchange cannot take fall back to TorchRec's own lookup and output_dist. The output is TorchRec's.
    """

    _kind = "unpooled tables"

    def __init__(
        self, *args: Any, options: ExchangeOptions, dedup: bool | str, cached: Mapping[str, float], **kwargs: Any
    ) -> None:
        """Take TorchRec's arguments, how to exchange, whether each distinct id travels once, and `cached` tables."""
        super().__init__(*args, **kwargs)
        self.dedup = dedup
        """True, False or auto; of an exchange that takes ids True or False"""
        self._dedups = None if dedup == "auto" else bool(dedup)
        """whether this rank finds distinct ids, where TorchRec sends them; None until it has measured a batch"""
        self._begin(options, cached)
        self._configs = {config.name: config for config in self._embedding_configs}
        self.unpooled_features = {name for config in self._embedding_configs for name in config.feature_names}
        names = get_embedding_names_by_table(self._embedding_configs)
        self._names = dict(zip(self._configs, names, strict=True))
        self._set_up_exchange(len(self._configs))
        self._has_rows_apart = self.exchange is not None and self.exchange.has_rows_apart
        if self._has_rows_apart:
            self.dedup = True  # which brings the ids of each host's rows together
        self._arriving = [first_features(sharding) for sharding in self._shardings]
        self._distinct = self._distinct_of(self.exchange.names) if self.exchange is not None else None
        """of the tables that are exchanged"""
        self._all_distinct = self._distinct
        """of these and, where the exchange takes ids, of data-parallel tables"""

    @property
    def _shardings(self) -> list[Any]:
        """TorchRec's shardings, by number."""
        return list(self._sharding_type_to_sharding.values())

    def _reasons(self, by_type: Mapping[str, Any]) -> dict[str, str | None]:
        reasons = super()._reasons(by_type)
        if None not in reasons.values():
            return reasons
        assert self._device is not None
        params = [each.fused_params or {} for sharding in by_type.values() for each in groups_of(sharding)]
        if self._device.type == "cpu" and any(each.get("weight_decay") or each.get("max_norm") for each in params):
            whole = "rows that decay, which on a CPU FBGEMM updates, feature by feature"
            return {kind: reason or whole for kind, reason in reasons.items()}
        return reasons

    def _why_falls_back(self, features: KeyedJaggedTensor | None = None) -> str | None:
        if (reason := super()._why_falls_back(features)) is not None:
            return reason
        if self._has_rows_apart:  # each owner would send a row for every slot
            return "rows on several hosts, whose unpooled embeddings GraphTrainPipeline alone exchanges"
        return None

    def _new_exchange(self, *arguments: Any) -> UnpooledExchange:
        return UnpooledExchange(*arguments, dim=self._embedding_dim)

    def _exchanged_names(self) -> dict[str, str]:
        """Return the tables that the exchange serves, in the order of the module."""
        return {name: name for name in self._tables_of(self._ours)}

    def _tables_of(self, numbers: Sequence[int]) -> list[str]:
        """Return the tables of some shardings, in the order of the module."""
        every = self._shardings
        found = {table.name for i in numbers for table in every[i].embedding_tables()}
        return [name for name in self._configs if name in found]

    def _distinct_of(self, tables: Sequence[str], ranges: Collection[RowRange] = ()) -> DistinctIds:
        """Return the finder of the distinct ids of some tables, or of ranges of their rows."""
        sequences = [
            NamedSequence(name, feature, number)
            for number, table in enumerate(tables)
            for name, feature in zip(self._names[table], self._configs[table].feature_names, strict=True)
        ]
        assert self._device is not None
        rows = [self._configs[table].num_embeddings for table in tables]
        firsts = [[each.first for each in ranges if each.table == table] or [0] for table in tables]
        return DistinctIds(sequences, rows, self._device, firsts)

    def take_ids(
        self,
        keys: Sequence[str],
        bound: BatchBound,
        order: CommunicationOrder | None = None,
        weighted: bool = False,
    ) -> None:
        """From now on, send ids to the owners of their rows by the exchange; a collective, see `Exchange.take_ids`."""
        self.exchange = self.exchange or self._make_exchange()
        if order is not None:
            self.exchange.order = order
        layout, replicated = self._with_replicated(self.exchange.table_layout)
        self.exchange.names = list(self._exchanged_names())
        ranges = layout.row_ranges(self._has_rows_apart)
        self._all_distinct = self._distinct_of(self.exchange.names, ranges.values())
        if self.dedup == "auto":  # by numbers that all ranks agree on
            self.dedup = self._is_worth(bound)
        self.exchange.take_distinct(self._all_distinct, bound, layout, replicated, bool(self.dedup))
        self.takes_ids = True

    def _is_worth(self, bound: BatchBound) -> bool:
        """Return whether batches of a bound have few enough distinct ids to be found."""
        ids = distinct = 0
        for table in self._exchanged_names():
            most = sum(bound.capacity(self._configs[table].feature_names))
            ids, distinct = ids + most, distinct + min(most, bound.distinct.get(table, most))
        return distinct <= _WORTH * ids

    def counted(self) -> tuple[list[str], DistinctIds] | None:
        """Return of whose distinct ids captured steps need a bound, and what counts them; None without.

        They are tables, or ranges of their rows, see `UnpooledExchange.row_ranges`.
        """
        if self.dedup is False:
            return None
        tables = self._tables_of([*self._exchanged, *self._replicated])
        own = self.exchange.row_ranges if self.exchange is not None else {}
        ranges = dict[str, RowRange]()
        for table in tables:
            found = {name: each for name, each in own.items() if each.table == table}
            ranges |= found or {table: RowRange(table, None, 0)}
        return list(ranges), self._distinct_of(tables, ranges.values())

    def forward(self, *input: Any, **kwargs: Any) -> LazyAwaitable[dict[str, JaggedTensor]]:
        """Look up and exchange, as TorchRec's sharded module does; where ids are taken, they are sent here at last."""
        if not self.takes_ids:
            return super().forward(*input, **kwargs)
        (features,) = (*input, *kwargs.values())
        if features.variable_stride_per_key() or features.inverse_indices_or_none() is not None:
            raise InputError(
                "ids: the model makes features with batches of their own for unpooled tables, which no captured step "
                "takes; give all features one batch, or train by TorchRec's pipeline"
            )
        assert self.exchange is not None
        assert self._all_distinct is not None
        rows, rooms = self.exchange.start_sent_rows(features), self.exchange.rooms_of(features)
        make = partial(to_sequences, self._all_distinct, features, rooms, self._need_indices)
        return SequencesAwaitable(rows, make, None, self._output_names)

    @property
    def _output_names(self) -> list[str]:
        """The names of the output in TorchRec's order."""
        return list(dict.fromkeys(chain.from_iterable(self._embedding_names_per_sharding)))

    def create_context(self) -> SlotsContext:
        """Return the context of a step."""
        return SlotsContext()

    def input_dist(self, ctx: EmbeddingCollectionContext, features: Any) -> Awaitable[Awaitable[KJTList]]:
        """Find the distinct ids, and send them as TorchRec sends ids: a slot as if it were a sample."""
        if self.exchange is None or not self._exchanged or not isinstance(features, KeyedJaggedTensor):
            return super().input_dist(ctx, features)
        features = with_bags_of_samples(features)
        if (reason := self._why_falls_back(features)) is not None:
            self._tell_once(reason)
            return super().input_dist(ctx, features)
        assert isinstance(ctx, SlotsContext)
        if self._has_uninitialized_input_dist:
            self._create_input_dist(features.keys())
            self._has_uninitialized_input_dist = False
        awaitables = []
        with torch.no_grad():
            found, begins, slots = self._find_distinct(ctx, features)
            stock = self._split(features)
            for number, (input_dist, sharding) in enumerate(zip(self._input_dists, self._shardings, strict=True)):
                ids = stock[number]
                if number in self._exchanged:
                    ids = self._slots_of(sharding, found, begins, slots, features.lengths().dtype)
                awaitables.append(input_dist(ids))
                permute = getattr(input_dist, "unbucketize_permute_tensor", None)
                sharding_context = SequenceShardingContext(
                    features_before_input_dist=ids, unbucketize_permute_tensor=permute
                )
                ctx.sharding_contexts.append(sharding_context)
        return KJTListSplitsAwaitable(awaitables, ctx, self._module_fqn, self._sharding_types)

    def _find_distinct(self, ctx: SlotsContext, features: KeyedJaggedTensor) -> tuple[Distinct, list[int], int]:
        """Return the distinct ids, the first one of each table, and the slots of a table; reads numbers back."""
        assert self._distinct is not None
        rooms = self._distinct.rooms_of(features)
        batch = self._distinct.sort(features, rooms, self._dedups is not False)
        begins = batch.first_run.tolist()
        if self._dedups is None and sum(rooms):
            self._dedups = begins[-1] <= _WORTH * sum(rooms)
        slots = _rounded(max(end - begin for begin, end in pairwise(begins)))
        blocks = SlotBlocks(slots, (1,) * (len(begins) - 1))  # TorchRec's features are fixed
        ctx.distinct, ctx.features, ctx.rooms = self._distinct.place(batch, blocks), features, rooms
        return ctx.distinct, begins, slots

    def _split(self, features: KeyedJaggedTensor) -> Sequence[KeyedJaggedTensor | None]:
        """Return the ids of each sharding, as TorchRec splits them; none where all are exchanged."""
        if len(self._exchanged) == len(self._shardings):
            return [None] * len(self._shardings)
        if self._features_order:
            features = features.permute(self._features_order)
        return features.split(self._feature_splits)

    def _slots_of(
        self, sharding: Any, distinct: Distinct, begins: Sequence[int], slots: int, lengths_type: torch.dtype
    ) -> KeyedJaggedTensor:
        """Return the slots of the tables of a sharding, each as its first feature; the others' bags are empty."""
        assert self.exchange is not None
        lengths_of = distinct.lengths.view(-1, slots)
        values, lengths, keys = [distinct.values[:0]], [], []
        for table in tables_in_order(sharding):
            number = self.exchange.names.index(table.name)
            values.append(distinct.values[begins[number] : begins[number + 1]])
            lengths += [lengths_of[number], *[lengths_of.new_zeros(slots)] * (len(table.feature_names) - 1)]
            keys += table.feature_names
        return KeyedJaggedTensor(keys, torch.cat(values), lengths=torch.cat(lengths).to(lengths_type), stride=slots)

    def compute_and_output_dist(
        self, ctx: EmbeddingCollectionContext, input: KJTList
    ) -> LazyAwaitable[dict[str, JaggedTensor]]:
        """Look up and exchange; TorchRec's train pipelines call this with ids that are already at their owners."""
        if not isinstance(ctx, SlotsContext) or ctx.distinct is None:
            return super().compute_and_output_dist(ctx, input)
        assert self.exchange is not None
        assert self._distinct is not None
        assert ctx.features is not None
        batch_sizes = ctx.sharding_contexts[self._exchanged[0]].batch_size_per_rank
        inputs = [_features_of(input[i], self._arriving[i]) for i in self._exchanged]
        rows = partial(self.exchange.rows_of, self.exchange.start(inputs, batch_sizes), ctx.distinct)
        make = partial(to_sequences, self._distinct, ctx.features, ctx.rooms, self._need_indices)
        return SequencesAwaitable(rows, make, self._start_others(ctx, input), self._output_names)

    def _start_others(self, ctx: SlotsContext, input: KJTList) -> LazyAwaitable[dict[str, JaggedTensor]] | None:
        """Look up the tables that stay with TorchRec, and start to send their rows as it does."""
        numbers = [i for i in range(len(self._shardings)) if i not in self._exchanged]
        if not numbers:
            return None
        awaitables, features = [], []
        for i in numbers:
            sharding_context: Any = ctx.sharding_contexts[i]
            sharding_context.lengths_after_input_dist = input[i].lengths().view(-1, input[i].stride())
            dim = self._embedding_dim_for_sharding_type(self._sharding_types[i])
            awaitables.append(self._output_dists[i](self._lookups[i](input[i]).view(-1, dim), sharding_context))
            features.append(sharding_context.features_before_input_dist)
        return EmbeddingCollectionAwaitable(
            awaitables_per_sharding=awaitables,
            features_per_sharding=features,
            embedding_names_per_sharding=[self._embedding_names_per_sharding[i] for i in numbers],
            ctx=EmbeddingCollectionContext(),
            need_indices=self._need_indices,
            features_to_permute_indices=self._features_to_permute_indices,
        )


def _features_of(ids: KeyedJaggedTensor, features: Sequence[int]) -> KeyedJaggedTensor:
    """Return some features of ids whose others are empty."""
    if len(features) == len(ids.keys()):
        return ids
    lengths = ids.lengths().view(len(ids.keys()), ids.stride())[list(features)]
    return KeyedJaggedTensor(
        [ids.keys()[i] for i in features], ids.values(), lengths=lengths.flatten(), stride=ids.stride()
    )


def _rounded(slots: int) -> int:
    """Return a few more slots than are needed, so that windows are seldom made anew. Example: 1000 gives 1024."""
    step = 1 << max(0, slots.bit_length() - 4)
    return max(1, -(-slots // step) * step)
