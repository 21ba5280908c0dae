"""Opens the two data sets of a run, and reads their batches ahead of the training loop."""

import math
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import AbstractContextManager, closing
from functools import partial

import torch

from dlrm_overlap.config import HELD_BATCHES, DataConfig, InputError
from dlrm_overlap.data.batch import Batch, Dataset
from dlrm_overlap.data.criteo import Criteo
from dlrm_overlap.data.days import Days
from dlrm_overlap.data.prepared import Prepared
from dlrm_overlap.data.records import Unpacker
from dlrm_overlap.data.ring import Form, Lent, Ring
from dlrm_overlap.data.synthetic import Synthetic

_CPU = torch.device("cpu")

PREPARE_TOGETHER = (
    "its ids were made by another vocabulary or hash, so no key makes them fit; prepare both in one `dlrm-overlap "
    "prepare` command, or, to prepare them apart, hash every column into the same rows in both"
)
"""in messages, why samples with other rows are refused, and the cure"""


def open_datasets(config: DataConfig, device: torch.device = _CPU) -> tuple[Dataset, Dataset]:
    """Open the samples to train on and those to evaluate on, and return both in this order.

    Raises:
        InputError: if files are missing or malformed, if no sample would be held out, or if the two differ in their
            tables' rows.
    """
    if config.kind == "synthetic":
        if device.type == "cuda":
            from dlrm_overlap.data.synthetic_device import DeviceSynthetic  # loads Triton, which a CPU may lack

            return DeviceSynthetic(config, "train", device), DeviceSynthetic(config, "eval", device)
        return Synthetic(config, "train"), Synthetic(config, "eval")
    dataset = open_files(config, config.path)
    held = dataset.held_out
    if config.eval_path is None and held is None:
        held = int(dataset.num_samples * config.eval_fraction)
        if held == 0:
            raise InputError(
                f"data.eval_fraction: {config.eval_fraction} holds out none of {dataset.num_samples} samples; "
                f"raise it or set data.eval_path"
            )
    kept = dataset.num_samples - (held or 0)
    held_out = dataset.part(kept, held or 0) if config.eval_path is None else open_files(config, config.eval_path)
    if foreign := other_ids(held_out.made_for, dataset.made_for):
        raise InputError(f"data.eval_path: {config.eval_path} has {foreign} in {config.path}; {PREPARE_TOGETHER}")
    return dataset.part(0, kept, config.shuffle, config.seed), held_out


def other_ids(rows: Sequence[int], expected: Sequence[int]) -> str:
    """Return how tables of `rows` differ from those of `expected` rows, in words; empty if they do not."""
    if len(rows) != len(expected):
        return f"{len(rows)} tables, not {len(expected)} as"
    pairs = enumerate(zip(rows, expected, strict=True))
    differing = (f"{found} rows in table {t}, not {other} as" for t, (found, other) in pairs if found != other)
    return next(differing, "")


def open_files(config: DataConfig, path: str | None) -> Days:
    """Open the samples at `path` (config.path or config.eval_path) in the format that config.kind names.

    Raises:
        InputError: if they do not exist, are empty or break their format.
    """
    assert path is not None, "DataConfig.require_source asks for the path of a file kind"
    if config.kind == "prepared":
        return Prepared(path, config.tables)
    return Criteo(path, config.tables, multi_hot=config.kind == "criteo_multihot")


class Loader(Iterator[Batch], AbstractContextManager["Loader"]):
    """The batches of one rank in some steps, read ahead of the training loop, for a single pass.

    The batch of step s holds the samples [s W b + rank b, s W b + rank b + b) of the data set, with b samples a rank on
    W ranks. A data set on the GPU makes them when `next` asks for them, on the current stream, without workers.

    Reading starts at the first `next`. The processes that read end after the last batch, when a read fails, when the
    loader is dropped, and before that by `close` or at the end of a `with` block.
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
        """Take the samples, b (`batch_size`), the number of this rank and of all, the steps, and how they are read.

        Args:
            workers: processes that read in turn; they end with the thread that asks for the first batch. They are
                forked, so data sets must not touch CUDA. With 0, `next` reads.
            prefetch: batches that each worker reads ahead.
            pin_memory: give the batches in page-locked memory, for runs on a GPU. A batch that a worker has read is
                then lent: once it is dropped, and the copies that `Batch.to` started are done, its memory is used
                again. Keep a `clone` instead. Records are unpacked on the GPU, on the current stream, in `next`.
            timeout_s: seconds after which a batch that a worker has not read ends the reading.
        """
        is_packed = dataset.packed is not None and pin_memory and workers > 0
        slots = prefetch + math.ceil(HELD_BATCHES / max(workers, 1))  # of each worker

        def read(step: int) -> Sequence[torch.Tensor]:
            first = (step * world_size + rank) * batch_size
            return (dataset.records(first, batch_size),) if is_packed else dataset.read(first, batch_size).tensors

        def read_here() -> Generator[Batch, None, None]:
            for step in steps:
                batch = Batch.from_tensors(*read(step))
                yield batch.pin_memory() if pin_memory and not dataset.on_gpu else batch

        def read_by_processes() -> Generator[Batch, None, None]:
            ring = Ring(read, steps, _form_of(dataset, batch_size, is_packed), workers, slots, pin_memory, timeout_s)
            with closing(ring):  # before the GPU is used here, which forked processes must not do
                unpack = Unpacker(dataset.packed, _gpu()) if is_packed else None
                yield from map(partial(_batch_of, unpack), ring)  # so that nothing here holds a batch

        reads_here = dataset.on_gpu or not workers
        self._source = read_here() if reads_here else read_by_processes()
        self.read_ahead = 0 if reads_here else workers * slots
        """greatest number of batches that are read before `next` asks for them"""
        self.wait_s = 0.0
        """seconds that the CPU has spent in `next` so far, waiting for a batch"""

    def __next__(self) -> Batch:
        """Return the next batch, on the CPU or, where the data set makes its samples there, ready for this stream."""
        start = time.perf_counter()
        try:
            return next(self._source)
        finally:
            self.wait_s += time.perf_counter() - start

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the reading. After this, `next` gives no batch."""
        self._source.close()


def _form_of(dataset: Dataset, b: int, is_packed: bool) -> Form:
    if is_packed:
        return [((b, dataset.packed.record_bytes), torch.uint8)]
    labels = len(dataset.labels)
    return [
        ((b, dataset.dense_features), torch.float32),
        ((b * len(dataset.rows),), torch.int32),
        ((b * dataset.max_ids,), torch.int32),
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
