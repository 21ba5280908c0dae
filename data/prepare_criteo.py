"""Turns Criteo's text into arrays that training maps from disk: `dlrm-overlap prepare criteo IN OUT`.

Text file i of IN, in natural order, becomes OUT's day_i_dense.npy (float32 [n, 13], log1p already taken),
day_i_sparse.npy (int32 [n, 26], row ids) and day_i_labels.npy (int32 [n, 1]); meta.json records how they were made,
and size and checksum of each. One process at a time writes to OUT, which `files.hold_folder` sees to.
Ids are made in one of two ways:

- hashing into `rows` rows a table: row 0 for a missing value, a hash for any other (see `hash_ids`);
- by frequency: row 0 for a missing value, row 1 for all values seen fewer than `min_count` times over all days, and a
  row each for the others, from 2 on, in ascending order of the value. vocabulary.npz keeps these values. Days that
  another run prepares get other rows, so the samples to evaluate on must be held out of the same days.
"""

import json
import tokenize
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from dlrm_overlap.config import CRITEO_DENSE, CRITEO_TABLES, InputError
from dlrm_overlap.data.criteo_text import BLOCK_BYTES, TextRows, criteo_files, hash_ids, read_rows
from dlrm_overlap.files import hold_folder, remove_temporaries, replacing

NOT_NPY = (ValueError, EOFError, SyntaxError, tokenize.TokenError)
"""What numpy raises for a file that is none of its arrays. It reads the header as a literal, so nothing is executed."""

_META, _VOCABULARY = "meta.json", "vocabulary.npz"
_DENSE = "log1p of the count; 0 where it is missing or negative"
_PARTS = {"dense": ("<f4", CRITEO_DENSE), "sparse": ("<i4", CRITEO_TABLES), "labels": ("<i4", 1)}
_CHECKED_BYTES = 1 << 24  # read at once where a checksum is taken
_MISSING, _RARE, _FIRST_KNOWN = 0, 1, 2  # rows of a table made by frequency


@dataclass(frozen=True)
class Written:
    """A file of a day, as it was written."""

    size_bytes: int
    crc32: int
    """of the array's bytes, which follow the npy header"""


@dataclass(frozen=True)
class SourceDay:
    """A text file as it was when its day was prepared, and what was made of it."""

    name: str
    size_bytes: int
    mtime_ns: int
    samples: int | None = None
    """None until the day's arrays are whole"""
    skipped: int = 0
    """lines that were no samples, and were left out"""
    files: dict[str, Written] | None = None
    """dense, sparse, labels -> the day's file; None until they are whole, and in folders of earlier versions"""


@dataclass(frozen=True)
class Meta:
    """What meta.json says of a folder of prepared days."""

    hash_rows: int | None
    """rows of every table, where ids are made by hashing; else None"""
    min_count: int | None
    """how often a value must be seen to get a row, where ids are made by frequency; else None"""
    rows: list[int] | None
    """rows of each table; None until the values are counted"""
    days: list[SourceDay]
    dense: str = _DENSE
    """what the dense features are, in words"""


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
        fields = json.loads(file.read_text())
        return Meta(**{**fields, "days": [_read_day(day) for day in fields["days"]]})
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(
            f"{file}: not what `dlrm-overlap prepare` writes ({error!r}); choose another folder"
        ) from error


def _read_day(fields: dict[str, Any]) -> SourceDay:
    files = fields.get("files")
    return SourceDay(**{**fields, "files": files and {part: Written(**file) for part, file in files.items()}})


def check_sizes(folder: Path, day: int, files: dict[str, Written]) -> None:
    """Check that a day's files have the sizes that meta.json gives.

    Raises:
        InputError: naming the file that has not.
    """
    for part, written in files.items():
        file = day_file(folder, day, part)
        if file.exists() and (size := file.stat().st_size) != written.size_bytes:
            raise InputError(
                f"{file}: {size} bytes, but prepare wrote {written.size_bytes}; run `prepare` again, which makes "
                f"this day anew, or copy the file again"
            )


def prepare_criteo(
    source: Path,
    target: Path,
    *,
    rows: int | None = None,
    min_count: int | None = None,
    skip_bad_rows: bool = False,
    block_bytes: int = BLOCK_BYTES,
) -> Meta:
    """Turn the text files at `source` into the days of the folder `target`, and return its meta.json.

    Give either `rows`, the rows of each table, or `min_count`, how often a value must be seen to get a row. Text is
    read in blocks of `block_bytes`. Hashing needs some ten times that memory, whatever the size of the data. Counting
    by frequency also needs 12 bytes for each distinct value of every table, and about five times those of one table
    while it merges them.

    With `skip_bad_rows`, lines that break the format are left out; meta.json counts them.

    Started again after an interruption, it goes on with the first day that was not finished. A day is kept while its
    source has the same name, size and time of modification, so a run that changes nothing does nothing. By frequency,
    a change of any source makes all days anew. Files appear whole or not at all, and meta.json marks a day as done only
    after its files are there; a day whose files have other sizes or checksums than meta.json gives is made anew. On a
    terminal, a bar on standard error shows the bytes read.

    Raises:
        InputError: if both or neither of `rows` and `min_count` are given, if there is no text or a line of it breaks
            the format and is not left out, or if `target` cannot be written to, is being written to by another process,
            or holds days that were made in another way.
    """
    if (rows is None) == (min_count is None):
        raise InputError(f"--rows {rows}, --min_count {min_count}: give one of them, to hash or to count the values")
    for option, value in (("--rows", rows), ("--min_count", min_count)):
        if value is not None and not 1 <= value < 2**31:
            raise InputError(f"{option}: {value} must be at least 1 and below {2**31}, so that ids fit; take another")
    files = criteo_files(source)
    stats = [file.stat() for file in files]
    days = [SourceDay(file.name, stat.st_size, stat.st_mtime_ns) for file, stat in zip(files, stats, strict=True)]
    wanted = Meta(rows, min_count, None if rows is None else [rows] * CRITEO_TABLES, days)
    found = read_meta(target)
    meta = _resume(target, found, wanted)
    if all(day.samples is not None for day in meta.days):
        return meta
    try:
        target.mkdir(parents=True, exist_ok=True)
        with hold_folder(target, "prepare") as is_alone:
            if is_alone:
                remove_temporaries(target)
            if (now := read_meta(target)) != found:  # another process has just been at work
                meta = _resume(target, now, wanted)
            return _make(files, target, meta, skip_bad_rows, block_bytes)
    except OSError as error:
        reason = "there is a file of that name" if isinstance(error, FileExistsError) else error.strerror
        raise InputError(f"{target}: cannot be written ({reason}); free it or choose another, and run again") from error


def _make(files: Sequence[Path], target: Path, meta: Meta, skip: bool, block_bytes: int) -> Meta:
    """Make the days of `meta` that are not done, and return the meta.json that says so. The folder's lock is held."""
    pending = [i for i, day in enumerate(meta.days) if day.samples is None]
    if not pending:
        return meta
    _write_meta(target, meta)
    with _progress_bar() as bar:
        if meta.rows is None:
            assert meta.min_count is not None
            vocabulary = _count(files, meta.min_count, block_bytes, _watch(bar, "counting values", meta.days), skip)
            with replacing(target / _VOCABULARY) as stream:
                np.savez(stream, *vocabulary)
            meta = replace(meta, rows=[_FIRST_KNOWN + len(known) for known in vocabulary])
            _write_meta(target, meta)
        encode = _encoder(target, meta)
        on_read = _watch(bar, "writing days", [meta.days[i] for i in pending])
        for i in pending:
            done = _write_day(read_rows(files[i], block_bytes, on_read, skip), target, i, encode)
            meta.days[i] = replace(meta.days[i], **done)
            _write_meta(target, meta)
    return meta


def _resume(target: Path, found: Meta | None, wanted: Meta) -> Meta:
    """Return `wanted`, with the days that the folder already holds marked as done; `found` is its meta.json."""
    if found is None:
        if any(target.glob("day_*_*.npy")):
            raise InputError(f"{target}: holds day files of another making; choose another folder")
        return wanted
    if (found.hash_rows, found.min_count, found.dense) != (wanted.hash_rows, wanted.min_count, wanted.dense):
        raise InputError(
            f"{target}: was prepared with --rows {found.hash_rows}, --min_count {found.min_count}, not "
            f"{wanted.hash_rows}, {wanted.min_count}; choose another folder or delete this one"
        )
    if len(found.days) > len(wanted.days):
        raise InputError(
            f"{target}: holds {len(found.days)} days, but there are {len(wanted.days)} text files; choose another "
            f"folder or delete this one"
        )
    same = [
        replace(old, samples=None, skipped=0, files=None) == new
        for old, new in zip(found.days, wanted.days, strict=False)
    ]
    counted = all(same) and len(same) == len(wanted.days) and (target / _VOCABULARY).exists()
    if wanted.min_count is not None and not counted:
        return wanted  # its rows are None, so values are counted anew
    days = list(wanted.days)
    for i, old in enumerate(found.days):
        if same[i] and _is_whole(target, i, old):
            days[i] = old
    return replace(wanted, rows=found.rows, days=days)


def _is_whole(target: Path, i: int, day: SourceDay) -> bool:
    try:
        arrays = {part: _map(day_file(target, i, part)) for part in _PARTS}
        if any(len(array) != day.samples for array in arrays.values()):
            return False
        check_sizes(target, i, day.files or {})
    except (OSError, *NOT_NPY):  # InputError is a ValueError
        return False
    return all(_crc32(array) == day.files[part].crc32 for part, array in arrays.items() if day.files)


def _map(file: Path) -> np.ndarray:
    return np.load(file, mmap_mode="r", allow_pickle=False)


def _crc32(array: np.ndarray) -> int:
    crc, block = 0, max(1, _CHECKED_BYTES // max(1, array[:1].nbytes))
    for first in range(0, len(array), block):
        crc = zlib.crc32(np.ascontiguousarray(array[first : first + block]).data, crc)
    return crc


def _write_meta(target: Path, meta: Meta) -> None:
    with replacing(target / _META) as stream:
        stream.write(json.dumps(asdict(meta), indent=1).encode())


def _write_day(
    texts: Iterator[TextRows], target: Path, day: int, encode: Callable[[TextRows], np.ndarray]
) -> dict[str, Any]:
    """Write a day's three files; return what `SourceDay` is to say of them: `samples`, `skipped`, `files`."""
    samples, skipped, crcs = 0, 0, dict.fromkeys(_PARTS, 0)
    with ExitStack() as stack:
        streams = {part: stack.enter_context(replacing(day_file(target, day, part))) for part in _PARTS}
        for part, stream in streams.items():
            _write_header(stream, part, 0)
        for text in texts:
            arrays = {"dense": text.dense, "sparse": encode(text), "labels": text.labels}
            for part, stream in streams.items():
                data = np.ascontiguousarray(arrays[part], _PARTS[part][0]).data
                stream.write(data)
                crcs[part] = zlib.crc32(data, crcs[part])
            samples += len(text.labels)
            skipped += text.skipped
        written = {part: Written(stream.tell(), crcs[part]) for part, stream in streams.items()}
        for part, stream in streams.items():
            _write_header(stream, part, samples)
    return {"samples": samples, "skipped": skipped, "files": written}


def _write_header(stream: BinaryIO, part: str, samples: int) -> None:
    """Write the npy header at the start of `stream`. numpy pads it to one length for any number of samples."""
    dtype, columns = _PARTS[part]
    stream.seek(0)
    np.lib.format.write_array_header_1_0(stream, {"descr": dtype, "fortran_order": False, "shape": (samples, columns)})


def _encoder(target: Path, meta: Meta) -> Callable[[TextRows], np.ndarray]:
    """Return the function that makes the ids [n, 26] int32 of a block of text."""
    if meta.min_count is None:
        assert meta.rows is not None
        rows = meta.rows
        return lambda text: hash_ids(text.categories, text.missing, rows)
    try:
        with np.load(target / _VOCABULARY, allow_pickle=False) as archive:
            vocabulary = [archive[f"arr_{t}"] for t in range(CRITEO_TABLES)]
    except (KeyError, zipfile.BadZipFile, zlib.error, *NOT_NPY) as error:
        raise InputError(
            f"{target / _VOCABULARY}: not what `dlrm-overlap prepare` writes ({error}); remove it and run again"
        ) from error
    return lambda text: _look_up(text, vocabulary)


def _look_up(text: TextRows, vocabulary: Sequence[np.ndarray]) -> np.ndarray:
    ids = np.full(text.categories.shape, _RARE, np.int32)
    for t, known in enumerate(vocabulary):
        if known.size:
            values = text.categories[:, t]
            place = np.searchsorted(known, values)
            is_known = known.take(place, mode="clip") == values
            ids[is_known, t] = place[is_known] + _FIRST_KNOWN
    ids[text.missing] = _MISSING
    return ids


def _count(
    files: Sequence[Path], min_count: int, block_bytes: int, on_read: Callable[[int], object], skip: bool
) -> list[np.ndarray]:
    """Return each table's values seen at least `min_count` times, uint32 in ascending order."""
    counters = [_Counter() for _ in range(CRITEO_TABLES)]
    for file in files:
        for text in read_rows(file, block_bytes, on_read, skip):
            for t, counter in enumerate(counters):
                counter.add(text.categories[~text.missing[:, t], t])
    return [counter.frequent(min_count) for counter in counters]


class _Counter:
    """Counts how often each value of a table is seen."""

    _LEAST_PENDING = 1 << 18

    def __init__(self) -> None:
        self._values = np.empty(0, np.uint32)
        self._counts = np.empty(0, np.int64)
        self._pending: list[np.ndarray] = []
        self._pending_size = 0

    def add(self, values: np.ndarray) -> None:
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


def _progress_bar() -> Progress:
    console = Console(stderr=True)
    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn()
    return Progress(*columns, TimeRemainingColumn(), console=console, disable=not console.is_terminal)


def _watch(bar: Progress, what: str, days: Sequence[SourceDay]) -> Callable[[int], object]:
    """Return a function that advances the bar by the bytes it is called with, as `read_rows` calls it."""
    task = bar.add_task(what, total=sum(day.size_bytes for day in days))
    return lambda size: bar.advance(task, size)
