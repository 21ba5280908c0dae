"""A folder of prepared samples: binary files, and meta.json, which describes them.

    records     uint8 [n, record_bytes], see `records`
    ends_t      int64 [n], for each table t whose bags differ in size: end of each sample's bag in list_t
    list_t      int32 [m], int64 for a table of any id: the ids of these bags, which are not in records
    times       int64 [n], if the schema names a column of times; see `times`
    checksums   uint64, of each block of these files, in this order; see `checksums`
    encoding    folder, if the samples were made of a table; see `encoding`

meta.json is written last, and a folder without it is refused. Its `digest` is a checksum of its other values and of the
file `checksums`.
"""

import json
import math
import os
import shutil
import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from dlrm_overlap.config import InputError, TablesConfig, in_one_line
from dlrm_overlap.data.checksums import BLOCK_BYTES, CheckedArray, ChecksumWriter, digest_of
from dlrm_overlap.data.day import Day, Ragged
from dlrm_overlap.data.days import Days
from dlrm_overlap.data.encoding import FOLDER, META, Encoded
from dlrm_overlap.data.records import Packed, RecordLayout, id_format
from dlrm_overlap.launching.files import open_file, write_json

_CHECKSUMS = "checksums"
_CURE = "copy the folder again, or run `dlrm-overlap prepare` again"


class Prepared(Days):
    cure = id_cure = "prepare the samples again"

    def __init__(self, path: str | Path, tables: TablesConfig):
        """Map the folder `path`.

        Raises:
            InputError: if a file is missing or has changed (changed blocks of samples are found on reading), or if
                `tables` has other numbers of rows than the ids were made for, unless both fold to the same number.
        """
        folder = Path(path)
        layout, content, digest = _read_meta(folder / META)
        checksums = _map(folder / _CHECKSUMS, "<u8")
        if digest != _digest_of(content, checksums):
            raise InputError(f"{folder}: {META} or {_CHECKSUMS} has changed since it was written; {_CURE}")
        # Check the tables' rows.
        made, most = layout.rows, tables.max_rows or math.inf
        rows = tables.rows if isinstance(tables.rows, list) else [tables.rows or each for each in made]
        if len(rows) != len(made) or any(
            found and expected and min(found, most) != min(expected, most)
            for found, expected in zip(rows, made, strict=True)
        ):
            raise InputError(
                f"data.tables.rows: {rows}, but the ids of {folder} were made for {made} rows; set it to null, which "
                f"takes these, and to save memory fold the ids by data.tables.max_rows"
            )
        # Map the files in the order of their checksums.
        samples, files = layout.samples, _Files(folder, checksums)
        records: Any = files.map_next("records", "u1", (samples, layout.record_bytes))
        unpacked: list[Any] = [Packed(records, each) for each in layout.fields()]
        dense, labels, *ids = unpacked
        for t in layout.lists:
            ends = files.map_next(f"ends_{t}", "<i8", (samples,))[:]
            if (falls := ends < np.append(0, ends[:-1])).any():
                raise InputError(
                    f"{folder / f'ends_{t}'}: the bag of sample {falls.argmax()} ends before it begins; {_CURE}"
                )
            ids.insert(t, Ragged(files.map_next(f"list_{t}", id_format(made[t]), (int(ends[-1]),)), ends))
        self.unordered = layout.unordered
        times = None if layout.unordered is None else files.map_next("times", "<i8", (samples,))
        super().__init__([Day(str(folder), labels, dense, ids, records, times)], made, tables.max_rows)
        self.held_out = layout.held_out
        self.labels = layout.labels
        self.encoded = _encoded(folder, layout)
        self.packed = None if layout.lists else replace(layout, moduli=self._moduli)


def encoded_of(folder: Path) -> Encoded | None:
    """Return the encoding of a prepared folder; None if it has none, or an earlier version wrote it."""
    return _encoded(folder, _read_meta(folder / META)[0])


def _encoded(folder: Path, layout: RecordLayout) -> Encoded | None:
    return Encoded(folder / FOLDER, layout.encoding) if layout.encoding else None


def _read_meta(file: Path) -> tuple[RecordLayout, dict[str, Any], str]:
    """Return the layout, the values that the digest covers, and the digest."""
    if file.parent.is_file():
        raise InputError(
            f"{file.parent}: a file, not a folder that `dlrm-overlap prepare` wrote; prepare it, and give the folder"
        )
    try:
        with open_file(file) as stream:
            content = json.load(stream)
        digest = content.pop("digest", None)
        layout = RecordLayout(**content)
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise InputError(
            f"{file.parent}: has no {META} of this version's `dlrm-overlap prepare` ({in_one_line(error):.200}); set "
            f"data.path, or data.eval_path, to a folder that it has written to its end, or data.kind to what this one "
            f"holds"
        ) from None
    labels, rows, sizes, samples = layout.labels, layout.rows, layout.sizes, layout.samples
    rules = {
        "digest": digest is None or isinstance(digest, str),
        "labels": isinstance(labels, dict) and labels and all(map(_is_weight, labels.values())),
        "dense": _is_count(layout.dense),
        "rows": isinstance(rows, list) and rows and all(each is None or _is_count(each) for each in rows),
        "sizes": isinstance(sizes, list) and all(each is None or _is_count(each) for each in sizes),
        "samples": _is_count(samples, 0, sys.maxsize),
        "held_out": layout.held_out is None or _is_count(layout.held_out, 1, sys.maxsize),
        "encoding": layout.encoding is None or isinstance(layout.encoding, str),
        "unordered": layout.unordered is None or _is_count(layout.unordered, 0, sys.maxsize),
        "moduli": layout.moduli == [],
    }
    wrong = [f"{key} {content.get(key, digest)!r:.60}" for key, holds in rules.items() if not holds]
    if not wrong and len(sizes) != len(rows):
        wrong.append(f"{len(sizes)} sizes of {len(rows)} tables")
    if not wrong and layout.held_out is not None and layout.held_out >= samples:
        wrong.append(f"held_out {layout.held_out} of {samples} samples")
    if wrong:
        raise InputError(f"{file}: {', '.join(wrong)} cannot be; {_CURE}")
    if digest is None:
        raise InputError(f"{file}: no digest, since an earlier version wrote the folder without checksums; {_CURE}")
    if not samples:
        raise InputError(f"{file.parent}: no samples; give a data set that has some")
    return layout, content, digest


def _is_count(value: Any, least: int = 1, most: int = 2**31 - 1) -> bool:
    return type(value) is int and least <= value <= most


def _is_weight(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value <= 1e37  # as `NonNegativeFloat`


def _digest_of(content: dict[str, Any], checksums: np.ndarray) -> str:
    return digest_of(json.dumps(content, sort_keys=True).encode(), checksums.data)


class _Files:
    def __init__(self, folder: Path, checksums: np.ndarray) -> None:
        self._folder, self._checksums = folder, checksums

    def map_next(self, name: str, dtype: str, shape: tuple[int, ...]) -> CheckedArray:
        array = _map(self._folder / name, dtype, shape)
        count = -(-array.nbytes // BLOCK_BYTES)
        checksums, self._checksums = np.split(self._checksums, [count])
        if len(checksums) < count:
            raise InputError(f"{self._folder / _CHECKSUMS}: has too few for {name}; {_CURE}")
        return CheckedArray(self._folder / name, array, checksums)


def _map(file: Path, dtype: str, shape: tuple[int, ...] | None = None) -> np.ndarray:
    try:
        found = file.stat().st_size if file.is_file() else -1
        item = np.dtype(dtype).itemsize
        size = max(found, 0) // item * item if shape is None else math.prod(shape) * item
        if found != size:
            what = f"{size} bytes that {META} names" if shape else f"file of numbers of {item} bytes that was written"
            raise InputError(f"{file}: not the {what}; {_CURE}")
        # Mode "c", since torch warns of read-only memory. A plain array slices faster than np.memmap.
        return np.asarray(np.memmap(file, dtype, "c", shape=shape)) if size else np.empty(shape or 0, dtype)
    except OSError as error:
        raise InputError(f"{file}: cannot be read ({error.strerror}); make it readable") from None


@contextmanager
def new_folder(target: Path) -> Iterator[None]:
    """Create the folder `target`, and delete it if the block fails. An InputError if it exists or cannot be written."""
    try:
        target.mkdir(parents=True)
        try:
            yield
        except BaseException:
            shutil.rmtree(target)
            raise
    except OSError as error:
        raise InputError(f"{target}: cannot be written ({error.strerror}); delete it, or name another folder") from None


def write_samples(target: Path, layout: RecordLayout, blocks: Iterable[Day], timed: bool = False) -> RecordLayout:
    """Write the samples of `blocks`, with times if `timed`, and return the layout with their number."""
    samples, unordered, newest = 0, 0, np.int64(np.iinfo(np.int64).min)
    ids = dict.fromkeys(layout.lists, 0)
    with ExitStack() as stack:
        names = ["records", *(f"{part}_{t}" for t in ids for part in ("ends", "list")), *["times"] * timed]
        files = {name: stack.enter_context((target / name).open("xb")) for name in [*names, _CHECKSUMS]}
        writers = {name: ChecksumWriter(files[name]) for name in names}
        for block in blocks:
            samples += len(block.labels)
            writers["records"].write(layout.pack(block))
            for t in ids:
                values, sizes = block.bags(t, slice(0, len(block.labels)))
                writers[f"ends_{t}"].write((ids[t] + sizes.cumsum()).astype("<i8"))
                writers[f"list_{t}"].write(values.astype(id_format(layout.rows[t])))
                ids[t] += len(values)
            if timed:
                times: Any = block.times
                writers["times"].write(times.astype("<i8"))
                so_far = np.maximum.accumulate(np.append(newest, times))
                unordered, newest = unordered + int((times < so_far[:-1]).sum()), so_far[-1]
        checksums = np.concatenate([writer.finish() for writer in writers.values()])
        files[_CHECKSUMS].write(checksums.data)
        for file in files.values():
            file.flush()
            os.fsync(file.fileno())
    layout = replace(layout, samples=samples, unordered=unordered if timed else None)
    content = asdict(layout)
    write_json(target / META, {**content, "digest": _digest_of(content, checksums)}, "OUT")
    return layout
