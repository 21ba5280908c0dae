"""Batches from reader processes, through a ring of slots in shared memory from which a GPU copies directly.

The training process does next to nothing for a batch: it waits on a semaphore and wraps the slot's memory in tensors.
Anything else (unpickling, mapping, copying to page-locked memory in a thread) would keep its interpreter from launching
kernels, and the step is bound by that.

A reader waits until a slot is free, fills it and raises its semaphore in `_filled`. The training process lends the slot
out as a batch. When that batch is dropped, and the copies to the GPU that `Batch.to` started from it are done, the slot
is free again.
"""

import mmap
import multiprocessing
import os
import signal
import traceback
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

import torch

from dlrm_overlap.config import InputError
from dlrm_overlap.data.batch import Batch, Lease

_INPUT_ERROR, _FAILURE = -1, -2  # stored in place of a batch's number of ids
_MESSAGE_BYTES = 4096
_POLL_S = 0.05
_CLOSE_S = 30.0  # in which a reader may finish its batch before it is killed
_PAGE = mmap.PAGESIZE


@dataclass(frozen=True)
class SlotShape:
    """Sizes of the largest batch, for which a slot has room."""

    samples: int
    """samples of a batch, b"""
    dense_features: int
    """dense features of a sample, F"""
    tables: int
    """number of tables, T"""
    max_ids: int
    """most ids of one sample, over all tables"""


class _Slot:
    """Views of one slot's memory: the tensors of a batch, its number of ids, and room for an error's message."""

    def __init__(self, memory: torch.Tensor, shape: SlotShape) -> None:
        self._memory, self._used = memory, 0
        b = shape.samples
        self.ids = self._take(1, torch.int64)
        self.stand_ins = self._take(1, torch.int64)
        self.message = self._take(_MESSAGE_BYTES, torch.uint8)
        self.values = self._take(b * shape.max_ids, torch.int32)
        self.lengths = self._take(b * shape.tables, torch.int32)
        self.dense = self._take(b * shape.dense_features, torch.float32).view(b, -1)
        self.labels = self._take(b, torch.float32)

    @staticmethod
    def size_bytes(shape: SlotShape) -> int:
        """Return the bytes that a slot needs, in whole pages."""
        per_sample = 4 * (shape.max_ids + shape.tables + shape.dense_features + 1)
        return -(-(16 + _MESSAGE_BYTES + shape.samples * per_sample) // _PAGE) * _PAGE

    def _take(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        start = self._used
        self._used += count * dtype.itemsize
        return self._memory[start : self._used].view(dtype)

    def write(self, batch: Batch) -> None:
        """Store `batch` in the slot."""
        values, lengths = batch.sparse.values(), batch.sparse.lengths()
        assert values.dtype == lengths.dtype == torch.int32, "data sets give int32 ids and lengths"
        self.values[: values.numel()].copy_(values)
        self.lengths.copy_(lengths)
        self.dense.copy_(batch.dense)
        self.labels.copy_(batch.labels)
        self.stand_ins[0] = batch.stand_ins
        self.ids[0] = values.numel()

    def write_error(self, kind: int, message: str) -> None:
        """Store an error in place of a batch."""
        text = message.encode()[:_MESSAGE_BYTES].ljust(_MESSAGE_BYTES, b"\0")
        self.message.copy_(torch.frombuffer(bytearray(text), dtype=torch.uint8))
        self.ids[0] = kind

    def read(self) -> Batch:
        """Return the batch, whose tensors are views of the slot's memory.

        Raises:
            InputError: as the data set raised it.
            RuntimeError: with the traceback of any other failure.
        """
        ids = int(self.ids[0])
        if ids >= 0:
            batch = Batch.from_tensors(self.dense, self.lengths, self.values[:ids], self.labels)
            batch.stand_ins = int(self.stand_ins[0])
            return batch
        text = self.message.numpy().tobytes().rstrip(b"\0").decode(errors="replace")
        raise InputError(text) if ids == _INPUT_ERROR else RuntimeError(f"a loader process failed:\n{text}")


class Ring:
    """An iterator over the batches `read(step)` of `steps`, in order, which `workers` processes read.

    The i-th step is read by worker i modulo `workers` into slot i modulo the number of slots. There are
    `slots_per_worker` slots for each worker, so a slot is always filled by the same one.

    With `pin`, the slots are page-locked for the current GPU, and a batch is in its slot until it is dropped. Without
    it, a batch is a copy.
    """

    def __init__(
        self,
        read: Callable[[int], Batch],
        steps: range,
        shape: SlotShape,
        workers: int,
        slots_per_worker: int,
        pin: bool,
    ) -> None:
        size, slots = _Slot.size_bytes(shape), workers * slots_per_worker
        # Anonymous memory, which forked readers share: it needs no file, and none of a container's small /dev/shm.
        self._memory = torch.frombuffer(mmap.mmap(-1, slots * size), dtype=torch.uint8)
        self._slots = [_Slot(self._memory[i * size : (i + 1) * size], shape) for i in range(slots)]
        context = multiprocessing.get_context("fork")
        self._free = [context.Semaphore(1) for _ in range(slots)]
        self._filled = [context.Semaphore(0) for _ in range(slots)]
        self._stop = context.Event()
        self._steps, self._next, self._pin = steps, 0, pin
        self._returned: deque[Lease] = deque()
        self._workers = [
            context.Process(target=self._fill, args=(read, worker, workers, os.getpid()), daemon=True)
            for worker in range(min(workers, len(steps)))
        ]
        for process in self._workers:
            process.start()
        if pin:
            code = _cudart().cudaHostRegister(self._memory.data_ptr(), self._memory.numel(), 0)
            torch.cuda.check_error(code)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Batch:
        """Return the next batch.

        Raises:
            InputError: as the data set raised it.
            RuntimeError: if a reader process failed or died.
        """
        if self._next == len(self._steps):
            raise StopIteration
        index = self._next % len(self._slots)
        self._reclaim()
        while not self._filled[index].acquire(timeout=_POLL_S):
            self._reclaim()
            self._check_alive()
        self._next += 1
        batch = self._slots[index].read()
        if self._pin:
            batch.lease = Lease(index, self._returned)
        else:
            batch = batch.clone()
            self._free[index].release()
        return batch

    def close(self) -> None:
        """End the reader processes, once they have read their current batches, or after 30 s."""
        self._stop.set()
        for semaphore in self._free:
            semaphore.release()
        for process in self._workers:
            process.join(_CLOSE_S)
            process.kill()  # does nothing to one that has ended
            process.join()
        if self._pin and self._workers:
            torch.cuda.synchronize()  # a copy from a slot may still run
            torch.cuda.check_error(_cudart().cudaHostUnregister(self._memory.data_ptr()))
        self._workers = []

    def _reclaim(self) -> None:
        """Free the slots whose batches have been dropped and whose copies are done."""
        while self._returned and self._returned[0].is_copied():
            self._free[self._returned.popleft().slot].release()

    def _check_alive(self) -> None:
        for process in self._workers:
            if process.exitcode:  # negative for a signal, such as that of the out-of-memory killer
                raise RuntimeError(f"a loader process ended with exit code {process.exitcode}, its batch unread")

    def _fill(self, read: Callable[[int], Batch], worker: int, workers: int, parent: int) -> None:
        """Read every `workers`-th step into its slot, as that becomes free; runs in a reader process."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the training process's to handle
        torch.set_num_threads(1)
        for position in range(worker, len(self._steps), workers):
            index = position % len(self._slots)
            while not self._free[index].acquire(timeout=1.0):
                if os.getppid() != parent:
                    return
            if self._stop.is_set():
                return
            failed = True
            try:
                self._slots[index].write(read(self._steps[position]))
                failed = False
            except InputError as error:
                self._slots[index].write_error(_INPUT_ERROR, str(error))
            except Exception:
                self._slots[index].write_error(_FAILURE, traceback.format_exc()[-_MESSAGE_BYTES // 2 :])
            self._filled[index].release()
            if failed:
                return


def _cudart() -> Any:
    """Return the CUDA runtime's functions."""
    return torch.cuda.cudart()
