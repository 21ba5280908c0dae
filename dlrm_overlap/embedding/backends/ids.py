"""Ids to the owners of their rows: published by every rank in its window, read by the owners, see `protocol.ids`."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dlrm_overlap.comm.record import ExchangeTimeoutError, Record
from dlrm_overlap.config import InputError
from dlrm_overlap.embedding.backends.host import meet_on_host, skip_on_host
from dlrm_overlap.embedding.device.peers import ready_flags, skip_epoch
from dlrm_overlap.embedding.options import ExchangeContext
from dlrm_overlap.embedding.protocol.ids import IdLayout
from dlrm_overlap.embedding.protocol.step import BatchSizes
from dlrm_overlap.embedding.protocol.windows import WindowPair
from dlrm_overlap.embedding.tables import BadIds, bad_id_message
from dlrm_overlap.kernels import reference
from dlrm_overlap.kernels.flags import raise_flags, wait_flags
from dlrm_overlap.kernels.ids.pull_ids import BLOCK_IDS, Places, Published, place_ids, pull_ids, pull_tasks

_GREATEST_INT32 = 2**31 - 1


class ArrivedIds(NamedTuple):
    """The ids of this rank's shards for one step: its only input, and the samples of each rank.

    Where lengths are not known beforehand, the input has one feature more than there are shards, behind the others. Its
    ids, all 0, pad the number of ids to what it is in every step.
    """

    ids: KeyedJaggedTensor
    batch: BatchSizes


class IdExchange(ABC):
    """The ids' exchange on one rank. All ranks call `send` alike, with as many samples each.

    What `send` returns is valid until the next but one.
    """

    def __init__(self, context: ExchangeContext, ids: IdLayout, windows: WindowPair) -> None:
        self.ids, self.windows, self.options, self.device = ids, windows, context.options, context.device
        self.layout, self.tables, self.order = context.layout, context.tables, context.order
        self.rank, self.world_size = context.group.rank(), context.group.size()
        self.known = ids.bound.known_lengths
        self.requested = ids.features(self.rank)
        self.bad_ids = BadIds(self.tables.bounds_check)

    def send(self, features: KeyedJaggedTensor, count: torch.Tensor | None = None) -> ArrivedIds:
        """Publish the ids of this rank's samples, and return those that this rank's shards look up.

        Args:
            features: with the same keys in every step, and b bags a feature.
            count: [1] int32 on the device, the number of ids, where `features` has room for more; without it there are
                as many as `features` has room for. Used where lengths are known beforehand.

        Raises:
            InputError: if the features are others than before, or the samples more than the bound; nothing has begun.
        """
        samples = self._check(features)
        self.windows.begin()
        self._publish(features, count)
        return self._fetch(samples)

    def _check(self, features: KeyedJaggedTensor) -> int:
        if features.keys() != list(self.ids.keys):
            raise InputError(
                f"ids: features {', '.join(features.keys())}, but every batch must have the same as the first, in this "
                f"order: {', '.join(self.ids.keys)}"
            )
        if (samples := features.stride()) > self.ids.bound.samples:
            raise InputError(
                f"ids: a batch of {samples} samples is beyond its bound of {self.ids.bound.samples}; raise the bound's "
                f"samples, or make smaller batches"
            )
        return samples

    def _publish(self, features: KeyedJaggedTensor, count: torch.Tensor | None) -> None:
        """Store ids and offsets in this rank's window."""
        window, values = self.windows.local, features.values()
        here = min(values.numel(), self.ids.values)
        if values.dtype != torch.int32:
            # Ids that no int32 holds stay outside every table, which has at most 2^31 - 1 rows.
            values = values.clamp(-1, _GREATEST_INT32)
        window[:here].copy_(values[:here])
        offsets = window[self.ids.offsets_at :]
        if not self.known:
            lengths = features.lengths()
            torch.cumsum(lengths, 0, dtype=torch.int32, out=offsets[1 : lengths.numel() + 1])
        elif count is not None:
            offsets[:1].copy_(count)
        else:
            offsets[:1].fill_(values.numel())

    @abstractmethod
    def _fetch(self, samples: int) -> ArrivedIds:
        """Tell the peers that this rank has published, wait for them, and read what this rank's shards need."""

    def arrived(self, values: torch.Tensor, offsets: torch.Tensor, samples: int) -> ArrivedIds:
        """Return ids that have arrived as the input of a step."""
        keys = [str(index) for index in range((offsets.numel() - 1) // (self.world_size * samples))]
        ids = KeyedJaggedTensor(keys, values, offsets=offsets, stride=self.world_size * samples)
        return ArrivedIds(ids, BatchSizes.of((samples,) * self.world_size))

    def report(self, shard: int, source: int, place: int, value: int, rows: int) -> None:
        """Report an id outside its table, see `BadIds`."""
        name = self.layout.by_owner[self.rank][shard].feature_name
        where = f"id {place} of feature {name} in the batch of rank {source}"
        self.bad_ids.report(f"{where}: {bad_id_message(name, value, rows)}")

    def overflow(self, rank: int, feature: int, count: int, most: int) -> ValueError:
        """Return what to raise for a batch that has too many ids, or another number than is known."""
        name = self.ids.keys[feature]
        if self.known:
            text = f"{count} ids, but by its bound, which gives every bag of a feature the same number, it has {most}"
        else:
            text = f"{count} ids of feature {name}, beyond the {most} of its bound"
        return ValueError(f"the batch of rank {rank} has {text}; correct the bound's bag_sizes, and start again")

    @abstractmethod
    def skip(self) -> None:
        """Take an epoch in which nothing is published, as `Half.skip`."""

    def check(self) -> None:  # noqa: B027  a CPU raises at once
        """Raise what a kernel has recorded; never waits for the device."""

    def close(self) -> None:
        """Forget the windows."""
        self.windows.close()


class HostIdExchange(IdExchange):
    """Between processes of one host, by the reference's copies."""

    def _fetch(self, samples: int) -> ArrivedIds:
        meet_on_host(self.windows, self.options.wait_timeout_s, "ids")
        published = [self._published(rank, samples) for rank in range(self.world_size)]
        values, offsets = reference.pull_ids(published, self.requested, samples)
        self._check_rows(values, offsets, samples)
        return self.arrived(values, offsets, samples)

    def skip(self) -> None:
        """Take an epoch in which nothing is published."""
        skip_on_host(self.windows, self.options.wait_timeout_s)

    def _published(self, rank: int, samples: int) -> tuple[torch.Tensor, torch.Tensor]:
        window, keys = self.windows.arena.view(self.windows.name, rank), self.ids.keys
        offsets = window[self.ids.offsets_at :]
        if self.known:
            known = self.ids.known_offsets(range(len(keys)), samples)
            if int(offsets[0]) != (total := int(known[-1])):
                raise self.overflow(rank, 0, int(offsets[0]), total)
            return window, known
        offsets = offsets[: len(keys) * samples + 1]
        counts = offsets[::samples].diff().tolist()
        for feature, (count, most) in enumerate(zip(counts, self.ids.capacity, strict=True)):
            if count > most:
                raise self.overflow(rank, feature, count, most)
        return window, offsets

    def _check_rows(self, values: torch.Tensor, offsets: torch.Tensor, samples: int) -> None:
        """Take row 0 for ids outside their table or, by the bounds check, stop."""
        pairs = offsets[::samples].tolist()
        for shard, feature_shard in enumerate(self.layout.by_owner[self.rank]):
            rows = self.tables.weight(feature_shard).shape[0]
            for source in range(self.world_size):
                pair = shard * self.world_size + source
                here = values[pairs[pair] : pairs[pair + 1]]
                outside = (here < 0) | (here >= rows)
                if outside.any():
                    place = int(outside.nonzero()[0])
                    self.report(shard, source, place, int(here[place]), rows)
                    here.masked_fill_(outside, 0)


class _DevicePlaces(NamedTuple):
    """What one number of samples needs on the device."""

    places: Places
    tasks: torch.Tensor
    total: int
    """ids of a rank's batch, where lengths are known"""
    arrived: list[tuple[torch.Tensor, torch.Tensor]]
    """values and offsets as they arrive: those of even epochs, those of odd ones"""


class DeviceIdExchange(IdExchange):
    """Between GPUs: flags, then kernels that read the ranks' windows. Nothing is read back to the host."""

    def __init__(self, context: ExchangeContext, ids: IdLayout, windows: WindowPair) -> None:
        super().__init__(context, ids, windows)
        self.record = Record(self.device)
        counts = torch.ones(self.world_size, dtype=torch.int32)
        self._flags = ready_flags(windows, counts, self.record.status, self.options)
        rows = [self.tables.weight(shard).shape[0] for shard in self.layout.by_owner[self.rank]]
        known = self._tensor(self.requested), self._tensor(rows), self._tensor(ids.capacity)
        self._published = [Published(windows.arena.addresses(name), ids.offsets_at, *known) for name in windows.names]
        self._values = [torch.zeros(ids.arriving(self.rank), dtype=torch.int32, device=self.device) for _ in range(2)]
        self._places: dict[int, _DevicePlaces] = {}

    def _tensor(self, numbers: Sequence[Any]) -> torch.Tensor:
        return torch.tensor(numbers, dtype=torch.int32, device=self.device)

    def _places_of(self, samples: int) -> _DevicePlaces:
        """Return what batches of `samples` need, made when they first appear; that allocates memory."""
        if samples not in self._places:
            batch, shards = self.world_size * samples, len(self.requested)
            total = samples * sum(most for _, most in self.ids.bound.bag_sizes.values())
            values = self._values
            if self.known:
                sources, counts, arrivals, starts = self.ids.known_places(self.rank, samples)
                places = Places(self._tensor(sources), self._tensor(counts), self._tensor([*arrivals, starts[-1]]))
                offsets = [self.ids.known_offsets(self.requested, batch).to(self.device)] * 2
                values = [each[: starts[-1]] for each in values]
            else:
                pairs = shards * self.world_size
                places = Places(*(self._tensor([0] * n) for n in (pairs, pairs, pairs + 1)))
                offsets = [self._tensor([0] * ((shards + 1) * batch + 1)) for _ in range(2)]
            capacities = [self.ids.capacity[feature] for feature in self.requested]
            padded = 0 if self.known else self._values[0].numel()
            tasks = pull_tasks(capacities, self.world_size, samples, padded, BLOCK_IDS)
            arrived = list(zip(values, offsets, strict=True))
            self._places[samples] = _DevicePlaces(places, self._tensor(tasks).reshape(len(tasks), 3), total, arrived)
        return self._places[samples]

    def _fetch(self, samples: int) -> ArrivedIds:
        self.check()
        found, parity = self._places_of(samples), self.windows.epoch % 2
        argument, published, status = self.windows.counter.argument, self._published[parity], self.record.status
        with self.order:
            raise_flags(self._flags, self.rank, 0, argument)
            wait_flags(self._flags, self.rank, argument)
        place_ids(published, found.places, status, samples, not self.known, found.total)
        values, offsets = found.arrived[parity]
        pull_ids(
            published,
            found.places,
            found.tasks,
            values,
            offsets,
            status,
            samples,
            lengths=not self.known,
            check=self.bad_ids.mode != BoundsCheckMode.NONE,
        )
        return self.arrived(values, offsets, samples)  # of its own in every step: it remembers lengths it is asked for

    def skip(self) -> None:
        """Take an epoch in which nothing is published."""
        skip_epoch(self.windows, self.record.status, self.options)

    def check(self) -> None:
        """Raise what a kernel has recorded.

        Raises:
            ExchangeTimeoutError: if a wait for a peer has expired.
            ValueError: if a batch is beyond its bound; or if an id is outside its table, under bounds check FATAL.
        """
        if self.record.empty:
            return
        if overflow := self.record.overflow():
            raise self.overflow(*overflow)
        if expired := self.record.expired():
            raise ExchangeTimeoutError(expired, self.options.wait_timeout_s, "ids")
        if bad := self.record.bad_arrival():
            self.report(*bad)
