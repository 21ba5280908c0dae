"""A folder of prepared days: the files of each, and meta.json, which says how they were made.

Of day i there are

    day_i_records.npy     uint8 [n, bytes of a record], as `records` says, which begin at a page of the file

and, if K tables have bags that differ in size, of which no record has the ids:

    day_i_ends.npy        int64 [n, K], where each sample's bags end in the K files
    day_i_list_k.npy      uint8 [m, bytes of an id]

Samples held out by their time are days of the same numbers in the folder held_out within it.
"""

import json
import operator
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from dlrm_overlap.config import InputError, TablesConfig
from dlrm_overlap.data.days import Day, Days, Ragged
from dlrm_overlap.data.npy_files import map_npy
from dlrm_overlap.data.records import Layout, Packed, bytes_below, field_of_ids
from dlrm_overlap.launching.files import hold_folder, remove_temporaries, replacing

_META = "meta.json"
_PAGE = 4096  # bytes
_FORMAT = 2
_HELD_OUT = "held_out"


def parts_of(layout: Layout) -> dict[str, tuple[str, int]]:
    """Return, for each part of a day, type and columns of its array."""
    parts, lists = {"records": ("|u1", layout.record_bytes)}, layout.lists
    if lists:
        parts |= {f"list_{k}": ("|u1", bytes_below(layout.rows[t])) for k, t in enumerate(lists)}
        parts["ends"] = ("<i8", len(lists))
    return parts


def day_file(folder: Path, day: int, part: str) -> Path:
    """Return the file of a day's `part`, such as records."""
    return folder / f"day_{day}_{part}.npy"


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
    format: int = _FORMAT

    @property
    def holds_out(self) -> bool:
        """Whether days have samples to evaluate on."""
        return bool(self.schema.get("time") or self.source)

    @property
    def unfinished(self) -> list[int]:
        """The numbers of the days that are not written yet."""
        return [i for i, day in enumerate(self.days) if day.samples is None]

    def layout(self) -> Layout:
        """Return what records hold, once the rows are known."""
        assert self.rows is not None, "values are counted before records are written"
        sizes = [column["size"] if column["list"] else 1 for column in self.schema["categorical"].values()]
        dense, labels = max(1, len(self.schema["dense"])), len(self.schema["labels"])
        return Layout(dense, labels, self.rows, sizes, self.dense == "float16")

    def is_of(self, other: "Meta") -> bool:
        """Return whether both are of the same files and making, however much of them is done."""
        metas = [
            replace(each, rows=None, days=[replace(day, samples=None, held_out=0) for day in each.days])
            for each in (self, other)
        ]
        return metas[0] == metas[1]


def read_meta(folder: Path) -> Meta | None:
    """Return the contents of the meta.json in `folder`, or None where there is none.

    Raises:
        InputError: if the file is not one that `prepare` writes, or of another format.
    """
    file = folder / _META
    try:
        found = json.loads(file.read_text())
        if (version := found["format"]) != _FORMAT:
            raise InputError(
                f"{folder}: was prepared in format {version}, and this version reads format {_FORMAT}; make it anew, "
                f"into another folder"
            )
        keys = SourceDay.__dataclass_fields__
        days = [SourceDay(**{key: day[key] for key in keys}) for day in found["days"]]
        return Meta(found["schema"], found["rows"], days, found["dense"], found["source"])
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(
            f"{file}: not what `dlrm-overlap prepare` writes ({error!r}); choose another folder"
        ) from error


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
        if meta.unfinished:
            raise InputError(
                f"{folder}: `dlrm-overlap prepare` did not finish {meta.days[meta.unfinished[0]].name}; run it again "
                f"with the same arguments"
            )
        layout = meta.layout()
        rows = tables.rows or list(layout.rows)
        rows = [rows] * len(layout.rows) if isinstance(rows, int) else rows
        if len(rows) != len(layout.rows) or any(map(operator.lt, rows, layout.rows)):
            raise InputError(
                f"data.tables.rows: {rows}, but {folder} has tables of {list(layout.rows)} rows; leave it out, or fold "
                f"the ids by data.tables.max_rows"
            )
        source = folder / _HELD_OUT if held_out else folder
        numbers = [day.held_out if held_out else day.samples or 0 for day in meta.days]
        days = [_open_day(source, i, samples, layout) for i, samples in enumerate(numbers)]
        super().__init__(days, rows, tables.max_rows)
        self.holds_out = meta.holds_out
        self.label_names = list(meta.schema["labels"])
        self.label_weights = [label["weight"] for label in meta.schema["labels"].values()]
        self.packed = None if layout.lists else (layout, self._moduli)


def _open_day(folder: Path, i: int, samples: int, layout: Layout) -> Day:
    """Map day `i` of `folder`, of so many samples.

    Raises:
        InputError: naming a file that is missing, breaks the format, or is not of these samples.
    """
    arrays = {
        part: map_npy(day_file(folder, i, part), np.dtype(dtype), columns)
        for part, (dtype, columns) in parts_of(layout).items()
    }
    records = arrays["records"]
    lengths: dict[str, int] = {"records": samples, "ends": samples}
    if "ends" in arrays and samples == len(arrays["ends"]):
        ends = arrays["ends"][-1] if samples else [0] * len(layout.lists)
        lengths |= {f"list_{k}": int(end) for k, end in enumerate(ends)}
    for part, array in arrays.items():
        if len(array) != lengths.get(part):
            raise InputError(
                f"{day_file(folder, i, part)}: {len(array)} rows, which are not those of {samples} samples; "
                f"run `dlrm-overlap prepare` anew, into another folder"
            )
    unpacked: list[Any] = [Packed(records, each) for each in layout.fields()]
    dense, labels, *tables = unpacked
    for k, t in enumerate(layout.lists):
        ids: Any = Packed(arrays[f"list_{k}"], field_of_ids(layout.rows[t]))
        tables.insert(t, Ragged(ids, arrays["ends"][:, k]))
    return Day(str(folder / f"day_{i}"), labels, dense, tables, records)


class _NpyFile:
    """An array of rows in an npy file, to which rows are appended. Its header fills a page."""

    def __init__(self, stream: BinaryIO, dtype: str, columns: int) -> None:
        self.rows = 0
        self._stream, self._dtype, self._columns = stream, dtype, columns
        self.write_header()

    def append(self, rows: np.ndarray) -> None:
        self._stream.write(np.ascontiguousarray(rows, self._dtype).data)
        self.rows += len(rows)

    def write_header(self) -> None:
        """Write the header, which has the number of rows so far."""
        header = {"descr": self._dtype, "fortran_order": False, "shape": (self.rows, self._columns)}
        start = np.lib.format.magic(1, 0)
        size = _PAGE - len(start) - 2
        self._stream.seek(0)
        self._stream.write(start + size.to_bytes(2, "little") + f"{header!r}".ljust(size - 1).encode() + b"\n")


@contextmanager
def hold_days(target: Path, wanted: Meta) -> Iterator[Meta]:
    """Make the folder `target` and hold its lock, while the block writes days there, and yield what it has of `wanted`.

    Raises:
        InputError: if it cannot be written to, is being written to by another process, or holds days of another making.
    """
    try:
        target.mkdir(parents=True, exist_ok=True)
        with hold_folder(target, "prepare") as is_alone:
            for folder in (target, target / _HELD_OUT) if is_alone else ():
                remove_temporaries(folder)
            if (meta := read_meta(target)) is None:
                write_meta(target, meta := wanted)
            elif not meta.is_of(wanted):
                raise InputError(
                    f"{target}: was prepared of other files, or in another way; choose another folder or delete it"
                )
            yield meta
    except OSError as error:
        reason = "there is a file of that name" if isinstance(error, FileExistsError) else error.strerror
        raise InputError(f"{target}: cannot be written ({reason}); free it or choose another, and run again") from error


def write_day(target: Path, i: int, meta: Meta, blocks: Iterable[tuple[Day, bool]]) -> None:
    """Write day `i` of `target`, whose files appear whole, and that it is done. Its lock must be held.

    `blocks` are samples, and whether they are held out; errors are those of `Layout.pack`.
    """
    layout = meta.layout()
    with ExitStack() as stack:
        folders = []
        for folder in [target, target / _HELD_OUT] if meta.holds_out else [target]:
            folder.mkdir(exist_ok=True)
            streams = {part: stack.enter_context(replacing(day_file(folder, i, part))) for part in parts_of(layout)}
            folders.append({part: _NpyFile(streams[part], *shape) for part, shape in parts_of(layout).items()})
        for day, is_held_out in blocks:
            files = folders[is_held_out]
            files["records"].append(layout.pack(day))
            ends = []
            for k, t in enumerate(layout.lists):
                bags, ids = day.ids[t], files[f"list_{k}"]
                assert isinstance(bags, Ragged), "bags of a list differ in size"
                ends.append(bags.ends + ids.rows)
                ids.append(layout.pack_ids(t, day))
            if ends:
                files["ends"].append(np.stack(ends, axis=1))
        for files in folders:
            for file in files.values():
                file.write_header()
    samples, *held_out = (files["records"].rows for files in folders)
    meta.days[i] = replace(meta.days[i], samples=samples, held_out=sum(held_out))
    write_meta(target, meta)
