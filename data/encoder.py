"""Makes samples of a table's columns: rows of categorical values, transformed dense features; and what it learns.

A vocabulary has row 0 for a missing value, row 1 for all values that are seen too seldom, and the rows from 2 on for
the others, in ascending order of their keys.
"""

import logging
import math
import zipfile
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from dlrm_overlap.config import InputError
from dlrm_overlap.data.columns import Keys, Raw, hashed_rows
from dlrm_overlap.data.days import Day, Ragged
from dlrm_overlap.data.npy_files import NOT_NPY
from dlrm_overlap.data.schema import Categorical, Schema
from dlrm_overlap.launching.files import replacing

log = logging.getLogger("dlrm_overlap")

VOCABULARY = "vocabulary.npz"
_MISSING, _RARE, _FIRST_KNOWN = 0, 1, 2  # rows of a table with a vocabulary
_LARGE = 10.0  # root mean square of a dense feature from which on losses have grown without bound


class ValueCounter:
    """Counts how often each key of a column is seen."""

    _LEAST_PENDING = 1 << 18

    def __init__(self) -> None:
        self._keys, self._counts = np.empty(0, np.int64), np.empty(0, np.int64)
        self._pending: list[tuple[np.ndarray, np.ndarray]] = []
        self._pending_size = 0

    def add(self, keys: Keys) -> None:
        """Count the values that are not missing."""
        self._pending.append((keys.keys, np.bincount(keys.codes, minlength=len(keys.keys) + 1)[:-1]))
        self._pending_size += len(keys.keys)
        # By merging only when as many values are pending as are known, the work for each value stays constant.
        if self._pending_size > max(self._LEAST_PENDING, len(self._keys)):
            self._merge()

    def frequent(self, min_count: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the keys seen at least `min_count` times, in ascending order, and how often."""
        self._merge()
        kept = self._counts >= min_count
        return self._keys[kept], self._counts[kept]

    def _merge(self) -> None:
        keys, counts = zip((self._keys, self._counts), *self._pending, strict=True)
        self._pending, self._pending_size = [], 0
        self._keys, first = np.unique(np.concatenate(keys), return_inverse=True)
        self._counts = np.bincount(first, np.concatenate(counts), len(self._keys)).astype(np.int64)


@dataclass(frozen=True)
class Learnt:
    """What is learnt of all samples to train on."""

    vocabularies: Mapping[str, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict)
    """column -> frequent keys [k] int64 in ascending order, and how often each was seen [k] int64"""
    standards: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """column -> mean and standard deviation"""

    def write(self, folder: Path) -> None:
        """Write it to `folder`: for each column NAME, NAME.keys and NAME.counts, or NAME.mean_and_std."""
        arrays = {f"{name}.mean_and_std": np.array(each) for name, each in self.standards.items()}
        for name, (keys, counts) in self.vocabularies.items():
            arrays |= {f"{name}.keys": keys, f"{name}.counts": counts}
        with replacing(folder / VOCABULARY) as stream:
            np.savez(stream, **arrays)  # pyright: ignore[reportArgumentType]

    @classmethod
    def read(cls, folder: Path, schema: Schema) -> "Learnt":
        """Return what `write` has written to `folder`.

        Raises:
            InputError: if the file is another.
        """
        try:
            with np.load(folder / VOCABULARY, allow_pickle=False) as archive:
                vocabularies = {name: (archive[f"{name}.keys"], archive[f"{name}.counts"]) for name in schema.counted}
                found = {name: archive[f"{name}.mean_and_std"].tolist() for name in schema.standardised}
                return cls(vocabularies, {name: (mean, std) for name, (mean, std) in found.items()})
        except (KeyError, zipfile.BadZipFile, zlib.error, *NOT_NPY) as error:
            raise InputError(
                f"{folder / VOCABULARY}: not what `dlrm-overlap prepare` writes ({error}); remove it and run again"
            ) from error


def learn(blocks: Iterable[Raw], schema: Schema) -> Learnt:
    """Return what is to be learnt of the samples that are not held out."""
    counters = {name: ValueCounter() for name in schema.counted}
    sums = {name: np.zeros(3) for name in schema.standardised}
    for block in blocks:
        raw = block.take(~block.held_out) if block.held_out.any() else block
        for name, keys in zip(schema.categorical, raw.keys, strict=True):
            if name in counters:
                counters[name].add(keys)
        for name, values in zip(schema.dense, raw.dense, strict=True):
            if name in sums:
                known = values[~np.isnan(values)]
                sums[name] += (len(known), known.sum(), np.square(known).sum())
    vocabularies = {
        name: counter.frequent(schema.categorical[name].min_count or 1) for name, counter in counters.items()
    }
    return Learnt(vocabularies, {name: _standard(*each.tolist()) for name, each in sums.items()})


def _standard(count: float, total: float, squares: float) -> tuple[float, float]:
    """Return mean and standard deviation of `count` numbers, 1 where they are all alike."""
    mean = total / max(count, 1)
    return mean, math.sqrt(max(squares / max(count, 1) - mean**2, 0.0)) or 1.0


class Encoder:
    """Makes samples of a table's columns."""

    def __init__(self, schema: Schema, learnt: Learnt) -> None:
        self._schema, self._learnt = schema, learnt
        self.rows = [
            column.rows or _FIRST_KNOWN + len(learnt.vocabularies[name][0])
            for name, column in schema.categorical.items()
        ]
        """of each table"""
        self._has_warned = False

    def encode(self, raw: Raw, name: str) -> Day:
        """Return the samples as a `Day` of that name. Without dense columns, they have one dense feature of ones."""
        count = len(raw.labels)
        dense = np.ones((count, max(1, len(raw.dense))), np.float32)
        for i, (column, values) in enumerate(zip(self._schema.dense, raw.dense, strict=True)):
            dense[:, i] = self._transformed(column, values)
        self._warn_of_large(dense)
        ids = []
        for (column, spec), keys in zip(self._schema.categorical.items(), raw.keys, strict=True):
            rows = np.append(self._rows_of(column, spec, keys.keys), np.int32(_MISSING))[keys.codes]
            ids.append(rows[:, None] if keys.lengths is None else Ragged(rows, keys.lengths.cumsum()))
        return Day(name, raw.labels, dense, ids)

    def _warn_of_large(self, dense: np.ndarray) -> None:
        """Name once the columns that a model can hardly learn from as they are."""
        large = np.sqrt(np.square(dense, dtype=np.float64).mean(0)) > _LARGE if len(dense) else ()
        names = [name for name, is_large in zip(self._schema.dense, large, strict=False) if is_large]
        if names and not self._has_warned:
            self._has_warned = True
            log.warning(
                "schema: dense columns %s have a root mean square above %g, on which losses may grow without bound; "
                "set their transform to standardised or log1p",
                ", ".join(names),
                _LARGE,
            )

    def _transformed(self, column: str, values: np.ndarray) -> np.ndarray:
        """Return dense features [n]; the missing ones of `values` are NaN."""
        transform, missing = self._schema.dense[column].transform, np.isnan(values)
        if transform == "log1p":
            found = np.log1p(np.maximum(values, 0).astype(np.float32))
        elif transform == "standardised":
            mean, std = self._learnt.standards[column]
            found = (values - mean) / std
        else:
            found = values
        return np.where(missing, 0, found)

    def _rows_of(self, column: str, spec: Categorical, keys: np.ndarray) -> np.ndarray:
        if spec.rows is not None:
            return hashed_rows(keys, spec.rows)
        known, _ = self._learnt.vocabularies[column]
        if not len(known):
            return np.full(len(keys), _RARE, np.int32)
        index = np.searchsorted(known, keys)
        return np.where(known.take(index, mode="clip") == keys, index + _FIRST_KNOWN, _RARE).astype(np.int32)
