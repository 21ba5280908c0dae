"""A batch of samples, and what every data set has."""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.streamable import Pipelineable


def table_keys(tables: int) -> list[str]:
    """Return the feature names of T tables, in the model's order: `t_00`, `t_01`, ..."""
    width = max(2, len(str(tables - 1)))
    return [f"t_{t:0{width}}" for t in range(tables)]


class Lease:
    """A batch's right to a slot of lent memory, until the batch is dropped and its copies to a GPU are done.

    A lease that is dropped appends itself to `returned`, from which the slot's owner takes it.
    """

    def __init__(self, slot: int, returned: deque["Lease"]) -> None:
        self.slot = slot
        self._returned = returned
        self._copied: torch.cuda.Event | None = None

    def copying(self) -> None:
        """Record that copies from the memory have been enqueued on the current stream."""
        self._copied = torch.cuda.Event()
        self._copied.record()

    def is_copied(self) -> bool:
        """Return whether the copies recorded last are done."""
        return self._copied is None or self._copied.query()

    def __del__(self) -> None:
        self._returned.append(self)


@dataclass
class Batch(Pipelineable):
    """The samples of one rank and step."""

    dense: torch.Tensor
    """[b, F] float32"""
    sparse: KeyedJaggedTensor
    """T keys of b bags each, lengths int32, values int32 or int64, table after table: all of a table's bags, sample by
    sample, then the next table's"""
    labels: torch.Tensor
    """[b] float32, or [b, L] where a sample has several, each 0 or 1"""
    lease: Lease | None = None
    """keeps lent memory for this batch"""

    @classmethod
    def from_tensors(
        cls, dense: torch.Tensor, lengths: torch.Tensor, values: torch.Tensor, labels: torch.Tensor
    ) -> "Batch":
        """Build a batch from dense [b, F], lengths [T*b] and values [sum of lengths] in table order, labels [b, ..]."""
        keys = table_keys(lengths.numel() // len(labels))
        return cls(dense, KeyedJaggedTensor(keys, values=values, lengths=lengths), labels)

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Those that `from_tensors` takes."""
        return self.dense, self.sparse.lengths(), self.sparse.values(), self.labels

    @classmethod
    def join(cls, batches: Sequence["Batch"]) -> "Batch":
        """Return one batch that holds the samples of all `batches`, in their order."""
        lengths = [batch.sparse.lengths().view(len(batch.sparse.keys()), -1) for batch in batches]
        tables = [
            batch.sparse.values().split(bags.sum(dim=1).tolist()) for batch, bags in zip(batches, lengths, strict=True)
        ]
        return cls.from_tensors(
            torch.cat([batch.dense for batch in batches]),
            torch.cat(lengths, dim=1).flatten(),
            torch.cat([values for table in zip(*tables, strict=True) for values in table]),
            torch.cat([batch.labels for batch in batches]),
        )

    def to(self, device: torch.device, non_blocking: bool = False) -> "Batch":
        """Return the batch on `device`."""
        moved = Batch(
            self.dense.to(device, non_blocking=non_blocking),
            self.sparse.to(device, non_blocking=non_blocking),
            self.labels.to(device, non_blocking=non_blocking),
        )
        if self.lease:
            self.lease.copying()
        return moved

    def clone(self) -> "Batch":
        """Return a copy in memory of its own."""
        return Batch.from_tensors(*(tensor.clone() for tensor in self.tensors))

    def record_stream(self, stream: torch.Stream) -> None:
        """Have the allocator keep the tensors' memory until `stream` has used it."""
        self.dense.record_stream(stream)
        self.sparse.record_stream(stream)  # type: ignore[arg-type]
        self.labels.record_stream(stream)

    def pin_memory(self) -> "Batch":
        """Return the batch in page-locked memory; one on a GPU stays there."""
        if self.dense.is_cuda:
            return self
        return Batch(self.dense.pin_memory(), self.sparse.pin_memory(), self.labels.pin_memory())


class Dataset:
    """A stream of samples in a fixed order, read by position.

    The global batch of a step is the samples [step * B, (step + 1) * B), whatever the number of ranks W: rank r reads
    the r-th of W equal shares.
    """

    rows: Sequence[int]
    """rows of each table"""
    pooling: Sequence[float]
    """mean number of ids in a bag, per table"""
    bag_sizes: Sequence[tuple[int, int]]
    """least and most ids of a bag, per table"""
    dense_features: int
    """dense features of a sample, F"""
    num_samples: int | None
    """number of samples; None for an endless stream"""
    labels: Mapping[str, float] = MappingProxyType({"label": 1.0})
    """name of each label of a sample, L -> factor of its loss in the loss that is trained"""
    packed: Any = None
    """where `records` has all of a sample: its `Layout`"""
    on_gpu: bool = False
    """samples are made on a GPU, by kernels on the stream that is current in `read`, rather than read on the CPU"""

    @property
    def max_ids(self) -> int:
        """Most ids of one sample, over all tables."""
        return sum(most for _, most in self.bag_sizes)

    def fingerprint(self) -> str:
        """Return a text that two data sets share only if their samples are most likely the same.

        It is empty where the configuration alone decides the samples.
        """
        return ""

    def records(self, first: int, count: int) -> torch.Tensor:
        """Return the samples of `read` as records [count, record_bytes] uint8; only where `packed` is not None."""
        raise NotImplementedError

    def read(self, first: int, count: int) -> Batch:
        """Return the samples [first, first + count), on the CPU unless `on_gpu`.

        Raises:
            InputError: naming the value, if a label is not 0 or 1, a dense feature not finite or an id not a row of
                its table.
        """
        raise NotImplementedError
