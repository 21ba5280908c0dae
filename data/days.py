"""Days of samples as arrays, read one after the other, for all of Criteo's formats.

All bags of a table hold the same number of ids. Samples keep the order of the files. Positions count on from day to
day; beyond the last sample comes the first one again. Every value is checked when it is read.
"""

import contextlib
import hashlib
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch

from dlrm_overlap.config import CRITEO_DENSE, InputError
from dlrm_overlap.data.batch import Batch, Dataset

_STAND_IN_REACH = 1000  # samples: bad ones are few, or the file is another
_FINGERPRINTED = 64  # samples, a page or two of a file each
_ROWS_CURE = "set data.tables.rows to the rows the ids were made for, or fold the ids by data.tables.max_rows"


@dataclass(frozen=True)
class Day:
    """The samples of one day."""

    name: str
    """path of the files without their last part, such as folder/day_0"""
    labels: np.ndarray
    """[n], any number type"""
    dense: np.ndarray
    """[n, 13] float32"""
    ids: Sequence[np.ndarray] | np.ndarray
    """of each table: [n, pooling factor] int32"""


@dataclass(frozen=True)
class _Samples:
    """Some samples of a batch that is being filled: views of its arrays."""

    labels: np.ndarray
    """[n] float32"""
    dense: np.ndarray
    """[n, 13] float32"""
    bags: Sequence[np.ndarray]
    """of each table: [n, pooling factor] int32"""


class Days(Dataset):
    """Days, read one after the other. All bags of a table hold the same number of ids."""

    def __init__(self, days: Sequence[Day], rows: Sequence[int], max_rows: int | None, bad_rows: str = "error"):
        """`rows` are those that each table's ids were made for; above `max_rows` ids are folded by modulo."""
        self._skips = bad_rows == "skip"
        self.rows: list[int] = cap_rows(rows, max_rows)
        self._folded = [kept < table_rows for kept, table_rows in zip(self.rows, rows, strict=True)]
        self._days = days
        self._ends = list(accumulate(len(day.labels) for day in days))
        self.num_samples: int = self._ends[-1]
        if self.num_samples == 0:
            raise InputError(f"{days[0].name}: no samples; give a data set that has some")
        self._pooling = [ids.shape[1] for ids in days[0].ids]
        self.pooling: list[float] = [float(factor) for factor in self._pooling]
        """ids a bag, of each table"""
        self.bag_sizes: list[tuple[int, int]] = [(factor, factor) for factor in self._pooling]
        self.max_ids, self.dense_features = sum(self._pooling), CRITEO_DENSE

    def fingerprint(self) -> str:
        """Return the number of samples, and a digest of some that lie evenly spread, as the files have them."""
        digest = hashlib.sha256()
        for position in np.linspace(0, self.num_samples - 1, _FINGERPRINTED).astype(np.int64).tolist():
            ((day, source, _),) = self._stretches(position, 1)
            for array in (day.labels, day.dense, *day.ids):
                digest.update(array[source].tobytes())
        return f"{self.num_samples} samples, {digest.hexdigest()[:12]}"

    def read(self, first: int, count: int) -> Batch:
        """Return the samples [first, first + count), modulo the number of samples.

        Under `data.bad_rows: skip` the next good sample stands in for a bad one (see `_stand_in`), so all others keep
        their positions, and every rank finds the same one at a position.

        Raises:
            InputError: naming the day, the sample and the value of a bad one, unless another stands in for it: a label
                other than 0 or 1, a dense feature that is not finite, or an id that is no row of its table.
        """
        dense = np.empty((count, CRITEO_DENSE), np.float32)
        labels = np.empty(count, np.float32)
        values = np.empty(count * sum(self._pooling), np.int32)
        table_ends = [count * end for end in accumulate(self._pooling)]
        bags = [table.reshape(count, -1) for table in np.split(values, table_ends[:-1])]
        stand_ins = 0
        for day, source, target in self._stretches(first, count):
            into = _Samples(labels[target], dense[target], [table[target] for table in bags])
            try:
                self._copy(day, source, into)
            except InputError:
                if not self._skips:
                    raise
                stand_ins += self._replace_bad(day, source, into, (first + target.start) % self.num_samples)
        lengths = np.repeat(np.array(self._pooling, np.int32), count)
        batch = Batch.from_tensors(*map(torch.from_numpy, (dense, lengths, values, labels)))
        batch.stand_ins = stand_ins
        return batch

    def _copy(self, day: Day, source: slice, into: _Samples) -> None:
        """Copy samples of `day` into `into`, and check them."""
        into.labels[:] = day.labels[source]
        _check(into.labels, _is_label, f"{day.name}: label", source.start, "0 or 1; correct the file")
        into.dense[:] = day.dense[source]
        _check(into.dense, np.isfinite, f"{day.name}: dense feature", source.start, "finite; correct the file")
        for t, table in enumerate(into.bags):
            table[:] = day.ids[t][source]
            self._fold_and_check(t, table, day, source.start)

    def _replace_bad(self, day: Day, source: slice, into: _Samples, position: int) -> int:
        """Copy samples of `day`, the first of which is at `position`, one by one; return how many others stand in."""
        stand_ins = 0
        for i in range(len(into.labels)):
            one = _Samples(into.labels[i : i + 1], into.dense[i : i + 1], [table[i : i + 1] for table in into.bags])
            try:
                self._copy(day, slice(source.start + i, source.start + i + 1), one)
            except InputError as error:
                self._stand_in(position + i, one, error)
                stand_ins += 1
        return stand_ins

    def _stand_in(self, position: int, into: _Samples, error: InputError) -> None:
        """Copy the sample that stands in for the bad one at `position`: the next good one, or else the one before.

        It is at most 1000 samples away. Where all of these are bad, the file or the tables' rows are wrong: then this
        raises `error`, that of the bad one.
        """
        after = range(position + 1, min(self.num_samples, position + _STAND_IN_REACH))
        before = range(position - 1, max(0, position - _STAND_IN_REACH) - 1, -1)
        for candidate in (*after, *before):
            ((day, source, _),) = self._stretches(candidate, 1)
            with contextlib.suppress(InputError):
                return self._copy(day, source, into)
        raise InputError(
            f"{error}; data.bad_rows: skip does not help, since no sample within {_STAND_IN_REACH} of it is good"
        ) from None

    def _stretches(self, first: int, count: int) -> Iterator[tuple[Day, slice, slice]]:
        """Yield each day with some of the samples [first, first + count), and their slices of it and of the batch."""
        done = 0
        while done < count:
            position = (first + done) % self.num_samples
            i = bisect_right(self._ends, position)
            day, size = self._days[i], min(count - done, self._ends[i] - position)
            start = position - (self._ends[i] - len(day.labels))
            yield day, slice(start, start + size), slice(done, done + size)
            done += size

    def _fold_and_check(self, t: int, ids: np.ndarray, day: Day, first: int) -> None:
        # The least and the greatest id show whether all are valid, and cost a fraction of a mask.
        rows, what = self.rows[t], f"{day.name}: table {t}, id"
        if ids.min() < 0:
            _check(ids, lambda x: x >= 0, what, first, "at least 0; correct the file")
        if ids.max() >= rows:
            if not self._folded[t]:
                _check(ids, lambda x: x < rows, what, first, f"below {rows}, the table's rows; {_ROWS_CURE}")
            ids -= ids // rows * rows  # numpy vectorises the division by a scalar, but not `%`


def _is_label(values: np.ndarray) -> np.ndarray:
    return (values == 0) | (values == 1)


def _check(values: np.ndarray, rule: Callable[[np.ndarray], np.ndarray], what: str, first: int, words: str) -> None:
    """Raise an InputError for the first of `values` that breaks `rule`.

    `values` [n] or [n, columns] are those of the samples from position `first` of their day on. The message begins with
    `what`, and ends with `words`, rule and cure.
    """
    good = rule(values)
    if not good.all():
        found = np.argwhere(~good)[0]
        column = f", column {found[1]}" if found.size > 1 else ""
        raise InputError(f"{what} of sample {first + found[0]}{column} is {values[tuple(found)]}, not {words}")


def cap_rows(rows: Sequence[int], max_rows: int | None) -> list[int]:
    """Return the rows of each table, none above `max_rows`.

    Raises:
        InputError: if ids would not fit in int32.
    """
    capped = [min(table_rows, max_rows or table_rows) for table_rows in rows]
    if max(capped) >= 2**31:
        raise InputError(f"data.tables.rows: {max(capped)} overflows int32 ids; stay below {2**31}")
    return capped
