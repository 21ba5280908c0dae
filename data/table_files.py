"""Reads files of samples by a schema: text (CSV, TSV; plain or compressed), Parquet and Arrow IPC."""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa
from pyarrow import csv, dataset, fs

from dlrm_overlap.config import InputError, in_one_line
from dlrm_overlap.data.day import require_successive
from dlrm_overlap.data.encoding import is_prepared
from dlrm_overlap.data.schema import Schema
from dlrm_overlap.launching.parsing import nearest
from dlrm_overlap.launching.progress_bar import ProgressBar
from dlrm_overlap.launching.text_table import count_of

_T = TypeVar("_T")
_READ_ERRORS = (ValueError, OSError, pa.ArrowException)  # an InputError is a ValueError
_BLOCK_ROWS = 1 << 16
_SHOWN_COLUMNS = 12  # in an error
_FORMATS = {  # by suffix, case-insensitive; all other files are text
    ".parquet": dataset.ParquetFileFormat,
    ".arrow": dataset.IpcFileFormat,
    ".feather": dataset.IpcFileFormat,
}
_PACKED = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd", ".lz4": "lz4"}
_NOT_TEXT = {  # by first bytes
    b"PK\x03\x04": "a zip file, such as a spreadsheet, which is neither text nor Parquet",
    b"PAR1\x15": "a Parquet file, whose name does not end in .parquet",
    b"\xfd7zXZ": "packed by xz, and only files packed by gzip, bz2, zstd or lz4 are read",
    b"\x1f\x8b": "packed by gzip, though its name does not end in .gz",
    b"\xff\xfe": "text in UTF-16, not in UTF-8",
    b"\xfe\xff": "text in UTF-16, not in UTF-8",
}
_OPEN = 'a quote (") at the start of a field has no end, so that all lines after it are in this field'
_DAY = re.compile(r"day_(\d{1,3})(?!\d)")  # longer numbers are dates


def table_files(path: Path) -> list[Path]:
    """Return the file `path`, or the files of the folder `path` in natural order: day_2 before day_10.

    Names that begin with `.` or `_` are left out. Raises an InputError if there is no file, if a link leads nowhere, if
    a file is there both plain and compressed, if the numbers of day_0, day_1, .. have a gap, or if `prepare` wrote the
    folder.
    """
    if path.is_file():
        return [path]
    if is_prepared(path) and (path / "records").exists():
        raise InputError(f"{path}: a folder that `prepare` wrote, not a table; name the table that it was made of")
    found = [file for file in path.iterdir() if file.name[0] not in "._"] if path.is_dir() else []
    if lost := sorted(file for file in found if not file.exists()):
        raise InputError(f"{lost[0]}: a link to a file that is not there; bring the file back, or remove the link")
    files = [file for file in found if file.is_file()]
    if not files:
        raise InputError(
            f"{path}: no such file, or a folder with no file of its own; name a file of samples, or a folder of them"
        )
    names = {file.name for file in files}
    if twice := sorted(file.name for file in files if file.suffix.lower() in _PACKED and file.stem in names):
        raise InputError(f"{path}: holds {Path(twice[0]).stem} and {twice[0]}, the same samples twice; remove one")
    require_successive(path, [int(day[1]) for name in names if (day := _DAY.match(name))])
    return sorted(files, key=lambda file: re.sub(r"\d+", lambda number: number[0].zfill(20), file.name))


def count_rows(files: Sequence[Path]) -> int | None:
    """Return the number of rows of Parquet and Arrow files, by their metadata; None if that does not tell."""
    try:
        fragments = [_fragment(file) for file in files if file.stat().st_size]
        return None if None in fragments else sum(fragment.count_rows() for fragment in fragments)
    except _READ_ERRORS:  # a damaged file, which is reported when it is read, or two columns of a name
        return None


def read_files(
    files: Sequence[Path],
    schema: Schema,
    block_bytes: int,
    bar: ProgressBar,
    use: Callable[[Path, int, pa.RecordBatch], _T],
    cure: str,
    names: Sequence[str] | None = None,
) -> Iterator[_T]:
    """Yield `use` of each file, the number of a block's first row in it, and the block.

    A header counts as a row, blank lines do not. If `names` has no label, text without a header may lack all labels.

    Args:
        block_bytes: size of a block of text.
        bar: is told an estimate of the number of rows of all files.
        cure: end of the message of an InputError.
        names: columns to read, by default the schema's.

    Raises:
        InputError: if a file cannot be read, or lacks a column; also if `use` raises a ValueError.
    """
    sizes, rows = [_size(file, cure) for file in files], 0
    for i, file in enumerate(files):
        try:
            for row, block, read in _read_blocks(file, schema, block_bytes, schema.read if names is None else names):
                rows += block.num_rows
                bar.estimate(rows * sum(sizes) / max(1, sum(sizes[:i]) + read))
                yield use(file, row, block)
        except _READ_ERRORS as error:
            reason = in_one_line(error)
            if "straddling" in reason:  # two blocks
                reason = f"a row is longer than {block_bytes} bytes, or {_OPEN}"
            raise InputError(f"{file}: {reason}; {cure}") from None


def _size(file: Path, cure: str) -> int:
    try:
        return file.stat().st_size
    except OSError as error:  # such as of a file that was removed since `table_files` found it
        raise InputError(f"{file}: cannot be read ({error.strerror}); {cure}") from None


def _read_blocks(
    file: Path, schema: Schema, block_bytes: int, names: Sequence[str]
) -> Iterator[tuple[int, pa.RecordBatch, int]]:
    """Yield the number of each block's first row, the block, and how many bytes were read so far, of text."""
    row, size, last = 1, file.stat().st_size, None
    if not size:
        return
    if (fragment := _fragment(file)) is not None:
        _require_columns(names, fragment.physical_schema.names, schema)
        blocks, read = fragment.to_batches(columns=names, batch_size=_BLOCK_ROWS), lambda: size
    elif (text := _text(file, block_bytes)[0]) is None:
        return
    else:
        columns = _columns_without_header(file, schema, block_bytes, names)
        row += columns is None
        found = _open_csv(text, schema, block_bytes).schema.names if columns is None else columns
        _require_columns(names, found, schema)
        text, read = _text(file, block_bytes)
        last = found[-1]
        blocks = _open_csv(text, schema, block_bytes, list(dict.fromkeys([*names, last])), column_names=columns)
    cell = b""
    for block in blocks:
        yield row, block.select(names), read()
        row += block.num_rows
        cell = block.column(last)[-1].as_py() if last is not None and block.num_rows else cell
    # Arrow reads all that follows a quote without an end as one field, in the last column if the row has all fields.
    if b"\n" in cell and not _ends_with_quote(_text(file, block_bytes)[0], block_bytes):
        raise ValueError(f"row {row - 1}, column {last}: {_OPEN}")


def _ends_with_quote(text: Any, block_bytes: int) -> bool:
    end = b""
    while part := text.read(block_bytes):
        end = (end + part).rstrip(b"\r\n")[-1:]
    return end == b'"'


def _fragment(file: Path) -> Any:
    """Open a Parquet or Arrow file; None if `file` is text."""
    kind = _FORMATS.get(file.suffix.lower())
    return kind and kind().make_fragment(str(file), fs.LocalFileSystem())


def _text(file: Path, block_bytes: int) -> tuple[pa.NativeFile | None, Callable[[], int]]:
    """Open the text of a file, None if it is empty, and how many bytes of the file were read so far."""
    packed = _PACKED.get(file.suffix.lower())

    def opened() -> tuple[pa.NativeFile, Callable[[], int]]:
        raw = pa.OSFile(str(file))
        return (pa.CompressedInputStream(raw, packed) if packed else raw), raw.tell

    text, _ = opened()
    start = text.read(block_bytes)
    if found := next((what for first, what in _NOT_TEXT.items() if start.startswith(first)), None):
        raise ValueError(found)
    if len(start) == block_bytes:
        return opened()
    # Arrow finds no columns in a line without an end.
    return pa.BufferReader(start + b"\n") if start else None, lambda: file.stat().st_size


def _columns_without_header(file: Path, schema: Schema, block_bytes: int, names: Sequence[str]) -> Sequence[str] | None:
    """Return the names of all columns of a text, None if a header has them."""
    if schema.columns is None or not schema.labels.keys().isdisjoint(names):
        return schema.columns
    unlabelled = [name for name in schema.columns if name not in schema.labels]
    with suppress(pa.ArrowInvalid):  # only blank lines
        first = _open_csv(
            _text(file, block_bytes)[0],
            schema,
            block_bytes,
            on_invalid=lambda _: "skip",
            autogenerate_column_names=True,
        )
        if len(first.schema) == len(unlabelled):
            return unlabelled
    return schema.columns


def _open_csv(
    text: pa.NativeFile | None,
    schema: Schema,
    block_bytes: int,
    columns: Sequence[str] = (),
    on_invalid: Callable[[Any], str] | None = None,
    **names: Any,
) -> Any:
    """Open a text for its `columns` as bytes; `on_invalid` decides about rows with another number of fields."""
    quoted = schema.delimiter != "\t"
    return csv.open_csv(
        text,
        csv.ReadOptions(block_size=block_bytes, use_threads=False, **names),  # without threads, errors name rows
        csv.ParseOptions(
            delimiter=schema.delimiter,
            quote_char='"' if quoted else False,
            newlines_in_values=quoted,
            invalid_row_handler=on_invalid,
        ),
        csv.ConvertOptions(column_types=dict.fromkeys(columns, pa.binary()), include_columns=columns),
    )


def _require_columns(needed: Sequence[str], found: Sequence[str], schema: Schema) -> None:
    for name in needed:
        if (number := found.count(name)) > 1:
            raise InputError(f"column {name}: twice")
        if not number:
            near = nearest(name, found)
            if other := next((each for each in "\t;|," if len(found) == 1 and each in found[0]), None):
                hint = f"whose name has {other!r}, while the schema's delimiter is {schema.delimiter!r}"
            elif near:
                shown = near if near == near.strip() else repr(near)  # else a space could not be seen
                hint = f"did you mean {shown:.200}?"
            else:
                hint = f"{', '.join(found):.200}" if len(found) <= _SHOWN_COLUMNS else "none has a similar name"
            rule = "; it is a label, without which a table is for `dlrm-overlap predict` only"
            raise InputError(
                f"column {name}: missing among the file's {count_of(len(found), 'column')} ({hint})"
                f"{rule if name in schema.labels else ''}"
            )
