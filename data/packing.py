"""Packs the samples of a configuration, of any kind, into a folder of records: `dlrm-overlap prepare samples`."""

from collections.abc import Iterator
from pathlib import Path

from dlrm_overlap.config import DataConfig, InputError
from dlrm_overlap.data.batch import Batch, Dataset
from dlrm_overlap.data.days import Day, Ragged
from dlrm_overlap.data.loader import Loader, open_datasets
from dlrm_overlap.data.prepared import new_folder, write_samples
from dlrm_overlap.data.records import Layout

_BATCH = 8192  # samples that are packed at once


def pack_samples(config: DataConfig, target: Path, samples: int | None) -> Layout:
    """Pack the samples of `config` into the folder `target`, and return the content of its meta.json.

    Of those to train on the first `samples` are taken, None takes all. Those to evaluate on follow them.

    Raises:
        InputError: if samples are endless or bad, or if `target` is there or cannot be written to.
    """
    train, evaluated = open_datasets(config)
    if samples is None and train.num_samples is None:
        raise InputError(f"--samples: none, but those of data.kind {config.kind} have no end; say how many")
    end = min(each for each in (samples, train.num_samples) if each)
    sizes = [
        trained[0] if len({*trained, *held_out}) == 1 else None
        for trained, held_out in zip(train.bag_sizes, evaluated.bag_sizes, strict=True)
    ]
    layout = Layout(dict(train.labels), train.dense_features, train.rows, sizes, held_out=evaluated.num_samples)

    def read() -> Iterator[Day]:
        yield from _read(train, end, config.workers)
        yield from _read(evaluated, evaluated.num_samples or 0, config.workers)

    with new_folder(target):
        return write_samples(target, layout, read())


def _read(dataset: Dataset, end: int, workers: int) -> Iterator[Day]:
    """Yield the samples [0, end)."""
    with Loader(dataset, _BATCH, 0, 1, range(end // _BATCH), workers, 2, False) as loader:
        for batch in loader:
            yield _day_of(batch)
    if rest := end % _BATCH:
        yield _day_of(dataset.read(end - rest, rest))


def _day_of(batch: Batch) -> Day:
    lengths = batch.sparse.lengths().view(len(batch.sparse.keys()), -1)
    tables = batch.sparse.values().split(lengths.sum(1).tolist())
    ids = [Ragged(ids.numpy(), ends.numpy()) for ids, ends in zip(tables, lengths.cumsum(1), strict=True)]
    return Day("samples", batch.labels.view(lengths.shape[1], -1).numpy(), batch.dense.numpy(), ids)
