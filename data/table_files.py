"""Reads files of samples as a schema describes them: text (CSV, TSV, plain or .gz), Parquet and Arrow's IPC files."""

import re
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
from pyarrow import csv, dataset

from dlrm_overlap.config import InputError
from dlrm_overlap.data.schema import Schema

READ_ERRORS = (ValueError, OSError, pa.ArrowException)  # an InputError is a ValueError
_BLOCK_ROWS = 1 << 16
_FORMATS = {".parquet": "parquet", ".arrow": "ipc", ".feather": "ipc"}  # of all other files: text
_TEXT_TYPES = {"string": pa.binary(), "int": pa.int64(), "hex": pa.string()}


def table_files(path: Path) -> list[Path]:
    """Return `path` if it is a file, or else the files of that folder in natural order: day_2 comes before day_10.

    Names that begin with `.` or `_`, and folders within it, are left out.

    Raises:
        InputError: if there is no such file.
    """
    if path.is_file():
        return [path]
    files = [file for file in path.iterdir() if file.is_file() and file.name[0] not in "._"] if path.is_dir() else []
    if not files:
        raise InputError(f"{path}: no such file, or a folder without files; name a file of samples, or a folder")
    return sorted(files, key=lambda file: re.sub(r"\d+", lambda number: number[0].zfill(20), file.name))


def read_blocks(file: Path, schema: Schema, block_bytes: int) -> Iterator[tuple[int, pa.RecordBatch]]:
    """Yield the columns of `schema` in blocks of rows, each after the number of its first row.

    The line of a header counts as a row.
    """
    row = 1
    if kind := _FORMATS.get(file.suffix):
        blocks = dataset.dataset(file, format=kind).to_batches(columns=schema.names, batch_size=_BLOCK_ROWS)
    else:
        row += schema.columns is None
        types = dict.fromkeys([*schema.labels, *schema.dense], pa.float64())
        types |= {
            name: pa.string() if column.list else _TEXT_TYPES[column.type]
            for name, column in schema.categorical.items()
        }
        blocks = csv.open_csv(
            file,  # unpacked, if its name ends in .gz
            csv.ReadOptions(column_names=schema.columns, block_size=block_bytes, use_threads=False),  # errors name rows
            csv.ParseOptions(delimiter=schema.delimiter, quote_char='"' if schema.delimiter != "\t" else False),
            csv.ConvertOptions(
                column_types=types, include_columns=schema.names, null_values=schema.missing, strings_can_be_null=True
            ),
        )
    for block in blocks:
        yield row, block
        row += block.num_rows
