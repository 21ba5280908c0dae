"""Reads cells of a table's columns as numbers or as keys of categorical values.

In every file format, a cell is missing if it is null, NaN, or an entry of the schema's `missing`, as text or as a
number. Text converts to numbers, true and false to 1 and 0, and numbers to Python's text for them.
"""

import hashlib
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from pyarrow import compute

from dlrm_overlap.config import InputError
from dlrm_overlap.data.times import NO_TIME, are_times, in_microseconds, time_of

pc: Any = compute  # pyarrow creates its functions at import
types: Any = pa.types

_FLOAT = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)(e[+-]?[0-9]{1,9})?|[+-]?(inf|infinity)", re.IGNORECASE)
_WHOLE = re.compile(r"([+-]?[0-9]{1,99})(\.0*)?")
_HEX = re.compile(r"(0x)?([0-9a-f]{1,99})", re.IGNORECASE)
_BOOLEANS = {"true": "1", "false": "0"}


def _float(text: str) -> float | None:
    text = _BOOLEANS.get(text.lower(), text)
    return float(text) if _FLOAT.fullmatch(text) else None


def _whole(text: str) -> int | None:
    """Return the key (int64) of an integer written like 7, 007, 7.0, 7e0 or 0x7, None for other texts."""
    if text[:2].lower() == "0x":
        return _hexadecimal(text)
    if found := _WHOLE.fullmatch(text):
        return _key(int(found[1]))  # exact, unlike a float
    number = _float(text)
    return _key(int(number)) if number is not None and number.is_integer() else None


def _hexadecimal(text: str) -> int | None:
    found = _HEX.fullmatch(text)
    return _key(int(found[2], 16)) if found else None


def _key(number: int) -> int | None:
    """Return the int64 with the bits of a number from -2^63 to 2^64 - 1, None for other numbers."""
    if not -(1 << 63) <= number < 1 << 64:
        return None
    return number - (1 << 64) if number >= 1 << 63 else number


class _Kind(NamedTuple):
    rule: str
    """what a cell must be; messages say that a cell is not this"""
    read: Callable[[str], Any]
    fast: Sequence[pa.DataType]
    """Arrow types to try for all cells at once, before `read`"""
    dtype: type


_OR_MISSING = "or missing (the schema's key `missing` lists such texts)"
_KINDS = {
    "label": _Kind("a label, 0 or 1", _float, [pa.float64()], np.float64),
    "float": _Kind(f"a finite number of 32 bits, {_OR_MISSING}", _float, [pa.float64()], np.float64),
    "int": _Kind(f"a whole number from -2^63 to 2^64 - 1, {_OR_MISSING}", _whole, [pa.int64(), pa.uint64()], np.int64),
    "hex": _Kind(f"a hexadecimal number of up to 64 bits, {_OR_MISSING}", _hexadecimal, [pa.uint64()], np.int64),
}


class Missing:
    def __init__(self, entries: Sequence[str]) -> None:
        self.words = frozenset(entries)
        self.texts = pa.array([entry.encode() for entry in entries], pa.binary())
        self.numbers = {
            name: [number for entry in entries if (number := kind.read(entry)) is not None]
            for name, kind in _KINDS.items()
        }


class Column:
    """A column in a block of rows. The cells of a column of lists are the elements of all lists."""

    def __init__(
        self, block: pa.RecordBatch, name: str, row: int, missing: Missing, separator: bool | str = False
    ) -> None:
        """Read the column `name` of `block`; messages number rows from `row`, the number of the block's first row.

        `separator` is False for single values, True for lists, and a text for lists or for text to split at it. Raises
        an InputError if the type of the column does not fit `separator`.
        """
        self._name, self._row, self._missing = name, row, missing
        self._ends: np.ndarray | None = None  # [n] int64, end of each row's list in the cells
        with self._named():
            cells = block.column(name)
            if separator and types.is_null(cells.type):
                cells = cells.cast(pa.list_(cells.type))
            self._cells: Any = _plain(cells)
            if isinstance(separator, str) and types.is_binary(self._cells.type):
                self._cells = pc.split_pattern(self._texts(), separator)
            is_list, is_single = _is_list(self._cells.type), not types.is_nested(self._cells.type)
            fits = is_list or (is_single and isinstance(separator, str)) if separator else is_single
            if not fits:
                kind = "text" if types.is_binary(cells.type) else cells.type
                lists = f"lists of single values (list: {separator})"
                asked = lists if separator else "single values, without the key list"
                raise pa.ArrowTypeError(f"{kind}, but the schema asks for {asked}")
            if is_list:
                self._ends = pc.list_value_length(self._cells).fill_null(0).to_numpy().astype(np.int64).cumsum()
                self._cells = _plain(self._cells.flatten())
                if types.is_binary(self._cells.type):
                    self._cells = _without(self._cells, pc.equal(pc.binary_length(self._cells), 0))
            elif separator:  # numbers, each a list of one
                self._ends = np.arange(1, len(self._cells) + 1)

    def labels(self) -> np.ndarray:
        """Return the cells as float64 [n], each 0 or 1."""
        numbers, missing = self._read("label")
        self._require(((numbers == 0) | (numbers == 1)) & ~missing, _KINDS["label"].rule)
        return numbers

    def numbers(self) -> np.ndarray:
        """Return the cells as float64 [n], NaN where missing."""
        numbers, missing = self._read("float")
        with np.errstate(over="ignore"):
            self._require(~np.isinf(numbers.astype(np.float32)), _KINDS["float"].rule)
        return np.where(missing, np.nan, numbers)

    def times(self, unit: str) -> np.ndarray:
        """Return the cells as int64 [n], see `times`; numbers are Unix times in `unit`."""
        if types.is_binary(self._cells.type):
            times, missing = self._read_times(unit)
        else:
            is_float = types.is_floating(self._cells.type)
            numbers, missing = self._read("float" if is_float else "int")
            if types.is_uint64(self._cells.type):
                missing = missing | (numbers < 0)  # from 2^63 on, which is no time in any unit
            times = in_microseconds(np.where(missing, 0, numbers), unit)
        rule = f"a time in the years 1 to 9999; numbers are Unix times in time_unit, which is {unit}"
        if unit == "s":
            rule += ", and not dates such as 20261120: write 2026-11-20"
        self._require(are_times(times) & ~missing, rule)
        return times

    def keys(self, kind: str) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        """Return keys [m] int64, a mask [m] bool that is True for missing cells, and ends of lists [n] int64 or None.

        For lists, missing elements are left out.
        """
        keys, missing = self._hash() if kind == "string" else self._read(kind)
        if self._ends is None:
            return keys, missing, None
        return keys[~missing], missing[~missing], np.append(0, (~missing).cumsum())[self._ends]

    def _require(self, good: np.ndarray, rule: str) -> None:
        if not good.all():
            bad = int(good.argmin())
            row = self._row + (bad if self._ends is None else int(self._ends.searchsorted(bad, "right")))
            cell = self._cells[bad].as_py()
            cell = _decoded(cell) if isinstance(cell, bytes) else cell
            raise InputError(f"row {row}, column {self._name}: {cell!r:.60} is not {rule}")

    @contextmanager
    def _named(self) -> Iterator[None]:
        try:
            yield
        except pa.ArrowException as error:
            raise InputError(f"row {self._row}, column {self._name}: {error}") from None

    def _texts(self) -> Any:
        """Return binary [m], null where missing."""
        cells = self._cells
        with self._named():
            if types.is_floating(cells.type) or types.is_boolean(cells.type):
                coded = cells.dictionary_encode()
                texts = pa.array(coded.dictionary.to_numpy(zero_copy_only=False).astype(str).tolist(), pa.string())
                cells = pa.DictionaryArray.from_arrays(coded.indices, texts).dictionary_decode()
            elif not types.is_binary(cells.type):
                cells = cells.cast(pa.string())
            cells = cells.cast(pa.binary())
        return _without(cells, pc.is_in(cells, value_set=self._missing.texts))

    def _hash(self) -> tuple[np.ndarray, np.ndarray]:
        texts = self._texts()
        coded = texts.dictionary_encode()
        distinct = [*coded.dictionary.to_pylist(), b""]
        hashes = b"".join(hashlib.blake2b(text, digest_size=8).digest() for text in distinct)
        codes = coded.indices.fill_null(len(distinct) - 1).to_numpy()
        return np.frombuffer(hashes, "<i8")[codes], texts.is_null().to_numpy(zero_copy_only=False)

    def _read(self, kind: str) -> tuple[np.ndarray, np.ndarray]:
        """Return numbers [m], and a mask [m] bool that is True for missing cells."""
        is_text = types.is_binary(self._cells.type)
        kind = "int" if kind == "hex" and not is_text else kind
        cells = self._texts() if is_text else self._cells
        with self._named():
            numbers, missing = self._read_fast(cells, kind) or self._read_each(cells, kind)
        is_float = numbers.dtype == np.float64
        if is_float:
            missing = missing | np.isnan(numbers)
        if entries := self._missing.numbers[kind]:
            dtype = np.float32 if is_float else np.int64  # a file may store floats in either size
            with np.errstate(over="ignore"):
                missing = missing | np.isin(numbers.astype(dtype), np.array(entries, dtype))
        return numbers, missing

    def _read_times(self, unit: str) -> tuple[np.ndarray, np.ndarray]:
        texts = self._texts()
        coded = texts.dictionary_encode()
        words = [_decoded(text).strip() for text in coded.dictionary.to_pylist()]
        times = [_time(word, unit) for word in words]
        codes = coded.indices.fill_null(len(words)).to_numpy()
        return np.array([*times, 0], np.int64)[codes], texts.is_null().to_numpy(zero_copy_only=False)

    def _read_fast(self, cells: Any, kind: str) -> tuple[np.ndarray, np.ndarray] | None:
        cells = pc.binary_replace_slice(cells, 0, 0, b"0x") if kind == "hex" else cells
        for of_arrow in _KINDS[kind].fast:
            try:
                numbers = cells.cast(pa.string()) if types.is_binary(cells.type) else cells
                numbers = numbers.cast(of_arrow, safe=of_arrow != pa.float64())
            except pa.ArrowInvalid:
                continue
            return numbers.fill_null(0).to_numpy().view(_KINDS[kind].dtype), numbers.is_null().to_numpy(False)
        return None

    def _read_each(self, cells: Any, kind: str) -> tuple[np.ndarray, np.ndarray]:
        coded = cells.dictionary_encode()
        distinct = coded.dictionary.to_pylist()
        words = [_decoded(cell).strip() if isinstance(cell, bytes) else str(cell) for cell in distinct]
        missing = [word in self._missing.words or word.lower().lstrip("+-") == "nan" for word in words]
        numbers = [0 if none else _KINDS[kind].read(word) for word, none in zip(words, missing, strict=True)]
        codes = coded.indices.fill_null(len(words)).to_numpy()
        self._require(np.array([number is not None for number in [*numbers, 0]])[codes], _KINDS[kind].rule)
        return np.array([*numbers, 0], _KINDS[kind].dtype)[codes], np.array([*missing, True])[codes]


def _time(text: str, unit: str) -> int:
    """Return the time that a text names, or one that `are_times` refuses."""
    if _FLOAT.fullmatch(text):
        if float(text) >= 1 << 63:  # `_whole` would make it negative
            return NO_TIME
        whole = _whole(text)
        return int(in_microseconds(np.array([float(text) if whole is None else whole]), unit)[0])
    try:
        return time_of(text)
    except ValueError:
        return NO_TIME


def _is_list(kind: Any) -> bool:
    """Return whether a type is of lists of single values."""
    kinds = types.is_list, types.is_large_list, types.is_fixed_size_list, types.is_list_view, types.is_large_list_view
    return any(each(kind) for each in kinds) and not types.is_nested(kind.value_type)


def _plain(array: Any) -> Any:
    if types.is_dictionary(array.type):
        array = array.dictionary_decode()
    if types.is_floating(array.type):
        return _without(array, array.is_null(nan_is_null=True))
    if types.is_temporal(array.type):
        array = array.cast(pa.string())
    if types.is_decimal(array.type) and array.type.bit_width < 128:  # for which Arrow lacks functions
        array = array.cast(pa.decimal128(array.type.precision, array.type.scale))
    kept = types.is_nested(array.type) or types.is_primitive(array.type) or types.is_decimal(array.type)
    return array if kept else array.cast(pa.binary())


def _without(array: Any, missing: Any) -> Any:
    return pc.if_else(missing, None, array) if pc.any(missing).as_py() else array


def _decoded(text: bytes) -> str:
    return text.decode(errors="backslashreplace")
