"""The encoding of a table: what turned its columns into samples. It is stored with the samples and in checkpoints.

    schema.yaml      the schema, with all keys; the first line is a comment with a checksum of the others
    vocabulary.npz   for each column NAME with a vocabulary: NAME.keys, ascending, and NAME.counts, both [k] int64

Samples fit a model only if their encoding has the digest of the one that the model was trained with.
"""

import json
import os
import re
import shutil
import zipfile
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import yaml

from dlrm_overlap.config import InputError, in_one_line
from dlrm_overlap.data.checksums import digest_of
from dlrm_overlap.data.schema import Schema, read_schema
from dlrm_overlap.launching.files import open_file, sync_folder
from dlrm_overlap.launching.text_table import count_of, plain

FOLDER = "encoding"
META = "meta.json"  # in the folder of the samples
SCHEMA, VOCABULARY = FILES = "schema.yaml", "vocabulary.npz"
_KEYS = ".keys"
_CHECKSUM = re.compile(rb"# checksum of the lines below: ([0-9a-f]{16})")


def is_prepared(folder: Path) -> bool:
    """Return whether `prepare` wrote the folder. It is in this module since `predict` must not import TorchRec."""
    return (folder / META).exists()


@dataclass(frozen=True)
class Encoding:
    schema: Schema
    keys: Mapping[str, np.ndarray]
    """column with a vocabulary -> its values' keys, ascending, [k] int64"""

    @cached_property
    def digest(self) -> str:
        """16 hexadecimal digits of everything that decides which row a value has."""
        schema = self.schema
        columns = [list(schema.labels), *(_pairs(each) for each in (schema.dense, schema.categorical)), schema.missing]
        parts: list[Any] = [json.dumps(columns).encode()]
        for name in sorted(self.keys):
            keys = np.ascontiguousarray(self.keys[name], "<i8")
            parts += [f"{name} {len(keys)}".encode(), keys.data]
        return digest_of(*parts)


def _pairs(columns: Mapping[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    # Without `any` where it is false, encodings that have no such column keep the digests of earlier versions.
    return [
        (name, {key: value for key, value in asdict(column).items() if key != "any" or value})
        for name, column in columns.items()
    ]


class Encoded(NamedTuple):
    """Where the encoding of a data set is, and its digest."""

    folder: Path
    digest: str

    def read(self) -> Encoding:
        """Return the encoding; an InputError if its files are missing, unreadable or have changed."""
        encoding = read_encoding(self.folder)
        if encoding.digest != self.digest:
            raise InputError(
                f"{self.folder}: has the digest {encoding.digest}, not {self.digest} as when it was written, so a file "
                f"in it has changed; copy the folder again"
            )
        return encoding

    def copy(self, folder: Path) -> "Encoded":
        """Copy the files to a new folder."""
        folder.mkdir()
        for name in FILES:
            with open_file(self.folder / name) as source, _synced(folder / name) as copy:
                shutil.copyfileobj(source, copy)
        sync_folder(folder)
        return Encoded(folder, self.digest)


class Unknown(NamedTuple):
    """Values of a column that have no row of their own in the model."""

    column: str
    values: int
    of: int
    """number of values that are not missing"""
    place: str = "vocabulary"
    """what lacks them: the vocabulary (they share the row of rare values) or the model (they read an initial row)"""

    def __str__(self) -> str:
        share = f"{self.values} of {count_of(self.of, 'value')} ({self.values / self.of:.1%})"
        return f"{plain(self.column)}: {share} not in the {self.place}"


def unknown_values(values: Counter[str], unknown: Counter[str], schema: Schema) -> list[Unknown]:
    """Return the columns with unknown values, by the counts of an `Encoder`."""
    places = {name: "table of ids" if column.any else "vocabulary" for name, column in schema.categorical.items()}
    return [Unknown(name, count, values[name], places[name]) for name, count in unknown.items() if count]


def write_encoding(folder: Path, schema: Schema, vocabularies: Mapping[str, np.ndarray]) -> Encoded:
    """Write a new folder; `vocabularies` are the arrays of vocabulary.npz."""
    folder.mkdir()
    text = yaml.safe_dump(asdict(schema), sort_keys=False, allow_unicode=True, encoding="utf-8")
    with _synced(folder / SCHEMA) as file:
        file.write(f"# checksum of the lines below: {digest_of(text)}\n".encode() + text)
    with _synced(folder / VOCABULARY) as file:
        np.savez(file, **vocabularies)  # pyright: ignore[reportArgumentType]
    sync_folder(folder)
    keys = {name: vocabularies[name + _KEYS] for name in _with_vocabulary(schema)}
    return Encoded(folder, Encoding(schema, keys).digest)


@contextmanager
def _synced(file: Path) -> Iterator[BinaryIO]:
    """Yield the new file, whose content is on disk once the block ends."""
    with file.open("xb") as stream:
        yield stream
        stream.flush()
        os.fsync(stream.fileno())


def _with_vocabulary(schema: Schema) -> list[str]:
    return sorted(name for name, column in schema.categorical.items() if column.min_count)


def read_encoding(folder: Path) -> Encoding:
    """Return the encoding in a folder; an InputError if a file is missing or unreadable, or the schema has changed."""
    schema, file = read_schema(folder / SCHEMA), folder / VOCABULARY
    # The digest does not cover keys that decide no row, such as time_unit; earlier versions wrote no checksum.
    first, _, text = (folder / SCHEMA).read_bytes().partition(b"\n")
    if (found := _CHECKSUM.fullmatch(first)) and found[1].decode() != digest_of(text):
        raise InputError(f"{folder / SCHEMA}: has changed since it was written; copy the folder again")
    try:
        with open_file(file) as stream, np.load(stream) as archive:
            keys = {name: archive[name + _KEYS] for name in _with_vocabulary(schema)}
    except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
        raise InputError(f"{file}: no vocabularies can be read ({in_one_line(error):.200}); copy it again") from None
    for name, array in keys.items():
        if array.dtype != np.int64 or array.ndim != 1 or (array[1:] <= array[:-1]).any():
            raise InputError(f"{file}: {name}{_KEYS} are not ascending 64-bit integers; copy the file again")
    return Encoding(schema, keys)


def other_encoding(samples: str, found: Encoded | None, made_by: str, expected: str | None, like: Path | str) -> str:
    """Return why the ids of `samples` do not fit what `made_by` says, or an empty string.

    Example: days has the encoding 0b5e.., not 77ac.. as the samples of step_300 had, so one value has different ids; ..

    Args:
        expected: digest of the right encoding; None if it is unknown.
        like: a folder with the right encoding, for the command that encodes a table by it.
    """
    if expected is None or (found is not None and found.digest == expected):
        return ""
    has = "no encoding" if found is None else f"the encoding {found.digest}"
    return (
        f"{samples} has {has}, not {expected} as {made_by}, so one value has different ids; encode the table of "
        f"{samples} by that encoding: dlrm-overlap prepare table TABLE OUT --like {like}"
    )
