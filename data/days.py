"""Days of samples as arrays: positions continue from day to day, and values are checked when they are read."""

import copy
import functools
import hashlib
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch

from dlrm_overlap.config import InputError
from dlrm_overlap.data.batch import Batch, Dataset, id_type
from dlrm_overlap.data.day import Day, Samples

_TIMES = 1 << 20  # read at a time
_FINGERPRINTED = 64  # samples; each costs a page or two of a file


class Days(Dataset):
    unordered: int | None = None
    """how many samples are older than one before them; None if samples have no times"""
    held_out: int | None = None
    """number of last samples to evaluate on, unless data.eval_fraction is given; None: it decides"""
    cure = "correct the file"
    id_cure = cure

    def __init__(self, days: Sequence[Day], rows: Sequence[int | None], max_rows: int | None):
        """Take the days, and each table's rows: None for a table of any id, which `max_rows` leaves as it is."""
        self.made_for: list[int | None] = list(rows)
        self.rows: list[int | None] = [made and min(made, max_rows or made) for made in rows]
        self._moduli = [
            kept if kept and made and kept < made else 0 for kept, made in zip(self.rows, rows, strict=True)
        ]
        self._id_type = np.int64 if id_type(rows) == torch.int64 else np.int32
        self._days, self.name = days, days[0].name
        self._ends = list(accumulate(len(day.labels) for day in days))
        self._start, self._shuffle, self._seed = 0, 0, 0
        self.num_samples: int = self._ends[-1]
        if self.num_samples == 0:
            raise InputError(f"{days[0].name}: no samples; give a data set that has some")
        sizes = [[day.bag_sizes(t) for t in range(len(self.rows))] for day in days if len(day.labels)]
        least, most, total = np.array(sizes).transpose(2, 0, 1)
        self.pooling: list[float] = (total.sum(0) / self.num_samples).tolist()
        self.bag_sizes = list(zip(least.min(0).tolist(), most.max(0).clip(1).tolist(), strict=True))
        self.dense_features: int = days[0].dense.shape[1]

    def part(self, start: int, num_samples: int, shuffle: int = 0, seed: int = 0) -> "Days":
        """Return a data set of the samples [start, start + num_samples); after the last one, it begins again.

        If `shuffle` is not 0, each window of `shuffle` samples is permuted, differently in each pass.
        """
        part = copy.copy(self)
        part._start, part.num_samples = start, num_samples
        part._shuffle, part._seed = shuffle, seed
        return part

    def fingerprint(self) -> str:
        """Return a text with the number of samples of all days and a digest of evenly spaced samples."""
        positions = np.linspace(0, self._ends[-1] - 1, _FINGERPRINTED).astype(np.int64)
        digest = hashlib.sha256()
        for tensor in self._gather(positions).tensors:
            digest.update(tensor.numpy().tobytes())
        return f"{self._ends[-1]} samples, {digest.hexdigest()[:12]}"

    def read(self, first: int, count: int) -> Batch:
        return self._gather(self._positions(np.arange(first, first + count)))

    def records(self, first: int, count: int) -> torch.Tensor:
        """Return the samples [first, first + count) as records [count, record_bytes] uint8.

        If the samples are successive in the file, the result is a view of the mapped file.
        """
        found = []
        for day, samples in self._stretches(self._positions(np.arange(first, first + count))):
            assert day.records is not None, "packed days have records"
            found.append(day.records[samples])
        return torch.from_numpy(found[0] if len(found) == 1 else np.concatenate(found))

    def times(self, first: int, count: int) -> np.ndarray | None:
        """Return the times of the samples [first, first + count), [count] int64; None if samples have none."""
        found = []
        for day, samples in self._stretches(self._positions(np.arange(first, first + count))):
            if day.times is None:
                return None
            found.append(day.times[samples])
        return np.concatenate(found) if found else None

    def first_from(self, time_us: int) -> int:
        """Return the number of the first sample at a time or later; `num_samples` if there is none."""
        if not self.unordered:
            return bisect_left(range(self.num_samples), time_us, key=self.time_of)
        for begin, times in self._times():
            if len(late := np.flatnonzero(times >= time_us)):
                return begin + int(late[0])
        return self.num_samples

    def time_of(self, sample: int) -> int:
        day, samples = self._stretches(np.array([self._start + sample]))[0]
        assert day.times is not None, "the samples have times"
        return int(day.times[samples][0])

    def first_time(self) -> int | None:
        """Return the time of the oldest sample; None if samples have none."""
        return self._extreme(0, np.min)

    def last_time(self) -> int | None:
        """Return the time of the newest sample; None if samples have none."""
        return self._extreme(self.num_samples - 1, np.max)

    def _extreme(self, sample: int, of: Callable[[Any], np.int64]) -> int | None:
        if self.unordered is None:
            return None
        if not self.unordered:
            return self.time_of(sample)
        return int(of([of(times) for _, times in self._times()]))

    def _times(self) -> Iterator[tuple[int, np.ndarray]]:
        """Yield this part's times in the order of the files, by blocks, each with the number of its first sample."""
        begin = 0
        while begin < self.num_samples:
            end = min(begin + _TIMES, self.num_samples)
            day, samples = self._stretches(np.arange(self._start + begin, self._start + end))[0]
            assert day.times is not None, "the samples have times"
            yield begin, (times := day.times[samples])
            begin += len(times)

    def _positions(self, positions: np.ndarray) -> np.ndarray:
        """Return the positions in all days of this part's `positions`, which wrap around at the end.

        Example: 6 samples in windows of 4. Positions 0 to 3 and 6 to 9 are samples 0 to 3 in two different orders.
        """
        if not self._shuffle:
            return self._start + positions % self.num_samples
        passes, within = np.divmod(positions, self.num_samples)
        windows = within // self._shuffle
        found = np.empty_like(positions)
        for each, window in set(zip(passes.tolist(), windows.tolist(), strict=True)):
            here, first = (passes == each) & (windows == window), window * self._shuffle
            size = min(self._shuffle, self.num_samples - first)
            found[here] = self._start + first + _order(self._seed, each, window, size)[within[here] - first]
        return found

    def _stretches(self, positions: np.ndarray) -> list[tuple[Day, Samples]]:
        found, numbers = [], np.searchsorted(self._ends, positions, "right")
        for part in np.split(np.arange(len(positions)), np.flatnonzero(np.diff(numbers)) + 1):
            day = self._days[i := int(numbers[part[0]])]
            samples: Samples = positions[part] - (self._ends[i] - len(day.labels))
            if (np.diff(samples) == 1).all():
                samples = slice(int(samples[0]), int(samples[-1]) + 1)
            found.append((day, samples))
        return found

    def _gather(self, positions: np.ndarray) -> Batch:
        stretches = self._stretches(positions)
        dense = np.concatenate([day.dense[samples] for day, samples in stretches], dtype=np.float32)
        labels = np.concatenate([day.labels[samples] for day, samples in stretches], dtype=np.float32)
        for name, good, found, rule in (
            ("dense feature", np.isfinite(dense), dense, "finite"),
            ("label", (labels == 0) | (labels == 1), labels, "0 or 1"),
        ):
            if not good.all():
                sample, column = divmod(int(good.argmin()), good.shape[1])
                raise InputError(
                    f"{_where(stretches, sample)}: {name} {column} is {found[sample, column]}, not {rule}; {self.cure}"
                )
        bags = [[day.bags(t, samples) for day, samples in stretches] for t in range(len(self.rows))]
        values = np.concatenate([ids for table in bags for ids, _ in table], dtype=self._id_type)
        lengths = np.stack([np.concatenate([sizes for _, sizes in table], dtype=np.int32) for table in bags])
        tables = np.split(values, lengths.sum(axis=1).cumsum()[:-1])
        for t, (ids, rows, modulus) in enumerate(zip(tables, self.rows, self._moduli, strict=True)):
            if rows is None:
                continue
            # Minimum and maximum show whether all ids are valid, for a fraction of a mask's time.
            if len(ids) and (ids.min() < 0 or (ids.max() >= rows and not modulus)):
                bad = int(((ids < 0) | ((ids >= rows) & (not modulus))).argmax())
                sample = int(lengths[t].cumsum().searchsorted(bad, "right"))
                raise InputError(
                    f"{_where(stretches, sample)}: id of table {t} is {ids[bad]}, not from 0 to {rows - 1}, a row of "
                    f"its table; {self.id_cure}"
                )
            if modulus:
                ids -= ids // modulus * modulus  # numpy vectorises division by a scalar, but not `%`
        labels = labels[:, 0] if labels.shape[1] == 1 else labels
        return Batch.from_tensors(*map(torch.from_numpy, (dense, lengths.reshape(-1), values, labels)))


@functools.lru_cache(4)
def _order(seed: int, epoch: int, window: int, size: int) -> np.ndarray:
    return np.random.default_rng((seed, epoch, window)).permutation(size)


def _where(stretches: Sequence[tuple[Day, Samples]], position: int) -> str:
    for day, samples in stretches:
        numbers = np.arange(samples.start, samples.stop) if isinstance(samples, slice) else samples
        if position < len(numbers):
            return f"{day.name}, sample {numbers[position]}"
        position -= len(numbers)
    raise AssertionError("the stretches have all samples")
