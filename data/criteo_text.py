"""Criteo's click logs as text: one sample a line, 40 fields between tabs.

The fields are a label (0 or 1), 13 counts (decimal integers, negative ones included) and 26 categories (hexadecimal
numbers of up to 32 bits). A blank field is a missing value. Kaggle's and the Terabyte set's files look alike.
"""

import gzip
import re
import string
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from dlrm_overlap.config import CRITEO_DENSE, CRITEO_TABLES, InputError

BLOCK_BYTES = 1 << 20  # small enough that a block's arrays stay near the caches

_FIELDS = 1 + CRITEO_DENSE + CRITEO_TABLES
_TAB, _NEWLINE, _RETURN, _MINUS, _ZERO = b"\t\n\r-0"
_FILE_NAME = re.compile(r"(train\.txt|day_\d+|.+\.tsv)(\.gz)?")
_LONG_COUNT = re.compile(rb"-?\d{9,18}")
_MAX_LINE_BYTES = 1 << 16

_WORD_BYTES = 8
_CURE = "correct or remove the line, or set bad_rows to skip, which leaves such lines out"
_EACH_BYTE = 0x0101010101010101
_NO_DIGIT = 0x80
_DIGIT_VALUES = bytes(int(chr(c), 16) if chr(c) in string.hexdigits else _NO_DIGIT for c in range(256))


@dataclass(frozen=True)
class TextRows:
    """The samples of a block of text."""

    labels: np.ndarray
    """[n] float32, each 0 or 1"""
    dense: np.ndarray
    """[n, 13] float32: log1p of the counts; 0 where the count is missing or negative"""
    categories: np.ndarray
    """[n, 26] uint32, the hexadecimal numbers; 0 where missing"""
    missing: np.ndarray
    """[n, 26] bool: the category is missing"""
    skipped: int = 0
    """lines that are no samples, and were left out"""


def criteo_files(path: Path) -> list[Path]:
    """Return `path` if it is a file, or the train.txt, day_0, day_1, ... and *.tsv of the folder `path`, plain or .gz.

    They are in natural order: day_2 comes before day_10.

    Raises:
        InputError: if there is no such file, or a folder holds a file both plain and compressed.
    """
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise InputError(f"{path}: no such file or folder; give Criteo's text, a file or a folder of them")
    files = [file for file in path.iterdir() if file.is_file() and _FILE_NAME.fullmatch(file.name)]
    if not files:
        raise InputError(f"{path}: holds no train.txt, day_0, day_1, ... or *.tsv, plain or .gz; give another folder")
    plain = {file.name for file in files}
    if twice := sorted(name for name in plain if f"{name}.gz" in plain):
        raise InputError(f"{path}: holds {twice[0]} and {twice[0]}.gz, the same samples twice; remove one")
    return sorted(files, key=_natural_key)


def _natural_key(file: Path) -> list[str | int]:
    return [int(part) if i % 2 else part for i, part in enumerate(re.split(r"(\d+)", file.name))]


def read_rows(
    file: Path,
    block_bytes: int = BLOCK_BYTES,
    on_read: Callable[[int], object] | None = None,
    skip: bool = False,
) -> Iterator[TextRows]:
    """Yield the samples of a text file, plain or .gz, in blocks of about `block_bytes` of text.

    After each block, `on_read` is called with the bytes of the file that it took, compressed ones for a .gz. With
    `skip`, bad lines are left out and counted in `TextRows.skipped`.

    Raises:
        InputError: if the file cannot be read, is empty or holds no sample, or a line is bad (see `parse_rows`).
    """
    line, rest, reported, samples = 1, b"", 0, 0
    try:
        with file.open("rb") as raw:
            stream = gzip.GzipFile(fileobj=raw) if file.suffix == ".gz" else raw
            while data := stream.read(block_bytes):
                end = data.rfind(b"\n") + 1
                block, rest = (rest + data[:end], data[end:]) if end else (b"", rest + data)
                if block:
                    rows = parse_rows(block, str(file), line, skip)
                    line += len(rows.labels) + rows.skipped
                    samples += len(rows.labels)
                    yield rows
                if len(rest) > _MAX_LINE_BYTES:
                    raise InputError(
                        f"{file}, line {line}: no end within {_MAX_LINE_BYTES} bytes; give text, or .gz of it"
                    )
                if on_read is not None:
                    on_read(raw.tell() - reported)
                    reported = raw.tell()
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(f"{file}: cannot be read ({error}); replace the file") from error
    if rest:
        rows = parse_rows(rest, str(file), line, skip)
        samples += len(rows.labels)
        yield rows
    elif line == 1:
        raise InputError(f"{file}: empty, but a data set needs samples; replace or remove the file")
    if samples == 0:
        raise InputError(f"{file}: no line of it is a sample; replace or remove the file")


def parse_rows(block: bytes, file: str, first_line: int = 1, skip: bool = False) -> TextRows:
    r"""Parse whole lines (ended by \n or \r\n; the last may lack its end) that begin at line `first_line` of `file`.

    With `skip`, lines for which it would raise are left out and counted.

    Raises:
        InputError: naming file and line, if a line has not 40 fields; and the field's column (from 1), if a label is
            not 0 or 1, a count not an integer (of up to 18 digits) or a category not a number of up to 8 hex digits.
    """
    # A number is read from the eight bytes that end where its field ends; padding in front gives the first field eight.
    block = bytes(_WORD_BYTES) + block + (b"" if block.endswith(b"\n") else b"\n")
    text = np.frombuffer(block, np.uint8)
    is_newline = text == _NEWLINE
    newlines = np.flatnonzero(is_newline)
    ends = np.flatnonzero(is_newline | (text == _TAB))
    if ends.size != _FIELDS * newlines.size or not np.array_equal(ends[_FIELDS - 1 :: _FIELDS], newlines):
        if skip:
            return _parse_whole_lines(block[_WORD_BYTES:], file)
        raise _wrong_fields(block[_WORD_BYTES:], file, first_line)
    starts = np.append(_WORD_BYTES, ends[:-1] + 1).reshape(-1, _FIELDS)
    ends = ends.reshape(-1, _FIELDS)
    ends[:, -1] -= text[ends[:, -1] - 1] == _RETURN
    blank = starts == ends

    digits = block.translate(_DIGIT_VALUES)
    wrong = np.empty_like(blank)

    labels = text[starts[:, 0]] - np.uint8(_ZERO)
    wrong[:, 0] = (ends[:, 0] - starts[:, 0] != 1) | (labels > 1)

    columns = np.s_[:, 1 : 1 + CRITEO_DENSE]
    negative = text[starts[columns]] == _MINUS
    counts, valid = _parse_numbers(digits, starts[columns] + negative, ends[columns], base=10)
    wrong[columns] = ~(valid | blank[columns])
    counts[negative | blank[columns]] = 0

    columns = np.s_[:, 1 + CRITEO_DENSE :]
    missing = blank[columns]
    categories, valid = _parse_numbers(digits, starts[columns], ends[columns], base=16)
    wrong[columns] = ~(valid | missing)
    categories[missing] = 0

    for row, column in np.argwhere(wrong):
        field = block[starts[row, column] : ends[row, column]]
        if 1 <= column <= CRITEO_DENSE and _LONG_COUNT.fullmatch(field):
            counts[row, column - 1] = max(0, int(field))
            wrong[row, column] = False
        elif not skip:
            raise _wrong_field(field, f"{file}, line {first_line + row}, column {column + 1}", column)
    dense = np.log1p(counts.astype(np.float32))
    rows = TextRows(labels.astype(np.float32), dense, categories.astype(np.uint32), missing)
    if not wrong.any():
        return rows
    good = ~wrong.any(axis=1)
    return TextRows(rows.labels[good], dense[good], rows.categories[good], missing[good], int((~good).sum()))


def _parse_whole_lines(block: bytes, file: str) -> TextRows:
    """Parse the lines of `block`, which ends in a newline, that have as many fields as a sample; leave out the others.

    A block without any gives a `TextRows` of no samples.
    """
    lines = block.split(b"\n")[:-1]
    whole = [line for line in lines if line.count(b"\t") == _FIELDS - 1]
    if whole:
        rows = parse_rows(b"\n".join(whole), file, skip=True)
    else:
        none = np.empty((0, CRITEO_TABLES), np.uint32)
        rows = TextRows(np.empty(0, np.float32), np.empty((0, CRITEO_DENSE), np.float32), none, none.astype(bool))
    return replace(rows, skipped=rows.skipped + len(lines) - len(whole))


def _parse_numbers(digits: bytes, starts: np.ndarray, ends: np.ndarray, base: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the numbers (uint64) of up to eight digits in [starts, ends), and whether each is one (bool).

    The eight bytes that end a field are loaded as one little-endian word, whose digits are then added up in pairs
    (SIMD within a register). For "123", the word holds the digits 0 0 0 0 0 1 2 3, then lanes of two digits 00 00 01
    23, then of four 0000 0123, then the number 123.
    """
    words = np.ndarray(len(digits) - _WORD_BYTES + 1, "<u8", digits, strides=(1,))[ends - _WORD_BYTES]
    length = ends - starts
    # An empty field is read as one byte: the separator or sign in front of it, which is not a digit.
    before = (_WORD_BYTES * (_WORD_BYTES - length.clip(1, _WORD_BYTES))).astype(np.uint64)
    words >>= before
    words <<= before
    # Adding 128 - base to every byte sets the top bit of each that is no digit.
    valid = (words + (128 - base) * _EACH_BYTE) & (_NO_DIGIT * _EACH_BYTE) == 0
    valid &= length <= _WORD_BYTES
    for bits, lanes in ((8, 0x00FF00FF00FF00FF), (16, 0x0000FFFF0000FFFF), (32, 0x00000000FFFFFFFF)):
        words = (words * base ** (bits // 8) + (words >> bits)) & lanes
    return words, valid


def _wrong_fields(block: bytes, file: str, first_line: int) -> InputError:
    lines = block.split(b"\n")
    row, found = next((i, n) for i, text in enumerate(lines) if (n := text.count(b"\t") + 1) != _FIELDS)
    return InputError(
        f"{file}, line {first_line + row}: {found} fields between tabs, but a sample has {_FIELDS} (label, "
        f"{CRITEO_DENSE} counts, {CRITEO_TABLES} categories); {_CURE}"
    )


def _wrong_field(field: bytes, source: str, column: int) -> InputError:
    if column == 0:
        rule = "a label, 0 or 1"
    elif column <= CRITEO_DENSE:
        rule = "an integer, or blank where missing"
    else:
        rule = "a number of up to 8 hexadecimal digits, or blank where missing"
    return InputError(f"{source}: {field[:40].decode('latin-1')!r} is not {rule}; {_CURE}")


def hash_ids(categories: np.ndarray, missing: np.ndarray, rows: Sequence[int]) -> np.ndarray:
    """Return the ids [n, 26] int32 of categories [n, 26] uint32 in 26 tables of `rows` rows, each below 2**31.

    A missing value takes row 0, any other value row 1 + mix(value) % (rows - 1). In a table of one row all take row 0.
    """
    sizes = np.asarray(rows, dtype=np.uint32)
    # MurmurHash3's 32-bit finaliser (A. Appleby). Criteo's numbers are hashes of an unknown kind; other text may hold
    # running numbers. Once mixed, both spread evenly over any number of rows.
    mixed = categories ^ (categories >> 16)
    mixed *= np.uint32(0x85EBCA6B)
    mixed ^= mixed >> 13
    mixed *= np.uint32(0xC2B2AE35)
    mixed ^= mixed >> 16
    ids = (mixed % np.maximum(sizes - 1, 1) + 1).astype(np.int32)
    ids[missing | (sizes == 1)] = 0
    return ids
