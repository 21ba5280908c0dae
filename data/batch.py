"""A batch of samples, and the interface of data sets."""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.streamable import Pipelineable

from dlrm_overlap.data.encoding import Encoded
from dlrm_overlap.data.schema import table_keys


def id_type(rows: Sequence[int | None]) -> torch.dtype:
    """Return the type of a batch's ids: int64 if a table has ids of any value (its rows are None), else int32."""
    return torch.int64 if None in rows else torch.int32


class Lease:
    """Keeps a slot of shared memory for a batch. When the last reference is dropped, it appends itself to `returned`.

    The slot may be reused once the batch's copies to a GPU are also done.
    """

    def __init__(self, slot: int, returned: deque["Lease"]) -> None:
        self.slot = slot
        self._returned = returned
        self._copied: torch.cuda.Event | None = None

    def copying(self) -> None:
        self._copied = torch.cuda.Event()
        self._copied.record()

    def is_copied(self) -> bool:
        return self._copied is None or self._copied.query()

    def __del__(self) -> None:
        self._returned.append(self)


@dataclass
class Batch(Pipelineable):
    dense: torch.Tensor
    """[b, F] float32"""
    sparse: KeyedJaggedTensor
    """ids: T keys of b bags each, in table order; lengths int32, values int32, or int64 if a table has ids of any
    value"""
    labels: torch.Tensor
    """[b] float32, or [b, L] with several labels per sample, each 0 or 1"""
    lease: Lease | None = None

    @classmethod
    def from_tensors(
        cls, dense: torch.Tensor, lengths: torch.Tensor, values: torch.Tensor, labels: torch.Tensor
    ) -> "Batch":
        """Make a batch of `dense` [b, F], `lengths` of bags [T * b], ids `values` [sum of lengths] and `labels`.

        `labels` is [b] or [b, L]; bags are in the order of tables, then of samples.
        """
        keys = table_keys(lengths.numel() // len(labels))
        return cls(dense, KeyedJaggedTensor(keys, values=values, lengths=lengths), labels)

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Return the arguments with which `from_tensors` makes this batch."""
        return self.dense, self.sparse.lengths(), self.sparse.values(), self.labels

    @classmethod
    def join(cls, batches: Sequence["Batch"]) -> "Batch":
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

    def to(
        self, device: torch.device, non_blocking: bool = False, data_copy_stream: torch.Stream | None = None
    ) -> "Batch":
        """Return the batch on `device`.

        With `data_copy_stream`, which TorchRec's in-place copies pass, the memory belongs to the current stream, and
        `data_copy_stream` copies to it after the current stream's earlier work.
        """
        if data_copy_stream is not None and self.dense.device != device:
            return self._copied_on(data_copy_stream, device, non_blocking)
        moved = Batch(
            self.dense.to(device, non_blocking=non_blocking),
            self.sparse.to(device, non_blocking=non_blocking),
            self.labels.to(device, non_blocking=non_blocking),
        )
        if self.lease:
            self.lease.copying()
        return moved

    def _copied_on(self, stream: torch.Stream, device: torch.device, non_blocking: bool) -> "Batch":
        streams = torch.get_device_module(device)
        dense, labels = (torch.empty_like(each, device=device) for each in (self.dense, self.labels))
        moved = Batch(dense, KeyedJaggedTensor.empty_like(self.sparse, device=device), labels)
        stream.wait_stream(streams.current_stream(device))  # the memory may still be read by work of that stream
        with streams.stream(stream):
            for target, source in zip(moved._parts(), self._parts(), strict=True):
                target.copy_(source, non_blocking=non_blocking)
            if self.lease:
                self.lease.copying()
        return moved

    def _parts(self) -> list[torch.Tensor]:
        ids = self.sparse
        inverse = ids.inverse_indices_or_none() or (None, None)
        parts = self.dense, self.labels, ids.values(), ids.weights_or_none(), ids.lengths_or_none(), inverse[1]
        return [part for part in (*parts, ids.offsets_or_none()) if part is not None]

    def clone(self) -> "Batch":
        return Batch.from_tensors(*(tensor.clone() for tensor in self.tensors))

    def record_stream(self, stream: torch.Stream) -> None:
        self.dense.record_stream(stream)
        self.sparse.record_stream(stream)  # type: ignore[arg-type]
        self.labels.record_stream(stream)

    def pin_memory(self) -> "Batch":
        if self.dense.is_cuda:
            return self
        return Batch(self.dense.pin_memory(), self.sparse.pin_memory(), self.labels.pin_memory())


class Dataset:
    """A stream of samples, read by position; step s trains on the samples [s * B, (s + 1) * B)."""

    rows: Sequence[int | None]
    """number of rows of each table; None: its ids are any 64-bit integers (a table of any id)"""
    pooling: Sequence[float]
    """mean number of ids per bag of each table"""
    bag_sizes: Sequence[tuple[int, int]]
    """minimum and maximum number of ids per bag of each table"""
    dense_features: int
    """F"""
    num_samples: int | None
    """None for an endless stream"""
    labels: Mapping[str, float] = MappingProxyType({"label": 1.0})
    """name of each of L labels -> weight of its loss"""
    encoded: Encoded | None = None
    """the encoding that made the ids from a table's columns; None if none did"""
    packed: Any = None
    """the `RecordLayout` of `records`; None if samples are not stored as records"""
    on_gpu: bool = False
    """whether `read` makes the samples on a GPU, on the current stream"""

    @property
    def max_ids(self) -> int:
        return sum(most for _, most in self.bag_sizes)

    def fingerprint(self) -> str:
        """Return a text that identifies the samples, empty if the configuration determines them."""
        return ""

    def times(self, first: int, count: int) -> np.ndarray | None:
        """Return the times of the samples [first, first + count), [count] int64; None if samples have none."""
        return None

    def records(self, first: int, count: int) -> torch.Tensor:
        """Return the samples [first, first + count) as records [count, record_bytes] uint8; only if `packed`."""
        raise NotImplementedError

    def read(self, first: int, count: int) -> Batch:
        """Return the samples [first, first + count), on the CPU unless `on_gpu`.

        Raises:
            InputError: if a label is not 0 or 1, a dense feature is not finite, or an id is not in its table, unless it
                is a table of any id.
        """
        raise NotImplementedError
