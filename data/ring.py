"""Batches from reader processes, through a ring of slots in shared memory from which a GPU copies directly.

The training process only receives the lengths of a batch's tensors and wraps the slot's memory in tensors: unpickling,
mapping or copying a batch would keep its interpreter from launching kernels.

A reader is sent the number of a free slot, fills it and sends it back. The training process lends the slot out as a
batch. When that batch is dropped, and the copies to the GPU that `Batch.to` started from it are done, the slot is free
again.

A reader may be killed at any instruction, and is in the end, so there is no lock between the processes: each has a pipe
of its own. Once the ring is made nothing of it has a name, so nothing is left of it.
"""

import gc
import math
import mmap
import multiprocessing
import os
import select
import signal
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from multiprocessing.process import BaseProcess
from multiprocessing.util import Finalize
from typing import Any, Self

import torch

from dlrm_overlap.comm.deadline import Deadline
from dlrm_overlap.config import InputError
from dlrm_overlap.data.batch import Lease
from dlrm_overlap.launching.lifetime import end_with_parent

Form = Sequence[tuple[tuple[int, ...], torch.dtype]]
"""shape and type of each tensor of the greatest batch; a batch may fill the first so many elements of each"""
Lent = tuple[list[torch.Tensor], Lease | None]
"""a batch's tensors, and the lease of the slot that they are views of; None if they are copies"""

_POLL_MS = 50
_ALIGNED_BYTES = 64  # more than the 16 bytes that a kernel reads of records at a time
# For the training process to handle, which needs batches until it ends; sent to a whole group, they reach readers too.
_DEAF_TO = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


class Ring:
    """An iterator over the batches `read(step)` of `steps`, in order, which `workers` processes read.

    The i-th step is read by worker i modulo `workers`, which has `slots_per_worker` slots. With `pin`, the slots are
    page-locked for the current GPU, and a batch is in its slot until it is dropped. Without it, a batch is a copy. A
    batch that does not come in `timeout_s` seconds ends the reading. The readers end with the thread that has made the
    ring.
    """

    def __init__(
        self,
        read: Callable[[int], Sequence[torch.Tensor]],
        steps: range,
        form: Form,
        workers: int,
        slots_per_worker: int,
        pin: bool,
        timeout_s: float = math.inf,
    ) -> None:
        self._memory, self._slots = _make_slots(form, workers * slots_per_worker)
        self._steps, self._next, self._pin, self._timeout_s = steps, 0, pin, timeout_s
        self._returned: deque[Lease] = deque()
        self._workers: list[BaseProcess] = []
        # They are deaf to SIGTERM, by which multiprocessing would end them at this process's end, and wait for that.
        self._end = Finalize(self, _kill, args=(self._workers,), exitpriority=0)
        context = multiprocessing.get_context("fork")
        self._pipes = [context.Pipe() for _ in range(workers)]
        self._polls = [select.poll() for _ in self._pipes]  # Connection.poll makes one for each call
        for poll, (ours, _) in zip(self._polls, self._pipes, strict=True):
            poll.register(ours, select.POLLIN)
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, _DEAF_TO)  # until they ignore these
        collects = gc.isenabled()
        gc.disable()  # in a fork, freeing what this process has on a GPU ends it
        try:
            for worker in range(min(workers, len(steps))):
                args = read, steps[worker::workers], self._slots, self._pipes[worker][1], os.getpid()
                process = context.Process(target=_fill, args=args, daemon=True)
                process.start()
                self._workers.append(process)
        finally:
            if collects:
                gc.enable()
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        for slot in range(len(self._slots)):
            self._free(slot)
        if pin:
            runtime: Any = torch.cuda.cudart()
            torch.cuda.check_error(runtime.cudaHostRegister(self._memory.data_ptr(), self._memory.numel(), 0))

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Lent:
        """Return the tensors of the next batch.

        Raises:
            InputError: as the data set raised it, or if a reader process died or stalls.
            RuntimeError: with the traceback of any other failure of a reader.
        """
        if self._next == len(self._steps):
            raise StopIteration
        self._reclaim()
        patience, reader = Deadline(self._timeout_s), self._next % len(self._pipes)
        while not self._polls[reader].poll(_POLL_MS):
            self._reclaim()
            self._check_readers(patience)
        slot, lengths = self._pipes[reader][0].recv()
        if isinstance(lengths, Exception):
            raise lengths
        self._next += 1
        tensors = [tensor[:length] for tensor, length in zip(self._slots[slot], lengths, strict=True)]
        if self._pin:
            return tensors, Lease(slot, self._returned)
        copies = [tensor.clone() for tensor in tensors]
        self._free(slot)
        return copies, None

    def close(self) -> None:
        """End the reader processes, whatever they do."""
        if not self._workers:
            return
        self._end()
        if self._pin:
            torch.cuda.synchronize()  # a copy from a slot may still run
            runtime: Any = torch.cuda.cudart()
            torch.cuda.check_error(runtime.cudaHostUnregister(self._memory.data_ptr()))

    def _free(self, slot: int) -> None:
        """Send a slot to its reader, which is always the same one."""
        self._pipes[slot % len(self._pipes)][0].send_bytes(slot.to_bytes(4))

    def _reclaim(self) -> None:
        """Free the slots whose batches have been dropped and whose copies are done."""
        while self._returned and self._returned[0].is_copied():
            self._free(self._returned.popleft().slot)

    def _check_readers(self, patience: Deadline) -> None:
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
            raise InputError(
                f"loader process {number} of {count} (pid {self._workers[number].pid}) has not read the batch of step "
                f"{step} in {self._timeout_s:g} s; look at the disk of data.path, or raise embedding.wait_timeout_s if "
                f"it is only slow"
            )


def _make_slots(form: Form, count: int) -> tuple[torch.Tensor, list[list[torch.Tensor]]]:
    """Return memory that forked processes share, and in it the tensors of each of `count` slots."""
    sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in form]
    rooms = [-(-size // _ALIGNED_BYTES) * _ALIGNED_BYTES for size in sizes]
    # Anonymous memory needs no file, and none of a container's small /dev/shm.
    memory = torch.frombuffer(mmap.mmap(-1, count * sum(rooms)), dtype=torch.uint8)
    slots = []
    for slot in memory.chunk(count):
        parts = zip(slot.split(rooms), sizes, form, strict=True)
        slots.append([part[:size].view(dtype).view(shape) for part, size, (shape, dtype) in parts])
    return memory, slots


def _fill(
    read: Callable[[int], Sequence[torch.Tensor]],
    steps: Sequence[int],
    slots: list[list[torch.Tensor]],
    pipe: Any,
    parent: int,
) -> None:
    """Read each step into a free slot, and send that with the lengths of its tensors; runs in a reader process."""
    end_with_parent(parent)
    gc.freeze()  # what is there is the parent's
    gc.enable()
    for number in _DEAF_TO:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _DEAF_TO)
    torch.set_num_threads(1)
    for step in steps:
        slot = int.from_bytes(pipe.recv_bytes())
        try:
            tensors = read(step)
            for target, tensor in zip(slots[slot], tensors, strict=True):
                assert tensor.dtype == target.dtype, "a form has the types of its batches"
                target[: len(tensor)].copy_(tensor)
            pipe.send((slot, [len(tensor) for tensor in tensors]))
        except Exception as error:
            known = isinstance(error, InputError)
            pipe.send((slot, error if known else RuntimeError(f"a loader process failed:\n{traceback.format_exc()}")))
            return


def _kill(processes: list[BaseProcess]) -> None:
    while processes:
        process = processes.pop()
        process.kill()  # does nothing to one that has ended
        process.join()
