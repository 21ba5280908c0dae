"""How large the batches of a step are on all ranks, and the bound that captured steps learn from that.

Of each batch a rank counts samples and, by feature, the ids of the batch and of its largest and smallest bag. The ranks
find the greatest of each number while earlier steps run. So all of them know alike whether a batch is captured, is
beyond the bound, which then grows, or is missing on a rank, which ends the iterator.
"""

import logging
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dlrm_overlap.comm.max_reduce import AsyncMaxReduce, Work
from dlrm_overlap.comm.order import CurrentStream
from dlrm_overlap.embedding.id_layout import BatchCapacity
from dlrm_overlap.kernels import reference
from dlrm_overlap.train.graphs.static_batch import BatchTensors

log = logging.getLogger("dlrm_overlap")

_ENDED, _UNLIKE, _SAMPLES, _HEADER = 0, 1, 2, 3
_ANY = np.iinfo(np.int64).max
_CPU = torch.device("cpu")
_LOOK = timedelta(seconds=1)  # at what kernels have recorded, while an answer is late


class PendingResult:
    """The elementwise maximum of some numbers over the ranks, computed while steps run.

    For a batch on a GPU, a kernel writes the numbers. The reduction starts when they are ready, at the latest before
    the next one: the CPU never waits for a step that it has just issued.
    """

    def __init__(self, agreement: "RankConsensus", numbers: torch.Tensor, written: torch.Event | None) -> None:
        """Take numbers, [n] int64 on the CPU, that are there once `written` has happened."""
        self._agreement, self._numbers, self._written = agreement, numbers, written
        self._work: Work | None = None

    def begin(self) -> None:
        """Ask the ranks, in the order of their questions."""
        if self._written is not None:
            self._written.synchronize()
        if (maxima := self._agreement.maxima) is not None:
            self._work = maxima.begin(self._numbers)

    def wait(self) -> np.ndarray:
        """Return the greatest numbers, [n] int64.

        Raises:
            RuntimeError: that kernels have recorded meanwhile, or if a rank has ended or does not answer.
        """
        if self is self._agreement.last:
            self._agreement.ask_last()
        while (work := self._work) is not None:
            try:
                work.wait(_LOOK)
                self._work = None
            except RuntimeError:
                if work.is_completed():
                    raise
                self._agreement.check()
        return self._numbers.numpy()


class RankConsensus:
    """The CPUs of a group's ranks, which put the same questions to each other in the same order."""

    def __init__(self, group: dist.ProcessGroup, check: Callable[[], None], device: torch.device = _CPU) -> None:
        """Take the ranks, a collective; `check` raises what kernels have recorded, while an answer is late."""
        on_gpu = device.type == "cuda"
        self._current = CurrentStream(torch.cuda.current_stream(device).device) if on_gpu else None
        self.check, self.is_first = check, group.rank() == 0
        self.maxima = AsyncMaxReduce(group) if group.size() > 1 else None
        self.last: PendingResult | None = None
        """the question that is still to be put to the ranks"""

    def ask(self, numbers: torch.Tensor, are_pending: bool = False) -> PendingResult:
        """Ask for the greatest of each number over the ranks; the current stream may still have to write some.

        The numbers are kept until they are there: kernels write to their memory.
        """
        self.ask_last()
        written = self._current().record_event() if self._current is not None and are_pending else None
        self.last = answer = PendingResult(self, numbers, written)
        if written is None:
            self.ask_last()
        return answer

    def ask_last(self) -> None:
        """Put the last question to the ranks, if that is still to be done."""
        if self.last is not None:
            last, self.last = self.last, None
            last.begin()

    def any_is(self, here: bool) -> bool:
        """Return whether `here` is true on any rank, when all have come here."""
        return bool(self.ask(torch.tensor([here], dtype=torch.int64, device="cpu")).wait())


class Description(NamedTuple):
    """The numbers that describe a batch, see `CapacityTracker`."""

    numbers: torch.Tensor
    """[3 + 3 * T + tables] int64 on the CPU"""
    are_pending: bool
    """whether the current stream has yet to write some of them"""


class CapacityTracker:
    """The capacity of captured steps, learned from the first batch and grown by later ones; the same on all ranks.

    A batch is described by [3 + 3 * T + tables] int64: 1 if there is no batch, 1 if it differs from the first one, its
    samples; then for each of T features the ids of the batch, the ids of the largest bag, and minus the ids of the
    smallest bag; then one count of distinct ids for each unpooled table, computed on the device. A rank without samples
    does not change the sizes of bags: see `reference.count_bags`.

    Example: bags f: [5] [], g: [7, 7] [1] give 0 0 2, then 1 3, 1 2, 0 -1. The capacity for 2 samples is 2 ids of f,
    since the largest bag has 1, and 4 ids of g, a quarter more than 3. A batch with 5 ids of g makes it 8.
    """

    def __init__(
        self,
        bound: BatchCapacity | None,
        agreement: RankConsensus,
        modules: Sequence[Any] = (),
        device: torch.device = _CPU,
    ) -> None:
        """Take the bound to begin with, None is learnt; and the modules whose unpooled tables have distinct ids."""
        self._capacity, self.agreement, self._device = bound, agreement, device
        counted = [module.counted() for module in modules if hasattr(module, "counted")]
        self._collections = [(tables, distinct) for tables, distinct in counted if tables]
        self._tables = list(dict.fromkeys(table for tables, _ in self._collections for table in tables))
        """unpooled ones by name; the greatest number counts where two collections have one of a name"""
        self._features: list[str] = []
        self._limits = np.zeros(0, np.int64)

    @property
    def capacity(self) -> BatchCapacity:
        """The bound that was given, or has been learnt."""
        assert self._capacity is not None, "a bound is learnt from the first batch"
        return self._capacity

    def learn(self, example: BatchTensors | None) -> bool:
        """Make room for a batch that later ones are like, and return whether every rank has one; waits for them."""
        if self.agreement.any_is(example is None) or example is None:
            return False
        self._features = _features(example)
        self._limit()
        numbers = self.ask(self.describe(example), example.ids).wait()
        if self._capacity is None or self.are_beyond(numbers):
            self.grow(numbers)
        return True

    def describe(self, batch: BatchTensors) -> Description:
        """Count a batch's samples and ids, on the current stream where the ids are on a GPU; not yet distinct ids."""
        on_gpu = any(ids.values().is_cuda for ids in batch.ids)
        room = self._distinct_from + len(self._tables)
        pinned = on_gpu or (bool(self._tables) and self._device.type == "cuda")
        numbers = torch.empty(room, dtype=torch.int64, device="cpu", pin_memory=pinned)
        numbers.numpy()[:_HEADER] = 0, 0, max((ids.stride() for ids in batch.ids), default=0)
        rows, first = numbers[_HEADER : self._distinct_from].view(3, len(self._features)), 0
        for ids in batch.ids:
            features = len(ids.keys())
            lengths, part = ids.lengths().view(features, ids.stride()), rows[:, first : first + features]
            first += features
            if lengths.is_cuda:
                from dlrm_overlap.kernels.count_bags import count_bags  # loads Triton, which a CPU may lack

                count_bags(lengths.contiguous(), part)
            else:
                part.copy_(reference.count_bags(lengths))
        return Description(numbers, on_gpu)

    @property
    def _distinct_from(self) -> int:
        return _HEADER + 3 * len(self._features)

    def ask(
        self, described: Description | None, ids: Sequence[KeyedJaggedTensor] = (), unlike: bool = False
    ) -> PendingResult:
        """Ask for the greatest numbers over all ranks; None if this one has no batch.

        Args:
            described: of the batch.
            ids: all of the batch, which may be copies elsewhere: their distinct ones are counted there.
            unlike: whether the batch is unlike the first one.
        """
        if described is None:
            numbers, are_pending = torch.zeros(len(self._limits), dtype=torch.int64, device="cpu"), False
            numbers[_ENDED] = 1
        else:
            numbers, are_pending = described
            numbers[_UNLIKE] = unlike
            if self._tables:
                numbers[self._distinct_from :].copy_(self._count_distinct(ids), non_blocking=True)
                are_pending |= self._device.type == "cuda"
        return self.agreement.ask(numbers, are_pending)

    def _count_distinct(self, all_ids: Sequence[KeyedJaggedTensor]) -> torch.Tensor:
        """Return the distinct ids of each unpooled table in all ids of a batch, [tables] int64, on the device."""
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

    def describes(self, batch: BatchTensors) -> bool:
        """Return whether a batch has the features that the bound is made of."""
        return bool(self._features) and _features(batch) == self._features

    def is_within(self, described: Description) -> bool:
        """Return whether this rank's batch is known to be within the bound, distinct ids aside: it is on a CPU."""
        known = slice(_SAMPLES, self._distinct_from)
        return not described.are_pending and not (described.numbers.numpy()[known] > self._limits[known]).any()

    def are_captured(self, numbers: np.ndarray) -> bool:
        """Return whether batches of these greatest numbers are captured."""
        return not (numbers > self._limits).any()

    def are_beyond(self, numbers: np.ndarray) -> bool:
        """Return whether one of them is beyond the bound."""
        return bool((numbers > self._limits)[_SAMPLES:].any())

    def grow(self, numbers: np.ndarray) -> None:
        """Make room for batches of these greatest numbers: a quarter more than they have, twice what was too little."""
        old = self._capacity or BatchCapacity(max(1, int(numbers[_SAMPLES])), {})
        sizes, ids, distinct = dict(old.bag_sizes), dict(old.ids), dict(old.distinct)
        columns = numbers[_HEADER : self._distinct_from].reshape(3, len(self._features)).tolist()
        for key, count, most, least in zip(self._features, *columns, strict=True):
            room = old.capacity([key])[0] if key in old.bag_sizes else 0
            seen = (-least, most) if most >= 0 else sizes.get(key, (0, 0))  # no rank has a sample
            before = sizes.get(key, seen)
            sizes[key] = min(before[0], seen[0]), max(before[1], seen[1])
            is_new = count > room or sizes[key] != old.bag_sizes.get(key)
            if is_new and sizes[key][0] < sizes[key][1]:  # else as many ids as bags of this size have
                ids[key] = _room_for(count, room)
        for table, count in zip(self._tables, numbers[self._distinct_from :].tolist(), strict=True):
            room = distinct.get(table, 0)
            if self._capacity is None or 0 < room < count:
                distinct[table] = max(1, _room_for(count, room))
        grown = BatchCapacity(max(int(numbers[_SAMPLES]), old.samples), sizes, ids, distinct)
        if self._capacity is not None and self.agreement.is_first:
            log.info("train pipeline: a batch is beyond the bound: steps are captured anew, by %s", grown)
        self._capacity = grown
        self._limit()

    def _limit(self) -> None:
        """Find the numbers that batches within the bound do not exceed."""
        bound = self._capacity or BatchCapacity(1, {})
        sizes = [bound.bag_sizes.get(key, (0, -1)) for key in self._features]
        known = bound.known_lengths
        ids = [_ANY if known else bound.capacity([key])[0] if key in bound.bag_sizes else -1 for key in self._features]
        most, least = [size[1] for size in sizes], [-size[0] for size in sizes]
        bags = [*most, *least] if known else [_ANY] * 2 * len(sizes)
        distinct = [bound.distinct.get(table, _ANY) for table in self._tables]
        self._limits = np.array([0, 0, bound.samples, *ids, *bags, *distinct], np.int64)


def _room_for(count: int, room: int) -> int:
    return max(-(-5 * count // 4), 2 * room if count > room else room)


def ended(numbers: np.ndarray) -> bool:
    """Return whether a rank has no batch."""
    return bool(numbers[_ENDED])


def _features(batch: BatchTensors) -> list[str]:
    return [key for ids in batch.ids for key in ids.keys()]  # noqa: SIM118
