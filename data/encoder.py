"""Makes samples of a table's columns: rows of categorical values, transformed dense features; and what it learns.

A vocabulary has row 0 for a missing value, row 1 for all values that are seen too seldom, and the rows from 2 on for
the others, in ascending order of their keys. What is learnt is a dictionary of arrays: of a column NAME with a
vocabulary, NAME.keys [k] int64, the frequent keys in ascending order, and NAME.counts [k] int64; of one that is
standardised, NAME.mean_and_std [2] float64.
"""

import math
from collections.abc import Iterable, Mapping

import numpy as np

from dlrm_overlap.data.days import Day, Ragged
from dlrm_overlap.data.schema import Categorical, Schema
from dlrm_overlap.data.table_files import Block

_MISSING, _RARE, _FIRST_KNOWN = 0, 1, 2  # rows of a table with a vocabulary
_LEAST_PENDING = 1 << 18


class _ValueCounter:
    """Counts how often each key of a column is seen."""

    def __init__(self) -> None:
        self._counted = [(np.empty(0, np.int64), np.empty(0, np.int64))]
        """keys and their counts: those of all before the last merge, then those of each block since"""
        self._pending = 0

    def add(self, keys: np.ndarray) -> None:
        self._counted.append(np.unique(keys, return_counts=True))
        self._pending += len(self._counted[-1][0])
        # By merging only when as many values are pending as are known, the work for each value stays constant.
        if self._pending > max(_LEAST_PENDING, len(self._counted[0][0])):
            self.merge()

    def merge(self) -> tuple[np.ndarray, np.ndarray]:
        """Return all keys in ascending order, and their counts."""
        keys, counts = (np.concatenate(each) for each in zip(*self._counted, strict=True))
        known, number = np.unique(keys, return_inverse=True)
        self._counted = [(known, np.bincount(number, counts, len(known)).astype(np.int64))]
        self._pending = 0
        return self._counted[0]


def learn(blocks: Iterable[Block], schema: Schema) -> dict[str, np.ndarray]:
    """Return what is to be learnt of the samples that are not held out."""
    counters = {name: _ValueCounter() for name in schema.counted}
    sums = {name: np.zeros(3) for name in schema.standardised}
    for block in blocks:
        if block.held_out:
            continue
        for name, values in zip(schema.categorical, block.values, strict=True):
            if name in counters:
                counters[name].add(values.keys[~values.missing])
        for name, numbers in zip(schema.dense, block.dense, strict=True):
            if name in sums:
                known = numbers[~np.isnan(numbers)]
                sums[name] += (len(known), known.sum(), np.square(known).sum())
    learnt = {f"{name}.mean_and_std": _standard(*each.tolist()) for name, each in sums.items()}
    for name, counter in counters.items():
        keys, counts = counter.merge()
        kept = counts >= (schema.categorical[name].min_count or 1)
        learnt |= {f"{name}.keys": keys[kept], f"{name}.counts": counts[kept]}
    return learnt


def _standard(count: float, total: float, squares: float) -> np.ndarray:
    """Return mean and standard deviation of `count` numbers, 1 where they are all alike."""
    mean = total / max(count, 1)
    return np.array([mean, math.sqrt(max(squares / max(count, 1) - mean**2, 0.0)) or 1.0])


class Encoder:
    """Makes samples of a table's columns."""

    def __init__(self, schema: Schema, learnt: Mapping[str, np.ndarray]) -> None:
        self._schema, self._learnt = schema, learnt
        self.rows = [
            column.rows or _FIRST_KNOWN + len(learnt[f"{name}.keys"]) for name, column in schema.categorical.items()
        ]
        """of each table"""

    def encode(self, block: Block) -> Day:
        """Return the samples as a `Day`. Without dense columns, they have one dense feature of ones."""
        dense = np.ones((len(block.labels), max(1, len(block.dense))), np.float32)
        for i, (column, numbers) in enumerate(zip(self._schema.dense, block.dense, strict=True)):
            dense[:, i] = self._transformed(column, numbers)
        ids = []
        for (column, spec), values in zip(self._schema.categorical.items(), block.values, strict=True):
            rows = np.where(values.missing, np.int32(_MISSING), self._rows_of(column, spec, values.keys))
            ids.append(rows[:, None] if values.lengths is None else Ragged(rows, values.lengths.cumsum()))
        return Day("table", block.labels, dense, ids)

    def _transformed(self, column: str, numbers: np.ndarray) -> np.ndarray:
        """Return dense features [n]; the missing ones of `numbers` are NaN."""
        transform, found = self._schema.dense[column].transform, numbers
        if transform == "log1p":
            found = np.log1p(np.maximum(numbers, 0).astype(np.float32))
        elif transform == "standardised":
            mean, std = self._learnt[f"{column}.mean_and_std"]
            found = (numbers - mean) / std
        return np.where(np.isnan(numbers), 0, found)

    def _rows_of(self, column: str, spec: Categorical, keys: np.ndarray) -> np.ndarray:
        if spec.rows is not None:
            return hashed_rows(keys, spec.rows)
        known = self._learnt[f"{column}.keys"]
        if not len(known):
            return np.full(len(keys), _RARE, np.int32)
        index = np.searchsorted(known, keys)
        return np.where(known.take(index, mode="clip") == keys, index + _FIRST_KNOWN, _RARE).astype(np.int32)


def hashed_rows(keys: np.ndarray, rows: int) -> np.ndarray:
    """Return the rows [d] int32 of keys [d] int64, 1 + mix(key) % (rows - 1): row 0 is for missing values.

    In a table of one row all take row 0.
    """
    if rows == 1:
        return np.zeros(len(keys), np.int32)
    high, low = (keys.view(np.uint64) >> np.uint64(32)).astype(np.uint32), keys.astype(np.uint32)
    return (_mixed(low ^ _mixed(high)) % np.uint32(rows - 1) + np.uint32(1)).astype(np.int32)


def _mixed(bits: np.ndarray) -> np.ndarray:
    # MurmurHash3's 32-bit finaliser (A. Appleby), under which 0 stays 0. Running numbers spread evenly over any rows.
    mixed = bits ^ (bits >> np.uint32(16))
    mixed *= np.uint32(0x85EBCA6B)
    mixed ^= mixed >> np.uint32(13)
    mixed *= np.uint32(0xC2B2AE35)
    mixed ^= mixed >> np.uint32(16)
    return mixed
