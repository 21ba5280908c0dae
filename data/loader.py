"""Opens a run's two data sets, and reads their batches ahead of the training loop."""

import math
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import AbstractContextManager, closing
from functools import partial

import torch

from dlrm_overlap.config import EVAL_FRACTION, HELD_BATCHES, DataConfig, InputError
from dlrm_overlap.data.batch import Batch, Dataset, id_type
from dlrm_overlap.data.criteo import Criteo
from dlrm_overlap.data.days import Days
from dlrm_overlap.data.encoding import other_encoding
from dlrm_overlap.data.prepared import Prepared
from dlrm_overlap.data.records import Unpacker
from dlrm_overlap.data.ring import Form, Lent, Ring
from dlrm_overlap.data.synthetic import Synthetic
from dlrm_overlap.data.times import text_of, time_of
from dlrm_overlap.launching.text_table import count_of

_CPU = torch.device("cpu")

_NO_TIMES = "the samples have no times; name their column as `time` in the schema, and prepare again"
PREPARE_TOGETHER = "no key makes these ids fit; prepare both in one `dlrm-overlap prepare` command"


def open_datasets(config: DataConfig, device: torch.device = _CPU) -> tuple[Dataset, Dataset]:
    """Return the data sets to train on and to evaluate on.

    Raises:
        InputError: if files are malformed, no sample is held out, or the two sets have different tables or columns.
    """
    if config.kind == "synthetic":
        if device.type == "cuda":
            from dlrm_overlap.data.synthetic_device import DeviceSynthetic  # needs Triton

            return DeviceSynthetic(config, "train", device), DeviceSynthetic(config, "eval", device)
        return Synthetic(config, "train"), Synthetic(config, "eval")
    # The range of samples to train on.
    dataset = open_files(config, config.path)
    held, begin = _held_out_of(config, dataset), 0
    if config.train_from:
        begin = first_from(dataset, config.train_from, "data.train_from")
    kept = dataset.num_samples - held - begin
    if held == dataset.num_samples:
        raise InputError(
            f"data.eval_from: {config.eval_from} holds out all of {held} samples, so none is left to train on; take a "
            f"later time, or, to evaluate all of them, give them as data.eval_path"
        )
    if kept <= 0:
        raise InputError(
            f"data.train_from: {config.train_from} leaves none of {dataset.num_samples - held} samples to train on; "
            f"take an earlier one"
        )
    # The held-out samples, whose ids and columns must fit.
    if config.eval_path is None:
        held_out = dataset.part(begin + kept, held)
    else:
        held_out = open_files(config, config.eval_path)
        expected = dataset.encoded and dataset.encoded.digest
        made_by = f"the samples of {config.path}"
        if other := other_encoding(config.eval_path, held_out.encoded, made_by, expected, str(config.path)):
            raise InputError(f"data.eval_path: {other}")
        if foreign := other_ids(held_out.made_for, dataset.made_for):
            raise InputError(f"data.eval_path: {config.eval_path} has {foreign} in {config.path}; {PREPARE_TOGETHER}")
        for columns, found, has in (
            ("dense features", held_out.dense_features, dataset.dense_features),
            ("labels", len(held_out.labels), len(dataset.labels)),
        ):
            if found != has:
                raise InputError(
                    f"data.eval_path: {config.eval_path} has {found} {columns}, not {has} as {config.path}; prepare "
                    f"both from the same columns"
                )
    if config.eval_window and held_out.unordered is None:
        raise InputError(f"data.eval_window: {config.eval_window}, but {_NO_TIMES}")
    return dataset.part(begin, kept, config.shuffle, config.seed), held_out


def _held_out_of(config: DataConfig, dataset: Days) -> int:
    """Return the number of last samples of data.path to evaluate on."""
    samples = dataset.num_samples
    if config.eval_from is not None:
        if held := samples - first_from(dataset, config.eval_from, "data.eval_from"):
            return held
        raise InputError(
            f"data.eval_from: {config.eval_from} holds out none of {samples} samples, which end at "
            f"{text_of(dataset.time_of(samples - 1))}; take an earlier time"
        )
    if config.eval_path is not None or (dataset.held_out is not None and config.eval_fraction is None):
        return dataset.held_out or 0
    fraction = EVAL_FRACTION if config.eval_fraction is None else config.eval_fraction
    if held := int(samples * fraction):
        return held
    raise InputError(
        f"data.eval_fraction: {fraction} holds out none of {samples} samples; raise it or set data.eval_path"
    )


def first_from(dataset: Days, start: int | str, key: str) -> int:
    """Return the number of the first sample at `start`, a number or a time, or later; all samples if there is none."""
    samples = dataset.num_samples
    if isinstance(start, int):
        return min(start, samples)
    if dataset.unordered is None:
        raise InputError(f"{key}: {start}, but {_NO_TIMES}")
    return dataset.first_from(time_of(start))


def warnings_of_time(train: Days, held_out: Days) -> list[str]:
    """Return what is wrong with the samples' order in time; nothing if they have no times."""
    found = [
        f"{count_of(each.unordered, 'sample')} of {each.name} are older than one before them, so the last samples are "
        f"not the newest; sort the table by time and prepare it again"
        for each in {each.name: each for each in (train, held_out)}.values()
        if each.unordered
    ]
    last, first = train.last_time(), held_out.first_time()
    if last is not None and first is not None and first < last:
        found.append(
            f"evaluation begins at {text_of(first)}, before training ends at {text_of(last)}, so its metrics are not "
            f"those of a later time; set data.eval_from, or evaluate a later table"
        )
    return found


def other_ids(rows: Sequence[int | None], expected: Sequence[int | None]) -> str:
    if len(rows) != len(expected):
        return f"{len(rows)} tables, not {len(expected)} as"
    pairs = enumerate(zip(rows, expected, strict=True))
    differing = (
        f"{_rows_text(found)} in table {t}, not {_rows_text(other)} as" for t, (found, other) in pairs if found != other
    )
    return next(differing, "")


def _rows_text(rows: int | None) -> str:
    return "any id" if rows is None else f"{rows} rows"


def open_files(config: DataConfig, path: str | None) -> Days:
    """Open the samples at `path` in the format `config.kind`. Raises an InputError if missing, empty or malformed."""
    assert path is not None, "DataConfig.require_source asks for the path of a file kind"
    if config.kind == "prepared":
        return Prepared(path, config.tables)
    return Criteo(path, config.tables, multi_hot=config.kind == "criteo_multihot")


class Loader(Iterator[Batch], AbstractContextManager["Loader"]):
    """Iterates once over one rank's batches of some steps, read ahead of the training loop.

    The batch of step s has the samples [s W b + rank b, s W b + rank b + b), for b samples per rank on W ranks. Reading
    starts at the first `next`. The reader processes end after the last batch, when a read fails, or when the loader is
    dropped or closed. A data set on the GPU needs no readers: it makes samples in `next`, on the current stream.
    """

    def __init__(
        self,
        dataset: Dataset,
        batch_size: int,
        rank: int,
        world_size: int,
        steps: range,
        workers: int,
        prefetch: int,
        pin_memory: bool,
        timeout_s: float = math.inf,
    ) -> None:
        """Prepare to read; no process starts yet.

        Args:
            workers: number of reader processes. They are forked, so data sets must not touch CUDA, and end with the
                thread that asks for the first batch. With 0, `next` reads.
            prefetch: batches that each worker reads ahead.
            pin_memory: return page-locked batches. The memory of a batch is reused once the batch is dropped and the
                copies that `Batch.to` started are done. `next` unpacks records on the GPU, on the current stream.
            timeout_s: seconds to wait for a worker's batch.
        """
        is_packed = dataset.packed is not None and pin_memory and workers > 0
        slots = prefetch + math.ceil(HELD_BATCHES / max(workers, 1))  # per worker

        def read(step: int) -> Sequence[torch.Tensor]:
            first = (step * world_size + rank) * batch_size
            return (dataset.records(first, batch_size),) if is_packed else dataset.read(first, batch_size).tensors

        def read_here() -> Generator[Batch, None, None]:
            for step in steps:
                batch = Batch.from_tensors(*read(step))
                yield batch.pin_memory() if pin_memory and not dataset.on_gpu else batch

        def read_by_processes() -> Generator[Batch, None, None]:
            ring = Ring(read, steps, _form_of(dataset, batch_size, is_packed), workers, slots, pin_memory, timeout_s)
            with closing(ring):  # forks before the GPU is used here
                unpack = Unpacker(dataset.packed, _gpu()) if is_packed else None
                yield from map(partial(_batch_of, unpack), ring)  # keeps no reference to a batch

        reads_here = dataset.on_gpu or not workers
        self._source = read_here() if reads_here else read_by_processes()
        self.read_ahead = 0 if reads_here else workers * slots
        """maximum number of batches read before `next` asks for them"""
        self.wait_s = 0.0

    def __next__(self) -> Batch:
        start = time.perf_counter()
        try:
            return next(self._source)
        finally:
            self.wait_s += time.perf_counter() - start

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._source.close()


def _form_of(dataset: Dataset, b: int, is_packed: bool) -> Form:
    if is_packed:
        return [((b, dataset.packed.record_bytes), torch.uint8)]
    labels = len(dataset.labels)
    return [
        ((b, dataset.dense_features), torch.float32),
        ((b * len(dataset.rows),), torch.int32),
        ((b * dataset.max_ids,), id_type(dataset.rows)),
        ((b,) if labels == 1 else (b, labels), torch.float32),
    ]


def _batch_of(unpack: Unpacker | None, lent: Lent) -> Batch:
    tensors, lease = lent
    if unpack is None:
        batch = Batch.from_tensors(*tensors)
        batch.lease = lease
        return batch
    records = tensors[0].to(_gpu(), non_blocking=True)
    if lease is not None:
        lease.copying()
    return unpack(records)


def _gpu() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())
