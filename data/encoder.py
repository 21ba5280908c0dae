"""Converts a table's columns to samples.

The key of a categorical value is the 64-bit integer itself, or the BLAKE2b hash of a text. A vocabulary has row 0 for
missing values, row 1 for all rare and unknown values, and rows from 2 on for the others in ascending order of keys.
The ids of a table of any id are the keys themselves, and `MISSING_ID` for missing values.
"""

from collections import Counter
from collections.abc import Mapping
from threading import Lock

import numpy as np
import pyarrow as pa

from dlrm_overlap.data.columns import Column, Missing
from dlrm_overlap.data.day import Day, Ragged
from dlrm_overlap.data.hashed import hashed_rows
from dlrm_overlap.data.schema import MISSING_ID, Schema

_MISSING, _RARE, _FIRST_KNOWN = 0, 1, 2  # rows of a table with a vocabulary
_LEAST_PENDING = 1 << 18


class _Vocabulary:
    def __init__(self, min_count: int, keys: np.ndarray | None = None) -> None:
        self.keys = self.counts = np.empty(0, np.int64) if keys is None else keys
        """[k] int64, keys in ascending order, and their counts"""
        self._min_count = min_count
        self._pending: list[tuple[np.ndarray, np.ndarray]] = []

    def count(self, keys: np.ndarray) -> None:
        self._pending.append(np.unique(keys, return_counts=True))
        # Merging only when as many values are pending as are known keeps the work per value constant.
        if sum(len(each) for each, _ in self._pending) > max(_LEAST_PENDING, len(self.keys)):
            self._merge()

    def _merge(self) -> None:
        blocks = [(self.keys, self.counts), *self._pending]
        keys, counts = (np.concatenate(each) for each in zip(*blocks, strict=True))
        self.keys, number = np.unique(keys, return_inverse=True)
        self.counts = np.bincount(number, counts, len(self.keys)).astype(np.int64)
        self._pending = []

    def number(self) -> None:
        self._merge()
        frequent = self.counts >= self._min_count
        self.keys, self.counts = self.keys[frequent], self.counts[frequent]

    def rows_of(self, keys: np.ndarray) -> np.ndarray:
        if not len(self.keys):
            return np.full(len(keys), _RARE, np.int32)
        index = np.searchsorted(self.keys, keys)
        return np.where(self.keys.take(index, mode="clip") == keys, index + _FIRST_KNOWN, _RARE).astype(np.int32)


class Encoder:
    """Converts blocks of a table to samples, by given vocabularies or after it has learnt them.

    Threads may share one that does not learn.
    """

    def __init__(self, schema: Schema, keys: Mapping[str, np.ndarray] | None = None) -> None:
        """Take the keys of all vocabularies, see `Encoding.keys`; None: `learn` them."""
        self._schema, self._missing = schema, Missing(schema.missing)
        self._vocabularies = {
            name: _Vocabulary(column.min_count, None if keys is None else keys[name])
            for name, column in schema.categorical.items()
            if column.min_count
        }
        self.learns = keys is None and bool(self._vocabularies)
        """whether `learn` must be called for all blocks, and then `finish`, before the first `encode`"""
        self.values = Counter[str]()
        """column -> number of its values that were encoded, or `count_ids` was told, without missing ones"""
        self.unknown = Counter[str]()
        """how many of these are in no vocabulary, or rare in the table that it was learnt from, or have no row"""
        self._counting = Lock()

    def learn(self, row: int, block: pa.RecordBatch) -> None:
        for name, vocabulary in self._vocabularies.items():
            keys, missing, _ = self._keys(row, block, name)
            vocabulary.count(keys[~missing])

    def finish(self) -> dict[str, np.ndarray]:
        """Return, for each column NAME, its vocabulary: NAME.keys, ascending, and NAME.counts, both [k] int64."""
        learnt = {}
        for name, vocabulary in self._vocabularies.items():
            vocabulary.number()
            learnt |= {f"{name}.keys": vocabulary.keys, f"{name}.counts": vocabulary.counts}
        return learnt

    @property
    def rows(self) -> list[int | None]:
        """Number of rows of each table; None for a table of any id."""
        return [
            None if column.any else column.rows or _FIRST_KNOWN + len(self._vocabularies[name].keys)
            for name, column in self._schema.categorical.items()
        ]

    def take_counts(self) -> tuple[Counter[str], Counter[str]]:
        """Return `values` and `unknown`, and count from 0 again."""
        with self._counting:
            counts = self.values, self.unknown
            self.values, self.unknown = Counter(), Counter()
        return counts

    def _count(self, name: str, values: int, unknown: int) -> None:
        with self._counting:
            self.values[name] += values
            self.unknown[name] += unknown

    def count_ids(self, name: str, ids: np.ndarray, has_row: np.ndarray) -> None:
        """Count the ids [n] of a column of any id; only the model knows which have a row."""
        given = ids != MISSING_ID
        self._count(name, int(given.sum()), int((given & ~has_row).sum()))

    def encode(self, row: int, block: pa.RecordBatch) -> Day:
        """Convert `block`, whose first row is number `row` of its file.

        Without dense columns in the schema, samples have one dense feature, which is 1.
        """
        labels = [Column(block, name, row, self._missing).labels() for name in self._schema.labels]
        dense, ids = self.features(row, block)
        time, unit = self._schema.time, self._schema.time_unit
        times = Column(block, time, row, self._missing).times(unit) if time else None
        return Day("table", np.stack(labels, axis=1), dense, ids, times=times)

    def features(self, row: int, block: pa.RecordBatch) -> tuple[np.ndarray, list[np.ndarray | Ragged]]:
        """Return the dense features [n, F] float32 of `block`, and the ids of each table; see `Day`."""
        dense = [self._dense(row, block, name) for name in self._schema.dense] or [np.ones(block.num_rows)]
        ids = [self._ids(row, block, name) for name in self._schema.categorical]
        return np.stack(dense, axis=1).astype(np.float32), ids

    def _dense(self, row: int, block: pa.RecordBatch, name: str) -> np.ndarray:
        numbers = Column(block, name, row, self._missing).numbers()
        if self._schema.dense[name].transform == "log1p":
            numbers = np.log1p(np.maximum(numbers, 0).astype(np.float32))
        return np.where(np.isnan(numbers), 0, numbers)

    def _ids(self, row: int, block: pa.RecordBatch, name: str) -> np.ndarray | Ragged:
        keys, missing, ends = self._keys(row, block, name)
        if self._schema.categorical[name].any:
            ids = np.where(missing, MISSING_ID, keys)
            return ids[:, None] if ends is None else Ragged(ids, ends)
        rows = self._schema.categorical[name].rows
        known = hashed_rows(keys, rows) if rows else self._vocabularies[name].rows_of(keys)
        ids = np.where(missing, np.int32(_MISSING), known)
        if not rows:
            self._count(name, len(keys) - int(missing.sum()), int((ids == _RARE).sum()))
        return ids[:, None] if ends is None else Ragged(ids, ends)

    def _keys(self, row: int, block: pa.RecordBatch, name: str) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        column = self._schema.categorical[name]
        return Column(block, name, row, self._missing, column.list).keys(column.type)
