"""Opens the two data sets of a run, and reads their batches ahead of the training loop."""

import contextlib
import functools
import math
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any, Self

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
    assert config.path is not None, "DataConfig.require_source asks for the path of a file kind"
    dataset, held_out = open_files(config, config.path)
    if config.eval_path is not None:
        held_out, _ = open_files(config, config.eval_path)
        if list(held_out.rows) != list(dataset.rows):
            raise InputError(
                f"data.eval_path: {config.eval_path} has tables of other rows than {config.path}; set data.tables.rows "
                f"to the rows both were made for"
            )
    if held_out is not None:
        return dataset.part(0, dataset.num_samples, config.shuffle, config.seed), held_out
    held = int(dataset.num_samples * config.eval_fraction)
    if held == 0:
        raise InputError(
            f"data.eval_fraction: {config.eval_fraction} holds out none of {dataset.num_samples} samples; "
            f"raise it or set data.eval_path"
        )
    kept = dataset.num_samples - held
    return dataset.part(0, kept, config.shuffle, config.seed), dataset.part(kept, held)


def open_held_out(config: DataConfig, device: torch.device = _CPU) -> Dataset:
    """Open the samples to evaluate on alone: those to train on need not be there if `config.eval_path` is set.

    Raises:
        InputError: as `open_datasets` does.
    """
    if config.eval_path is None:
        return open_datasets(config, device)[1]
    return open_files(config, config.eval_path)[0]


def open_files(config: DataConfig, path: str) -> tuple[Days, Days | None]:
    """Open the samples at `path` (config.path or config.eval_path) in the format that config.kind names.

    Returns:
        The samples, and those that their schema holds out by time.

    Raises:
        InputError: if they do not exist, are empty or break their format.
    """
    tables = config.tables
    if config.kind in ("criteo_npy", "criteo_multihot"):
        return Criteo(path, tables, multi_hot=config.kind == "criteo_multihot"), None
    dataset = Prepared(path, tables)
    return dataset, Prepared(path, tables, held_out=True) if dataset.holds_out else None


class Loader(Iterator[Batch]):
    """One rank's batches, read ahead of the training loop, for a single pass.

    Reading starts at the first `next`. The processes that read end after the last batch, when a read fails, when the
    loader is dropped, and before that by `close` or at the end of a `with` block.
    """

    def __init__(self, source: Generator[Batch, None, None], read_ahead: int):
        self._source = source
        self.read_ahead = read_ahead
        """greatest number of batches that are read before `next` asks for them"""
        self.wait_s = 0.0
        """seconds that the host has spent in `next` so far, waiting for a batch"""

    def __next__(self) -> Batch:
        """Return the next batch, on the CPU or, where the data set makes its samples there, ready for this stream."""
        start = time.perf_counter()
        try:
            return next(self._source)
        finally:
            self.wait_s += time.perf_counter() - start

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the reading. After this, `next` gives no batch."""
        self._source.close()


def make_loader(
    dataset: Dataset,
    batch_size: int,
    rank: int,
    world_size: int,
    first_step: int,
    last_step: int,
    workers: int,
    prefetch: int,
    pin_memory: bool,
    distinct_steps: int = 0,
    timeout_s: float = math.inf,
) -> Loader:
    """Return a loader of the batches of rank `rank` in the steps [first_step, last_step).

    The batch of step s holds the samples [s W b + rank b, s W b + rank b + b) of `dataset`, where b is `batch_size`.

    Args:
        dataset: the samples. One on the GPU makes them when `next` asks for them, on the current stream; `workers`,
            `prefetch` and `pin_memory` have no effect then.
        batch_size: samples of a rank and step, b.
        rank: this rank.
        world_size: number of ranks, W.
        first_step: first step to read.
        last_step: the step after the last one to read.
        workers: processes that read in turn. They are forked, so data sets must not touch CUDA, and they end with the
            thread that asks for the first batch. With 0, `next` reads.
        prefetch: batches that each worker reads ahead.
        pin_memory: give the batches in page-locked memory, for runs on a GPU. A batch that a worker has read is then
            lent: once it is dropped, and the copies that `Batch.to` started are done, its memory is used again. Keeping
            such batches stops the reading: keep a `clone`. Records that a worker has read are unpacked on the GPU, on
            the current stream, when `next` asks for them.
        distinct_steps: number of steps after which the first batches come again, from memory; 0 is never.
        timeout_s: seconds after which a batch that a worker has not read ends the reading.
    """
    is_packed = dataset.packed is not None and pin_memory and workers > 0

    def read(step: int, /) -> Sequence[torch.Tensor]:
        first = (step * world_size + rank) * batch_size
        return (dataset.records(first, batch_size),) if is_packed else dataset.read(first, batch_size).tensors

    steps = range(first_step, last_step)
    if distinct_steps:
        read = _repeating(read, distinct_steps)
    if dataset.on_gpu or not workers:
        return Loader(_read_here(read, steps, pin_memory and not dataset.on_gpu), 0)
    slots_per_worker = prefetch + math.ceil(HELD_BATCHES / workers)
    ring = functools.partial(
        Ring, read, steps, _form_of(dataset, batch_size, is_packed), workers, slots_per_worker, pin_memory, timeout_s
    )
    return Loader(_read_by_processes(ring, dataset.packed if is_packed else None), workers * slots_per_worker)


def _form_of(dataset: Dataset, b: int, is_packed: bool) -> Form:
    if is_packed:
        return [((b, dataset.packed[0].record_bytes), torch.uint8)]
    labels = len(dataset.label_names)
    return [
        ((b, dataset.dense_features), torch.float32),
        ((b * len(dataset.rows),), torch.int32),
        ((b * dataset.max_ids,), torch.int32),
        ((b,) if labels == 1 else (b, labels), torch.float32),
    ]


def _repeating(
    read: Callable[[int], Sequence[torch.Tensor]], distinct_steps: int
) -> Callable[[int], Sequence[torch.Tensor]]:
    # A worker keeps its own steps only, if distinct_steps is a multiple of the workers.
    @functools.cache
    def remember(step: int) -> Sequence[torch.Tensor]:
        tensors = read(step)
        if tensors[0].is_cuda:
            torch.cuda.current_stream().synchronize()  # another stream may ask for them again
        return tensors

    return lambda step: remember(step % distinct_steps)


def _read_here(
    read: Callable[[int], Sequence[torch.Tensor]], steps: range, pin_memory: bool
) -> Generator[Batch, None, None]:
    for step in steps:
        # In a KeyedJaggedTensor of its own, since one remembers the offsets and sums that a step has asked it for.
        batch = Batch.from_tensors(*read(step))
        yield batch.pin_memory() if pin_memory else batch


def _read_by_processes(make_ring: Callable[[], Ring], packed: tuple[Any, Any] | None) -> Generator[Batch, None, None]:
    with contextlib.closing(make_ring()) as ring:  # before the GPU is used here, which forked processes must not do
        unpack = Unpacker(*packed, _gpu()) if packed else None

        def finish(lent: Lent) -> Batch:
            if unpack is None:
                batch = Batch.from_tensors(*lent.tensors)
                batch.lease = lent.lease
                return batch
            records = lent.tensors[0].to(_gpu(), non_blocking=True)
            if lent.lease is not None:
                lent.lease.copying()
            return unpack(records)

        yield from map(finish, ring)  # so that nothing here holds a batch


def _gpu() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())
