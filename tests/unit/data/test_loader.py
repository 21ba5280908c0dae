import gc
import multiprocessing
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Literal

import numpy as np
import pytest
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dlrm_overlap.config import DataConfig, InputError, TablesConfig
from dlrm_overlap.data import loader as loader_module
from dlrm_overlap.data import synthetic_device
from dlrm_overlap.data.batch import Batch, Dataset
from dlrm_overlap.data.day import Day, Ragged
from dlrm_overlap.data.days import Days
from dlrm_overlap.data.loader import Loader, open_datasets
from dlrm_overlap.data.synthetic import Synthetic
from tests.agreement import assert_same
from tests.conftest import refuses, wait_until

WORKERS = pytest.mark.parametrize("workers", [0, 1, 2])
MESSAGE = "day_0: label of sample 17 is 3, not 0 or 1; correct the file"


class Numbered(Dataset):
    """Sample i has the dense feature i and, in its one table, i % 3 ids, all i. `reads` lists the first samples."""

    def __init__(self, num_samples: int | None = None, bad: int | None = None, error: type[Exception] = InputError):
        self.rows, self.pooling, self.num_samples = [1000], [1.0], num_samples
        self.bag_sizes, self.dense_features = [(0, 2)], 1
        self.bad, self.error = bad, error
        self.read_s = 0.0
        self.reads: list[int] = []

    def read(self, first: int, count: int) -> Batch:
        time.sleep(self.read_s)
        self.reads.append(first)
        if self.bad is not None and first <= self.bad < first + count:
            raise self.error(MESSAGE)
        numbers = torch.arange(first, first + count, dtype=torch.int32)
        lengths = numbers % 3
        values = numbers.repeat_interleave(lengths)
        return Batch.from_tensors(numbers.float()[:, None], lengths, values, (numbers % 2).float())


def load(dataset: Dataset, workers: int, **changes) -> Loader:
    arguments = {"batch_size": 4, "rank": 0, "world_size": 1, "steps": range(8), "prefetch": 2}
    return Loader(dataset, workers=workers, **{"pin_memory": False, **arguments, **changes})


def tensors(batch: Batch) -> list[list]:
    return [tensor.tolist() for tensor in batch.tensors]


@pytest.fixture
def leaves_nothing_behind():
    threads = set(threading.enumerate())
    yield
    gone = lambda: not multiprocessing.active_children() and set(threading.enumerate()) <= threads  # noqa: E731
    wait_until(gone, 10, "a reader lives on")


@WORKERS
@pytest.mark.usefixtures("leaves_nothing_behind")
def test_batches_come_in_order_and_equal_direct_reads(workers: int):
    tables = TablesConfig(rows=[100, 7], multi_hot=["0..4", 2])
    dataset = Synthetic(DataConfig(tables=tables), "train")
    batches = list(load(dataset, workers, batch_size=8, rank=1, world_size=3, steps=range(5, 12)))
    assert len(batches) == 7
    for step, batch in enumerate(batches, start=5):
        expected = dataset.read((step * 3 + 1) * 8, 8)
        assert tensors(batch) == tensors(expected)
        assert batch.sparse.keys() == expected.sparse.keys() == ["t_00", "t_01"]
        assert (batch.sparse.lengths().dtype, batch.sparse.values().dtype) == (torch.int32, torch.int32)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_ranks_split_a_global_batch(world_size: int):
    loaders = [
        load(Numbered(), 0, batch_size=16 // world_size, rank=rank, world_size=world_size, steps=range(3, 5))
        for rank in range(world_size)
    ]
    for step in (3, 4):
        numbers = torch.cat([next(loader).dense.flatten() for loader in loaders])
        assert numbers.tolist() == list(range(step * 16, step * 16 + 16))


class MadeOnGpu(Numbered):
    """A data set that claims to make its samples on the GPU; `threads` are the threads that read."""

    on_gpu = True

    def read(self, first: int, count: int) -> Batch:
        self.threads = {*getattr(self, "threads", ()), threading.current_thread()}
        return super().read(first, count)


@WORKERS
@pytest.mark.usefixtures("leaves_nothing_behind")
def test_samples_of_the_gpu_are_made_where_and_when_they_are_asked_for(workers: int):
    dataset = MadeOnGpu()
    changes = {"rank": 1, "world_size": 2, "steps": range(1, 9)}
    loader = load(dataset, workers, pin_memory=True, **changes)
    assert (dataset.reads, loader.read_ahead) == ([], 0)
    batches = [next(loader)]
    assert len(dataset.reads) == 1
    batches += loader
    assert dataset.threads == {threading.current_thread()}
    with load(Numbered(), 0, **changes) as expected:
        assert [tensors(batch) for batch in batches] == [tensors(batch) for batch in expected]
    assert len(dataset.reads) == 8


@WORKERS
@pytest.mark.usefixtures("leaves_nothing_behind")
def test_input_error_arrives_in_its_turn_and_unchanged(workers: int):
    batches = load(Numbered(bad=17), workers)
    assert [int(next(batches).dense[0]) for _ in range(4)] == [0, 4, 8, 12]
    with refuses(f"^{MESSAGE}$"):
        next(batches)
    with pytest.raises(StopIteration):
        next(batches)


@WORKERS
@pytest.mark.usefixtures("leaves_nothing_behind")
def test_other_errors_are_not_swallowed(workers: int):
    # An error of another process is text with a traceback.
    with pytest.raises(RuntimeError if workers else KeyError, match="label of sample 17"):
        list(load(Numbered(bad=17, error=KeyError), workers))


@WORKERS
@pytest.mark.parametrize("taken", [0, 1, 8])
@pytest.mark.usefixtures("leaves_nothing_behind")
def test_closing_ends_the_reading(workers: int, taken: int):
    with load(Numbered(), workers) as batches:
        assert [int(next(batches).dense[0]) for _ in range(taken)] == list(range(0, 4 * taken, 4))
    assert list(batches) == []
    batches.close()


@WORKERS
@pytest.mark.usefixtures("leaves_nothing_behind")
def test_a_dropped_loader_ends_the_reading(workers: int):
    batches = load(Numbered(), workers, steps=range(10**9))
    next(batches)
    del batches
    gc.collect()


@pytest.mark.gpu
@WORKERS
@pytest.mark.usefixtures("leaves_nothing_behind")
def test_batches_are_pinned(workers: int):
    with load(Numbered(), workers, pin_memory=True) as batches:
        for step, batch in enumerate(batches):
            assert all(tensor.is_pinned() for tensor in batch.tensors)
            assert tensors(batch) == tensors(Numbered().read(4 * step, 4))


@pytest.mark.parametrize("weighted", [False, True])
def test_a_copy_on_another_stream_has_the_same_tensors_in_memory_of_the_current_one(
    weighted: bool, monkeypatch: pytest.MonkeyPatch
):
    """As TorchRec's in-place copies need it; the device is a CPU with streams that note what they are asked for."""
    calls: list[str] = []

    class Stream:
        def wait_stream(self, other: object) -> None:
            calls.append(f"waits for {other}")

    @contextmanager
    def stream(_: Stream) -> Iterator[None]:
        calls.append("begins")
        yield
        calls.append("ends")

    streams = SimpleNamespace(current_stream=lambda device: "the current one", stream=stream)
    monkeypatch.setattr(torch, "get_device_module", lambda device: streams)
    weights = torch.rand(3) if weighted else None
    ids = KeyedJaggedTensor(["f"], torch.tensor([7, 8, 9]), weights, lengths=torch.tensor([1, 2]))
    ids.to_dict()  # which TorchRec's copy would keep
    batch = Batch(torch.rand(2, 3), ids, torch.ones(2))
    batch.lease = SimpleNamespace(copying=lambda: calls.append("copied"))  # type: ignore[assignment]
    moved = batch._copied_on(Stream(), torch.device("cpu"), non_blocking=True)  # type: ignore[arg-type]
    assert calls == ["waits for the current one", "begins", "copied", "ends"]
    assert moved.lease is None
    for made, source in zip(moved._parts(), batch._parts(), strict=True):
        assert_same(made, source, "part")
        assert made.data_ptr() != source.data_ptr()
    assert_same(moved.sparse.to_dict()["f"].values(), ids.values(), "ids")
    assert moved.sparse.to_dict()["f"].values().data_ptr() != ids.values().data_ptr()


def test_a_part_wraps_table_by_table():
    bags = np.array([2, 0, 3, 1, 1, 0, 4, 2, 1, 5])
    ids = [Ragged(np.arange(bags.sum(), dtype=np.int32), bags.cumsum()), np.arange(20, dtype=np.int32).reshape(10, 2)]
    dataset = Days([Day("day_0", np.zeros((10, 1)), np.arange(10.0)[:, None], ids)], [100, 50], None)
    part = dataset.part(3, 6)
    wrapped, batches = part.read(4, 5), [dataset.read(7, 2), dataset.read(3, 3)]
    for key in ("t_00", "t_01"):
        expected = [bag.tolist() for batch in batches for bag in batch.sparse[key].to_dense()]
        assert [bag.tolist() for bag in wrapped.sparse[key].to_dense()] == expected
    assert (part.rows, part.pooling, part.num_samples) == ([100, 50], [1.9, 2.0], 6)


def test_sizes_of_bags_are_those_of_all_days():
    """A day without samples, 3 of 2 ids a bag, and 1 of 5; the ranges decide on the memory of a batch."""
    shapes = (0, 7), (3, 2), (1, 5)
    days = [Day("d", np.zeros((n, 1)), np.zeros((n, 1)), [np.zeros((n, size), np.int32)]) for n, size in shapes]
    dataset = Days(days, [9], None)
    assert (dataset.bag_sizes, dataset.pooling, dataset.num_samples) == ([(2, 5)], [11 / 4], 4)


def test_the_fingerprint_is_of_all_days_and_of_every_kind_of_column():
    def fingerprint(**changed: np.ndarray) -> str:
        columns = {
            "labels": np.zeros((40, 1)),
            "dense": np.zeros((40, 2)),
            "ids": np.zeros((40, 1), np.int32),
        } | changed
        parts = slice(0, 30), slice(30, 40)
        days = [Day("d", columns["labels"][p], columns["dense"][p], [columns["ids"][p]]) for p in parts]
        return Days(days, [9], None).fingerprint()

    plain = fingerprint()
    assert plain.startswith("40 samples, ")
    for sample in (0, 29, 30, 39):  # all of so few samples are looked at
        for name, columns, dtype in (("labels", 1, float), ("dense", 2, float), ("ids", 1, np.int32)):
            changed = np.zeros((40, columns), dtype)
            changed[sample, -1] = 1
            assert fingerprint(**{name: changed}) != plain, (name, sample)


def test_synthetic_samples_are_made_on_the_runs_device(monkeypatch: pytest.MonkeyPatch):
    def make(config: DataConfig, split: Literal["train", "eval"], device: torch.device) -> tuple[str, str]:
        return split, device.type  # making it would need the GPU

    monkeypatch.setattr(synthetic_device, "DeviceSynthetic", make)
    config = DataConfig(tables=TablesConfig(count=2, rows=10))
    assert open_datasets(config, torch.device("cuda")) == (("train", "cuda"), ("eval", "cuda"))
    assert [type(dataset) for dataset in open_datasets(config)] == [Synthetic, Synthetic]


@pytest.fixture
def file_config(monkeypatch: pytest.MonkeyPatch) -> Callable[..., DataConfig]:
    """Make a config whose paths are numbers of samples, or `other`, 4 samples of a larger table."""

    def open_numbered(config: DataConfig, path: str) -> Days:
        samples, rows = (4, 2000) if path == "other" else (int(path), 1000)
        numbers = np.arange(samples)[:, None]
        return Days([Day(path, numbers % 2, numbers, [numbers])], [rows], None)

    monkeypatch.setattr(loader_module, "open_files", open_numbered)
    return lambda **keys: DataConfig(kind="criteo_npy", **keys)


def test_the_last_samples_of_a_path_are_held_out(file_config: Callable[..., DataConfig]):
    train, held_out = open_datasets(file_config(path="10"))
    assert (train.num_samples, held_out.num_samples) == (8, 2)
    assert torch.cat([train.read(0, 8).dense, held_out.read(0, 2).dense]).flatten().tolist() == [*range(10)]


@pytest.mark.parametrize(("path", "fraction"), [("3", 0.25), ("100", 0.0), ("1", 0.9)])
def test_an_empty_split_is_refused(file_config: Callable[..., DataConfig], path: str, fraction: float):
    with refuses(f"^data.eval_fraction: {fraction} holds out none of {path} samples; raise it or set data.eval_path$"):
        open_datasets(file_config(path=path, eval_fraction=fraction))


def test_held_out_samples_of_other_tables_are_refused(file_config: Callable[..., DataConfig]):
    train, held_out = open_datasets(file_config(path="12", eval_path="3"))
    assert (train.num_samples, held_out.num_samples) == (12, 3), "those to train on stay whole"
    with refuses(
        r"^data\.eval_path: other has 2000 rows in table 0, not 1000 rows as in 12; no key makes these ids fit; "
    ):
        open_datasets(file_config(path="12", eval_path="other"))


@pytest.mark.parametrize(
    ("dense", "labels", "fault"),
    [(2, ["label"], "has 2 dense features, not 1 as days"), (1, ["click", "buy"], "has 2 labels, not 1 as days")],
)
def test_held_out_samples_of_other_columns_are_refused(
    monkeypatch: pytest.MonkeyPatch, dense: int, labels: list[str], fault: str
):
    def open_named(config: DataConfig, path: str) -> Days:
        features, names = (dense, labels) if path == "other" else (1, ["label"])
        opened = Days([Day(path, np.zeros((4, len(names))), np.zeros((4, features)), [np.zeros((4, 1))])], [9], None)
        opened.labels = dict.fromkeys(names, 1.0)
        return opened

    monkeypatch.setattr(loader_module, "open_files", open_named)
    with refuses(rf"^data\.eval_path: other {fault}; prepare both from the same columns$"):
        open_datasets(DataConfig(kind="prepared", path="days", eval_path="other"))
