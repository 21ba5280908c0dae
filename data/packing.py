"""Packs the samples of a configuration, of any kind, into the days of a folder: `dlrm-overlap prepare samples`."""

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from dlrm_overlap.config import DataConfig, InputError
from dlrm_overlap.data.batch import Batch, Dataset
from dlrm_overlap.data.days import Day, Ragged
from dlrm_overlap.data.loader import make_loader, open_datasets
from dlrm_overlap.data.prepared import Meta, SourceDay, hold_days, write_day
from dlrm_overlap.data.schema import Categorical, Dense, Label, Schema

_BATCH = 8192  # samples that are packed at once
DAY_SAMPLES = 1 << 24


def pack_samples(
    config: DataConfig, target: Path, samples: int | None, dense: str = "float32", day_samples: int = DAY_SAMPLES
) -> Meta:
    """Pack the samples of `config` into the folder `target`, and return its meta.json.

    Those to evaluate on are held out. Started again, it goes on after the last day that was done.

    Args:
        config: of the samples, which `config.workers` processes read.
        target: folder of the days.
        samples: the first ones to train on that are taken; None takes all.
        dense: type of dense features: float32 or float16.
        day_samples: of a day; 8192 or a multiple, or fewer.

    Raises:
        InputError: if samples are endless or bad, or if `target` cannot be written to, is being written to by another
            process, or was made of other samples.
    """
    datasets = open_datasets(config)
    if samples is None and datasets[0].num_samples is None:
        raise InputError(f"--samples: none, but those of data.kind {config.kind} have no end; say how many")
    found = [dataset.num_samples for dataset in datasets]
    ends = [min(end for end in (samples, found[0]) if end), found[1] or 0]
    of = " and ".join(dataset.fingerprint() for dataset in datasets)
    days = [SourceDay(f"samples from {i} on of {of}", 0, 0) for i in range(0, max(ends), day_samples)]
    source = {**asdict(config), "workers": 0, "prefetch": 0, "samples": samples}
    rows = list(datasets[0].rows)
    with hold_days(target, Meta(_schema_of(datasets[0]).as_dict(), rows, days, dense, source)) as meta:
        for i in meta.unfinished:
            write_day(target, i, meta, _blocks(i, day_samples, datasets, ends, config.workers))
    return meta


def _blocks(
    i: int, size: int, datasets: tuple[Dataset, Dataset], ends: list[int], workers: int
) -> Iterator[tuple[Day, bool]]:
    for is_held_out, dataset in enumerate(datasets):
        end = min((i + 1) * size, ends[is_held_out])
        for batch in _batches(dataset, i * size, end, min(size, _BATCH), workers):
            yield _day_of(batch, dataset), bool(is_held_out)


def _batches(dataset: Dataset, first: int, end: int, size: int, workers: int) -> Iterator[Batch]:
    """Yield the samples [first, end); `first` is a multiple of `size`."""
    last = max(first, end // size * size)
    with make_loader(dataset, size, 0, 1, first // size, last // size, workers, 2, False) as loader:
        yield from loader
    if last < end:
        yield dataset.read(last, end - last)


def _day_of(batch: Batch, dataset: Dataset) -> Day:
    lengths = batch.sparse.lengths().view(len(dataset.rows), -1)
    tables = batch.sparse.values().split(lengths.sum(1).tolist())
    ids = [Ragged(ids.numpy(), ends.numpy()) for ids, ends in zip(tables, lengths.cumsum(1), strict=True)]
    return Day("samples", batch.labels.view(lengths.shape[1], -1).numpy(), batch.dense.numpy(), ids)


def _schema_of(dataset: Dataset) -> Schema:
    columns = [
        Categorical("int", rows, list=True, size=low if low == high else None)
        for rows, (low, high) in zip(dataset.rows, dataset.bag_sizes, strict=True)
    ]
    return Schema(
        labels={name: Label(weight) for name, weight in zip(dataset.label_names, dataset.label_weights, strict=True)},
        dense={f"dense_{i}": Dense() for i in range(dataset.dense_features)},
        categorical={f"t_{t}": column for t, column in enumerate(columns)},
    )
