"""The sharded module of pooled tables."""

from collections.abc import Mapping, Sequence
from functools import cache, partial, reduce
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed.types import Awaitable, LazyAwaitable, NoWait
from torchrec.modules.embedding_configs import PoolingType
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from dlrm_overlap.backends import BACKENDS
from dlrm_overlap.embedding.exchange import Exchange, PooledAwaitable
from dlrm_overlap.embedding.exchanging_module import Deferred, ExchangingModule, exchanges_of
from dlrm_overlap.embedding.id_layout import BatchCapacity, joined
from dlrm_overlap.embedding.id_sender import IdSender
from dlrm_overlap.embedding.layout import Layout
from dlrm_overlap.embedding.shardings import (
    exchanging_group,
    in_rank_order,
    joined_inputs,
    model_order,
    names_of,
    output_types,
)
from dlrm_overlap.embedding.steps import weights_of, with_float_weights
from dlrm_overlap.embedding.torchrec_tables import TorchRecTables
from dlrm_overlap.embedding.variable_batch import InverseIndices, gathering, of_samples, with_even_batches
from dlrm_overlap.embedding.window_input_dist import ByTorchRec, WindowInput, WindowInputDist
from dlrm_overlap.torchrec_private import (
    EmbeddingBagCollectionAwaitable,
    KJTList,
    KJTListSplitsAwaitable,
    ShardedEmbeddingBagCollection,
    maybe_td_to_kjt,
)
from dlrm_overlap.torchrec_private.attributes import first_wait, send_ids, shardings_by_type


class OverlapShardedEmbeddingBagCollection(ExchangingModule[Exchange], ShardedEmbeddingBagCollection):
    """TorchRec's sharded module with its shards exchanged by an `Exchange`; other shardings fall back to TorchRec.

    The output's features are in TorchRec's order, which follows the plan. With `output_order` model the exchanged
    features come first, in the order of the unsharded module, then the others in TorchRec's.
    """

    _exchange_type = Exchange

    def __init__(self, *args: Any, output_order: str, input_dist: str, **kwargs: Any) -> None:
        self._output_order, self._input_dist_by = output_order, input_dist
        super().__init__(*args, **kwargs)

    def _set_up(self) -> None:
        self._window_input_dist: WindowInputDist | None = None
        super()._set_up()
        self._order_output(Layout([], [], 1) if self.exchange is None else self.exchange.layout)

    def _make_exchange(self) -> Exchange:
        exchange = super()._make_exchange()
        if self._can_send_by_windows:
            exchange.layout = joined(exchange.layout)
            exchange.window_input_dist = self._window_input_dist = WindowInputDist(exchange)
        return exchange

    @property
    def _can_send_by_windows(self) -> bool:
        """Whether ids may be sent through windows in TorchRec's pipelines; the same on every rank.

        Modules that change the ids that input_dist has sent call it themselves. They have weighted tables, as feature
        processors have, or they do not give the module inside them its name in the model.
        """
        by_default = "windows" if torch.device(self._device).type == "cuda" else "torchrec"
        return (
            (by_default if self._input_dist_by == "auto" else self._input_dist_by) == "windows"
            and BACKENDS[self._resolved.backend].stores_to_peers
            and not self.cached
            and not self._is_weighted
            and self._module_fqn is not None
        )

    def _names_in_output(self, numbers: Sequence[int]) -> dict[str, str]:
        names = names_of([self._embedding_shardings[i] for i in numbers])
        if self._output_order == "plan":
            return names
        return {name: names[name] for name in model_order(self._embedding_bag_configs) if name in names}

    def _order_output(self, layout: Layout) -> None:
        self._output_names, self._output_dims = self._embedding_names, self._embedding_dims
        if self._output_order == "model":
            others = self._others
            self._output_names = [*self._names_in_output(self._ours).values(), *names_of(others).values()]
            self._output_dims = layout.dims + [dim for each in others for dim in each.embedding_dims()]

    @property
    def _others(self) -> list[Any]:
        return [each for i, each in enumerate(self._embedding_shardings) if i not in self._ours]

    @property
    def leading_columns(self) -> int:
        """Number of columns in front of the output that the model may fill, see `ExchangeOptions.leading_columns`."""
        # With mean pooling the output is divided, which makes a new tensor.
        if self.exchange is None or self._output_order != "model" or self._others or self._has_mean_pooling_callback:
            return 0
        options = self.exchange.options
        return options.leading_columns if BACKENDS[options.backend].stores_to_peers else 0

    def _take_ids(self, keys: Sequence[str], capacity: BatchCapacity, weighted: bool) -> None:
        others = [i for i in range(len(self._shardings)) if i not in self._ours]
        self.torchrec_tables = TorchRecTables(self, others) if others else None
        if self.exchange is not None:
            layout = self._layout(self._ours)
            replicated, about = self._replicated_tables, (weighted, self.mixes, self.change_ids)
            self.sender = IdSender(self.exchange, keys, capacity, layout, replicated, *about)
            self._order_output(layout)
        if self._has_mean_pooling_callback:
            self._divided_by = self._rows_of_divisor(keys).to(self._device)

    def _rows_of_divisor(self, keys: Sequence[str]) -> torch.Tensor:
        """Return [D_total] int64: for each column the index in `keys` of the feature whose lengths divide it.

        Columns are in TorchRec's order. The index is len(keys) for a column that is not divided. TorchRec's
        `_create_mean_pooling_divisor` decides: of a feature pooled to sums, only the first shard is not divided.
        """
        every: list[Any] = self._embedding_shardings
        features = [name for sharding in every for name in sharding.feature_names()]
        undivided = {features.index(name) for name in self._pooling_type_to_rs_features[PoolingType.SUM.value]}
        columns = list(range(len(features)))
        if len(self._embedding_names) != len(features):
            columns = [features.index(name.partition("@")[0]) for name in self._embedding_names]
        rows = [len(keys) if i in undivided else list(keys).index(features[i]) for i in columns]
        return torch.tensor(rows).repeat_interleave(torch.tensor(self._embedding_dims))

    def _divisor(self, features: KeyedJaggedTensor) -> torch.Tensor:
        """Return divisors [b, D_total], in TorchRec's order: a bag's number of ids or sum of weights, plus 1e-6."""
        lengths, weights = features.lengths(), weights_of(features)
        if weights is not None:
            lengths = torch.ops.fbgemm.segment_sum_csr(1, features.offsets().int(), weights)
        lengths = lengths.view(len(features.keys()), features.stride())
        return torch.cat([lengths, torch.ones_like(lengths[:1])]).index_select(0, self._divided_by).T + 1e-6

    def forward(self, *input: Any, **kwargs: Any) -> LazyAwaitable[KeyedTensor]:
        """After `take_ids`, send the ids of the batch unless `sender` has sent them before."""
        if not self.takes_ids:
            return super().forward(*input, **kwargs)
        (features,) = (*input, *kwargs.values())
        features = with_even_batches(maybe_td_to_kjt(features, self._ids_keys))
        exchanged, others = None, {}
        if self.sender is not None:
            exchanged = self.sender.start(features)
        if self.torchrec_tables is not None:
            pooled = zip(self.torchrec_tables.numbers, self.torchrec_tables.pooled(features), strict=True)
            others = {number: NoWait(each) for number, each in pooled}
        divisor = self._divisor(features) if self._has_mean_pooling_callback else None
        return _of_samples(self._output(exchanged, others, divisor), gathering(features))

    def input_dist(self, ctx: Any, features: Any) -> Awaitable[Awaitable[KJTList]]:
        """Send the ids by TorchRec; a variable batch is first padded to one bag for each sample."""
        if not self._exchanged or not isinstance(features, KeyedJaggedTensor):
            return super().input_dist(ctx, features)
        even = with_even_batches(features)
        if (request := self._request_by_windows(ctx, even)) is not None:
            ctx.inverse_indices = gathering(even)
            return request
        awaitable = super().input_dist(ctx, even)
        ctx.inverse_indices = gathering(even)
        return awaitable

    def _request_by_windows(self, ctx: Any, features: KeyedJaggedTensor) -> Awaitable[Awaitable[KJTList]] | None:
        """Return an awaitable of the ids of other shardings, then a `WindowInput`; None if TorchRec must send all."""
        # Pipelines want TorchRec's input_dist made by the first batch, which it sends.
        input_dist = self._window_input_dist
        if input_dist is None or self.takes_ids or self._has_uninitialized_input_dist or self.has_tracker:
            return None
        # The pipeline frees the batch's ids after this call, and windows are filled later. Not in every release.
        if getattr(self, "_free_features_storage_early", False):
            return None
        request = input_dist.request(features, partial(self._send_by_torchrec, features))
        if request is None:
            return None
        if self._has_mean_pooling_callback:
            if not hasattr(self, "_divided_by"):
                self._divided_by = self._rows_of_divisor(features.keys()).to(self._device)
            ctx.divisor = self._divisor(features)
        awaitables: list[Any] = []
        if others := self._other_numbers:
            awaitables, ctx.sharding_contexts = send_ids(self, others, features)
        awaitables.append(request)
        return KJTListSplitsAwaitable(awaitables, ctx)

    def _send_by_torchrec(self, features: KeyedJaggedTensor) -> ByTorchRec:
        context: Any = self.create_context()
        request: Any = super().input_dist(context, features)
        return context, first_wait(request, context).wait()

    def prefetch(self, dist_input: KJTList, forward_stream: Any = None, ctx: Any = None) -> None:
        if not isinstance(dist_input[len(dist_input) - 1], WindowInput):
            super().prefetch(dist_input, forward_stream, ctx)
            return
        for ids, number in zip(dist_input, self._other_numbers, strict=False):
            lookup: Any = self._lookups[number]
            inner = lookup.module if isinstance(lookup, DistributedDataParallel) else lookup
            inner.prefetch(sparse_features=ids, forward_stream=forward_stream)

    def compute_and_output_dist(self, ctx: Any, input: KJTList) -> LazyAwaitable[KeyedTensor]:
        if self.exchange is None or not self._exchanged:
            return super().compute_and_output_dist(ctx, input)
        given: Any = input[len(input) - 1]
        if (windows := self._window_input_dist) is not None:
            windows.poll()
        if windows is not None and isinstance(given, WindowInput):
            by_torchrec = given.by_torchrec
            if given.send_again is not None and self.has_tracker:  # registered since the ids were sent
                by_torchrec = given.send_again()
            if by_torchrec is None:
                exchanged, others = windows.start(given), self._look_up_others(input, ctx.sharding_contexts)
                return _of_samples(self._output(exchanged, others, ctx.divisor), ctx.inverse_indices)
            inverse = ctx.inverse_indices
            ctx, input = by_torchrec
            ctx.inverse_indices = inverse
        if self.has_tracker:
            self._tell_once("steps stay with TorchRec: a tracker is registered")
            look_up = partial(super().compute_and_output_dist, ctx, input)
            return _of_samples(self._look_up_by_torchrec(look_up), ctx.inverse_indices)
        batch_sizes = ctx.sharding_contexts[self._exchanged[0]].batch_size_per_rank
        if not batch_sizes:  # TorchRec's pipeline leaves them out after `detach`; every rank has the same then
            ranks = exchanging_group(self._env).size()
            batch_sizes = [input[self._exchanged[0]].stride() // ranks] * ranks
        shardings = [(self._embedding_shardings[i], with_float_weights(input[i])) for i in self._exchanged]
        ids = [in_rank_order(each, sharding, tuple(batch_sizes)) for sharding, each in shardings]
        if windows is not None or self.takes_ids:  # then the exchange has one input
            ids = [joined_inputs(ids, sum(batch_sizes))]
        exchanged = self.exchange.start(ids, batch_sizes)
        numbers = self._other_numbers
        others = self._look_up_others([input[i] for i in numbers], [ctx.sharding_contexts[i] for i in numbers])
        return _of_samples(self._output(exchanged, others, ctx.divisor), ctx.inverse_indices)

    @property
    def _other_numbers(self) -> list[int]:
        """The shardings that TorchRec looks up."""
        return [i for i in range(len(self._lookups)) if i not in self._exchanged]

    def _look_up_others(self, inputs: Any, contexts: Sequence[Any]) -> dict[int, Awaitable[torch.Tensor]]:
        """Return the pooled embeddings of the shardings that TorchRec looks up, by number."""
        return {
            number: self._output_dists[number](self._lookups[number](inputs[i]), contexts[i])
            for i, number in enumerate(self._other_numbers)
        }

    def output_dist(self, ctx: Any, output: list[torch.Tensor]) -> LazyAwaitable[KeyedTensor]:
        return _of_samples(super().output_dist(ctx, output), ctx.inverse_indices if self._exchanged else None)

    def _output(
        self,
        exchanged: PooledAwaitable | None,
        others: Mapping[int, Awaitable[torch.Tensor]],
        divisor: torch.Tensor | None,
    ) -> LazyAwaitable[KeyedTensor]:
        """Return all columns in order; `others` are by sharding number, `divisor` is in TorchRec's order."""
        parts = [*([] if exchanged is None else [exchanged]), *others.values()]
        if exchanged is not None and others and self._output_order == "plan":
            every: list[Any] = self._embedding_shardings
            widths = [sum(every[i].embedding_dims()) for i in self._ours]
            columns = cache(lambda: exchanged.wait().split(widths, dim=1))
            ours = {i: Deferred(lambda number=number: columns()[number]) for number, i in enumerate(self._ours)}
            parts = [ours[i] if i in ours else others[i] for i in range(len(every))]
        pooled = EmbeddingBagCollectionAwaitable(
            awaitables=parts,
            embedding_dims=self._output_dims,
            embedding_names=self._output_names,
            module_fqn=self._module_fqn,
        )
        if divisor is not None:
            pooled.callbacks.append(partial(self._divide, divisor=divisor))
        return pooled

    def _divide(self, pooled: KeyedTensor, divisor: torch.Tensor) -> KeyedTensor:
        divisors = dict(zip(self._embedding_names, divisor.split(self._embedding_dims, dim=1), strict=True))
        values = pooled.values() / torch.cat([divisors[name] for name in pooled.keys()], dim=1)  # noqa: SIM118
        return KeyedTensor(pooled.keys(), pooled.length_per_key(), values)

    def update_shards(self, *args: Any, **kwargs: Any) -> None:
        if self.exchange is not None:
            self.exchange.close()
            self.exchange = None
        super().update_shards(*args, **kwargs)
        self._set_up()


def _of_samples(pooled: LazyAwaitable[KeyedTensor], inverse: InverseIndices | None) -> LazyAwaitable[KeyedTensor]:
    if inverse is not None:
        pooled.callbacks.append(partial(of_samples, inverse=inverse))
    return pooled


def output_dtype(module: nn.Module) -> torch.dtype:
    """Return the type of the pooled embeddings; float32 if the module is not sharded."""
    module = getattr(module, "exchanging", module)  # inside a managed collision module
    if not isinstance(module, ShardedEmbeddingBagCollection):
        return torch.float32
    shardings, types = dict(enumerate(shardings_by_type(module).values())), []
    if isinstance(module, OverlapShardedEmbeddingBagCollection) and module.exchange is not None:
        types = [module.exchange.options.output_dtype]
        shardings = {number: each for number, each in shardings.items() if number not in module._exchanged}
    types += [output.as_dtype() for sharding in shardings.values() for output in output_types(sharding)]
    return reduce(torch.promote_types, types)


def exchanges(model: nn.Module) -> list[Exchange]:
    return exchanges_of(module for module in model.modules() if isinstance(module, ExchangingModule))
