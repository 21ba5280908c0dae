"""Reads files of samples as a schema describes them: text (CSV, TSV, plain or .gz), Parquet and Arrow's IPC files.

Every format gives the same samples: a schema says what a value is, not how a file stores it. A categorical value is
known by its key, an integer of 64 bits: the value itself, or the BLAKE2b hash of a text's bytes.
"""

import hashlib
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from pyarrow import compute, csv, dataset

from dlrm_overlap.config import InputError, in_one_line
from dlrm_overlap.data.schema import Categorical, Schema, Time

BLOCK_BYTES = 1 << 21  # small enough that a block's arrays stay near the caches
_BLOCK_ROWS = 1 << 16
_FORMATS = {".parquet": "parquet", ".arrow": "ipc", ".feather": "ipc"}  # of all other files: text

pc: Any = compute  # whose functions are made when it is imported


class Values(NamedTuple):
    """The values of a categorical column in some rows."""

    keys: np.ndarray
    """[m] int64; any number for a missing value"""
    missing: np.ndarray
    """[m] bool"""
    lengths: np.ndarray | None
    """[n] int64, values of each row; None where each has one"""


class Block(NamedTuple):
    """Some samples of a file, before what is learnt of all samples is applied."""

    labels: np.ndarray
    """[n, L] float32, each 0 or 1"""
    dense: np.ndarray
    """[F, n] float64, NaN where missing; F may be 0"""
    values: list[Values]
    """of each table"""
    held_out: bool
    """these samples are to evaluate on"""


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
        raise InputError(
            f"{path}: no such file, or a folder without files; give a file of samples, or a folder of them"
        )
    return sorted(files, key=_natural_key)


def _natural_key(file: Path) -> list[str | int]:
    return [int(part) if i % 2 else part for i, part in enumerate(re.split(r"(\d+)", file.name))]


def read_blocks(file: Path, schema: Schema, block_bytes: int = BLOCK_BYTES) -> Iterator[Block]:
    """Yield the samples of a file, those to train on and those to evaluate on in blocks of their own.

    Raises:
        InputError: if the file cannot be read, lacks a column, holds no sample or a bad row; naming file, row and
            column where they are known. The line of a header counts as a row.
    """
    first = start = 1 if file.suffix in _FORMATS or schema.columns else 2
    try:
        for batch in _batches(file, schema, block_bytes):
            rows = np.arange(first, first + batch.num_rows)
            first += batch.num_rows
            if schema.time is None:
                yield _block(batch, schema, rows, False)
                continue
            held_out = _held_out(batch, schema.time, rows)
            for wanted, is_held_out in ((~held_out, False), (held_out, True)):
                yield _block(batch.filter(pa.array(wanted)), schema, rows[wanted], is_held_out)
        if first == start:
            raise InputError("no samples")
    except (InputError, OSError, pa.ArrowException) as error:
        raise InputError(f"{file}: {in_one_line(error)}; correct or replace the file, or correct the schema") from None


def _batches(file: Path, schema: Schema, block_bytes: int) -> Iterable[pa.RecordBatch]:
    """Return an iterator over the columns that `schema` names."""
    if kind := _FORMATS.get(file.suffix):
        return dataset.dataset(file, format=kind).to_batches(columns=schema.names, batch_size=_BLOCK_ROWS)
    kinds = {name: pa.float64() for name in (*schema.labels, *schema.dense)}
    by_type = {"string": pa.binary(), "int": pa.int64(), "hex": pa.string()}
    for name, column in schema.categorical.items():
        kinds[name] = pa.string() if column.list else by_type[column.type]
    if schema.time:
        kinds[schema.time.column] = pa.scalar(schema.time.held_out_from).type
    return csv.open_csv(
        file,  # unpacked, if its name ends in .gz
        csv.ReadOptions(column_names=schema.columns, block_size=block_bytes, use_threads=False),  # so errors name rows
        csv.ParseOptions(delimiter=schema.delimiter, quote_char='"' if schema.delimiter != "\t" else False),
        csv.ConvertOptions(
            column_types=kinds, include_columns=schema.names, null_values=schema.missing, strings_can_be_null=True
        ),
    )


def _held_out(batch: pa.RecordBatch, time: Time, rows: np.ndarray) -> np.ndarray:
    times = batch.column(time.column)
    _require(times.is_valid().to_numpy(False), times, rows, time.column, "a time")
    return pc.greater_equal(times, pa.scalar(time.held_out_from).cast(times.type)).to_numpy(False)


def _block(batch: pa.RecordBatch, schema: Schema, rows: np.ndarray, held_out: bool) -> Block:
    """Return the samples of `batch`, whose rows have the numbers `rows` [n] in their file."""
    labels = np.empty((len(rows), len(schema.labels)), np.float32)
    dense = np.empty((len(schema.dense), len(rows)))
    values = []
    name = ""
    try:
        for i, (name, label) in enumerate(schema.labels.items()):
            column = batch.column(name)
            numbers = _numbers(column)
            if label.above is None:
                _require((numbers == 0) | (numbers == 1), column, rows, name, "a label, 0 or 1")
                labels[:, i] = numbers
            else:
                _require(np.isfinite(numbers), column, rows, name, "a number, from which a label is made")
                labels[:, i] = numbers > label.above
        for i, name in enumerate(schema.dense):
            column = batch.column(name)
            dense[i] = _numbers(column)
            known = np.isfinite(dense[i]) | column.is_null().to_numpy(False)
            _require(known, column, rows, name, "a finite number, or missing")
        for name, spec in schema.categorical.items():
            found = _values(batch.column(name), spec)
            if spec.size is not None and found.lengths is not None:
                column = batch.column(name)
                _require(found.lengths == spec.size, column, rows, name, f"a list of {spec.size} values")
            values.append(found)
    except pa.ArrowException as error:
        raise InputError(f"column {name}: {error}") from None
    return Block(labels, dense, values, held_out)


def _require(good: np.ndarray, column: pa.Array, rows: np.ndarray, name: str, rule: str) -> None:
    if not good.all():
        bad = int(good.argmin())
        raise InputError(f"row {rows[bad]}, column {name}: {column[bad].as_py()!r:.60} is not {rule}")


def _numbers(column: pa.Array) -> np.ndarray:
    """Return a column as float64 [n], NaN where it is missing."""
    return column.cast(pa.float64(), safe=False).to_numpy(False)


def _values(array: pa.Array, column: Categorical) -> Values:
    lengths = None
    if isinstance(column.list, str) and not pa.types.is_nested(array.type):
        array = pc.split_pattern(array, column.list)
    if pa.types.is_nested(array.type) != bool(column.list):
        raise pa.ArrowTypeError(f"{array.type}, but the schema's key list is {column.list}")
    if column.list:
        if column.longest is not None:
            array = pc.list_slice(array, 0, column.longest)
        lengths = pc.list_value_length(array).fill_null(0).to_numpy(False).astype(np.int64)
        array = array.flatten()
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    missing = array.is_null().to_numpy(False)
    if column.type == "string":
        coded = array.dictionary_encode()
        texts = coded.dictionary  # of a file of integers, those of a CSV file
        texts = texts if pa.types.is_binary(texts.type) else texts.cast(pa.string()).cast(pa.binary())
        hashes = b"".join(hashlib.blake2b(text, digest_size=8).digest() for text in [*texts.to_pylist(), b""])
        return Values(np.frombuffer(hashes, "<i8")[coded.indices.fill_null(len(texts)).to_numpy()], missing, lengths)
    if column.type == "hex":
        array = pc.binary_join_element_wise("0x", array.cast(pa.string()), "")
    return Values(array.cast(pa.int64()).fill_null(0).to_numpy(), missing, lengths)
