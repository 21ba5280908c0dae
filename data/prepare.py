"""Turns files of samples into records that training maps from disk: `dlrm-overlap prepare`.

File i of IN, in natural order, becomes OUT's day i (`prepared`). One process at a time writes to OUT. A schema says how
ids are made: by a hash of the value, or from a vocabulary, which is learnt of all files first and kept in
vocabulary.npz beside the days (`encoder`). Days that another run prepares have other vocabularies, so the samples to
evaluate on must be held out of the same days.
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from dlrm_overlap.config import InputError
from dlrm_overlap.data.columns import Raw
from dlrm_overlap.data.days import Day
from dlrm_overlap.data.encoder import VOCABULARY, Encoder, Learnt, learn
from dlrm_overlap.data.prepared import Meta, SourceDay, hold_days, is_whole, read_meta, write_day, write_meta
from dlrm_overlap.data.schema import Schema
from dlrm_overlap.data.table_files import BLOCK_BYTES, read_rows, table_files


def prepare(
    source: Path,
    target: Path,
    schema: Schema,
    skip_bad_rows: bool = False,
    block_bytes: int = BLOCK_BYTES,
    dense: str = "float32",
) -> Meta:
    """Turn the files at `source` into the days of the folder `target`, and return its meta.json.

    It takes some ten times `block_bytes` of memory; to learn vocabularies, also 16 bytes for each distinct value of
    every table, and about five times those of one table while it merges them. With `skip_bad_rows`, bad rows are left
    out, and counted in meta.json.

    Started again, it keeps each day whose source has the same name, size and time of modification, and whose files are
    whole. Where something is learnt, a change of any source makes all days anew. Files appear whole or not at all.
    Standard error names each file as it is read.

    Raises:
        InputError: if there are no files or a bad row, or if `target` cannot be written to, is being written to by
            another process, or holds days of another making.
    """
    files = table_files(source, schema)
    stats = [file.stat() for file in files]
    days = [SourceDay(file.name, stat.st_size, stat.st_mtime_ns) for file, stat in zip(files, stats, strict=True)]
    rows = None if schema.learns else Encoder(schema, Learnt()).rows
    wanted = Meta(schema.as_dict(), rows, days, dense)
    with hold_days(target):
        meta = _resume(target, read_meta(target), wanted, schema)
        return _make(files, target, meta, schema, skip_bad_rows, block_bytes)


def _make(files: Sequence[Path], target: Path, meta: Meta, schema: Schema, skip: bool, block_bytes: int) -> Meta:
    """Make the days of `meta` that are not done, and return the meta.json that says so. The folder's lock is held."""
    pending = [i for i, day in enumerate(meta.days) if day.samples is None]
    if not pending:
        return meta
    write_meta(target, meta)

    def read(file: Path, purpose: str) -> Iterator[Raw]:
        print(f"{file.name}: {purpose}", file=sys.stderr)
        yield from read_rows(file, schema, skip, block_bytes)

    if meta.rows is None:
        learnt = learn((raw for file in files for raw in read(file, "counting values")), schema)
        learnt.write(target)
        meta = replace(meta, rows=Encoder(schema, learnt).rows)
        write_meta(target, meta)
    encoder = Encoder(schema, Learnt.read(target, schema) if schema.learns else Learnt())
    for i in pending:
        raw = read(files[i], f"writing day {i}")
        meta.days[i] = write_day(target, i, meta, _encoded(raw, encoder, files[i].name, meta.holds_out))
        write_meta(target, meta)
    return meta


def _encoded(blocks: Iterator[Raw], encoder: Encoder, name: str, holds_out: bool) -> Iterator[tuple[Day, bool, int]]:
    for raw in blocks:
        yield encoder.encode(raw.take(~raw.held_out), name), False, raw.skipped
        if holds_out:
            yield encoder.encode(raw.take(raw.held_out), name), True, 0


def _resume(target: Path, found: Meta | None, wanted: Meta, schema: Schema) -> Meta:
    """Return `wanted`, with the days that the folder already holds marked as done; `found` is its meta.json."""
    if found is None:
        if any(target.glob("day_*_*.npy")):
            raise InputError(f"{target}: holds day files of another making; choose another folder")
        return wanted
    made, making = (meta.schema | {"type of dense features": meta.dense} for meta in (found, wanted))
    if made != making:
        key = next(key for key, value in making.items() if made.get(key) != value)
        raise InputError(f"{target}: was prepared with other {key}; choose another folder or delete this one")
    if len(found.days) > len(wanted.days):
        raise InputError(
            f"{target}: holds {len(found.days)} days, but there are {len(wanted.days)} files; choose another folder or "
            f"delete this one"
        )
    fresh = [replace(old, samples=None, held_out=0, skipped=0) for old in found.days]
    same = [old == new for old, new in zip(fresh, wanted.days, strict=False)]
    counted = all(same) and len(same) == len(wanted.days) and (target / VOCABULARY).exists()
    if schema.learns and not counted:
        return wanted  # its rows are None, so values are counted anew
    days = list(wanted.days)
    for i, old in enumerate(found.days):
        if same[i] and is_whole(target, i, found):
            days[i] = old
    return replace(wanted, rows=found.rows, days=days)
