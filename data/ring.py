"""Batches from reader processes, through a ring of slots in shared memory from which a GPU copies directly.

A reader receives the number of a free slot, fills the slot and sends the number back with the lengths of the tensors.
The training process does not unpickle, map or copy batches, since that would delay its kernel launches. A reader may be
killed at any instruction, so processes share no lock; each has its own pipe.
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
"""shape and dtype of each tensor of the largest batch"""
Lent = tuple[list[torch.Tensor], Lease | None]
"""a batch's tensors, and the lease of the slot that holds them; the lease is None if the tensors are copies"""

_POLL_MS = 50
_ALIGNED_BYTES = 64  # a kernel reads records by 16 bytes
# Signals to a process group also reach readers. Only the training process handles them; it needs batches until it ends.
_IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


class Ring:
    """An iterator over the batches `read(step)` of `steps`, in order; worker i modulo `workers` reads the i-th batch.

    With `pin`, slots are page-locked for the current GPU and batches are views of them; otherwise batches are copies.
    The readers end with the thread that made the ring.
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
        # multiprocessing would end readers by SIGTERM, which they ignore, and wait for them at this process's exit.
        self._end = Finalize(self, _kill, args=(self._workers,), exitpriority=0)
        context = multiprocessing.get_context("fork")
        self._pipes = [context.Pipe() for _ in range(workers)]
        self._polls = [select.poll() for _ in self._pipes]  # Connection.poll would make one per call
        for poll, (ours, _) in zip(self._polls, self._pipes, strict=True):
            poll.register(ours, select.POLLIN)
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, _IGNORED)  # until the readers ignore them
        collects = gc.isenabled()
        gc.disable()  # a fork that frees this process's GPU memory would crash
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
        """Wait for the next batch, and return its tensors with the lease of their slot.

        Raises:
            InputError: from the data set, or if a reader has died or takes longer than `timeout_s`.
            RuntimeError: with the traceback, if a reader fails in another way.
        """
        if self._next == len(self._steps):
            raise StopIteration
        self._reclaim()
        deadline, reader = Deadline(self._timeout_s), self._next % len(self._pipes)
        while not self._polls[reader].poll(_POLL_MS):
            self._reclaim()
            self._check_readers(deadline)
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
        if not self._workers:
            return
        self._end()
        if self._pin:
            torch.cuda.synchronize()  # copies from slots may still run
            runtime: Any = torch.cuda.cudart()
            torch.cuda.check_error(runtime.cudaHostUnregister(self._memory.data_ptr()))

    def _free(self, slot: int) -> None:
        self._pipes[slot % len(self._pipes)][0].send_bytes(slot.to_bytes(4))

    def _reclaim(self) -> None:
        while self._returned and self._returned[0].is_copied():
            self._free(self._returned.popleft().slot)

    def _check_readers(self, deadline: Deadline) -> None:
        step, count = self._steps[self._next], len(self._workers)
        for number, process in enumerate(self._workers):
            if code := process.exitcode:
                how = f"exit code {code}" if code > 0 else signal.Signals(-code).name
                raise InputError(
                    f"loader process {number} of {count} (pid {process.pid}) ended by {how}, and step {step} has no "
                    f"batch; SIGKILL is most often the kernel's out-of-memory killer: lower data.workers or "
                    f"data.prefetch"
                )
        if deadline.is_over():
            number = self._next % count
            raise InputError(
                f"loader process {number} of {count} (pid {self._workers[number].pid}) has not read the batch of step "
                f"{step} in {self._timeout_s:g} s; look at the disk of data.path, or raise embedding.wait_timeout_s if "
                f"it is only slow"
            )


def _make_slots(form: Form, count: int) -> tuple[torch.Tensor, list[list[torch.Tensor]]]:
    sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in form]
    padded = [-(-size // _ALIGNED_BYTES) * _ALIGNED_BYTES for size in sizes]
    # Anonymous memory uses neither a file nor a container's small /dev/shm.
    memory = torch.frombuffer(mmap.mmap(-1, count * sum(padded)), dtype=torch.uint8)
    slots = []
    for slot in memory.chunk(count):
        parts = zip(slot.split(padded), sizes, form, strict=True)
        slots.append([part[:size].view(dtype).view(shape) for part, size, (shape, dtype) in parts])
    return memory, slots


def _fill(
    read: Callable[[int], Sequence[torch.Tensor]],
    steps: Sequence[int],
    slots: list[list[torch.Tensor]],
    pipe: Any,
    parent: int,
) -> None:
    end_with_parent(parent)
    gc.freeze()  # existing objects belong to the parent
    gc.enable()
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _IGNORED)
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
        process.kill()  # no effect on an ended process
        process.join()
