"""A folder of prepared days: the files of each, meta.json, which says how they were made, and vocabulary.npz.

Of day i there are day_i_dense.npy (float32 [n, 13], log1p taken), day_i_sparse.npy (int32 [n, 26], row ids) and
day_i_labels.npy (int32 [n, 1]). vocabulary.npz has each table's values that are seen often. Row 0 is for a missing
value, row 1 for all values that are seen too seldom, and the rows from 2 on for the others, in ascending order.
"""

import json
import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from dlrm_overlap.config import CRITEO_DENSE, CRITEO_TABLES, InputError
from dlrm_overlap.data.criteo_text import TextRows
from dlrm_overlap.data.npy_files import NOT_NPY
from dlrm_overlap.launching.files import replacing

_Made = TypeVar("_Made")
VOCABULARY = "vocabulary.npz"
_MISSING, _RARE, _FIRST_KNOWN = 0, 1, 2  # rows of a table
_META = "meta.json"

PARTS = {"dense": ("<f4", CRITEO_DENSE), "sparse": ("<i4", CRITEO_TABLES), "labels": ("<i4", 1)}
"""part of a day -> type and columns of its array"""


@dataclass(frozen=True)
class SourceDay:
    """A text file as it was when its day was prepared, and the day made of it."""

    name: str
    size_bytes: int
    mtime_ns: int
    samples: int | None = None
    """None until the day's arrays are whole"""
    skipped: int = 0
    """lines that were no samples, and were left out"""


@dataclass(frozen=True)
class Meta:
    """The content of meta.json."""

    hash_rows: int | None
    """rows of every table, where ids are made by hashing; else None"""
    min_count: int | None
    """how often a value must be seen to get a row, where ids are made by frequency; else None"""
    rows: list[int] | None
    """rows of each table; None until the values are counted"""
    days: list[SourceDay]


def day_file(folder: Path, day: int, part: str) -> Path:
    """Return the file of a day's `part`: dense, sparse or labels."""
    return folder / f"day_{day}_{part}.npy"


def read_meta(folder: Path) -> Meta | None:
    """Return the contents of the meta.json in `folder`, or None where there is none.

    Raises:
        InputError: if the file is not one that `prepare_criteo` writes.
    """
    file = folder / _META
    try:
        found = json.loads(file.read_text())
        meta = _made_of(Meta, found | {"days": [_made_of(SourceDay, day) for day in found["days"]]})
        if meta.rows is not None:
            _check_rows(meta.rows)
        return meta
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise InputError(
            f"{file}: not what `dlrm-overlap prepare` writes ({error!r}); choose another folder"
        ) from error


def _check_rows(rows: Any) -> None:
    if len(rows) != CRITEO_TABLES or not all(isinstance(count, int) and count > 0 for count in rows):
        raise ValueError(f"rows are not {CRITEO_TABLES} positive numbers")


def _made_of(kind: type[_Made], found: dict[str, Any]) -> _Made:
    """Return the dataclass `kind` with the fields that it has among those of a folder of another version."""
    return kind(**{each.name: found[each.name] for each in fields(kind) if each.name in found})  # type: ignore[arg-type]


def write_meta(target: Path, meta: Meta) -> None:
    """Write `meta` to the folder `target`."""
    with replacing(target / _META) as stream:
        stream.write(json.dumps(asdict(meta), indent=1).encode())


def is_whole(target: Path, i: int, day: SourceDay) -> bool:
    """Return whether day `i` of the folder `target` has the samples that meta.json gives.

    Its files were synced before they got their names, and numpy maps no file that is shorter than its header says.
    """
    try:
        return all(len(np.load(day_file(target, i, part), mmap_mode="r")) == day.samples for part in PARTS)
    except (OSError, *NOT_NPY):
        return False


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
        counts = np.append(self._counts, fresh_counts)
        self._values, first = np.unique(np.append(self._values, fresh), return_inverse=True)
        self._counts = np.bincount(first, counts, len(self._values)).astype(np.int64)


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
