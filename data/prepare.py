"""Writes folders of records that training maps from disk: `dlrm-overlap prepare`."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from dlrm_overlap.config import DataConfig, InputError
from dlrm_overlap.data.batch import Batch, Dataset
from dlrm_overlap.data.day import Day, Ragged
from dlrm_overlap.data.encoding import FOLDER, Encoded, Unknown, unknown_values, write_encoding
from dlrm_overlap.data.loader import Loader, open_datasets
from dlrm_overlap.data.prepared import new_folder, write_samples
from dlrm_overlap.data.records import RecordLayout
from dlrm_overlap.data.schema import Schema
from dlrm_overlap.launching.progress_bar import ProgressBar

_T = TypeVar("_T")
_BATCH = 8192  # samples packed at once
_BLOCK_BYTES = 1 << 21  # of text, so that a block's arrays stay near the caches


def prepare_files(
    source: Path, target: Path, schema: Schema | None, block_bytes: int = _BLOCK_BYTES, like: Encoded | None = None
) -> tuple[RecordLayout, list[Unknown]]:
    """Convert the files at `source` to the folder `target`.

    Without `like`, vocabularies are learnt from all files first. Memory: about ten times `block_bytes`, 16 bytes per
    distinct value of vocabularies, and about five times the vocabulary of one table while it is merged.

    Args:
        like: encode by this encoding's schema and vocabularies; then `schema` is None.

    Returns:
        The content of meta.json, and the columns with unknown values, which only `like` may leave.

    Raises:
        InputError: if the files or the encoding cannot be read.
        ModuleNotFoundError: without pyarrow.
    """
    from dlrm_overlap.data.encoder import Encoder  # needs pyarrow
    from dlrm_overlap.data.table_files import count_rows, read_files, table_files

    encoding = like and like.read()
    schema = encoding.schema if encoding else schema
    assert schema is not None, "a schema, or an encoding, which has one"
    files, encoder = table_files(source), Encoder(schema, encoding and encoding.keys)

    def read(bar: ProgressBar, use: Callable[[int, Any], _T]) -> Iterator[_T]:
        def count(file: Path, row: int, block: Any) -> _T:
            used = use(row, block)
            bar.advance(block.num_rows)
            return used

        return read_files(files, schema, block_bytes, bar, count, "correct the file, or the schema")

    with new_folder(target):
        rows = count_rows(files)
        if encoder.learns:
            with ProgressBar("counting values", rows) as bar:
                for _ in read(bar, encoder.learn):
                    pass
            rows = bar.count
        encoded = like.copy(target / FOLDER) if like else write_encoding(target / FOLDER, schema, encoder.finish())
        labels = {name: label.weight for name, label in schema.labels.items()}
        sizes = [None if column.list else 1 for column in schema.categorical.values()]
        layout = RecordLayout(labels, max(1, len(schema.dense)), encoder.rows, sizes, encoding=encoded.digest)
        with ProgressBar("writing samples", rows) as bar:
            layout = write_samples(target, layout, read(bar, encoder.encode), timed=bool(schema.time))
        if not layout.samples:
            raise InputError(f"{source}: no samples; name a file, or a folder, that has some")
        if encoder.learns and layout.samples != rows:
            raise InputError(
                f"{source}: {rows} rows when values were counted, then {layout.samples}, so it has changed meanwhile; "
                f"prepare it again once nothing writes to it"
            )
        return layout, unknown_values(*encoder.take_counts(), schema) if like else []


def prepare_samples(config: DataConfig, target: Path, samples: int | None) -> RecordLayout:
    """Write samples as records into the folder `target`, and return the content of its meta.json.

    They are the first `samples` training samples of `config` (None: all), then the held-out samples.
    """
    train, evaluated = open_datasets(config)
    if samples is None and train.num_samples is None:
        raise InputError(f"--samples: none, but those of data.kind {config.kind} have no end; say how many")
    end = min(each for each in (samples, train.num_samples) if each)
    sizes = [
        trained[0] if len({*trained, *held_out}) == 1 else None
        for trained, held_out in zip(train.bag_sizes, evaluated.bag_sizes, strict=True)
    ]
    encoded, held_out = train.encoded, evaluated.num_samples
    layout = RecordLayout(
        dict(train.labels),
        train.dense_features,
        train.rows,
        sizes,
        held_out=held_out,
        encoding=encoded and encoded.digest,
    )

    def read(bar: ProgressBar) -> Iterator[Day]:
        for dataset, samples in ((train, end), (evaluated, held_out or 0)):
            for day in _read(dataset, samples, config.workers):
                yield day
                bar.advance(len(day.labels))

    with new_folder(target):
        if encoded:
            encoded.copy(target / FOLDER)
        timed = all(each.times(0, 1) is not None for each in (train, evaluated))
        with ProgressBar("writing samples", end + (held_out or 0), "samples") as bar:
            return write_samples(target, layout, read(bar), timed)


def _read(dataset: Dataset, end: int, workers: int) -> Iterator[Day]:
    with Loader(dataset, _BATCH, 0, 1, range(end // _BATCH), workers, 2, False) as loader:
        for step, batch in enumerate(loader):
            yield _day_of(batch, dataset.times(step * _BATCH, _BATCH))
    if rest := end % _BATCH:
        yield _day_of(dataset.read(end - rest, rest), dataset.times(end - rest, rest))


def _day_of(batch: Batch, times: np.ndarray | None) -> Day:
    lengths = batch.sparse.lengths().view(len(batch.sparse.keys()), -1)
    tables = batch.sparse.values().split(lengths.sum(1).tolist())
    ids = [Ragged(ids.numpy(), ends.numpy()) for ids, ends in zip(tables, lengths.cumsum(1), strict=True)]
    return Day("samples", batch.labels.view(lengths.shape[1], -1).numpy(), batch.dense.numpy(), ids, times=times)
