"""Sends ids to the owners of their rows: ranks publish ids in their windows (`id_layout`), owners read them there."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import torch
from torch.nn.functional import pad
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dlrm_overlap.comm.device_errors import DeviceErrorRecord
from dlrm_overlap.config import InputError
from dlrm_overlap.embedding.backends.cpu import CpuSignals
from dlrm_overlap.embedding.backends.messages import send_window
from dlrm_overlap.embedding.distinct import Distinct
from dlrm_overlap.embedding.id_layout import IdLayout
from dlrm_overlap.embedding.internode import published_window
from dlrm_overlap.embedding.layout import EVERY_RANK, SLOTS_FROM, FeatureShard
from dlrm_overlap.embedding.options import ExchangeContext
from dlrm_overlap.embedding.steps import BatchSizes, weights_of
from dlrm_overlap.embedding.tables import BadIds, bad_id_message
from dlrm_overlap.embedding.windows import DeviceSignals, Signals, WindowPair, one_flag_each, skip_epoch
from dlrm_overlap.kernels import reference
from dlrm_overlap.kernels.divide_ids import Shares, divide_ids
from dlrm_overlap.kernels.ids.id_map import Claims
from dlrm_overlap.kernels.launches import Launch, StepCache, prepared
from dlrm_overlap.kernels.pull_ids import (
    ANY_ID,
    BLOCK_IDS,
    Arrivals,
    Published,
    arguments_of,
    prepare_locate,
    prepare_pull,
    pull_tasks,
)
from dlrm_overlap.kernels.store_words import store_words


class Bags(NamedTuple):
    values: torch.Tensor
    """[n] int32: ids, or their low words, bag by bag"""
    offsets: torch.Tensor
    """offsets of the bags"""
    weights: torch.Tensor | None = None
    """[n] float32: the ids' weights, if any"""
    high: torch.Tensor | None = None
    """[n] int32: the ids' high words, see `ArrivedIds.high`"""


@dataclass(frozen=True, eq=False)
class _Prepared:
    arrivals: Arrivals
    tasks: torch.Tensor
    arrived: list[Bags]
    """where ids arrive, in even epochs and in odd ones"""


class IdPull(ABC):
    """Reads the ids of some shards from the windows of the ranks `sources`."""

    status: torch.Tensor | None = None

    def __init__(self, exchange: "IdExchange", shards: Sequence[FeatureShard], sources: range) -> None:
        self._exchange, self._ids, self._shards, self._sources = exchange, exchange.ids, shards, sources
        self._rows = [ANY_ID.value if shard.buckets else exchange.rows_of(shard) for shard in shards]
        self._features = [self._ids.published(shard) for shard in shards]
        arena, names = exchange.windows.arena, exchange.windows.names
        self._windows = [[published_window(arena, name, rank) for rank in sources] for name in names]
        """the ranks' windows, of even epochs and of odd ones"""

    @abstractmethod
    def __call__(self, samples: int, buffer_index: int) -> Bags:
        """Return the ids in the windows of `buffer_index`, epoch mod 2, with `samples` bags a feature and rank."""

    def check(self) -> None:  # noqa: B027  optional
        """See `IdExchange.check`."""


class DeviceIdPull(IdPull):
    def __init__(self, exchange: "IdExchange", shards: Sequence[FeatureShard], sources: range) -> None:
        super().__init__(exchange, shards, sources)
        self._device, self._known = exchange.device, exchange.known
        self._record = DeviceErrorRecord(self._device)
        self.status = self._record.status
        self._looks = exchange.checks and bool(shards) and exchange.bad_ids_of(shards[0]).looks
        numbers = self._tensor(self._features), self._tensor(self._rows), self._tensor(self._ids.published_capacity)
        addresses = [torch.tensor([each.data_ptr() for each in one], device=self._device) for one in self._windows]
        at = self._ids.offsets_at, self._ids.weights_at
        self._published = [Published(each, *at, *numbers, self._ids.high_at) for each in addresses]
        capacity = self._ids.arriving(self._features, len(sources))
        # Without memory, they only say what each step allocates.
        self._where = torch.device("meta") if exchange.in_new_memory else self._device
        self._values = [torch.zeros(capacity, dtype=torch.int32, device=self._where) for _ in range(2)]
        self._weights: Sequence[torch.Tensor | None] = [None, None]
        if self._ids.weighted:
            self._weights = [torch.zeros(capacity, device=self._where) for _ in range(2)]
        self._high: Sequence[torch.Tensor | None] = [None, None]
        if self._ids.wide:
            self._high = [torch.zeros_like(values) for values in self._values]
        self._prepared = StepCache[int, _Prepared]()
        """by number of samples of a rank"""

    def _tensor(self, numbers: Sequence[Any]) -> torch.Tensor:
        return torch.tensor(numbers, dtype=torch.int32, device=self._device)

    def _prepare(self, samples: int) -> _Prepared:
        sources, features = len(self._sources), len(self._features)
        values, weights = self._values, self._weights
        if self._known:
            firsts, counts, begins, starts = self._ids.known_arrivals(self._features, sources, samples)
            arrivals = Arrivals(self._tensor(firsts), self._tensor(counts), self._tensor([*begins, starts[-1]]))
            offsets = [self._ids.known_offsets(self._features, sources * samples).to(self._device)] * 2
            values = [each[: starts[-1]] for each in values]
            weights = [None if each is None else each[: starts[-1]] for each in weights]
        else:
            pairs = features * sources
            arrivals = Arrivals(*(self._tensor([0] * n) for n in (pairs, pairs, pairs + 1)))
            bags = (features + 1) * sources * samples
            offsets = [torch.zeros(bags + 1, dtype=torch.int32, device=self._where) for _ in range(2)]
        capacities = [self._ids.published_capacity[feature] for feature in self._features]
        padded = 0 if self._known else self._values[0].numel()
        tasks = pull_tasks(capacities, sources, samples, padded, BLOCK_IDS)
        arrived = [Bags(*each) for each in zip(values, offsets, weights, self._high, strict=True)]
        return _Prepared(arrivals, self._tensor(tasks).reshape(len(tasks), 3), arrived)

    def __call__(self, samples: int, buffer_index: int) -> Bags:
        found = self._prepared.get(samples, self._prepare, samples)
        bags = self._allocated(found.arrived[buffer_index])
        arrived = arguments_of(bags)
        locate, pull = self._launches(arrived, bags.weights is not None, found, samples, buffer_index)
        locate()
        pull(*arrived)
        return bags

    @prepared
    def _launches(
        self, arrived: Sequence[torch.Tensor], weighted: bool, found: _Prepared, samples: int, buffer_index: int
    ) -> tuple[Launch, Launch]:
        """Return the launches that locate ids and that pull them to tensors like `arrived`; see `arguments_of`."""
        values, offsets, weights, high = arrived
        published, status, lengths = self._published[buffer_index], self._record.status, not self._known
        where = published, found.arrivals
        bags = values, offsets, weights if weighted else None, high if self._ids.wide else None
        return (
            prepare_locate(*where, status, samples, lengths, self._ids.known_total(samples)),
            prepare_pull(*where, found.tasks, bags, status, samples, lengths, self._looks),
        )

    def _allocated(self, arrived: Bags) -> Bags:
        """Return `arrived` with new memory for tensors without memory."""
        if not self._exchange.in_new_memory:
            return arrived
        (values, offsets), others = map(self._with_memory, arrived[:2]), arrived[2:]
        return Bags(values, offsets, *(None if each is None else self._with_memory(each) for each in others))

    def _with_memory(self, tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_meta:
            return tensor
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=self._device)  # empty_like takes ten times as long

    def check(self) -> None:
        if self._record.empty:
            return
        first_rank = self._sources.start
        if overflow := self._record.overflow():
            rank, *rest = overflow
            raise self._exchange.overflow(first_rank + rank, *rest)
        self._record.raise_expired(self._exchange.options.wait_timeout_s, "ids")
        if bad := self._record.bad_arrival():
            shard, source, *rest = bad
            self._exchange.report(self._shards[shard], first_rank + source, *rest)


_GREATEST_INT32 = 2**31 - 1


def _store(window: torch.Tensor, source: torch.Tensor) -> None:
    """Copy int32 by a kernel: in a CUDA graph it has its stream's priority, whereas a copy has the lowest."""
    torch.bitwise_or(source, 0, out=window)


class ArrivedIds(NamedTuple):
    """The ids that a step looks up, one input for all of this rank's shards.

    Unless lengths are known beforehand, the input has an extra feature, whose ids are all 0: it pads the number of ids
    to the same in every step.
    """

    ids: KeyedJaggedTensor
    batch: BatchSizes
    replicated: KeyedJaggedTensor | None = None
    """this rank's ids of replicated features, padded in the same way"""
    own_offsets: torch.Tensor | None = None
    """[published * b + 1] int32: offsets of the bags of this rank's samples, see `Step.own_offsets`"""
    distinct: Distinct | None = None
    """if bags are slots: which of this rank's ids are in which slot"""
    high: torch.Tensor | None = None
    """[n] int32, parallel to `ids.values()`, if there are tables of any id: high words of the ids of such tables, whose
    low words are in `ids` until `IdTables.activate`; 0 for all other ids and for padding"""


class IdTables(Protocol):
    """This rank's shards of tables of any id, which know the row of each id."""

    waits: bool
    """whether `prepare_step` may wait for the device"""

    def activate(self, arrived: ArrivedIds) -> Claims | None:
        """Replace the next step's ids by rows, in place; on GPUs by the current stream, without the host.

        Feature i of `arrived.ids` has the ids of this rank's shard i in the exchange's layout. If the shard has
        buckets, the row of each id, numbered within the shard, is written over its low word. Other ids stay. Returns
        the rows of new ids, for `fill`.
        """
        ...

    def fill(self, claims: Claims) -> None:
        """Give rows of new ids their initial values where the step looks them up: in the table, or in its cache."""
        ...

    def follow_clock(self) -> None:
        """Write the time where the next step, captured or not, reads it; call it outside a capture."""
        ...

    def expect(self, is_taken: bool) -> None:
        """Say whether a step will look up the ids that are sent next, by a replay or not."""
        ...

    def prepare_step(self) -> None:
        """Before a step that looks up activated ids, do what needs the host; further calls for a step do nothing."""
        ...


class IdExchange:
    """Sends ids to the owners of their rows; on GPUs, the host reads nothing back."""

    pull_type: type[IdPull] = DeviceIdPull
    signals_type: type[Signals] = DeviceSignals

    def __init__(
        self, context: ExchangeContext, ids: IdLayout, windows: WindowPair, in_new_memory: bool = False
    ) -> None:
        """With `in_new_memory` ids arrive in new memory in every step, and the lookup checks them, not this object."""
        self.in_new_memory, self.checks = in_new_memory, not in_new_memory
        self.ids, self.windows, self.options, self.device = ids, windows, context.options, context.device
        self.layout, self.tables, self.order = context.layout, context.tables, context.order
        self.group, self.rank, self.world_size = context.group, context.group.rank(), context.group.size()
        self._replicated_tables = context.replicated
        self.own_bad_ids = BadIds(context.replicated.bounds_checks if context.replicated is not None else [])
        self.known = ids.known_lengths
        self.bad_ids = BadIds(self.tables.bounds_checks)
        self._pulls = [self.pull_type(self, self.layout.by_owner[self.rank], range(self.world_size))]
        """of this rank's shards and, if there are some, of replicated tables"""
        if self.layout.replicated:
            self._pulls.append(self.pull_type(self, self.layout.replicated, range(self.rank, self.rank + 1)))
        self._status = self._pulls[0].status
        counts = one_flag_each(range(self.world_size), self.world_size)
        self._signals = self.signals_type(windows, counts, self.options.wait_timeout_s, self._status, "ids")
        if ids.shares:
            self._make_shares()

    def _make_shares(self) -> None:
        ids, offsets = self.ids, 1 + len(self.ids.shares) * self.ids.batch_capacity.samples
        entries = torch.tensor(ids.shares, dtype=torch.int64, device=self.device)
        where = ids.shares_at, ids.shared_values, ids.offsets_at, len(ids.keys)
        if not ids.wide:
            entries = entries[:, :3].contiguous()
        planes = ids.weights_at * ids.weighted, ids.high_at * ids.wide
        self._shares = Shares(entries, ids.values, *where, *planes)
        self._counts = torch.full((offsets,), ids.shares_at, dtype=torch.int32, device=self.device)

    def send(self, features: KeyedJaggedTensor, samples: int, count: torch.Tensor | None = None) -> ArrivedIds:
        """Publish the ids of this rank's samples, and return the ids of this rank's shards; a collective.

        The result is valid until the call after the next, or without limit if it is in new memory.

        Args:
            features: the same keys in every step, with up to `samples` bags a feature.
            samples: the largest number of samples of a rank.
            count: [1] int32 on the device, the number of ids if `features` is padded; read if lengths are known.

        Raises:
            InputError: if keys or the presence of weights change, weights require a gradient, or there are too many
                samples; nothing has begun.
        """
        self._check(features, samples)
        if features.stride() < samples:
            features, count = self._padded(features, samples), None
        self.windows.begin()
        self._publish(self.windows.local, features, count)
        return self._fetch(samples)

    def _check(self, features: KeyedJaggedTensor, samples: int) -> None:
        if features.keys() != list(self.ids.keys):
            raise InputError(
                f"ids: features {', '.join(features.keys())}, but every batch must have the same as the first, in this "
                f"order: {', '.join(self.ids.keys)}"
            )
        if ((weights := weights_of(features)) is not None) != self.ids.weighted:
            raise InputError("ids: some batches' have weights, and others' none; give them to all or to none")
        if weights is not None and weights.requires_grad and torch.is_grad_enabled():
            raise InputError(
                "ids: their weights require a gradient, which nothing computes where ids are sent without the host; "
                "detach the weights, or train by TorchRec's pipeline"
            )
        if samples > self.ids.batch_capacity.samples:
            raise InputError(
                f"ids: a batch of {samples} samples exceeds its capacity of {self.ids.batch_capacity.samples}; raise "
                f"the capacity's samples, or make smaller batches"
            )

    def _padded(self, features: KeyedJaggedTensor, samples: int) -> KeyedJaggedTensor:
        """Return ids with more bags: empty ones, or if all lengths are known the same ones again.

        Nobody reads embeddings of the added bags, so their gradients are zero. They have ids of this batch, whose rows
        are updated anyway, because an optimizer such as Adam changes a row in a step even by a gradient of zero.
        """
        keys, bags = features.keys(), features.stride()
        more, values, weights = samples - bags, features.values(), weights_of(features)
        if self.known:
            sizes = [self.ids.batch_capacity.bag_sizes[key][1] for key in keys]

            def padded(of_ids: torch.Tensor) -> torch.Tensor:
                parts = of_ids.split([size * bags for size in sizes])
                repeated = [part.repeat(-(-samples // max(bags, 1))) for part in parts]
                return torch.cat([part[: size * samples] for part, size in zip(repeated, sizes, strict=True)])

            values, weights = padded(values), weights if weights is None else padded(weights)
        lengths = pad(features.lengths().view(len(keys), bags), (0, more)).flatten()
        return KeyedJaggedTensor(keys, values, weights, lengths=lengths, stride=samples)

    def _publish(self, window: torch.Tensor, features: KeyedJaggedTensor, count: torch.Tensor | None) -> None:
        values = features.values()
        here = min(values.numel(), self.ids.values)
        if self.ids.wide:
            store_words(values[:here], window[:here], window[self.ids.high_at :][:here], self.ids.mixes)
        elif values.dtype != torch.int32:
            # Ids beyond int32 stay outside every table: a table has at most 2^31 - 1 rows.
            values = values.clamp(-1, _GREATEST_INT32)
            window[:here].copy_(values[:here])
        elif self.in_new_memory:  # in eager steps, where a copy has the priority of its stream
            window[:here].copy_(values[:here])
        else:
            _store(window[:here], values[:here])
        if self.ids.weighted:
            weights = features.weights()[:here].detach().float().view(torch.int32)
            _store(window[self.ids.weights_at :][:here], weights)
        offsets = window[self.ids.offsets_at :]
        if not self.known:
            lengths = features.lengths()
            torch.cumsum(lengths, 0, dtype=torch.int32, out=offsets[1 : lengths.numel() + 1])
            if self.ids.shares:
                self.divide(window, features.stride())
        elif count is not None:
            _store(offsets[:1], count)
        else:
            offsets[:1].fill_(values.numel())

    def divide(self, window: torch.Tensor, samples: int) -> None:
        divide_ids(window, self._shares, samples, self._counts)

    def _fetch(self, samples: int) -> ArrivedIds:
        self.check()
        reach = self.windows.arena.reach
        with self.order:
            self._signals.signal()
            if not reach.is_one_node:
                send_window(self.windows, self.group)
            for source in reach.sources:
                self._signals.signal(source)
            self._signals.wait()
        buffer_index = self.windows.counter.value % 2
        bags, *own_bags = [pull(samples, buffer_index) for pull in self._pulls]
        ids = _input(bags, self.world_size * samples)  # a new one in every step, since it caches lengths
        own = _input(own_bags[0], samples) if own_bags else None
        offsets = self.windows.local[self.ids.offsets_at :] if self.ids.shares or self.layout.has_slots else None
        published = len(self.ids.published_capacity) * samples + 1
        batch = BatchSizes.of((samples,) * self.world_size)
        return ArrivedIds(ids, batch, own, None if offsets is None else offsets[:published], high=bags.high)

    def rows_of(self, shard: FeatureShard) -> int:
        if shard.owner != EVERY_RANK:
            return self.tables.rows(shard)
        assert self._replicated_tables is not None
        return self._replicated_tables.weight(shard).shape[0]

    def report(self, shard: FeatureShard, source: int, index: int, value: int, rows: int) -> None:
        """Report an id outside its table; `value` is relative to the first row of the shard."""
        name = shard.feature_name
        first, end = shard.rows
        value, rows = value + first, end or rows
        where = f"id {index} of feature {name} in the batch of rank {source}"
        self.bad_ids_of(shard).report(f"{where}: {bad_id_message(name, value, rows)}")

    def bad_ids_of(self, shard: FeatureShard) -> BadIds:
        return self.own_bad_ids if shard.owner == EVERY_RANK else self.bad_ids

    def overflow(self, rank: int, feature: int, count: int, most: int) -> ValueError:
        """Return the error for a batch with too many ids or, if lengths are known, with a wrong number of ids."""
        keys = self.ids.keys
        if self.known:
            text = f"{count} ids, but its capacity, with the same number in every bag of a feature, gives {most}"
        elif feature == len(keys):  # the unused space between the ids of the features and those of the shares
            count = most - count
            text = f"{count} ids, beyond its total capacity of {most}"
        else:
            name = keys[feature if feature < len(keys) else self.ids.shares[feature - len(keys) - 1].key]
            table, _, first_slot = name.partition(SLOTS_FROM)
            what = f"ids of feature {name}"
            if self.layout.has_slots:
                before, what = int(first_slot or 0), f"distinct ids of table {table}"
                count, most = count + before, most + before
            text = f"{count} {what}, beyond its capacity of {most}"
        cure = "correct the capacity's bag_sizes" if count >= 0 else "give every bag a length of 0 or more"
        if self.layout.has_slots:
            cure = "raise the capacity's distinct, and its bag_sizes"
        return ValueError(f"the batch of rank {rank} has {text}; {cure}, and start again")

    def skip(self) -> None:
        skip_epoch(self.windows, self.signals_type, self.options.wait_timeout_s, self._status)

    def check(self) -> None:
        """Raise or report the errors that kernels have recorded; never waits for the device.

        Raises:
            ExchangeTimeoutError: if a wait has expired.
            ValueError: if a batch is beyond the capacity, or for an id outside its table, see `BadIds`.
        """
        for pull in self._pulls:
            pull.check()

    def close(self) -> None:
        """Drop the pulls, which refer to this exchange: a reference cycle would keep memory."""
        self._pulls.clear()


def _input(bags: Bags, samples: int) -> KeyedJaggedTensor:
    values, offsets, weights, _ = bags
    keys = [str(index) for index in range((offsets.numel() - 1) // samples)]
    return KeyedJaggedTensor(keys, values, weights, offsets=offsets, stride=samples)


class CpuIdPull(IdPull):
    def __call__(self, samples: int, buffer_index: int) -> Bags:
        ids = self._ids
        published = [
            self._offsets(*each, samples) for each in zip(self._sources, self._windows[buffer_index], strict=True)
        ]

        def pulled(first: int) -> tuple[torch.Tensor, torch.Tensor]:
            return reference.pull_ids([(window[first:], of) for window, of in published], self._features, samples)

        (values, offsets), weights, high = pulled(0), None, None
        if ids.weighted:
            weights = pulled(ids.weights_at)[0].view(torch.float32)
        bounds = offsets[::samples].tolist()
        if ids.wide:
            high = pulled(ids.high_at)[0]
            self._take_rows(values, high, bounds)
        self._check_rows(values, bounds)
        return Bags(values, offsets, weights, high)

    def _offsets(self, rank: int, window: torch.Tensor, samples: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a rank's window and offsets, after a check that the ids do not exceed their capacity."""
        exchange, ids = self._exchange, self._exchange.ids
        offsets = window[ids.offsets_at :]
        if exchange.known:
            if int(offsets[0]) != (total := ids.known_total(samples)):
                raise exchange.overflow(rank, 0, int(offsets[0]), total)
            return window, ids.known_offsets(range(len(ids.keys)), samples)
        capacity = ids.published_capacity
        offsets = offsets[: len(capacity) * samples + 1]
        for feature, (count, most) in enumerate(zip(offsets[::samples].diff().tolist(), capacity, strict=True)):
            if not 0 <= count <= most:
                raise exchange.overflow(rank, feature, count, most)
        return window, offsets

    def _take_rows(self, values: torch.Tensor, high: torch.Tensor, bounds: Sequence[int]) -> None:
        """Replace ids, given by their words, by row numbers, except ids of tables of any id."""
        shards = [shard for shard in self._shards for _ in self._sources]
        for shard, (begin, end) in zip(shards, pairwise(bounds), strict=True):
            if not shard.buckets:
                here = slice(begin, end)
                values[here] = reference.rows_of(reference.joined_words(values[here], high[here]))
                high[here] = 0

    def _check_rows(self, values: torch.Tensor, bounds: Sequence[int]) -> None:
        if not self._exchange.checks:
            return
        shards = zip(self._shards, self._rows, strict=True)
        arrived = [(*each, source) for each in shards for source in self._sources]
        for (shard, rows, source), (begin, end) in zip(arrived, pairwise(bounds), strict=True):
            if shard.buckets:
                continue
            here = values[begin:end]
            outside = (here < 0) | (here >= rows)
            if outside.any():
                index = int(outside.nonzero()[0])
                self._exchange.report(shard, source, index, int(here[index]), rows)
                here.masked_fill_(outside, 0)


class CpuIdExchange(IdExchange):
    pull_type, signals_type = CpuIdPull, CpuSignals

    def divide(self, window: torch.Tensor, samples: int) -> None:
        """Divide the ids into shares, unless they exceed the capacity: then the pull raises the error."""
        ids, features = self.ids, len(self.ids.keys)
        offsets = window[ids.offsets_at :]
        shared = offsets[(features + 1) * samples :][: len(ids.shares) * samples + 1]
        shared.fill_(ids.shares_at)
        counts = offsets[: features * samples + 1 : samples].diff()
        if (counts < 0).any() or (counts > torch.tensor(ids.capacity, device="cpu")).any():
            return
        published = window[: ids.values]
        if ids.wide:
            published = reference.joined_words(published, window[ids.high_at :][: ids.values])
        values, positions, lengths = reference.divide_ids(published, offsets, ids.shares, samples)
        if ids.wide:
            high = window[ids.high_at + ids.shares_at :][: values.numel()]
            store_words(values, window[ids.shares_at :][: values.numel()], high)
        else:
            window[ids.shares_at :][: values.numel()] = values
        if ids.weighted:
            weights = window[ids.weights_at :]
            weights[ids.shares_at :][: values.numel()] = weights[positions]
        shared[1:] += lengths.cumsum(0)
