"""Rows by frequency: which values of a table are seen often, and the row of each.

Row 0 is for a missing value, row 1 for all values that are seen too seldom, and the rows from 2 on for the others, in
ascending order of the value.
"""

import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from dlrm_overlap.config import CRITEO_TABLES, InputError
from dlrm_overlap.data.criteo_text import TextRows
from dlrm_overlap.data.npy_files import NOT_NPY
from dlrm_overlap.launching.files import replacing

VOCABULARY = "vocabulary.npz"
_MISSING, _RARE, _FIRST_KNOWN = 0, 1, 2  # rows of a table


class ValueCounter:
    """Counts how often each value of a table is seen."""

    _LEAST_PENDING = 1 << 18

    def __init__(self) -> None:
        self._values = np.empty(0, np.uint32)
        self._counts = np.empty(0, np.int64)
        self._pending: list[np.ndarray] = []
        self._pending_size = 0

    def add(self, values: np.ndarray) -> None:
        """Count `values` [n] uint32."""
        self._pending.append(values)
        self._pending_size += values.size
        # By merging only when as many values are pending as are known, the work for each value stays constant.
        if self._pending_size > max(self._LEAST_PENDING, self._values.size):
            self._merge()

    def frequent(self, min_count: int) -> np.ndarray:
        """Return the values seen at least `min_count` times, in ascending order."""
        self._merge()
        return self._values[self._counts >= min_count]

    def _merge(self) -> None:
        fresh, fresh_counts = np.unique(np.concatenate([self._values[:0], *self._pending]), return_counts=True)
        self._pending, self._pending_size = [], 0
        values, counts = np.append(self._values, fresh), np.append(self._counts, fresh_counts)
        order = np.argsort(values, kind="stable")
        values, counts = values[order], counts[order]
        first = np.flatnonzero(np.append(True, values[1:] != values[:-1])[: values.size])
        self._values = values[first]
        self._counts = np.add.reduceat(counts, first) if first.size else counts


def write_vocabulary(folder: Path, vocabulary: Sequence[np.ndarray]) -> list[int]:
    """Write each table's frequent values, uint32 in ascending order, to `folder`, and return each table's rows."""
    with replacing(folder / VOCABULARY) as stream:
        np.savez(stream, *vocabulary)
    return [_FIRST_KNOWN + len(known) for known in vocabulary]


def read_vocabulary(folder: Path) -> list[np.ndarray]:
    """Return what `write_vocabulary` has written to `folder`.

    Raises:
        InputError: if the file is another.
    """
    try:
        with np.load(folder / VOCABULARY, allow_pickle=False) as archive:
            return [archive[f"arr_{t}"] for t in range(CRITEO_TABLES)]
    except (KeyError, zipfile.BadZipFile, zlib.error, *NOT_NPY) as error:
        raise InputError(
            f"{folder / VOCABULARY}: not what `dlrm-overlap prepare` writes ({error}); remove it and run again"
        ) from error


def look_up(text: TextRows, vocabulary: Sequence[np.ndarray]) -> np.ndarray:
    """Return the ids [n, 26] int32 of a block of text."""
    ids = np.full(text.categories.shape, _RARE, np.int32)
    for t, known in enumerate(vocabulary):
        if known.size:
            values = text.categories[:, t]
            index = np.searchsorted(known, values)
            is_known = known.take(index, mode="clip") == values
            ids[is_known, t] = index[is_known] + _FIRST_KNOWN
    ids[text.missing] = _MISSING
    return ids
