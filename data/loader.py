"""Opens the two data sets of a run, and reads their batches ahead of the training loop."""

import contextlib
import functools
import math
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Self

import numpy as np
import torch

from dlrm_overlap.config import HELD_BATCHES, DataConfig, InputError
from dlrm_overlap.data.batch import Batch, Dataset, Records
from dlrm_overlap.data.criteo import Criteo
from dlrm_overlap.data.prepared import Prepared
from dlrm_overlap.data.records import Unpacker
from dlrm_overlap.data.ring import Form, Ring
from dlrm_overlap.data.synthetic import Synthetic

_CPU = torch.device("cpu")


class Slice(Dataset):
    """A view of the samples [start, start + num_samples) of a data set. Positions wrap at the view's own end."""

    def __init__(self, dataset: Dataset, start: int, num_samples: int, shuffle: int = 0, seed: int = 0):
        """With `shuffle`, so many successive samples are in an order drawn from `seed`, another one in each pass."""
        assert num_samples >= 1
        self.rows, self.pooling, self.bag_sizes = dataset.rows, dataset.pooling, dataset.bag_sizes
        self.max_ids, self.dense_features = dataset.max_ids, dataset.dense_features
        self.num_samples: int = num_samples
        self.packed = dataset.packed
        self.label_names, self.label_weights = dataset.label_names, dataset.label_weights
        self._dataset, self._start, self._shuffle, self._seed = dataset, start, shuffle, seed

    def fingerprint(self) -> str:
        """Return that of the whole data set."""
        return self._dataset.fingerprint()

    def read(self, first: int, count: int) -> Batch:
        """Return the samples [first, first + count), modulo the view's length."""
        return self._dataset.read_at(self._positions(np.arange(first, first + count)))

    def records_at(self, positions: np.ndarray) -> Records:
        """See `Dataset`."""
        return self._dataset.records_at(self._positions(positions))

    def _positions(self, positions: np.ndarray) -> np.ndarray:
        """Return the positions in the data set of samples at `positions`, which go on beyond the view's end.

        Example: 6 samples, shuffled by 4. Positions 0 to 3 are samples 0 to 3 in some order, 4 and 5 are 4 and 5; 6 to
        9 are samples 0 to 3 again, in another order.
        """
        if not self._shuffle:
            return self._start + positions % self.num_samples
        passes, within = np.divmod(positions, self.num_samples)
        windows = within // self._shuffle
        found = np.empty_like(positions)
        for each, window in set(zip(passes.tolist(), windows.tolist(), strict=True)):
            here, first = (passes == each) & (windows == window), window * self._shuffle
            size = min(self._shuffle, self.num_samples - first)
            found[here] = self._start + first + _order(self._seed, each, window, size)[within[here] - first]
        return found


@functools.lru_cache(4)
def _order(seed: int, epoch: int, window: int, size: int) -> np.ndarray:
    return np.random.default_rng((seed, epoch, window)).permutation(size)


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
    assert dataset.num_samples is not None, "files have an end"
    if held_out is not None:
        whole = Slice(dataset, 0, dataset.num_samples, config.shuffle, config.seed)
        return whole if config.shuffle else dataset, held_out
    held = int(dataset.num_samples * config.eval_fraction)
    if held == 0:
        raise InputError(
            f"data.eval_fraction: {config.eval_fraction} holds out none of {dataset.num_samples} samples; "
            f"raise it or set data.eval_path"
        )
    kept = dataset.num_samples - held
    return Slice(dataset, 0, kept, config.shuffle, config.seed), Slice(dataset, kept, held)


def open_held_out(config: DataConfig, device: torch.device = _CPU) -> Dataset:
    """Open the samples to evaluate on alone: those to train on need not be there if `config.eval_path` is set.

    Raises:
        InputError: as `open_datasets` does.
    """
    if config.eval_path is None:
        return open_datasets(config, device)[1]
    return open_files(config, config.eval_path)[0]


def open_files(config: DataConfig, path: str) -> tuple[Dataset, Dataset | None]:
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

    Reading starts at the first `next`. The thread or processes that read end after the last batch, when a read fails,
    when the loader is dropped, and before that by `close` or at the end of a `with` block.
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
            thread that asks for the first batch. With 0, a thread of this process reads instead.
        prefetch: batches that each worker, or the thread, reads ahead.
        pin_memory: give the batches in page-locked memory, for runs on a GPU. A batch that a worker has read is then
            lent: once it is dropped, and the copies that `Batch.to` started are done, its memory is used again. Keeping
            such batches stops the reading: keep a `clone`. Records that a worker has read are unpacked on the GPU, on
            the current stream, when `next` asks for them.
        distinct_steps: number of steps after which the first batches come again, from memory; 0 is never.
        timeout_s: seconds after which a batch that a worker has not read ends the reading.
    """

    def read(step: int, /) -> Any:
        return dataset.read((step * world_size + rank) * batch_size, batch_size)

    steps = range(first_step, last_step)
    if dataset.on_gpu:
        return Loader(_make_on_gpu(read, steps, distinct_steps), 0)
    form = _form_of(dataset, batch_size)
    unpack = None
    if dataset.packed is not None and pin_memory and workers:
        read = functools.partial(_read_records, dataset, batch_size, rank, world_size)
        form = Form(Records, [((batch_size, dataset.packed[0].record_bytes), torch.uint8)])
        unpack = functools.partial(Unpacker, *dataset.packed, _gpu())
    if distinct_steps:
        read = _repeating(read, distinct_steps)
    if workers == 0:
        return Loader(_read_by_thread(read, steps, prefetch, pin_memory), prefetch)
    slots_per_worker = prefetch + math.ceil(HELD_BATCHES / workers)
    ring = functools.partial(Ring, read, steps, form, workers, slots_per_worker, pin_memory, timeout_s)
    return Loader(_read_by_processes(ring, unpack), workers * slots_per_worker)


def _form_of(dataset: Dataset, b: int) -> Form:
    labels = len(dataset.label_names)
    shapes = [
        ((b, dataset.dense_features), torch.float32),
        ((b * len(dataset.rows),), torch.int32),
        ((b * dataset.max_ids,), torch.int32),
        ((b,) if labels == 1 else (b, labels), torch.float32),
    ]
    return Form(Batch, shapes)


def _gpu() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def _read_records(dataset: Dataset, batch_size: int, rank: int, world_size: int, step: int) -> Records:
    first = (step * world_size + rank) * batch_size
    return dataset.records_at(np.arange(first, first + batch_size))


def _repeating(read: Callable[[int], Any], distinct_steps: int) -> Callable[[int], Any]:
    # A worker keeps its own steps only, if distinct_steps is a multiple of the workers.
    remember = functools.cache(read)
    return lambda step: remember(step % distinct_steps)


def _make_on_gpu(read: Callable[[int], Batch], steps: range, distinct_steps: int) -> Generator[Batch, None, None]:
    kept: dict[int, tuple[Batch, torch.cuda.Event | None]] = {}
    for step in steps:
        if not distinct_steps:
            yield read(step)
            continue
        first_time = step % distinct_steps
        if first_time not in kept:
            batch = read(first_time)
            made = torch.cuda.Event() if batch.dense.is_cuda else None
            if made is not None:
                made.record()
            kept[first_time] = batch, made
        batch, made = kept[first_time]
        if made is not None:
            made.wait()  # on the current stream, which may be another than made it
        # In a KeyedJaggedTensor of its own, since one remembers the offsets and sums that a step has asked it for.
        yield Batch.from_tensors(*batch.tensors)


def _read_by_processes(
    make_ring: Callable[[], Ring], make_unpacker: Callable[[], Unpacker] | None
) -> Generator[Batch, None, None]:
    with contextlib.closing(make_ring()) as ring:  # before the GPU is used here, which forked processes must not do
        if make_unpacker is None:
            yield from ring
            return
        unpack = make_unpacker()
        for records in ring:
            batch = unpack(records)
            del records  # whose memory is free once it is copied
            yield batch


def _read_by_thread(
    read: Callable[[int], Batch], steps: range, prefetch: int, pin_memory: bool
) -> Generator[Batch, None, None]:
    device = torch.accelerator.current_device_index() if pin_memory else None

    def read_and_pin(step: int) -> Batch:
        batch = read(step)
        if device is None:
            return batch
        torch.accelerator.set_device_index(device)  # a thread starts out on GPU 0, where pinning would open a context
        return batch.pin_memory()

    pool = ThreadPoolExecutor(1, "loader")
    pending = deque()
    try:
        for step in steps:
            pending.append(pool.submit(read_and_pin, step))
            if len(pending) > prefetch:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)
