"""Ids to the owners of their rows: published by every rank in its window, read by the owners, see `id_layout`."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch.nn.functional import pad
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dlrm_overlap.comm.arena import HostArena
from dlrm_overlap.comm.record import Record
from dlrm_overlap.config import InputError
from dlrm_overlap.embedding.backends.cpu import meet_on_cpu, skip_on_cpu
from dlrm_overlap.embedding.backends.messages import send_window
from dlrm_overlap.embedding.crossing import published_window
from dlrm_overlap.embedding.distinct import Distinct
from dlrm_overlap.embedding.id_layout import IdLayout
from dlrm_overlap.embedding.layout import EVERY_RANK, SLOTS_FROM, FeatureShard
from dlrm_overlap.embedding.options import ExchangeContext
from dlrm_overlap.embedding.steps import BatchSizes, StepCache, weights_of
from dlrm_overlap.embedding.tables import BadIds, bad_id_message
from dlrm_overlap.embedding.windows import WindowPair, ready_flags, skip_epoch
from dlrm_overlap.kernels import reference
from dlrm_overlap.kernels.divide_ids import Shares, divide_ids
from dlrm_overlap.kernels.flags import raise_flags, wait_flags
from dlrm_overlap.kernels.pull_ids import BLOCK_IDS, Arrivals, Published, place_ids, pull_ids, pull_tasks

Bags = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]
"""ids, bag after bag, the offsets of the bags, and the ids' weights, if they have some"""


class _Prepared(NamedTuple):
    """Tensors on the device for one number of samples."""

    arrivals: Arrivals
    tasks: torch.Tensor
    arrived: list[Bags]
    """where ids arrive: those of even epochs, those of odd ones"""


class IdPull:
    """The kernels that read the ids of some features out of the windows of some ranks, on the device."""

    def __init__(
        self, ids: IdLayout, windows: WindowPair, sources: range, features: Sequence[int], rows: Sequence[int]
    ) -> None:
        """Take the ranks to read from, and of each feature its index in the keys and its table's rows."""
        self._ids, self._features, self._sources = ids, features, len(sources)
        self._device, self._known = windows.arena.device, ids.known_lengths
        self.record = Record(self._device)
        numbers = self._tensor(features), self._tensor(rows), self._tensor(ids.published_capacity)
        seen = [[published_window(windows.arena, name, rank) for rank in sources] for name in windows.names]
        addresses = [torch.tensor([each.data_ptr() for each in one], device=self._device) for one in seen]
        self._published = [Published(each, ids.offsets_at, ids.weights_at, *numbers) for each in addresses]
        room = ids.arriving(features, self._sources)
        self._values = [torch.zeros(room, dtype=torch.int32, device=self._device) for _ in range(2)]
        self._weights: Sequence[torch.Tensor | None] = [None, None]
        if ids.weighted:
            self._weights = [torch.zeros(room, device=self._device) for _ in range(2)]
        self._prepared = StepCache[int, _Prepared]()
        """by samples of a rank"""

    def _tensor(self, numbers: Sequence[Any]) -> torch.Tensor:
        return torch.tensor(numbers, dtype=torch.int32, device=self._device)

    def _prepare(self, samples: int) -> _Prepared:
        """Return the tensors for batches of `samples`, newly allocated."""
        sources, features = self._sources, len(self._features)
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
            offsets = [self._tensor([0] * ((features + 1) * sources * samples + 1)) for _ in range(2)]
        capacities = [self._ids.published_capacity[feature] for feature in self._features]
        padded = 0 if self._known else self._values[0].numel()
        tasks = pull_tasks(capacities, sources, samples, padded, BLOCK_IDS)
        arrived = list(zip(values, offsets, weights, strict=True))
        return _Prepared(arrivals, self._tensor(tasks).reshape(len(tasks), 3), arrived)

    def __call__(self, samples: int, parity: int, check: bool) -> Bags:
        """Read the ids that the ranks have published in the windows of `parity`; `check` holds them against tables."""
        found = self._prepared.get(samples, self._prepare, samples)
        published, status = self._published[parity], self.record.status
        place_ids(published, found.arrivals, status, samples, not self._known, self._ids.known_total(samples))
        bags, lengths = found.arrived[parity], not self._known
        pull_ids(published, found.arrivals, found.tasks, *bags, status, samples, lengths=lengths, check=check)
        return bags


_GREATEST_INT32 = 2**31 - 1


def _store(window: torch.Tensor, source: torch.Tensor) -> None:
    """Copy int32 by a kernel, which has its stream's priority in a CUDA graph: a copy has the lowest."""
    torch.bitwise_or(source, 0, out=window)


class ArrivedIds(NamedTuple):
    """The ids of one step: those of this rank's shards, its only input, and those of the tables that every rank holds.

    Where lengths are not known beforehand, the input has one feature more than there are shards, after the others. Its
    ids, all 0, pad the number of ids to the same in every step.
    """

    ids: KeyedJaggedTensor
    batch: BatchSizes
    """the samples of each rank"""
    replicated: KeyedJaggedTensor | None = None
    """of this rank's samples, the ids of the replicated features, padded likewise; None without such features"""
    own_offsets: torch.Tensor | None = None
    """[published * b + 1] int32: the offsets of all bags that this rank has published; None where nobody asks"""
    distinct: Distinct | None = None
    """where bags are slots: which of this rank's ids are in them"""


class IdExchange(ABC):
    """The ids' exchange on one rank. All ranks call `send` alike.

    The result of `send` is valid until the next but one.
    """

    def __init__(self, context: ExchangeContext, ids: IdLayout, windows: WindowPair) -> None:
        self.ids, self.windows, self.options, self.device = ids, windows, context.options, context.device
        self.layout, self.tables, self.order = context.layout, context.tables, context.order
        self.group, self.rank, self.world_size = context.group, context.group.rank(), context.group.size()
        self._replicated_tables = context.replicated
        self.own_bad_ids = BadIds(context.replicated.bounds_checks if context.replicated is not None else [])
        self.known = ids.known_lengths
        self.requested, self.replicated = ids.features(self.rank), ids.replicated
        self.bad_ids = BadIds(self.tables.bounds_checks)

    def send(self, features: KeyedJaggedTensor, samples: int, count: torch.Tensor | None = None) -> ArrivedIds:
        """Publish the ids of this rank's samples, and return those that this rank's shards look up.

        Args:
            features: with the same keys in every step, and up to `samples` bags a feature.
            samples: of the rank that has most, as which all ranks publish.
            count: [1] int32 on the device, the number of ids, where `features` has room for more; without it there are
                as many as `features` has room for. Used where lengths are known beforehand.

        Raises:
            InputError: if the features are others than before, some ids have weights and others none, weights require a
                gradient, or the samples are more than the bound; nothing has begun.
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
            before, now = ("weights", "none") if self.ids.weighted else ("no weights", "some")
            raise InputError(f"ids: the first batch's have {before}, and this one's {now}; give them to all or to none")
        if weights is not None and weights.requires_grad and torch.is_grad_enabled():
            raise InputError(
                "ids: their weights require a gradient, which nothing computes where ids are sent without the host; "
                "detach the weights, or train by TorchRec's pipeline"
            )
        if samples > self.ids.bound.samples:
            raise InputError(
                f"ids: a batch of {samples} samples is beyond its bound of {self.ids.bound.samples}; raise the bound's "
                f"samples, or make smaller batches"
            )

    def _padded(self, features: KeyedJaggedTensor, samples: int) -> KeyedJaggedTensor:
        """Return ids with empty bags up to `samples`; with bags of id 0 where all lengths are known.

        Nobody reads the pooled embeddings of these bags, so their gradient is zero.
        """
        keys, bags = features.keys(), features.stride()
        more, values, weights = samples - bags, features.values(), weights_of(features)
        if self.known:
            sizes = [self.ids.bound.bag_sizes[key][1] for key in keys]

            def padded(of_ids: torch.Tensor) -> torch.Tensor:
                parts = of_ids.split([size * bags for size in sizes])
                return torch.cat([pad(part, (0, size * more)) for part, size in zip(parts, sizes, strict=True)])

            values, weights = padded(values), weights if weights is None else padded(weights)
        lengths = pad(features.lengths().view(len(keys), bags), (0, more)).flatten()
        return KeyedJaggedTensor(keys, values, weights, lengths=lengths, stride=samples)

    def _publish(self, window: torch.Tensor, features: KeyedJaggedTensor, count: torch.Tensor | None) -> None:
        """Store ids and offsets in this rank's `window`."""
        values = features.values()
        here = min(values.numel(), self.ids.values)
        if values.dtype != torch.int32:
            # Ids that no int32 holds stay outside every table, which has at most 2^31 - 1 rows.
            values = values.clamp(-1, _GREATEST_INT32)
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

    @abstractmethod
    def divide(self, window: torch.Tensor, samples: int) -> None:
        """Publish the ids of each share of tables that are cut by rows, out of those of the features in `window`."""

    @abstractmethod
    def _fetch(self, samples: int) -> ArrivedIds:
        """Raise flags that this rank has published, wait for the peers', and read the ids of this rank's shards."""

    def arrived(self, shards: Bags, replicated: Bags | None, samples: int) -> ArrivedIds:
        """Return the ids that have arrived for this rank's shards, and its own of replicated tables, as a step's."""
        ids = _input(*shards, self.world_size * samples)
        batch = BatchSizes.of((samples,) * self.world_size)
        own = _input(*replicated, samples) if replicated is not None else None
        offsets = self.windows.local[self.ids.offsets_at :] if self.ids.shares or self.layout.has_slots else None
        published = len(self.ids.published_capacity) * samples + 1
        return ArrivedIds(ids, batch, own, None if offsets is None else offsets[:published])

    def _share_offsets(self, samples: int) -> torch.Tensor:
        """Return [shares * samples + 1]: in this rank's window, the offsets of the bags of each share."""
        offsets = self.windows.local[self.ids.offsets_at + (len(self.ids.keys) + 1) * samples :]
        return offsets[: len(self.ids.shares) * samples + 1]

    def rows_of(self, shard: FeatureShard) -> int:
        """Return the rows of the table of a shard that this rank holds, be it alone or as every rank does."""
        if shard.owner != EVERY_RANK:
            return self.tables.rows(shard)
        assert self._replicated_tables is not None
        return self._replicated_tables.weight(shard).shape[0]

    def report(self, shard: FeatureShard, source: int, index: int, value: int, rows: int) -> None:
        """Report an id outside its table, see `BadIds`; the ids of a share count from the first row of the shard."""
        name = shard.feature_name
        first, end = shard.rows
        value, rows = value + first, end or rows
        where = f"id {index} of feature {name} in the batch of rank {source}"
        bad_ids = self.own_bad_ids if shard.owner == EVERY_RANK else self.bad_ids
        bad_ids.report(f"{where}: {bad_id_message(name, value, rows)}")

    def overflow(self, rank: int, feature: int, count: int, most: int) -> ValueError:
        """Return the error for a batch that has too many ids, or another number than is known."""
        keys = self.ids.keys
        if self.known:
            text = f"{count} ids, but by its bound, which gives every bag of a feature the same number, it has {most}"
        elif feature == len(keys):  # the room between the ids of the features and those of the shares
            count = most - count
            text = f"{count} ids, beyond the {most} of all its bounds"
        else:
            name = keys[feature if feature < len(keys) else self.ids.shares[feature - len(keys) - 1].key]
            table, _, first_slot = name.partition(SLOTS_FROM)
            if self.layout.has_slots:
                count, most = count + int(first_slot or 0), most + int(first_slot or 0)
            what = f"distinct ids of table {table}" if self.layout.has_slots else f"ids of feature {name}"
            text = f"{count} {what}, beyond the {most} of its bound"
        cure = "correct the bound's bag_sizes" if count >= 0 else "give every bag a length of 0 or more"
        if self.layout.has_slots:
            cure = "raise the bound's distinct, and its bag_sizes"
        return ValueError(f"the batch of rank {rank} has {text}; {cure}, and start again")

    @abstractmethod
    def skip(self) -> None:
        """Take an epoch in which nothing is published, as `Half.skip`."""

    def check(self) -> None:  # noqa: B027  a CPU raises at once
        """Raise the faults that kernels have recorded; never waits for the device."""

    def close(self) -> None:
        """Forget the windows."""
        self.windows.close()


def _input(
    values: torch.Tensor, offsets: torch.Tensor, weights: torch.Tensor | None, samples: int
) -> KeyedJaggedTensor:
    keys = [str(index) for index in range((offsets.numel() - 1) // samples)]
    return KeyedJaggedTensor(keys, values, weights, offsets=offsets, stride=samples)


class CpuIdExchange(IdExchange):
    """`IdExchange` on CPUs: every rank copies the ids of its tables as the reference does."""

    def __init__(self, context: ExchangeContext, ids: IdLayout, windows: WindowPair) -> None:
        super().__init__(context, ids, windows)
        ranks = range(self.world_size)
        self._seen = [[published_window(windows.arena, name, rank) for rank in ranks] for name in windows.names]
        """the window of each rank in even epochs, and in odd ones"""
        self._rows = {
            shard: self.rows_of(shard) for shard in (*self.layout.by_owner[self.rank], *self.layout.replicated)
        }

    def divide(self, window: torch.Tensor, samples: int) -> None:
        """Divide the ids as the reference does; of a batch beyond its bound, whose error comes later, none."""
        offsets, features = window[self.ids.offsets_at :], len(self.ids.keys)
        shared = self._share_offsets(samples)
        shared.fill_(self.ids.shares_at)
        counts = offsets[: features * samples + 1 : samples].diff()
        if (counts < 0).any() or (counts > torch.tensor(self.ids.capacity)).any():
            return
        ids, positions, lengths = reference.divide_ids(window, offsets, self.ids.shares, samples)
        window[self.ids.shares_at : self.ids.shares_at + ids.numel()] = ids
        if self.ids.weighted:
            weights = window[self.ids.weights_at :]
            weights[self.ids.shares_at : self.ids.shares_at + ids.numel()] = weights[positions]
        shared[1:] += lengths.cumsum(0)

    def _fetch(self, samples: int) -> ArrivedIds:
        arena = self.windows.arena
        assert isinstance(arena, HostArena)
        if len(arena.reached) < self.world_size:
            send_window(self.windows, self.group)
            for source in arena.reach.sources:
                for peer in arena.reached:
                    arena.raise_flag(self.windows.flags, peer, 0, self.windows.epoch, source)
        epoch = meet_on_cpu(self.windows, range(self.world_size), self.options.wait_timeout_s, "ids")
        published = [self._published(*each, samples) for each in enumerate(self._seen[epoch % 2])]
        shards = self._pull(published, self.requested, samples)
        self._check_rows(self.layout.by_owner[self.rank], range(self.world_size), *shards[:2], samples)
        if not self.replicated:
            return self.arrived(shards, None, samples)
        own = self._pull(published[self.rank : self.rank + 1], self.replicated, samples)
        self._check_rows(self.layout.replicated, [self.rank], *own[:2], samples)
        return self.arrived(shards, own, samples)

    def _pull(
        self, published: Sequence[tuple[torch.Tensor, torch.Tensor]], features: Sequence[int], samples: int
    ) -> Bags:
        values, offsets = reference.pull_ids(published, features, samples)
        if not self.ids.weighted:
            return values, offsets, None
        weights = [(window[self.ids.weights_at :], offsets) for window, offsets in published]
        return values, offsets, reference.pull_ids(weights, features, samples)[0].view(torch.float32)

    def skip(self) -> None:
        """Take an epoch in which nothing is published."""
        skip_on_cpu(self.windows, self.options.wait_timeout_s)

    def close(self) -> None:
        """Forget the windows."""
        self._seen = []
        super().close()

    def _published(self, rank: int, window: torch.Tensor, samples: int) -> tuple[torch.Tensor, torch.Tensor]:
        offsets = window[self.ids.offsets_at :]
        if self.known:
            known = self.ids.known_offsets(range(len(self.ids.keys)), samples)
            if int(offsets[0]) != (total := self.ids.known_total(samples)):
                raise self.overflow(rank, 0, int(offsets[0]), total)
            return window, known
        capacity = self.ids.published_capacity
        offsets = offsets[: len(capacity) * samples + 1]
        counts = offsets[::samples].diff().tolist()
        for feature, (count, most) in enumerate(zip(counts, capacity, strict=True)):
            if not 0 <= count <= most:
                raise self.overflow(rank, feature, count, most)
        return window, offsets

    def _check_rows(
        self,
        shards: Sequence[FeatureShard],
        sources: Sequence[int],
        values: torch.Tensor,
        offsets: torch.Tensor,
        samples: int,
    ) -> None:
        """Take row 0 for ids outside their table or, by the bounds check, stop."""
        pairs = iter(pairwise(offsets[::samples].tolist()))
        for shard in shards:
            rows = self._rows[shard]
            for source in sources:
                begin, end = next(pairs)
                here = values[begin:end]
                outside = (here < 0) | (here >= rows)
                if outside.any():
                    index = int(outside.nonzero()[0])
                    self.report(shard, source, index, int(here[index]), rows)
                    here.masked_fill_(outside, 0)


class DeviceIdExchange(IdExchange):
    """Between GPUs: flags, then kernels that read the ranks' windows. Nothing is read back to the CPU."""

    def __init__(self, context: ExchangeContext, ids: IdLayout, windows: WindowPair) -> None:
        super().__init__(context, ids, windows)
        self._shards = self.layout.by_owner[self.rank]
        rows = [[self.rows_of(shard) for shard in shards] for shards in (self._shards, self.layout.replicated)]
        self._pull = IdPull(ids, windows, range(self.world_size), self.requested, rows[0])
        self._pull_own: IdPull | None = None
        if self.replicated:
            self._pull_own = IdPull(ids, windows, range(self.rank, self.rank + 1), self.replicated, rows[1])
        if ids.shares:
            entries = torch.tensor(ids.shares, dtype=torch.int64, device=self.device)
            where = ids.shares_at, ids.shared_values, ids.offsets_at, len(ids.keys)
            self._shares = Shares(entries, ids.values, *where, ids.weights_at * ids.weighted)
            room = 1 + len(ids.shares) * ids.bound.samples
            self._counts = torch.full((room,), ids.shares_at, dtype=torch.int32, device=self.device)
        counts = torch.ones(self.world_size, dtype=torch.int32, device="cpu")
        self._flags = ready_flags(windows, counts, self._pull.record.status, self.options.wait_timeout_s)

    def divide(self, window: torch.Tensor, samples: int) -> None:
        """Divide the ids by kernels."""
        divide_ids(window, self._shares, samples, self._counts)

    def _fetch(self, samples: int) -> ArrivedIds:
        self.check()
        argument, parity = self.windows.counter.argument, self.windows.epoch % 2
        with self.order:
            raise_flags(self._flags, self.rank, 0, argument)
            if not self.windows.arena.reach.whole:
                send_window(self.windows, self.group)
            for source in self.windows.arena.reach.sources:
                raise_flags(self._flags, source, 0, argument)
            wait_flags(self._flags, self.rank, argument)
        shards = self._pull(samples, parity, self.bad_ids.looks)
        own = None
        if self._pull_own is not None:
            own = self._pull_own(samples, parity, self.own_bad_ids.looks)
        return self.arrived(shards, own, samples)  # of its own in every step: it remembers lengths it is asked for

    def skip(self) -> None:
        """Take an epoch in which nothing is published."""
        skip_epoch(self.windows, self._pull.record.status, self.options.wait_timeout_s)

    def check(self) -> None:
        """Raise the faults that kernels have recorded.

        Raises:
            ExchangeTimeoutError: if a wait for a peer has expired.
            ValueError: if a batch is beyond its bound; or if an id is outside its table, under bounds check FATAL.
        """
        self._raise(self._pull.record, self._shards, 0)
        if self._pull_own is not None:
            self._raise(self._pull_own.record, self.layout.replicated, self.rank)

    def _raise(self, record: Record, shards: Sequence[FeatureShard], first_rank: int) -> None:
        """Raise the faults in a record, whose kernels count `shards`, and ranks from `first_rank` on."""
        if record.empty:
            return
        if overflow := record.overflow():
            rank, *rest = overflow
            raise self.overflow(first_rank + rank, *rest)
        record.raise_expired(self.options.wait_timeout_s, "ids")
        if bad := record.bad_arrival():
            shard, source, *rest = bad
            self.report(shards[shard], first_rank + source, *rest)
