"""Columns of a table as numbers: labels, dense features, and the keys of categorical values.

A key is an integer of 64 bits: the value itself, or the BLAKE2b hash of a text's bytes. An encoder makes rows of keys,
by a hash or from a vocabulary.
"""

import contextlib
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any, NamedTuple, Self

import numpy as np
import pyarrow as pa
from pyarrow import compute

from dlrm_overlap.config import InputError
from dlrm_overlap.data.schema import Categorical, Schema

pc: Any = compute  # whose functions are made when it is imported
# Texts that are numbers, and the prefix by which Arrow reads them as such.
_NUMBERS = {"int": ("^-?[0-9]{1,19}$", ""), "hex": ("^[0-9a-fA-F]{1,8}$", "0x")}

_LEAST, _GREATEST = (pa.scalar(Decimal(each), pa.decimal128(19)) for each in (-(1 << 63), (1 << 63) - 1))


class Fault(NamedTuple):
    """The first bad row of a block."""

    row: int
    column: str
    value: Any
    rule: str
    """a value that is well is .."""


@dataclass(frozen=True)
class Keys:
    """The values of a categorical column in some rows."""

    keys: np.ndarray
    """[d] int64, in no order; some may be there twice"""
    codes: np.ndarray
    """[m] int32, of each value the number of its key; d for a missing one"""
    lengths: np.ndarray | None
    """[n] int64, values of each row; None where each has one"""

    def take(self, wanted: np.ndarray) -> "Keys":
        """Return those of the rows of the mask `wanted` [n]."""
        if self.lengths is None:
            return Keys(self.keys, self.codes[wanted], None)
        return Keys(self.keys, self.codes[np.repeat(wanted, self.lengths)], self.lengths[wanted])


@dataclass(frozen=True)
class Raw:
    """Samples, before what is learnt of all of them is applied."""

    labels: np.ndarray
    """[n, L] float32, each 0 or 1"""
    dense: np.ndarray
    """[F, n] float64, NaN where missing; F may be 0"""
    keys: Sequence[Keys]
    """of each table"""
    held_out: np.ndarray
    """[n] bool: to evaluate on"""
    skipped: int = 0
    """rows that are no samples, and were left out"""

    @classmethod
    def none(cls, schema: Schema, skipped: int) -> Self:
        """Return no samples."""
        lengths = [np.empty(0, np.int64) if column.list else None for column in schema.categorical.values()]
        keys = [Keys(np.empty(0, np.int64), np.empty(0, np.int32), each) for each in lengths]
        labels, dense = np.empty((0, len(schema.labels)), np.float32), np.empty((len(schema.dense), 0))
        return cls(labels, dense, keys, np.empty(0, bool), skipped)

    def take(self, wanted: np.ndarray, skipped: int = 0) -> "Raw":
        """Return the samples of the mask `wanted` [n]."""
        keys = [each.take(wanted) for each in self.keys]
        return Raw(self.labels[wanted], self.dense[:, wanted], keys, self.held_out[wanted], skipped)


@dataclass
class _Faults:
    """Masks of bad rows, found column by column."""

    table: pa.Table
    bad: np.ndarray
    found: list[Fault] = field(default_factory=list)

    def add(self, bad: np.ndarray, column: str, rule: str) -> None:
        """Note the rows of the mask `bad` [n]."""
        if bad.any():
            row = int(bad.argmax())
            self.found.append(Fault(row, column, self.table.column(column)[row].as_py(), rule))
            self.bad |= bad


def raw_of(table: pa.Table, schema: Schema) -> tuple[Raw, Fault | None]:
    """Return the samples of `table` but its bad rows, and the first of these.

    Raises:
        InputError: if a column has a type that its use does not allow.
    """
    faults = _Faults(table, np.zeros(table.num_rows, bool))
    labels = np.empty((table.num_rows, len(schema.labels)), np.float32)
    for i, (name, label) in enumerate(schema.labels.items()):
        values = _numbers(table, name)
        if label.above is None:
            faults.add(~((values == 0) | (values == 1)), name, "a label, 0 or 1")
            labels[:, i] = values
        else:
            faults.add(~np.isfinite(values), name, "a number, from which a label is made")
            labels[:, i] = values > label.above
    dense = np.empty((len(schema.dense), table.num_rows))
    for i, name in enumerate(schema.dense):
        dense[i] = _numbers(table, name)
        if not np.isfinite(dense[i]).all():
            missing = table.column(name).is_null().to_numpy()
            faults.add(~np.isfinite(dense[i]) & ~missing, name, "a finite number, or missing")
    keys = []
    for name, column in schema.categorical.items():
        each, bad = _keys(_only_chunk(table, name), name, column)
        keys.append(each)
        if column.size is not None and each.lengths is not None:
            faults.add(each.lengths != column.size, name, f"a list of {column.size} values")
        if bad is not None:
            faults.add(
                bad, name, "a whole number" if column.type == "int" else "a number of up to 8 hexadecimal digits"
            )
    held_out = np.zeros(table.num_rows, bool)
    if schema.time:
        times = table.column(schema.time.column)
        faults.add(times.is_null().to_numpy(), schema.time.column, "a time")
        border = pa.scalar(schema.time.held_out_from)
        try:
            held_out = pc.greater_equal(times, border.cast(times.type)).fill_null(False).to_numpy()
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
            raise InputError(
                f"time.held_out_from: {border} is of another type than column {schema.time.column}, {times.type}; "
                f"correct it"
            ) from None
    raw = Raw(labels, dense, keys, held_out)
    if not faults.found:
        return raw, None
    return raw.take(~faults.bad, int(faults.bad.sum())), min(faults.found, key=lambda fault: fault.row)


def _only_chunk(table: pa.Table, name: str) -> pa.Array:
    chunks = table.column(name).chunks
    return chunks[0] if len(chunks) == 1 else pa.concat_arrays(chunks)


def _numbers(table: pa.Table, name: str) -> np.ndarray:
    """Return a column as float64 [n], NaN where it is missing."""
    column = table.column(name)
    try:
        return column.cast(pa.float64(), safe=False).to_numpy()
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        raise InputError(
            f"column {name}: {column.type}, but labels and dense features are numbers; convert it"
        ) from None


def _keys(array: pa.Array, name: str, column: Categorical) -> tuple[Keys, np.ndarray | None]:
    """Return the keys of a column, and a mask [n] of the rows with a value that has none, if there is one."""
    lengths = None
    if column.list:
        if isinstance(column.list, str) and not _is_list(array.type):
            array = pc.split_pattern(array, column.list)
        if not _is_list(array.type):
            raise InputError(f"column {name}: {array.type}, but the schema says list; leave list out")
        if column.longest is not None:
            array = pc.list_slice(array, 0, column.longest)
        lengths = pc.list_value_length(array).fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64)
        array = array.flatten()
    elif _is_list(array.type):
        raise InputError(f"column {name}: {array.type}, but the schema says no list; set list")
    keys, codes, bad = _coded(array, column.type)
    if bad is not None and lengths is not None:
        bad = np.bincount(np.repeat(np.arange(len(lengths)), lengths), bad, len(lengths)) > 0
    return Keys(keys, codes, lengths), bad


def _is_list(kind: pa.DataType) -> bool:
    return pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)


def _coded(array: pa.Array, kind: str) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Return `Keys.keys` and `Keys.codes` of an array, and a mask of the values that have no key, if there are some."""
    if kind == "string":
        array = array if pa.types.is_dictionary(array.type) else array.dictionary_encode()
        texts = _texts(array.dictionary).to_pylist()
        keys = np.frombuffer(b"".join([hashlib.blake2b(text, digest_size=8).digest() for text in texts]), "<i8")
        return keys, array.indices.fill_null(len(keys)).to_numpy().astype(np.int32, copy=False), None
    array = array.dictionary_decode() if pa.types.is_dictionary(array.type) else array
    keys, good = _whole(array, kind)
    codes = np.arange(len(keys), dtype=np.int32)
    if array.null_count:
        missing = array.is_null().to_numpy(zero_copy_only=False)
        codes[missing] = len(keys)
        good |= missing
    return keys, codes, None if good.all() else ~good


def _texts(values: pa.Array) -> pa.Array:
    """Return values as binary texts, so that a file of integers has the texts of a CSV file."""
    return values if pa.types.is_binary(values.type) else values.cast(pa.string()).cast(pa.binary())


def _whole(array: pa.Array, kind: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the numbers [m] int64 of integers or of texts of them, and whether each is one (bool)."""
    if kind == "int":
        with contextlib.suppress(pa.ArrowInvalid):
            array = array if pa.types.is_integer(array.type) else array.cast(pa.string())
            return array.cast(pa.int64()).fill_null(0).to_numpy(), np.ones(len(array), bool)
    (pattern, prefix), texts = _NUMBERS[kind], _texts(array)
    good = pc.match_substring_regex(texts, pattern).fill_null(False)
    texts = pc.if_else(good, texts, b"0").cast(pa.string())
    if kind == "int":  # of 19 digits some are beyond 64 bits
        wide = texts.cast(pa.decimal128(19))
        inside = pc.and_(pc.greater_equal(wide, _LEAST), pc.less_equal(wide, _GREATEST))
        good, texts = pc.and_(good, inside), pc.if_else(inside, texts, "0")
    numbers = pc.binary_join_element_wise(prefix, texts, "").cast(pa.int64())
    return numbers.to_numpy(), good.to_numpy(zero_copy_only=False).copy()


def hashed_rows(keys: np.ndarray, rows: int) -> np.ndarray:
    """Return the rows [d] int32 of keys [d] int64, 1 + mix(key) % (rows - 1): row 0 is for missing values.

    In a table of one row all take row 0.
    """
    if rows == 1:
        return np.zeros(len(keys), np.int32)
    high, low = (keys.view(np.uint64) >> np.uint64(32)).astype(np.uint32), keys.astype(np.uint32)
    return (_mixed(low ^ _mixed(high)) % np.uint32(rows - 1) + np.uint32(1)).astype(np.int32)


def _mixed(bits: np.ndarray) -> np.ndarray:
    # MurmurHash3's 32-bit finaliser (A. Appleby), under which 0 stays 0. Running numbers spread evenly over any rows.
    mixed = bits ^ (bits >> np.uint32(16))
    mixed *= np.uint32(0x85EBCA6B)
    mixed ^= mixed >> np.uint32(13)
    mixed *= np.uint32(0xC2B2AE35)
    mixed ^= mixed >> np.uint32(16)
    return mixed
