"""Turns Criteo's text into arrays that training maps from disk: `dlrm-overlap prepare criteo IN OUT`.

Text file i of IN, in natural order, becomes OUT's day i (`prepared`). One process at a time writes to OUT. Ids are made
in one of two ways:

- hashing into `rows` rows a table: row 0 for a missing value, a hash for any other (see `hash_ids`);
- by frequency: row 0 for a missing value, row 1 for all values seen fewer than `min_count` times over all days, and a
  row each for the others, from 2 on, in ascending order of the value. vocabulary.npz keeps these values. Days that
  another run prepares get other rows, so the samples to evaluate on must be held out of the same days.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from dlrm_overlap.config import CRITEO_TABLES, InputError
from dlrm_overlap.data.criteo_text import BLOCK_BYTES, TextRows, criteo_files, hash_ids, read_rows
from dlrm_overlap.data.prepared import (
    PARTS,
    VOCABULARY,
    Meta,
    SourceDay,
    ValueCounter,
    day_file,
    is_whole,
    look_up,
    read_meta,
    read_vocabulary,
    write_meta,
    write_vocabulary,
)
from dlrm_overlap.launching.files import hold_folder, remove_temporaries, replacing


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

    Give either `rows`, the rows of each table, or `min_count`, how often a value must be seen to get a row. Hashing
    needs some ten times `block_bytes` of memory. Counting also needs 12 bytes for each distinct value of every table,
    and about five times those of one table while it merges them. With `skip_bad_rows`, bad lines are left out, and
    counted in meta.json.

    Started again, it keeps each day whose source has the same name, size and time of modification, and whose files are
    whole. By frequency, a change of any source makes all days anew. Files appear whole
    or not at all. On a terminal, a bar on standard error shows the bytes read.

    Raises:
        InputError: if both or neither of `rows` and `min_count` are given, if there is no text or a bad line, or if
            `target` cannot be written to, is being written to by another process, or holds days of another making.
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
    write_meta(target, meta)
    with _progress_bar() as bar:
        if meta.rows is None:
            assert meta.min_count is not None
            vocabulary = _count(files, meta.min_count, block_bytes, _watch(bar, "counting values", meta.days), skip)
            meta = replace(meta, rows=write_vocabulary(target, vocabulary))
            write_meta(target, meta)
        encode = _encoder(target, meta)
        on_read = _watch(bar, "writing days", [meta.days[i] for i in pending])
        for i in pending:
            done = _write_day(read_rows(files[i], block_bytes, on_read, skip), target, i, encode)
            meta.days[i] = replace(meta.days[i], **done)
            write_meta(target, meta)
    return meta


def _resume(target: Path, found: Meta | None, wanted: Meta) -> Meta:
    """Return `wanted`, with the days that the folder already holds marked as done; `found` is its meta.json."""
    if found is None:
        if any(target.glob("day_*_*.npy")):
            raise InputError(f"{target}: holds day files of another making; choose another folder")
        return wanted
    if (found.hash_rows, found.min_count) != (wanted.hash_rows, wanted.min_count):
        was, now = (
            f"--rows {each.hash_rows}" if each.hash_rows else f"--min_count {each.min_count}"
            for each in (found, wanted)
        )
        raise InputError(f"{target}: was prepared with {was}, not {now}; choose another folder or delete this one")
    if len(found.days) > len(wanted.days):
        raise InputError(
            f"{target}: holds {len(found.days)} days, but there are {len(wanted.days)} text files; choose another "
            f"folder or delete this one"
        )
    same = [replace(old, samples=None, skipped=0) == new for old, new in zip(found.days, wanted.days, strict=False)]
    counted = all(same) and len(same) == len(wanted.days) and (target / VOCABULARY).exists()
    if wanted.min_count is not None and not counted:
        return wanted  # its rows are None, so values are counted anew
    days = list(wanted.days)
    for i, old in enumerate(found.days):
        if same[i] and is_whole(target, i, old):
            days[i] = old
    return replace(wanted, rows=found.rows, days=days)


def _write_day(
    texts: Iterator[TextRows], target: Path, day: int, encode: Callable[[TextRows], np.ndarray]
) -> dict[str, Any]:
    """Write a day's three files; return what `SourceDay` is to say of them: `samples` and `skipped`."""
    samples, skipped = 0, 0
    with ExitStack() as stack:
        streams = {part: stack.enter_context(replacing(day_file(target, day, part))) for part in PARTS}
        for part, stream in streams.items():
            _write_header(stream, part, 0)
        for text in texts:
            arrays = {"dense": text.dense, "sparse": encode(text), "labels": text.labels}
            for part, stream in streams.items():
                stream.write(np.ascontiguousarray(arrays[part], PARTS[part][0]).data)
            samples += len(text.labels)
            skipped += text.skipped
        for part, stream in streams.items():
            _write_header(stream, part, samples)
    return {"samples": samples, "skipped": skipped}


def _write_header(stream: BinaryIO, part: str, samples: int) -> None:
    """Write the npy header at the start of `stream`. numpy pads it to one length for any number of samples."""
    dtype, columns = PARTS[part]
    stream.seek(0)
    np.lib.format.write_array_header_1_0(stream, {"descr": dtype, "fortran_order": False, "shape": (samples, columns)})


def _encoder(target: Path, meta: Meta) -> Callable[[TextRows], np.ndarray]:
    """Return the function that makes the ids [n, 26] int32 of a block of text."""
    if meta.min_count is None:
        assert meta.rows is not None
        rows = meta.rows
        return lambda text: hash_ids(text.categories, text.missing, rows)
    vocabulary = read_vocabulary(target)
    return lambda text: look_up(text, vocabulary)


def _count(
    files: Sequence[Path], min_count: int, block_bytes: int, on_read: Callable[[int], object], skip: bool
) -> list[np.ndarray]:
    """Return each table's values seen at least `min_count` times, uint32 in ascending order."""
    counters = [ValueCounter() for _ in range(CRITEO_TABLES)]
    for file in files:
        for text in read_rows(file, block_bytes, on_read, skip):
            for t, counter in enumerate(counters):
                counter.add(text.categories[~text.missing[:, t], t])
    return [counter.frequent(min_count) for counter in counters]


def _progress_bar() -> Progress:
    console = Console(stderr=True)
    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn()
    return Progress(*columns, TimeRemainingColumn(), console=console, disable=not console.is_terminal)


def _watch(bar: Progress, what: str, days: Sequence[SourceDay]) -> Callable[[int], object]:
    """Return a function that advances the bar by the bytes it is called with, as `read_rows` calls it."""
    task = bar.add_task(what, total=sum(day.size_bytes for day in days))
    return lambda size: bar.advance(task, size)
