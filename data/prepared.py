"""A folder of prepared days: the files of each, and meta.json, which says how they were made.

Of day i there are, for F dense features, L labels and S tables of one id a bag:

    day_i_dense.npy       float32 [n, F]
    day_i_labels.npy      int32 [n, L], 0 or 1
    day_i_sparse.npy      int32 [n, S], rows of the tables, in their order
    day_i_ends.npy        int64 [n, K], where each sample's bags end in the K files of tables of lists:
    day_i_list_k.npy      int32 [m, 1]

Samples held out by their time are days of the same numbers in the folder held_out within it.
"""

import json
import re
from contextlib import ExitStack
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from dlrm_overlap.config import CRITEO_TABLES, InputError, TablesConfig
from dlrm_overlap.data.days import Day, Days, Ragged
from dlrm_overlap.data.npy_files import map_npy
from dlrm_overlap.data.schema import Schema, criteo_schema, schema_of
from dlrm_overlap.launching.files import replacing

_Made = TypeVar("_Made")
_META = "meta.json"
HELD_OUT = "held_out"


def parts_of(schema: Schema) -> dict[str, tuple[str, int]]:
    """Return, for each part of a day, type and columns of its array."""
    lists = schema.lists
    parts = {"dense": ("<f4", max(1, len(schema.dense))), "labels": ("<i4", len(schema.labels))}
    if single := len(schema.categorical) - len(lists):
        parts["sparse"] = ("<i4", single)
    if lists:
        parts |= {"ends": ("<i8", len(lists)), **{f"list_{k}": ("<i4", 1) for k in range(len(lists))}}
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


def day_file(folder: Path, day: int, part: str) -> Path:
    """Return the file of a day's `part`, such as dense."""
    return folder / f"day_{day}_{part}.npy"


def read_meta(folder: Path) -> Meta | None:
    """Return the contents of the meta.json in `folder`, or None where there is none.

    Raises:
        InputError: if the file is not one that `prepare` writes.
    """
    file = folder / _META
    try:
        found = json.loads(file.read_text())
        meta = _made_of(Meta, found | {"days": [_made_of(SourceDay, day) for day in found["days"]]})
        if meta.rows is not None:
            _check_rows(meta.rows, len(schema_of(meta.schema, file).categorical))
        return meta
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise InputError(
            f"{file}: not what `dlrm-overlap prepare` writes ({error!r}); choose another folder"
        ) from error


def _check_rows(rows: Any, tables: int) -> None:
    if len(rows) != tables or not all(isinstance(count, int) and count > 0 for count in rows):
        raise ValueError(f"rows are not {tables} positive numbers")


def _made_of(kind: type[_Made], found: dict[str, Any]) -> _Made:
    """Return the dataclass `kind` with the fields that it has among those of a folder of another version."""
    return kind(**{each.name: found[each.name] for each in fields(kind) if each.name in found})  # type: ignore[arg-type]


def write_meta(target: Path, meta: Meta) -> None:
    """Write `meta` to the folder `target`."""
    with replacing(target / _META) as stream:
        stream.write(json.dumps(asdict(meta), indent=1).encode())


class Prepared(Days):
    """The days of a folder that `dlrm-overlap prepare` has written, or TorchRec's arrays of Criteo's samples, mapped.

    TorchRec's are day_i_{dense,sparse,labels}.npy for some days i: float32 [n, 13], int32 [n, 26] and int32 [n] or
    [n, 1]; no meta.json is beside them.
    """

    def __init__(self, path: str | Path, tables: TablesConfig, bad_rows: str = "error", held_out: bool = False):
        """Map the days of the folder `path`, in ascending order, or with `held_out` those of the folder within it.

        Rows that `tables` lacks are those of meta.json.

        Raises:
            InputError: if the rows are unknown, if a file is missing, breaks the format, or differs in length from the
                others of its day, or if `prepare` was interrupted.
        """
        folder = Path(path)
        meta = read_meta(folder)
        unfinished = [day.name for day in meta.days if day.samples is None] if meta else []
        if unfinished:
            raise InputError(
                f"{folder}: `dlrm-overlap prepare` did not finish {unfinished[0]}; run it again with the same arguments"
            )
        if (rows := tables.rows or (meta and meta.rows)) is None:
            raise InputError(
                f"data.tables.rows: null, and {folder} has no meta.json of `dlrm-overlap prepare`; set data.tables.rows"
            )
        schema = schema_of(meta.schema, folder / _META) if meta else criteo_schema([1] * CRITEO_TABLES)
        rows = [rows] * len(schema.categorical) if isinstance(rows, int) else rows
        if len(rows) != len(schema.categorical):
            raise InputError(
                f"data.tables.rows: {len(rows)} values, but {folder} has {len(schema.categorical)} tables; leave it out"
            )
        source = folder / HELD_OUT if held_out else folder
        days = [open_day(source, day, schema) for day in days_in(source, "dense", "labels", "sparse")]
        super().__init__(days, rows, tables.max_rows, bad_rows)
        self.schema = schema
        self.label_names, self.label_weights = schema.tasks


def days_in(folder: Path, *parts: str, suffix: str = "npy") -> list[int]:
    """Return, in ascending order, the days of which `folder` holds one of `parts`.

    Raises:
        InputError: if there is none.
    """
    expected = f"day_0_{parts[-1]}.{suffix}"
    if not folder.is_dir():
        raise InputError(
            f"{folder}: not a folder; set data.path, or data.eval_path, to the one that holds {expected} and its like"
        )
    name = re.compile(rf"day_(\d+)_(({'|'.join(parts[:-1])})\.npy|{parts[-1]}\.{suffix})")
    days = {int(match[1]) for file in folder.iterdir() if (match := name.fullmatch(file.name))}
    if not days:
        raise InputError(f"{folder}: holds no {expected} nor its like; give another folder or data.kind")
    return sorted(days)


def is_whole(target: Path, i: int, day: SourceDay, schema: Schema) -> bool:
    """Return whether day `i` of the folder `target` has the samples that meta.json gives.

    Its files were synced before they got their names, and numpy maps no file that is shorter than its header says.
    """
    try:
        folders = {target: day.samples, **({target / HELD_OUT: day.held_out} if schema.time else {})}
        return all(len(open_day(folder, i, schema).labels) == samples for folder, samples in folders.items())
    except InputError:
        return False


def open_day(folder: Path, i: int, schema: Schema) -> Day:
    """Map day `i` of `folder`, whose samples are those of `schema`.

    Raises:
        InputError: naming a file that is missing, breaks the format or differs in length from the others of its day.
    """
    name, parts = str(folder / f"day_{i}"), parts_of(schema)
    arrays = {
        part: map_npy(day_file(folder, i, part), np.dtype(dtype), columns) for part, (dtype, columns) in parts.items()
    }
    if len(lengths := {len(array) for part, array in arrays.items() if not part.startswith("list_")}) > 1:
        raise InputError(
            f"{name}: files of {sorted(lengths)} samples, but dense, labels and sparse must agree; replace them"
        )
    single, lists = iter(arrays["sparse"].T[:, :, None] if "sparse" in arrays else ()), schema.lists
    ids: list[np.ndarray | Ragged] = []
    for t in range(len(schema.categorical)):
        if t not in lists:
            ids.append(next(single))
            continue
        k = lists.index(t)
        bags = Ragged(arrays[f"list_{k}"][:, 0], arrays["ends"][:, k])
        if len(bags) and bags.ends[-1] != len(bags.values):
            raise InputError(
                f"{name}: list_{k} has {len(bags.values)} ids, not the {bags.ends[-1]} of ends; replace them"
            )
        ids.append(bags)
    return Day(name, arrays["labels"], arrays["dense"], ids)


class DayWriter(ExitStack):
    """Writes the files of a day, which get their names when the block ends without an error."""

    def __init__(self, folder: Path, day: int, schema: Schema) -> None:
        super().__init__()
        self.samples = 0
        self._parts, self._lists = parts_of(schema), schema.lists
        self._streams = {part: self.enter_context(replacing(day_file(folder, day, part))) for part in self._parts}
        self._lengths = dict.fromkeys(self._parts, 0)
        for part in self._parts:
            self._write_header(part)

    def add(self, day: Day) -> None:
        """Append the samples of `day`."""
        single = [ids[:, 0] for ids in day.ids if not isinstance(ids, Ragged)]
        lists = [ids for ids in day.ids if isinstance(ids, Ragged)]
        arrays = {"dense": day.dense, "labels": day.labels}
        if single:
            arrays["sparse"] = np.stack(single, axis=1)
        if lists:
            arrays["ends"] = np.stack([bags.ends + self._lengths[f"list_{k}"] for k, bags in enumerate(lists)], axis=1)
            arrays |= {f"list_{k}": bags.values for k, bags in enumerate(lists)}
        for part, array in arrays.items():
            self._streams[part].write(np.ascontiguousarray(array, self._parts[part][0]).data)
            self._lengths[part] += len(array)
        self.samples += len(day.labels)

    def finish(self) -> None:
        """Write the headers anew, with the lengths that the arrays have in the end."""
        for part in self._parts:
            self._write_header(part)

    def _write_header(self, part: str) -> None:
        """Write the npy header at the start of a file. numpy pads it to one length for any number of samples."""
        (dtype, columns), stream = self._parts[part], self._streams[part]
        stream.seek(0)
        shape = (self._lengths[part], columns)
        np.lib.format.write_array_header_1_0(stream, {"descr": dtype, "fortran_order": False, "shape": shape})
