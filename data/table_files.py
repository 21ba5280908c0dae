"""Reads files of samples by a schema: text (CSV, TSV; plain or compressed), Parquet and Arrow IPC."""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyarrow import csv, dataset, fs

from dlrm_overlap.config import InputError
from dlrm_overlap.data.day import require_successive
from dlrm_overlap.data.schema import Schema

READ_ERRORS = (ValueError, OSError, pa.ArrowException)  # an InputError is a ValueError
_BLOCK_ROWS = 1 << 16
_FORMATS = {  # by suffix, case-insensitive; all other files are text
    ".parquet": dataset.ParquetFileFormat,
    ".arrow": dataset.IpcFileFormat,
    ".feather": dataset.IpcFileFormat,
}
_PACKED = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd", ".lz4": "lz4"}
_DAY = re.compile(r"day_(\d{1,3})(?!\d)")  # longer numbers are dates


def table_files(path: Path) -> list[Path]:
    """Return the file `path`, or the files of the folder `path` in natural order: day_2 before day_10.

    Names that begin with `.` or `_` are left out. Raises an InputError if there is no file, if a file is there both
    plain and compressed, or if the numbers of day_0, day_1, .. have a gap.
    """
    if path.is_file():
        return [path]
    files = [file for file in path.iterdir() if file.is_file() and file.name[0] not in "._"] if path.is_dir() else []
    if not files:
        raise InputError(f"{path}: no such file, or a folder without files; name a file of samples, or a folder")
    names = {file.name for file in files}
    if twice := sorted(file.name for file in files if file.suffix.lower() in _PACKED and file.stem in names):
        raise InputError(f"{path}: holds {Path(twice[0]).stem} and {twice[0]}, the same samples twice; remove one")
    require_successive(path, [int(day[1]) for name in names if (day := _DAY.match(name))])
    return sorted(files, key=lambda file: re.sub(r"\d+", lambda number: number[0].zfill(20), file.name))


def read_blocks(
    file: Path, schema: Schema, block_bytes: int, names: Sequence[str] | None = None
) -> Iterator[tuple[int, pa.RecordBatch]]:
    """Yield the number of each block's first row in the file, and the block, with the columns `names` or the schema's.

    A header counts as a row, blank lines do not.
    """
    row, names = 1, schema.read if names is None else names
    if not file.stat().st_size:
        return
    if kind := _FORMATS.get(file.suffix.lower()):
        fragment = kind().make_fragment(str(file), fs.LocalFileSystem())
        _require_columns(names, fragment.physical_schema.names)
        blocks = fragment.to_batches(columns=names, batch_size=_BLOCK_ROWS)
    elif not _text(file).read(1):  # compressed, and empty
        return
    else:
        if schema.columns is None:
            _require_columns(names, _open_csv(file, schema, block_bytes).schema.names)
            row += 1
        blocks = _open_csv(file, schema, block_bytes, names)
    for block in blocks:
        yield row, block
        row += block.num_rows


def _text(file: Path) -> pa.NativeFile:
    return pa.input_stream(str(file), compression=_PACKED.get(file.suffix.lower()))


def _open_csv(file: Path, schema: Schema, block_bytes: int, columns: Sequence[str] = ()) -> Any:
    return csv.open_csv(
        _text(file),
        csv.ReadOptions(column_names=schema.columns, block_size=block_bytes, use_threads=False),  # errors name rows
        csv.ParseOptions(delimiter=schema.delimiter, quote_char='"' if schema.delimiter != "\t" else False),
        csv.ConvertOptions(column_types=dict.fromkeys(columns, pa.binary()), include_columns=columns),
    )


def _require_columns(needed: Sequence[str], found: Sequence[str]) -> None:
    for name in needed:
        if (number := found.count(name)) != 1:
            what = "twice" if number else f"missing; the file has {', '.join(found):.200}"
            raise InputError(f"column {name}: {what}")
