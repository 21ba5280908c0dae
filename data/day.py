"""Samples of one day as arrays. Does not import torch."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np

from dlrm_overlap.config import InputError
from dlrm_overlap.data.checksums import CheckedArray

Samples = slice | np.ndarray  # numbers of samples in a day


@dataclass(frozen=True)
class Ragged:
    values: np.ndarray | CheckedArray
    """[m] int32, or int64 for a table of any id: ids, bag after bag"""
    ends: np.ndarray
    """[n] int64, end of each bag in `values`"""


@dataclass(frozen=True)
class Day:
    """The samples of one day, as arrays or as `records.Packed`."""

    name: str
    labels: np.ndarray
    """[n, L], any number type"""
    dense: np.ndarray
    """[n, F] float32"""
    ids: Sequence[np.ndarray | Ragged]
    """per table: [n, pooling factor] int32, or int64 for a table of any id; or ragged"""
    records: np.ndarray | CheckedArray | None = None
    """[n, record_bytes] uint8 if the other fields are unpacked from records"""
    times: np.ndarray | CheckedArray | None = None
    """[n] int64, see `times`; None if the samples have none"""

    def bags(self, table: int, samples: Samples) -> tuple[np.ndarray, np.ndarray]:
        """Return the ids [m] of one table for `samples`, and the size of each sample's bag."""
        ids = self.ids[table]
        if not isinstance(ids, Ragged):
            taken = ids[samples]
            return taken.reshape(-1), np.full(len(taken), taken.shape[1])
        ends = ids.ends[samples]
        if isinstance(samples, slice):
            first = ids.ends[samples.start - 1] if samples.start else 0
            last = ends[-1] if len(ends) else first
            return ids.values[first:last].reshape(-1), np.diff(ends, prepend=first)
        sizes = ends - np.where(samples > 0, ids.ends[samples - 1], 0)
        within = np.arange(sizes.sum()) - np.repeat(sizes.cumsum() - sizes, sizes)
        return ids.values[np.repeat(ends - sizes, sizes) + within].reshape(-1), sizes

    def bag_sizes(self, table: int) -> tuple[int, int, int]:
        """Return a table's minimum and maximum bag size and number of ids in this day, which must have samples."""
        ids = self.ids[table]
        if isinstance(ids, Ragged):
            sizes = np.diff(ids.ends, prepend=0)
            return int(sizes.min()), int(sizes.max()), len(ids.values)
        samples, size = ids.shape
        return size, size, samples * size


def require_successive(folder: Path, days: Iterable[int]) -> None:
    """Raise an InputError if the numbers of day_i, from any first one on, have a gap."""
    for day, following in pairwise(sorted(days)):
        if following > day + 1:
            raise InputError(
                f"{folder}: holds day_{day} and day_{following}, but no day_{day + 1}; add it, or number the days "
                f"without a gap"
            )
