"""Turns files of samples into records that training maps from disk: `dlrm-overlap prepare`.

File i of IN, in natural order, becomes OUT's day i (`prepared`). A schema says how ids are made: by a hash of the
value, or from a vocabulary, which is learnt of all files first and kept in vocabulary.npz beside the days (`encoder`).
Days that another run prepares have other vocabularies, so the samples to evaluate on must be held out of the same days.
"""

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from dlrm_overlap.data.encoder import Encoder, learn
from dlrm_overlap.data.prepared import Meta, SourceDay, hold_days, write_day, write_meta
from dlrm_overlap.data.schema import Schema
from dlrm_overlap.data.table_files import BLOCK_BYTES, Block, read_blocks, table_files
from dlrm_overlap.launching.files import replacing

_VOCABULARY = "vocabulary.npz"


def prepare(source: Path, target: Path, schema: Schema, dense: str = "float32", block_bytes: int = BLOCK_BYTES) -> Meta:
    """Turn the files at `source` into the days of the folder `target`, and return its meta.json.

    It takes some ten times `block_bytes` of memory; to learn vocabularies, also 16 bytes for each distinct value of
    every table, and about five times those of one table while it merges them.

    Started again, it goes on after the last day that was done. Standard error names each file as it is read.

    Raises:
        InputError: if there are no files or a bad row, or if `target` cannot be written to, is being written to by
            another process, or holds days of other files or of another making.
    """
    files = table_files(source)
    stats = [file.stat() for file in files]
    days = [SourceDay(file.name, stat.st_size, stat.st_mtime_ns) for file, stat in zip(files, stats, strict=True)]

    def read(file: Path, purpose: str) -> Iterator[Block]:
        print(f"{file.name}: {purpose}", file=sys.stderr)
        yield from read_blocks(file, schema, block_bytes)

    with hold_days(target, Meta(schema.as_dict(), None, days, dense)) as meta:
        if meta.rows is None:
            learnt = {}
            if schema.learns:
                learnt = learn((block for file in files for block in read(file, "counting values")), schema)
                with replacing(target / _VOCABULARY) as stream:
                    np.savez(stream, **learnt)  # pyright: ignore[reportArgumentType]
            meta = replace(meta, rows=Encoder(schema, learnt).rows)
            write_meta(target, meta)
        encoder = Encoder(schema, dict(np.load(target / _VOCABULARY)) if schema.learns else {})
        for i in meta.unfinished:
            blocks = read(files[i], f"writing day {i}")
            write_day(target, i, meta, ((encoder.encode(block), block.held_out) for block in blocks))
    return meta
