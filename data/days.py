"""Days of samples as arrays, in memory or mapped from disk, read one after the other.

Samples keep the order of the files. Positions count on from day to day; beyond the last sample comes the first one
again. Every value is checked when it is read.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch

from dlrm_overlap.config import InputError
from dlrm_overlap.data.batch import Batch, Dataset

_FINGERPRINTED = 64  # samples, a page or two of a file each
ROWS_CURE = "set data.tables.rows to the rows the ids were made for, or fold the ids by data.tables.max_rows"


Samples = slice | np.ndarray  # some of a day, by their numbers


@dataclass(frozen=True)
class Ragged:
    """The ids of a table whose bags differ in size."""

    values: np.ndarray
    """[m] int32, bag after bag"""
    ends: np.ndarray
    """[n] int64, where each bag ends in `values`"""

    def __len__(self) -> int:
        return len(self.ends)


@dataclass(frozen=True)
class Day:
    """The samples of one day, as arrays or as `records.Packed`, which unpacks the part that is taken."""

    name: str
    """path of the files without their last part, such as folder/day_0"""
    labels: np.ndarray
    """[n, L], any number type"""
    dense: np.ndarray
    """[n, F] float32"""
    ids: Sequence[np.ndarray | Ragged] | np.ndarray
    """of each table: [n, pooling factor] int32, or ragged"""
    records: np.ndarray | None = None
    """[n, bytes] uint8, which the others are unpacked from, if they are"""

    def bags(self, table: int, samples: Samples) -> tuple[np.ndarray, np.ndarray | int]:
        """Return the ids [m] int32 of some samples, and the sizes [samples] of their bags, or that of all."""
        ids = self.ids[table]
        if not isinstance(ids, Ragged):
            return ids[samples].reshape(-1), ids.shape[1]
        if isinstance(samples, slice):
            ends = ids.ends[samples]
            first = ids.ends[samples.start - 1] if samples.start else 0
            return ids.values[first : ends[-1]].reshape(-1), np.diff(ends, prepend=first)
        ends = ids.ends[samples]
        sizes = ends - np.where(samples > 0, ids.ends[samples - 1], 0)
        within = np.arange(sizes.sum()) - np.repeat(sizes.cumsum() - sizes, sizes)
        return ids.values[np.repeat(ends - sizes, sizes) + within].reshape(-1), sizes


@dataclass(frozen=True)
class _Stretch:
    """Some samples of a day."""

    day: Day
    samples: Samples
    size: int

    def number(self, i: int) -> int:
        """Return the number in the day of the i-th one."""
        return self.samples.start + i if isinstance(self.samples, slice) else int(self.samples[i])


class Days(Dataset):
    """Days, read one after the other."""

    def __init__(self, days: Sequence[Day], rows: Sequence[int], max_rows: int | None):
        """`rows` are those that each table's ids were made for; above `max_rows` ids are folded by modulo."""
        self.rows: list[int] = cap_rows(rows, max_rows)
        self._folded = [kept < table_rows for kept, table_rows in zip(self.rows, rows, strict=True)]
        self._days = days
        self._ends = list(accumulate(len(day.labels) for day in days))
        self.num_samples: int = self._ends[-1]
        if self.num_samples == 0:
            raise InputError(f"{days[0].name}: no samples; give a data set that has some")
        sizes = [_bag_sizes([day.ids[t] for day in days if len(day.labels)]) for t in range(len(self.rows))]
        self.pooling: list[float] = [total / self.num_samples for _, _, total in sizes]
        """mean number of ids in a bag, of each table"""
        self.bag_sizes: list[tuple[int, int]] = [(least, most) for least, most, _ in sizes]
        self.max_ids = sum(most for _, most in self.bag_sizes)
        self.dense_features: int = days[0].dense.shape[1]

    def fingerprint(self) -> str:
        """Return the number of samples, and a digest of some that lie evenly spread, as the files have them."""
        digest = hashlib.sha256()
        for position in np.linspace(0, self.num_samples - 1, _FINGERPRINTED).astype(np.int64).tolist():
            (stretch,) = self._stretches(np.array([position]))
            day, samples = stretch.day, stretch.samples
            bags = [day.bags(t, samples)[0] for t in range(len(self.rows))]
            for array in (day.labels[samples], day.dense[samples], *bags):
                digest.update(array.tobytes())
        return f"{self.num_samples} samples, {digest.hexdigest()[:12]}"

    def read(self, first: int, count: int) -> Batch:
        """Return the samples [first, first + count), modulo the number of samples; see `read_at`."""
        return self.read_at(np.arange(first, first + count))

    def read_at(self, positions: np.ndarray) -> Batch:
        """Return the samples at `positions` [count] int64, modulo the number of samples.

        Raises:
            InputError: naming the day, the sample and the value of a bad one: a label other than 0 or 1, a dense
                feature that is not finite, or an id that is no row of its table.
        """
        return self._gather(self._stretches(positions % self.num_samples))

    def _gather(self, stretches: Sequence[_Stretch]) -> Batch:
        """Return the samples of `stretches` in a batch, and check them."""
        dense = np.concatenate([each.day.dense[each.samples] for each in stretches], dtype=np.float32)
        labels = np.concatenate([each.day.labels[each.samples] for each in stretches], dtype=np.float32)
        _check(labels, _is_label, stretches, "label", "0 or 1; correct the file")
        _check(dense, np.isfinite, stretches, "dense feature", "finite; correct the file")
        bags = [[each.day.bags(t, each.samples) for each in stretches] for t in range(len(self.rows))]
        values = np.concatenate([ids for table in bags for ids, _ in table], dtype=np.int32)
        lengths, end = np.empty((len(bags), len(labels)), np.int32), 0
        ends = [0, *accumulate(each.size for each in stretches)]
        for t, table in enumerate(bags):
            for k, (_, sizes) in enumerate(table):
                lengths[t, ends[k] : ends[k + 1]] = sizes
            start, end = end, end + sum(len(ids) for ids, _ in table)
            self._fold_and_check(t, values[start:end], lengths[t], stretches)
        labels = labels[:, 0] if labels.shape[1] == 1 else labels
        return Batch.from_tensors(*map(torch.from_numpy, (dense, lengths.reshape(-1), values, labels)))

    def _stretches(self, positions: np.ndarray) -> list[_Stretch]:
        """Return the samples at `positions`, day by day; successive ones are a slice, which is not copied."""
        found, numbers = [], np.searchsorted(self._ends, positions, "right")
        for part in np.split(np.arange(len(positions)), np.flatnonzero(np.diff(numbers)) + 1):
            day = self._days[i := int(numbers[part[0]])]
            samples: Samples = positions[part] - (self._ends[i] - len(day.labels))
            if (np.diff(samples) == 1).all():
                samples = slice(int(samples[0]), int(samples[-1]) + 1)
            found.append(_Stretch(day, samples, len(part)))
        return found

    def _fold_and_check(self, t: int, ids: np.ndarray, sizes: np.ndarray, stretches: Sequence[_Stretch]) -> None:
        if not len(ids):
            return
        # The least and the greatest id show whether all are valid, and cost a fraction of a mask.
        rows, what = self.rows[t], f"table {t}, id"
        if ids.min() < 0:
            _check(ids, lambda x: x >= 0, stretches, what, "at least 0; correct the file", sizes)
        if ids.max() >= rows:
            if not self._folded[t]:
                rule = f"below {rows}, the table's rows; {ROWS_CURE}"
                _check(ids, lambda x: x < rows, stretches, what, rule, sizes)
            ids -= ids // rows * rows  # numpy vectorises the division by a scalar, but not `%`


def _bag_sizes(ids: Sequence[np.ndarray | Ragged]) -> tuple[int, int, int]:
    """Return the least and the most ids of a bag of a table, and how many ids there are, over its days."""
    least, most, total = [], [], 0
    for each in ids:
        if isinstance(each, Ragged):
            sizes = np.diff(each.ends, prepend=0)
            least.append(int(sizes.min()))
            most.append(int(sizes.max()))
            total += len(each.values)
        else:
            least.append(each.shape[1])
            most.append(each.shape[1])
            total += len(each) * each.shape[1]
    return min(least), max(1, *most), total


def _is_label(values: np.ndarray) -> np.ndarray:
    return (values == 0) | (values == 1)


def _check(
    values: np.ndarray,
    rule: Callable[[np.ndarray], np.ndarray],
    stretches: Sequence[_Stretch],
    what: str,
    words: str,
    sizes: np.ndarray | None = None,
) -> None:
    """Raise an InputError for the first of `values` that breaks `rule`.

    `values` [n, columns] are those of the samples of `stretches`, or [m] the ids of their bags of `sizes`. The message
    names the day, `what` and the sample, and ends with `words`, rule and cure.
    """
    good = rule(values)
    if good.all():
        return
    found = np.argwhere(~good)[0]
    sample, column, is_only = int(found[0]), int(found[-1]), values.shape[-1] == 1
    if sizes is not None:
        sample = int(np.searchsorted(sizes.cumsum(), found[0], "right"))
        column, is_only = int(found[0] - sizes[:sample].sum()), False
    for each in stretches:
        if sample < each.size:
            where = f"sample {each.number(sample)}" + f", column {column}" * (not is_only)
            raise InputError(f"{each.day.name}: {what} of {where} is {values[tuple(found)]}, not {words}")
        sample -= each.size


def cap_rows(rows: Sequence[int], max_rows: int | None) -> list[int]:
    """Return the rows of each table, none above `max_rows`.

    Raises:
        InputError: if ids would not fit in int32.
    """
    capped = [min(table_rows, max_rows or table_rows) for table_rows in rows]
    if max(capped) >= 2**31:
        raise InputError(f"data.tables.rows: {max(capped)} overflows int32 ids; stay below {2**31}")
    return capped
