"""Turns files of samples into records that training maps from disk: `dlrm-overlap prepare`.

A schema says how ids are made: by a hash of the value, or from a vocabulary, which is learnt of all files first and
kept in vocabulary.npz (`encoder`). Samples that another run prepares have other vocabularies, so the samples to
evaluate on must be prepared with those to train on, as their last ones.
"""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import numpy as np
import pyarrow as pa

from dlrm_overlap.config import InputError, in_one_line
from dlrm_overlap.data.encoder import Encoder
from dlrm_overlap.data.prepared import new_folder, write_samples
from dlrm_overlap.data.records import Layout
from dlrm_overlap.data.schema import Schema
from dlrm_overlap.data.table_files import BLOCK_BYTES, read_blocks, table_files

_T = TypeVar("_T")


def prepare(source: Path, target: Path, schema: Schema, block_bytes: int = BLOCK_BYTES) -> Layout:
    """Turn the files at `source` into the folder `target`, and return the content of its meta.json.

    It takes some ten times `block_bytes` of memory; to learn vocabularies, also 16 bytes for each distinct value of
    every table, and about five times those of one table while it merges them. Standard error names each file as it is
    read.

    Raises:
        InputError: if there are no files, if one cannot be read, lacks a column or has a bad row, or if `target` is
            there or cannot be written to.
    """
    files, encoder = table_files(source), Encoder(schema)

    def read(purpose: str, use: Callable[[int, pa.RecordBatch], _T]) -> Iterator[_T]:
        for file in files:
            print(f"{file.name}: {purpose}", file=sys.stderr)
            try:
                for row, block in read_blocks(file, schema, block_bytes):
                    yield use(row, block)
            except (ValueError, OSError, pa.ArrowException) as error:  # an InputError is a ValueError
                cure = "correct or replace the file, or correct the schema"
                raise InputError(f"{file}: {in_one_line(error)}; {cure}") from None

    with new_folder(target):
        if encoder.learns:
            for _ in read("counting values", encoder.learn):
                pass
            np.savez(target / "vocabulary.npz", **encoder.finish())  # pyright: ignore[reportArgumentType]
        labels = {name: label.weight for name, label in schema.labels.items()}
        sizes = [None if column.list else 1 for column in schema.categorical.values()]
        layout = Layout(labels, max(1, len(schema.dense)), encoder.rows, sizes)
        return write_samples(target, layout, read("writing samples", encoder.encode))
