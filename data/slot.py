"""One slot of a ring: memory for a batch, or for a reader process's error."""

import mmap
from dataclasses import dataclass
from typing import Any

import torch

from dlrm_overlap.config import InputError
from dlrm_overlap.data.batch import Batch, Records

_NUMBER_BYTES = 16  # of which 8 are the number, so that records begin where a kernel reads 16 bytes at a time
_MESSAGE_BYTES = 4096
_INPUT_ERROR, _FAILURE = -1, -2  # stored instead of a batch's number of ids
_PAGE = mmap.PAGESIZE


@dataclass(frozen=True)
class SlotShape:
    """Sizes of the largest batch, for which a slot has room."""

    samples: int
    """samples of a batch, b"""
    dense_features: int = 0
    """dense features of a sample, F"""
    tables: int = 0
    """number of tables, T"""
    max_ids: int = 0
    """most ids of one sample, over all tables"""
    labels: int = 1
    """labels of a sample, L"""
    record_bytes: int = 0
    """bytes of a record, if slots hold records, for which the others do not count; 0 if they hold batches"""


class Slot:
    """Views of one slot's memory: a batch's number of ids, room for an error's message, and the tensors of a batch.

    `values` [b * max_ids] int32, the ids; `lengths` [b * T] int32; `dense` [b, F], `labels` [b] or [b, L] float32. Or,
    of records, `packed` [b, record_bytes] uint8 alone.
    """

    def __init__(self, memory: torch.Tensor, shape: SlotShape) -> None:
        self._memory, self._used = memory, 0
        b = shape.samples
        self.ids = self._take(_NUMBER_BYTES // 8, torch.int64)[:1]
        self.message = self._take(_MESSAGE_BYTES, torch.uint8)
        self.packed = self._take(b * shape.record_bytes, torch.uint8).view(b, -1) if shape.record_bytes else None
        if self.packed is not None:
            return
        self.values = self._take(b * shape.max_ids, torch.int32)
        self.lengths = self._take(b * shape.tables, torch.int32)
        self.dense = self._take(b * shape.dense_features, torch.float32).view(b, -1)
        labels = self._take(b * shape.labels, torch.float32)
        self.labels = labels if shape.labels == 1 else labels.view(b, -1)

    @staticmethod
    def size_bytes(shape: SlotShape) -> int:
        """Return the bytes that a slot needs, in whole pages."""
        unpacked = 4 * (shape.max_ids + shape.tables + shape.dense_features + shape.labels)
        per_sample = shape.record_bytes or unpacked
        return -(-(_NUMBER_BYTES + _MESSAGE_BYTES + shape.samples * per_sample) // _PAGE) * _PAGE

    def _take(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        start = self._used
        self._used += count * dtype.itemsize
        return self._memory[start : self._used].view(dtype)

    def write(self, batch: Batch | Records) -> None:
        """Store `batch` in the slot."""
        if isinstance(batch, Records):
            assert self.packed is not None, "the slot was made for batches"
            self.packed.copy_(batch.packed)
            self.ids[0] = 0
            return
        values, lengths = batch.sparse.values(), batch.sparse.lengths()
        assert values.dtype == lengths.dtype == torch.int32, "data sets give int32 ids and lengths"
        self.values[: values.numel()].copy_(values)
        self.lengths.copy_(lengths)
        self.dense.copy_(batch.dense)
        self.labels.copy_(batch.labels)
        self.ids[0] = values.numel()

    def write_input_error(self, message: str) -> None:
        """Store the message of an `InputError` instead of a batch."""
        self._write_error(_INPUT_ERROR, message)

    def write_failure(self, trace: str) -> None:
        """Store the end of the traceback of any other error instead of a batch."""
        self._write_error(_FAILURE, trace[-_MESSAGE_BYTES // 2 :])  # of which a character may take several bytes

    def _write_error(self, kind: int, message: str) -> None:
        text = message.encode()[:_MESSAGE_BYTES].ljust(_MESSAGE_BYTES, b"\0")
        self.message.copy_(torch.frombuffer(bytearray(text), dtype=torch.uint8))
        self.ids[0] = kind

    def read(self) -> Any:
        """Return the batch, or the records, whose tensors are views of the slot's memory.

        Raises:
            InputError: as the data set raised it.
            RuntimeError: with the traceback of any other failure.
        """
        ids = int(self.ids[0])
        if ids >= 0 and self.packed is not None:
            return Records(self.packed)
        if ids >= 0:
            return Batch.from_tensors(self.dense, self.lengths, self.values[:ids], self.labels)
        text = self.message.numpy().tobytes().rstrip(b"\0").decode(errors="replace")
        raise InputError(text) if ids == _INPUT_ERROR else RuntimeError(f"a loader process failed:\n{text}")
