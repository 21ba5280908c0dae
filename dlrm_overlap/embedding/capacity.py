"""Sizes of batches over all ranks, and the capacity of windows and captured steps that is learned from the sizes.

From the greatest sizes over all ranks, each rank knows whether the batch exceeds the capacity, whether its step is
captured, and whether some rank has no batch left, which ends the training.
"""

import logging
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dlrm_overlap.comm.max_reduce import AsyncMaxReduce, Work
from dlrm_overlap.comm.order import CurrentStream
from dlrm_overlap.embedding.id_layout import BatchCapacity
from dlrm_overlap.kernels import reference

log = logging.getLogger("dlrm_overlap")

_ENDED, _MISMATCH, _SAMPLES, _HEADER = 0, 1, 2, 3
_ANY = np.iinfo(np.int64).max
_CPU = torch.device("cpu")
_CHECK_INTERVAL = timedelta(seconds=1)  # between checks for errors of kernels, while a result is late


class BatchOfIds(Protocol):
    """A batch of `BatchTensors`, or another one."""

    @property
    def ids(self) -> Sequence[KeyedJaggedTensor]: ...


class PendingResult:
    """The elementwise maximum of some numbers over the ranks.

    If kernels write the numbers, the reduction starts once they are ready, at the latest before the next one, so the
    CPU never waits for a step that it has just issued.
    """

    def __init__(self, consensus: "RankConsensus", numbers: torch.Tensor, written: torch.Event | None) -> None:
        """Take `numbers`, [n] int64 on the CPU. If kernels write them, `written` is the event that follows."""
        self._consensus, self._numbers, self._written = consensus, numbers, written
        self._work: Work | None = None

    @property
    def is_ready(self) -> bool:
        """True if the numbers are written, so that `begin` does not wait."""
        return self._written is None or self._written.query()

    def begin(self) -> None:
        if self._written is not None:
            self._written.synchronize()
        if (maxima := self._consensus.maxima) is not None:
            self._work = maxima.begin(self._numbers)

    def wait(self) -> np.ndarray:
        """Wait for all ranks and return the greatest numbers, [n] int64.

        Raises:
            RuntimeError: if a kernel has recorded an error, or a rank has ended or does not answer.
        """
        if self is self._consensus.last:
            self._consensus.ask_last()
        while (work := self._work) is not None:
            try:
                work.wait(_CHECK_INTERVAL)
                self._work = None
            except RuntimeError:
                if work.is_completed():
                    raise
                self._consensus.check()
        return self._numbers.numpy()


class RankConsensus:
    """Asynchronous max-reductions over the CPUs of a group, in the same order on all ranks."""

    def __init__(self, group: dist.ProcessGroup, check: Callable[[], None], device: torch.device = _CPU) -> None:
        """`check` raises errors that kernels have recorded, and is called while a result is late; a collective."""
        on_gpu = device.type == "cuda"
        self._current = CurrentStream(torch.cuda.current_stream(device).device) if on_gpu else None
        self.check, self.is_first = check, group.rank() == 0
        self.maxima = AsyncMaxReduce(group) if group.size() > 1 else None
        self.last: PendingResult | None = None
        """the result whose reduction has not started"""

    def ask(
        self, numbers: torch.Tensor, are_pending: bool = False, event: torch.cuda.Event | None = None
    ) -> PendingResult:
        """Return the pending elementwise maximum of `numbers`, [n] int64 on the CPU, over the ranks.

        If `are_pending`, kernels on the current stream have yet to write some of the numbers. Does not wait for them,
        but for the kernels of the previous call. `event` is recorded then, by default a new one.
        """
        self.ask_last()
        written = self._current().record_event(event) if self._current is not None and are_pending else None
        self.last = result = PendingResult(self, numbers, written)
        if written is None:
            self.ask_last()
        return result

    def ask_last(self) -> None:
        if self.last is not None:
            last, self.last = self.last, None
            last.begin()

    def poll(self) -> None:
        """Start the last reduction if its numbers are ready; never waits. An early start lets `wait` return sooner."""
        if self.last is not None and self.last.is_ready:
            self.ask_last()

    def any_is(self, here: bool) -> bool:
        """Return whether `here` is true on any rank; waits for all of them."""
        return bool(self.ask(torch.tensor([here], dtype=torch.int64, device="cpu")).wait())


class Description(NamedTuple):
    numbers: torch.Tensor
    """[3 + 3 * T + tables] int64 on the CPU, see `CapacityTracker`"""
    are_pending: bool
    """True if kernels on the current stream have yet to write some of the numbers"""


class SizesBuffer:
    """Memory for the sizes of a batch, which takes longer to make than to fill."""

    def __init__(self, count: int, features: int, pinned: bool) -> None:
        self.numbers = torch.empty(count, dtype=torch.int64, device="cpu", pin_memory=pinned)
        """see `Description.numbers`"""
        self.array = self.numbers.numpy()
        self.of_features = self.numbers[_HEADER : _HEADER + 3 * features].view(3, features)
        self.event = torch.cuda.Event() if pinned else None
        """see `RankConsensus.ask`"""


class CapacityTracker:
    """The capacity of windows and captured steps, learned from the first batch and grown by later ones.

    It is the same on all ranks.

    The sizes of a batch are [3 + 3 * T + tables] int64: 1 if there is no batch, 1 if it does not match the first one,
    and its number of samples; then T numbers of ids, one per feature, T numbers of ids in the largest bag, and T
    negated numbers of ids in the smallest bag; then the number of distinct ids of each unpooled table, computed on the
    device. A rank without samples does not change the greatest sizes of bags (see `reference.count_bags`), but its
    smallest bag is empty, because empty bags are its padding.

    Example: bags f: [5] [], g: [7, 7] [1] give 0 0 2, then 1 3, 1 2, 0 -1. The capacity for 2 samples is 2 ids of f,
    since its largest bag has 1, and 4 ids of g, a quarter more than 3. A batch g: [1, 2, 3, 4, 5] [] grows the capacity
    of g to 8.
    """

    def __init__(
        self,
        capacity: BatchCapacity | None,
        consensus: RankConsensus,
        modules: Sequence[Any] = (),
        device: torch.device = _CPU,
    ) -> None:
        self._capacity, self.consensus, self._device = capacity, consensus, device
        counted = [module.counted() for module in modules if hasattr(module, "counted")]
        self._collections = [(tables, distinct) for tables, distinct in counted if tables]
        self._tables = list(dict.fromkeys(table for tables, _ in self._collections for table in tables))
        """names of unpooled tables; if two collections have a table of one name, the greater number of ids counts"""
        self._features: list[str] = []
        self._limits = np.zeros(0, np.int64)

    @property
    def capacity(self) -> BatchCapacity:
        assert self._capacity is not None, "the capacity is learned from the first batch"
        return self._capacity

    def learn(self, example: BatchOfIds | None) -> bool:
        """Grow the capacity to the first batch, and return whether every rank has a batch; waits for all ranks."""
        if self.consensus.any_is(example is None) or example is None:
            return False
        self._features = _features(example)
        self._limit()
        sizes = self.ask(self.describe(example), example.ids).wait()
        if self._capacity is None or self.are_beyond(sizes):
            self.grow(sizes)
        return True

    def describe(self, batch: BatchOfIds, into: SizesBuffer | None = None) -> Description:
        """Return a batch's sizes, without distinct ids; for ids on a GPU, kernels on the current stream write sizes.

        `into` is the memory, by default new.
        """
        on_gpu = any(ids.values().is_cuda for ids in batch.ids)
        sizes = into or self.sizes_buffer(on_gpu or (bool(self._tables) and self._device.type == "cuda"))
        sizes.array[:_HEADER] = 0, 0, max((ids.stride() for ids in batch.ids), default=0)
        first = 0
        for ids in batch.ids:
            features = len(ids.keys())
            lengths, part = ids.lengths().view(features, ids.stride()), sizes.of_features
            if len(batch.ids) > 1:
                part = part[:, first : first + features]
            first += features
            if lengths.is_cuda and ids.stride():
                from dlrm_overlap.kernels.count_bags import count_bags  # needs Triton

                count_bags(lengths.contiguous(), part)
            else:
                part.copy_(reference.count_bags(lengths))
            if not ids.stride():
                part[2] = 0
        return Description(sizes.numbers, on_gpu)

    def sizes_buffer(self, pinned: bool) -> SizesBuffer:
        return SizesBuffer(self._distinct_from + len(self._tables), len(self._features), pinned)

    @property
    def _distinct_from(self) -> int:
        return _HEADER + 3 * len(self._features)

    def ask(
        self,
        described: Description | None,
        ids: Sequence[KeyedJaggedTensor] = (),
        is_mismatch: bool = False,
        event: torch.cuda.Event | None = None,
    ) -> PendingResult:
        """Return the pending maximum of the sizes over all ranks; every rank calls this for every batch.

        `described` is None if this rank has no batch. `ids` are all ids of the batch, or copies of them on the device;
        the distinct ids of unpooled tables are counted in them. For `event` see `RankConsensus.ask`.
        """
        if described is None:
            numbers, are_pending = torch.zeros(len(self._limits), dtype=torch.int64, device="cpu"), False
            numbers[_ENDED] = 1
        else:
            numbers, are_pending = described
            numbers[_MISMATCH] = is_mismatch
            if self._tables:
                numbers[self._distinct_from :].copy_(self._count_distinct(ids), non_blocking=True)
                are_pending |= self._device.type == "cuda"
        return self.consensus.ask(numbers, are_pending, event)

    def _count_distinct(self, all_ids: Sequence[KeyedJaggedTensor]) -> torch.Tensor:
        counts = dict[str, torch.Tensor]()
        for tables, distinct in self._collections:
            wanted = {sequence.feature for sequence in distinct.sequences}
            ids = next((each for each in all_ids if wanted <= set(each.keys())), None)
            if ids is None:
                continue
            ids = ids.to(self._device)
            for table, count in zip(tables, distinct.sort(ids, distinct.capacities_of(ids)).counts, strict=True):
                counts[table] = count.maximum(counts[table]) if table in counts else count
        none = torch.zeros((), dtype=torch.int64, device=self._device)
        return torch.stack([counts.get(table, none) for table in self._tables])

    @property
    def is_learned(self) -> bool:
        return bool(self._features)

    def describes(self, batch: BatchOfIds) -> bool:
        return self.is_learned and _features(batch) == self._features

    def is_within(self, described: Description) -> bool:
        """Return whether a batch is within the capacity, without checking distinct ids; False if sizes are pending."""
        known = slice(_SAMPLES, self._distinct_from)
        return not described.are_pending and not (described.numbers.numpy()[known] > self._limits[known]).any()

    def samples_of(self, sizes: np.ndarray) -> int:
        """Return the greatest number of samples of a rank, at least 1."""
        return max(1, int(sizes[_SAMPLES]))

    def are_captured(self, sizes: np.ndarray) -> bool:
        return not (sizes > self._limits).any()

    def are_beyond(self, sizes: np.ndarray) -> bool:
        return bool((sizes > self._limits)[_SAMPLES:].any())

    def grow(self, numbers: np.ndarray) -> None:
        """Grow the capacity to batches with these greatest sizes.

        Numbers of ids grow to a quarter more than the batch has, and to at least twice the exceeded capacity.
        """
        old = self._capacity or BatchCapacity(max(1, int(numbers[_SAMPLES])), {})
        sizes, ids, distinct = dict(old.bag_sizes), dict(old.ids), dict(old.distinct)
        columns = numbers[_HEADER : self._distinct_from].reshape(3, len(self._features)).tolist()
        for key, count, most, least in zip(self._features, *columns, strict=True):
            capacity = old.capacity([key])[0] if key in old.bag_sizes else 0
            seen = -least, max(most, 0)  # if no rank has a sample, `most` is negative
            before = sizes.get(key, seen)
            sizes[key] = min(before[0], seen[0]), max(before[1], seen[1])
            is_new = count > capacity or sizes[key] != old.bag_sizes.get(key)
            if is_new and sizes[key][0] < sizes[key][1]:  # else the bag size gives the number of ids
                ids[key] = _grown(capacity, count)
        for table, count in zip(self._tables, numbers[self._distinct_from :].tolist(), strict=True):
            capacity = distinct.get(table, 0)
            if self._capacity is None or 0 < capacity < count:
                distinct[table] = max(1, _grown(capacity, count))
        grown = BatchCapacity(max(int(numbers[_SAMPLES]), old.samples), sizes, ids, distinct)
        if self._capacity is not None and self.consensus.is_first:
            log.info("ids: a batch exceeds the capacity of windows and captured steps, which grows to %s", grown)
        self._capacity = grown
        self._limit()

    def _limit(self) -> None:
        given = self._capacity or BatchCapacity(1, {})
        sizes = [given.bag_sizes.get(key, (0, -1)) for key in self._features]
        known = given.known_lengths
        ids = [_ANY if known else given.capacity([key])[0] if key in given.bag_sizes else -1 for key in self._features]
        most, least = [size[1] for size in sizes], [-size[0] for size in sizes]
        bags = [*most, *least] if known else [_ANY] * 2 * len(sizes)
        distinct = [given.distinct.get(table, _ANY) for table in self._tables]
        self._limits = np.array([0, 0, given.samples, *ids, *bags, *distinct], np.int64)


def _grown(capacity: int, count: int) -> int:
    return max(-(-5 * count // 4), 2 * capacity if count > capacity else capacity)


def ended(sizes: np.ndarray) -> bool:
    return bool(sizes[_ENDED])


def _features(batch: BatchOfIds) -> list[str]:
    return [key for ids in batch.ids for key in ids.keys()]  # noqa: SIM118
