"""Batches from reader processes, through a ring of slots in shared memory from which a GPU copies directly.

The training process only waits for a count and wraps the slot's memory in tensors: unpickling, mapping or copying would
keep its interpreter from launching kernels.

A reader waits until a slot is free, fills it and counts up `_filled`. The training process lends the slot out as a
batch. When that batch is dropped, and the copies to the GPU that `Batch.to` started from it are done, the slot is free
again.

A reader may be killed at any instruction, and is in the end, so there is no lock between the processes. Once the ring
is made nothing of it has a name, so nothing is left of it.
"""

import contextlib
import gc
import math
import mmap
import multiprocessing
import os
import signal
import stat
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from multiprocessing.process import BaseProcess
from multiprocessing.util import Finalize
from typing import Any, NamedTuple, Self

import torch

from dlrm_overlap.comm.patience import Patience
from dlrm_overlap.config import InputError
from dlrm_overlap.data.batch import Batch, Lease, Records
from dlrm_overlap.launching.lifetime import end_with_parent

_POLL_S = 0.05
_HEADER_BYTES, _MESSAGE_BYTES = 64, 4096
_BATCH, _INPUT_ERROR, _FAILURE = range(3)  # what is in a slot
# For the training process to handle, which needs batches until it ends; sent to a whole group, they reach readers too.
_DEAF_TO = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


class Form(NamedTuple):
    """The greatest batch that a slot has room for."""

    kind: type[Batch] | type[Records]
    tensors: Sequence[tuple[tuple[int, ...], torch.dtype]]
    """shape and type of each of its `tensors`, of which a batch may fill the first so many elements"""

    def slot_bytes(self) -> int:
        """Return the bytes of a slot, in whole pages."""
        used = sum(math.prod(shape) * dtype.itemsize for shape, dtype in self.tensors)
        return -(-(_HEADER_BYTES + _MESSAGE_BYTES + used) // mmap.PAGESIZE) * mmap.PAGESIZE


class Slot:
    """Memory for one batch, or for a reader process's error: a header, room for a message, and the tensors.

    The header has what is in the slot, then the length of each tensor. Records begin where a kernel reads 16 bytes at a
    time.
    """

    def __init__(self, memory: torch.Tensor, form: Form) -> None:
        self._kind, self._header = form.kind, memory[:_HEADER_BYTES].view(torch.int64)
        start = _HEADER_BYTES + _MESSAGE_BYTES
        self._message, self.tensors = memory[_HEADER_BYTES:start], list[torch.Tensor]()
        for shape, dtype in form.tensors:
            end = start + math.prod(shape) * dtype.itemsize
            self.tensors.append(memory[start:end].view(dtype).view(shape))
            start = end

    def write(self, batch: Batch | Records) -> None:
        """Store `batch` in the slot."""
        for i, (target, tensor) in enumerate(zip(self.tensors, batch.tensors, strict=True)):
            assert tensor.dtype == target.dtype, "a form has the types of its batches"
            target[: len(tensor)].copy_(tensor)
            self._header[1 + i] = len(tensor)
        self._header[0] = _BATCH

    def write_error(self, kind: int, message: str) -> None:
        """Store the message of an `InputError`, or the end of the traceback of any other, instead of a batch."""
        if kind == _FAILURE:
            message = message[-_MESSAGE_BYTES // 2 :]  # of which a character may take several bytes
        text = message.encode()[:_MESSAGE_BYTES].ljust(_MESSAGE_BYTES, b"\0")
        self._message.copy_(torch.frombuffer(bytearray(text), dtype=torch.uint8))
        self._header[0] = kind

    def read(self) -> Any:
        """Return the batch, or the records, whose tensors are views of the slot's memory.

        Raises:
            InputError: as the data set raised it.
            RuntimeError: with the traceback of any other failure.
        """
        kind, *lengths = self._header.tolist()
        if kind == _BATCH:
            return self._kind.from_tensors(*(tensor[:n] for tensor, n in zip(self.tensors, lengths, strict=False)))
        text = self._message.numpy().tobytes().rstrip(b"\0").decode(errors="replace")
        raise InputError(text) if kind == _INPUT_ERROR else RuntimeError(f"a loader process failed:\n{text}")


class Ring:
    """An iterator over the batches `read(step)` of `steps`, in order, which `workers` processes read.

    The i-th step is read by worker i modulo `workers` into slot i modulo the number of slots. There are
    `slots_per_worker` slots for each worker, so a slot is always filled by the same one.

    With `pin`, the slots are page-locked for the current GPU, and a batch is in its slot until it is dropped. Without
    it, a batch is a copy. A batch that does not come in `timeout_s` seconds ends the reading. The readers end with the
    thread that has made the ring.
    """

    def __init__(
        self,
        read: Callable[[int], Batch | Records],
        steps: range,
        form: Form,
        workers: int,
        slots_per_worker: int,
        pin: bool,
        timeout_s: float = math.inf,
    ) -> None:
        size, slots = form.slot_bytes(), workers * slots_per_worker
        # Anonymous memory, which forked readers share: it needs no file, and none of a container's small /dev/shm.
        self._memory = torch.frombuffer(mmap.mmap(-1, slots * size), dtype=torch.uint8)
        self._slots = [Slot(self._memory[i * size : (i + 1) * size], form) for i in range(slots)]
        context = multiprocessing.get_context("fork")
        # Semaphores are counters that a killed reader cannot hold.
        self._free = [context.Semaphore(1) for _ in range(slots)]
        self._filled = [context.Semaphore(0) for _ in range(slots)]
        self._steps, self._next, self._pin, self._timeout_s = steps, 0, pin, timeout_s
        self._returned: deque[Lease] = deque()
        self._workers = [
            context.Process(target=self._fill, args=(read, worker, workers, os.getpid()), daemon=True)
            for worker in range(min(workers, len(steps)))
        ]
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, _DEAF_TO)  # until they ignore these
        collects = gc.isenabled()
        gc.disable()  # in a fork, freeing what this process has on a GPU ends it
        try:
            for process in self._workers:
                process.start()
        except OSError as error:
            _kill([process for process in self._workers if process.pid])
            raise InputError(
                f"data.workers: {workers} loader processes with {slots} batches cannot be started ({error.strerror}); "
                f"lower data.workers, or raise what this user may have (`ulimit -u`)"
            ) from None
        finally:
            if collects:
                gc.enable()
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        # They are deaf to SIGTERM, by which multiprocessing would end them at this process's end, and wait for that.
        self._end = Finalize(self, _kill, args=(list(self._workers),), exitpriority=0)
        if pin:
            runtime: Any = torch.cuda.cudart()
            torch.cuda.check_error(runtime.cudaHostRegister(self._memory.data_ptr(), self._memory.numel(), 0))

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        """Return the next batch, or its records, as `read` gives them.

        Raises:
            InputError: as the data set raised it, or if a reader process died or stalls.
            RuntimeError: if a reader process failed.
        """
        if self._next == len(self._steps):
            raise StopIteration
        index = self._next % len(self._slots)
        self._reclaim()
        patience = Patience(self._timeout_s)
        while not self._filled[index].acquire(timeout=_POLL_S):
            self._reclaim()
            self._check_readers(patience)
        self._next += 1
        batch = self._slots[index].read()
        if self._pin:
            batch.lease = Lease(index, self._returned)
        else:
            batch = batch.clone()
            self._free[index].release()
        return batch

    def close(self) -> None:
        """End the reader processes, whatever they do."""
        if not self._workers:
            return
        self._end()
        if self._pin:
            torch.cuda.synchronize()  # a copy from a slot may still run
            runtime: Any = torch.cuda.cudart()
            torch.cuda.check_error(runtime.cudaHostUnregister(self._memory.data_ptr()))
        self._workers = []

    def _reclaim(self) -> None:
        """Free the slots whose batches have been dropped and whose copies are done."""
        while self._returned and self._returned[0].is_copied():
            self._free[self._returned.popleft().slot].release()

    def _check_readers(self, patience: Patience) -> None:
        """Raise an InputError that names a reader that has ended or, once `patience` is over, still reads."""
        step, count = self._steps[self._next], len(self._workers)
        for number, process in enumerate(self._workers):
            if code := process.exitcode:
                how = f"exit code {code}" if code > 0 else signal.Signals(-code).name
                raise InputError(
                    f"loader process {number} of {count} (pid {process.pid}) ended by {how}, and step {step} has no "
                    f"batch; SIGKILL is most often the kernel's out-of-memory killer: lower data.workers or "
                    f"data.prefetch"
                )
        if patience.is_over():
            number = self._next % count
            process = self._workers[number]
            raise InputError(
                f"loader process {number} of {count} (pid {process.pid}) has not read the batch of step {step} in "
                f"{self._timeout_s:g} s; look at the disk of data.path, or raise embedding.wait_timeout_s if "
                f"it is only slow"
            )

    def _fill(self, read: Callable[[int], Batch | Records], worker: int, workers: int, parent: int) -> None:
        """Read every `workers`-th step into its slot, as that becomes free; runs in a reader process."""
        end_with_parent(parent)
        gc.freeze()  # what is there is the parent's
        gc.enable()
        for number in _DEAF_TO:
            signal.signal(number, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _DEAF_TO)
        _close_sockets()
        torch.set_num_threads(1)
        for position in range(worker, len(self._steps), workers):
            index = position % len(self._slots)
            while not self._free[index].acquire(timeout=1.0):
                pass
            failed = True
            try:
                self._slots[index].write(read(self._steps[position]))
                failed = False
            except InputError as error:
                self._slots[index].write_error(_INPUT_ERROR, str(error))
            except Exception:
                self._slots[index].write_error(_FAILURE, traceback.format_exc())
            self._filled[index].release()
            if failed:
                return


def _kill(processes: list[BaseProcess]) -> None:
    for process in processes:
        process.kill()  # does nothing to one that has ended
        process.join()


def _close_sockets() -> None:
    """Close the forked process's copies of sockets: they would keep up the connections and ports of a dead rank."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the one that listed them is gone
            if int(name) > 2 and stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                os.close(int(name))
