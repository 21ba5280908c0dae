"""A folder of prepared days: the files of each, and meta.json, which says how they were made.

Of day i there are

    day_i_records.npy     uint8 [n, bytes of a record], as `records` says, which begin at a page of the file

and, if K tables have bags that differ in size, of which no record has the ids:

    day_i_ends.npy        int64 [n, K], where each sample's bags end in the K files
    day_i_list_k.npy      uint8 [m, bytes of an id]

Samples held out by their time are days of the same numbers in the folder held_out within it.
"""

import json
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dlrm_overlap.config import InputError, TablesConfig
from dlrm_overlap.data.batch import Records
from dlrm_overlap.data.days import ROWS_CURE, Day, Days, Ragged
from dlrm_overlap.data.npy_files import map_npy
from dlrm_overlap.data.records import Layout, Packed, bytes_below, field_of_ids
from dlrm_overlap.data.schema import schema_of
from dlrm_overlap.launching.files import hold_folder, remove_temporaries, replacing

_META = "meta.json"
_PAGE = 4096  # bytes
FORMAT = 2
HELD_OUT = "held_out"


def parts_of(layout: Layout) -> dict[str, tuple[str, int]]:
    """Return, for each part of a day, type and columns of its array."""
    parts, lists = {"records": ("|u1", layout.record_bytes)}, layout.lists
    if lists:
        parts |= {f"list_{k}": ("|u1", bytes_below(layout.rows[t])) for k, t in enumerate(lists)}
        parts["ends"] = ("<i8", len(lists))
    return parts


@dataclass(frozen=True)
class SourceDay:
    """A file as it was when its day was prepared, and the day made of it."""

    name: str
    size_bytes: int
    mtime_ns: int
    samples: int | None = None
    """None until the day's arrays are whole"""
    held_out: int = 0
    """samples besides, in the day of the folder held_out"""
    skipped: int = 0
    """rows that were no samples, and were left out"""


@dataclass(frozen=True)
class Meta:
    """The content of meta.json."""

    schema: dict[str, Any]
    """of the samples, which says also how ids were made"""
    rows: list[int] | None
    """rows of each table; None until the values are counted"""
    days: list[SourceDay]
    dense: str = "float32"
    """type of dense features in records: float32 or float16"""
    source: dict[str, Any] = field(default_factory=dict)
    """the keys of `data` whose samples were packed, where they were no files of a schema"""
    format: int = FORMAT

    @property
    def holds_out(self) -> bool:
        """Whether days have samples to evaluate on."""
        return bool(self.schema.get("time") or self.source)

    def layout(self) -> Layout:
        """Return what records hold, once the rows are known."""
        assert self.rows is not None, "values are counted before records are written"
        schema = schema_of(self.schema, Path(_META))
        dense = max(1, len(schema.dense))
        return Layout(dense, len(schema.labels), self.rows, schema.sizes, self.dense == "float16")


def day_file(folder: Path, day: int, part: str) -> Path:
    """Return the file of a day's `part`, such as dense."""
    return folder / f"day_{day}_{part}.npy"


def read_meta(folder: Path) -> Meta | None:
    """Return the contents of the meta.json in `folder`, or None where there is none.

    Raises:
        InputError: if the file is not one that `prepare` writes, or of another format.
    """
    file = folder / _META
    try:
        found = json.loads(file.read_text())
        if (version := found["format"]) != FORMAT:
            raise InputError(
                f"{folder}: was prepared in format {version}, and this version reads format {FORMAT}; make it anew, "
                f"into another folder"
            )
        meta = Meta(**found | {"days": [SourceDay(**day) for day in found["days"]]})
        tables = len(schema_of(meta.schema, file).categorical)
        if meta.rows is None and any(day.samples is not None for day in meta.days):
            raise ValueError("days, but no rows")
        rows = [1] * tables if meta.rows is None else meta.rows
        if len(rows) != tables or not all(isinstance(count, int) and count > 0 for count in rows):
            raise ValueError(f"rows are not {tables} positive numbers")
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(
            f"{file}: not what `dlrm-overlap prepare` writes ({error!r}); choose another folder"
        ) from error
    return meta


def write_meta(target: Path, meta: Meta) -> None:
    """Write `meta` to the folder `target`."""
    with replacing(target / _META) as stream:
        stream.write(json.dumps(asdict(meta), indent=1).encode())


class Prepared(Days):
    """The days of a folder that `dlrm-overlap prepare` has written, mapped."""

    def __init__(self, path: str | Path, tables: TablesConfig, held_out: bool = False):
        """Map the days of the folder `path`, in ascending order, or with `held_out` those of the folder within it.

        Rows that `tables` lacks are those of meta.json.

        Raises:
            InputError: if there is no meta.json, or one of another format; if ids may be beyond the rows of `tables`;
                if a file is missing, cut, or differs in length from the others of its day; or if `prepare` was
                interrupted.
        """
        folder = Path(path)
        if (meta := read_meta(folder)) is None:
            raise InputError(
                f"{folder}: has no {_META} of `dlrm-overlap prepare`; set data.path, or data.eval_path, to a folder "
                f"that it has written, or data.kind to what this one holds"
            )
        if unfinished := [day.name for day in meta.days if day.samples is None] or [_META] * (not meta.days):
            raise InputError(
                f"{folder}: `dlrm-overlap prepare` did not finish {unfinished[0]}; run it again with the same arguments"
            )
        layout = meta.layout()
        rows = tables.rows or list(layout.rows)
        rows = [rows] * len(layout.rows) if isinstance(rows, int) else rows
        if len(rows) != len(layout.rows):
            raise InputError(
                f"data.tables.rows: {len(rows)} values, but {folder} has {len(layout.rows)} tables; leave it out"
            )
        for t, (given, made) in enumerate(zip(rows, layout.rows, strict=True)):
            if given < made:
                raise InputError(f"{folder}: ids of table {t} are below {made}, its rows only {given}; {ROWS_CURE}")
        source = folder / HELD_OUT if held_out else folder
        numbers = [day.held_out if held_out else day.samples or 0 for day in meta.days]
        days = [open_day(source, i, samples, layout) for i, samples in enumerate(numbers)]
        super().__init__(days, rows, tables.max_rows)
        self.schema = schema_of(meta.schema, folder / _META)
        self.holds_out = meta.holds_out
        self.label_names, self.label_weights = self.schema.tasks
        self._moduli = [kept if kept < made else 0 for kept, made in zip(self.rows, rows, strict=True)]
        self.packed = None if layout.lists else (layout, self._moduli)

    def records_at(self, positions: np.ndarray) -> Records:
        """Return the samples at `positions` as records: a view of the file where they follow each other in a day."""
        found = []
        for each in self._stretches(positions % self.num_samples):
            assert each.day.records is not None, "days of this class have records"
            found.append(each.day.records[each.samples])
        return Records(torch.from_numpy(found[0] if len(found) == 1 else np.concatenate(found)))


def is_whole(target: Path, i: int, meta: Meta) -> bool:
    """Return whether day `i` of the folder `target` has the samples that meta.json gives.

    Its files were synced before they got their names, and numpy maps no file that is shorter than its header says.
    """
    day = meta.days[i]
    if day.samples is None:
        return False
    try:
        open_day(target, i, day.samples, meta.layout())
        if meta.holds_out:
            open_day(target / HELD_OUT, i, day.held_out, meta.layout())
        return True
    except InputError:
        return False


def open_day(folder: Path, i: int, samples: int, layout: Layout) -> Day:
    """Map day `i` of `folder`, of so many samples.

    Raises:
        InputError: naming a file that is missing, breaks the format, or is not of these samples.
    """
    name, parts, lists = str(folder / f"day_{i}"), parts_of(layout), layout.lists
    arrays = {
        part: map_npy(day_file(folder, i, part), np.dtype(dtype), columns) for part, (dtype, columns) in parts.items()
    }
    lengths = {len(array) for part, array in arrays.items() if not part.startswith("list_")}
    if lengths != {samples}:
        raise InputError(f"{name}: files of {sorted(lengths)} samples, not {samples}; replace them")
    records = arrays["records"]
    unpacked: list[Any] = [Packed(records, each) for each in layout.fields()]
    dense, labels, *tables = unpacked
    single, ids = iter(tables), list[Any]()
    for t, rows in enumerate(layout.rows):
        if t not in lists:
            ids.append(next(single))
            continue
        k = lists.index(t)
        values: Any = Packed(arrays[f"list_{k}"], field_of_ids(rows))
        ids.append(Ragged(values, ends := arrays["ends"][:, k]))
        if len(ends) and ends[-1] != len(values):
            raise InputError(f"{name}: list_{k} has {len(values)} ids, not the {ends[-1]} of ends; replace them")
    return Day(name, labels, dense, ids, records)


class DayWriter(ExitStack):
    """Writes the files of a day, which get their names when the block ends without an error."""

    def __init__(self, folder: Path, day: int, layout: Layout) -> None:
        super().__init__()
        self.samples = 0
        self._layout, self._parts = layout, parts_of(layout)
        self._streams = {part: self.enter_context(replacing(day_file(folder, day, part))) for part in self._parts}
        self._lengths = dict.fromkeys(self._parts, 0)
        for part in self._parts:
            self._write_header(part)

    def add(self, day: Day) -> None:
        """Append the samples of `day`; errors are those of `Layout.pack`."""
        if not len(day.labels):
            return
        arrays = {"records": self._layout.pack(day)}
        if lists := [day.ids[t] for t in self._layout.lists]:
            arrays |= {f"list_{k}": self._layout.pack_ids(t, day) for k, t in enumerate(self._layout.lists)}
            ends = [bags.ends + self._lengths[f"list_{k}"] for k, bags in enumerate(lists) if isinstance(bags, Ragged)]
            arrays["ends"] = np.stack(ends, axis=1)
        for part, array in arrays.items():
            self._streams[part].write(np.ascontiguousarray(array, self._parts[part][0]).data)
            self._lengths[part] += len(array)
        self.samples += len(day.labels)

    def __exit__(self, kind: Any, *error: Any) -> bool | None:
        if kind is None:
            for part in self._parts:
                self._write_header(part)  # anew, with the lengths that the arrays have in the end
        return super().__exit__(kind, *error)

    def _write_header(self, part: str) -> None:
        """Write the npy header at the start of a file, which fills a page."""
        (dtype, columns), stream = self._parts[part], self._streams[part]
        header = {"descr": dtype, "fortran_order": False, "shape": (self._lengths[part], columns)}
        start = np.lib.format.magic(1, 0)
        size = _PAGE - len(start) - 2
        stream.seek(0)
        stream.write(start + size.to_bytes(2, "little") + f"{header!r}".ljust(size - 1).encode() + b"\n")


@contextmanager
def hold_days(target: Path) -> Iterator[None]:
    """Make the folder `target` and hold its lock, while the block writes days and meta.json there.

    Raises:
        InputError: if it cannot be written to, or is being written to by another process.
    """
    try:
        target.mkdir(parents=True, exist_ok=True)
        with hold_folder(target, "prepare") as is_alone:
            for folder in (target, target / HELD_OUT) if is_alone else ():
                remove_temporaries(folder)
            yield
    except OSError as error:
        reason = "there is a file of that name" if isinstance(error, FileExistsError) else error.strerror
        raise InputError(f"{target}: cannot be written ({reason}); free it or choose another, and run again") from error


def write_day(target: Path, i: int, meta: Meta, blocks: Iterable[tuple[Day, bool, int]]) -> SourceDay:
    """Write day `i` of `target`, and return what meta.json is to say of it.

    `blocks` are samples, whether they are held out, and how many rows beside them were no samples.
    """
    folders, all_skipped = [target, target / HELD_OUT] if meta.holds_out else [target], 0
    with ExitStack() as stack:
        for folder in folders:
            folder.mkdir(exist_ok=True)
        writers = [stack.enter_context(DayWriter(folder, i, meta.layout())) for folder in folders]
        for day, is_held_out, skipped in blocks:
            writers[is_held_out].add(day)
            all_skipped += skipped
    samples, *held_out = (writer.samples for writer in writers)
    return replace(meta.days[i], samples=samples, held_out=sum(held_out), skipped=all_skipped)
