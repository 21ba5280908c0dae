"""Reads files of samples as a schema describes them: text (CSV, TSV, plain or .gz), Parquet and Arrow's IPC files.

Every format gives the same samples: a schema says what a value is, not how a file stores it. Text is split into blocks
of whole lines, so a field has no line break. Bad rows are named by file and line or row.
"""

import csv
import gzip
import re
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
from pyarrow import csv as pa_csv
from pyarrow import parquet

from dlrm_overlap.config import InputError, in_one_line
from dlrm_overlap.data.columns import Raw, raw_of
from dlrm_overlap.data.schema import Schema

BLOCK_BYTES = 1 << 21  # small enough that a block's arrays stay near the caches
_BATCH_ROWS = 1 << 16
_MAX_LINE_BYTES = 1 << 16
_CURE = "correct or remove it, or give --bad_rows skip, which leaves such rows out"
_SUFFIXES = {"csv": ("csv", "tsv", "txt"), "parquet": ("parquet",), "arrow": ("arrow", "feather")}
_MOST_BAD = 0.5  # of a file's rows: more of them, and it is the schema that does not fit


class _Table(NamedTuple):
    """Some rows of a file."""

    columns: pa.Table
    unit: str
    """line or row"""
    first: int
    """the number of the first one in its file, from 1"""


def table_files(path: Path, schema: Schema) -> list[Path]:
    """Return `path` if it is a file, or else the files of that folder that `schema` takes, in natural order.

    day_2 comes before day_10. What is in folders within it is not read.

    Raises:
        InputError: if there is no such file, or a folder holds a file both plain and compressed.
    """
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise InputError(f"{path}: no such file or folder; give a file of samples, or a folder of them")
    suffixes = _SUFFIXES[schema.format] if schema.format else sum(_SUFFIXES.values(), ())
    name = re.compile(f"({schema.files or '.+[.](' + '|'.join(suffixes) + ')'})([.]gz)?")
    files = [file for file in path.iterdir() if file.is_file() and name.fullmatch(file.name)]
    if not files:
        raise InputError(f"{path}: holds no file of a name like {name.pattern}; give another folder")
    plain = {file.name for file in files}
    if twice := sorted(name for name in plain if f"{name}.gz" in plain):
        raise InputError(f"{path}: holds {twice[0]} and {twice[0]}.gz, the same samples twice; remove one")
    return sorted(files, key=_natural_key)


def _natural_key(file: Path) -> list[str | int]:
    return [int(part) if i % 2 else part for i, part in enumerate(re.split(r"(\d+)", file.name))]


def format_of(file: Path, schema: Schema) -> str:
    """Return csv, parquet or arrow.

    Raises:
        InputError: if neither `schema` nor the file's name says.
    """
    suffix = Path(file.name.removesuffix(".gz")).suffix[1:]
    found = schema.format or next((name for name, known in _SUFFIXES.items() if suffix in known), None)
    if found is None:
        raise InputError(f"{file}: its name ends in none of .csv, .parquet, .arrow and their like; set format")
    return found


def read_rows(file: Path, schema: Schema, skip: bool = False, block_bytes: int = BLOCK_BYTES) -> Iterator[Raw]:
    """Yield the samples of a file in blocks. With `skip`, bad rows are left out and counted in `Raw.skipped`.

    Raises:
        InputError: if the file cannot be read, lacks a column or holds no sample; if a row is bad: naming file, line or
            row, and column; or, with `skip`, if more than half of the rows are.
    """
    samples, skipped = 0, 0
    for raw in _raw_blocks(file, schema, skip, block_bytes):
        samples += len(raw.labels)
        skipped += raw.skipped
        yield raw
    if samples + skipped == 0:
        raise InputError(f"{file}: empty, but a data set needs samples; replace or remove the file")
    if skipped > _MOST_BAD * (samples + skipped):
        raise InputError(
            f"{file}: {skipped} of {samples + skipped} rows are no samples; correct the schema, or replace the file"
        )


def _raw_blocks(file: Path, schema: Schema, skip: bool, block_bytes: int) -> Iterator[Raw]:
    kind = format_of(file, schema)
    try:
        with file.open("rb") as stream:
            if kind == "csv":
                tables: Iterable[_Table | InputError] = _Text(file, stream, schema, block_bytes)
            else:
                tables = _parquet_rows(file, schema) if kind == "parquet" else _arrow_rows(file, schema)
            for table in tables:
                if isinstance(table, InputError):
                    if not skip:
                        raise table
                    yield Raw.none(schema, skipped=1)
                else:
                    try:
                        raw, fault = raw_of(table.columns.combine_chunks(), schema)
                    except InputError as error:
                        raise InputError(f"{file}: {error}") from None
                    if fault is not None and not skip:
                        where = f"{file}, {table.unit} {table.first + fault.row}, column {fault.column}"
                        raise InputError(f"{where}: {fault.value!r:.60} is not {fault.rule}; {_CURE}")
                    yield raw
    except (OSError, EOFError, zlib.error, pa.ArrowException) as error:
        raise InputError(f"{file}: cannot be read ({in_one_line(error)}); replace the file") from error


class _Text:
    """An iterator over a text file's blocks of lines, and the errors of its lines that cannot be parsed."""

    def __init__(self, file: Path, raw: Any, schema: Schema, block_bytes: int) -> None:
        self._file, self._schema, self._block_bytes = file, schema, block_bytes
        self._stream = gzip.GzipFile(fileobj=raw) if file.suffix == ".gz" else raw
        kinds = {name: pa.float64() for name in (*schema.labels, *schema.dense)}
        by_type = {"string": pa.dictionary(pa.int32(), pa.binary()), "int": pa.int64(), "hex": pa.binary()}
        kinds |= {
            name: pa.string() if column.list else by_type[column.type] for name, column in schema.categorical.items()
        }
        if schema.time:
            kinds[schema.time.column] = pa.scalar(schema.time.held_out_from).type
        self._converted = pa_csv.ConvertOptions(
            column_types=kinds,
            include_columns=schema.names,
            null_values=schema.missing,
            strings_can_be_null=True,
        )
        quotes = '"' if schema.delimiter != "\t" else False
        self._parsed = pa_csv.ParseOptions(delimiter=schema.delimiter, quote_char=quotes, ignore_empty_lines=False)
        self._columns: list[str] = schema.columns or []

    def __iter__(self) -> Iterator[_Table | InputError]:
        line, rest = 1, b""
        while data := self._stream.read(self._block_bytes):
            end = data.rfind(b"\n") + 1
            block, rest = (rest + data[:end], data[end:]) if end else (b"", rest + data)
            if block and not self._columns:
                header, _, block = block.partition(b"\n")
                line += 1
                self._take_header(header)
            if block:
                yield from self._parse(block, line)
                line += block.count(b"\n")
            if len(rest) > _MAX_LINE_BYTES:
                raise InputError(
                    f"{self._file}, line {line}: no end within {_MAX_LINE_BYTES} bytes; give text, or .gz of it"
                )
        if rest and self._columns:
            yield from self._parse(rest, line)

    def _take_header(self, header: bytes) -> None:
        text = header.decode(errors="replace").removeprefix("\ufeff").rstrip("\r")
        self._columns = next(csv.reader([text], delimiter=self._schema.delimiter), [])
        _check_columns(self._file, self._schema, self._columns)

    def _parse(self, block: bytes, first: int) -> Iterator[_Table | InputError]:
        """Yield the rows of the lines of `block`, of which the first one has the number `first`.

        Where it cannot be parsed, each half of its lines is, until the lines are found that are at fault.
        """
        read = pa_csv.ReadOptions(column_names=self._columns, block_size=len(block) + 1, use_threads=False)
        lines = block.count(b"\n") + (not block.endswith(b"\n"))
        try:
            table = pa_csv.read_csv(pa.BufferReader(block), read, self._parsed, self._converted)
            if table.num_rows != lines:
                raise pa.ArrowInvalid("a line break within it")
            yield _Table(table, "line", first)
        except pa.ArrowInvalid as error:
            if lines == 1:
                what = re.sub(r"Row #1: ", "", in_one_line(error))[:100]
                what = re.sub(r"In CSV column #(\d+)", lambda found: f"column {self._columns[int(found[1])]}", what)
                yield InputError(f"{self._file}, line {first}: {what}; {_CURE}")
                return
            middle = block.find(b"\n", len(block) // 2, len(block) - 1) + 1
            middle = middle or block.rfind(b"\n", 0, len(block) - 1) + 1
            yield from self._parse(block[:middle], first)
            yield from self._parse(block[middle:], first + block.count(b"\n", 0, middle))


def _check_columns(file: Path, schema: Schema, columns: list[str]) -> None:
    if lacks := [name for name in schema.names if name not in columns]:
        raise InputError(f"{file}: has no column {lacks[0]}, but {', '.join(columns)}; correct the schema or the file")


def _parquet_rows(file: Path, schema: Schema) -> Iterator[_Table]:
    with parquet.ParquetFile(file) as source:
        _check_columns(file, schema, source.schema_arrow.names)
        first = 1
        for batch in source.iter_batches(_BATCH_ROWS, columns=schema.names):
            yield _Table(pa.Table.from_batches([batch]), "row", first)
            first += batch.num_rows


def _arrow_rows(file: Path, schema: Schema) -> Iterator[_Table]:
    with pa.memory_map(str(file)) as source:
        try:
            reader = pa.ipc.open_file(source)
            batches = (reader.get_batch(i) for i in range(reader.num_record_batches))
        except pa.ArrowInvalid:  # the streaming form
            source.seek(0)
            batches = reader = pa.ipc.open_stream(source)
        _check_columns(file, schema, reader.schema.names)
        first = 1
        for batch in batches:
            for start in range(0, batch.num_rows, _BATCH_ROWS):
                yield _Table(pa.Table.from_batches([batch.slice(start, _BATCH_ROWS)]), "row", first + start)
            first += batch.num_rows
