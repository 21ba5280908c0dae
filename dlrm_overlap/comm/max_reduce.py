"""The elementwise maximum of integers over ranks, computed by the CPUs while the GPUs work.

Ranks of one machine use unnamed pipes, which take a tenth of gloo's time and which no other user can open. gloo is used
between machines, and for more numbers than fit a pipe.
"""

import fcntl
import os
import select
import weakref
from collections import deque
from collections.abc import Iterable, Mapping
from contextlib import suppress
from datetime import timedelta
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

from dlrm_overlap.comm.deadline import Deadline
from dlrm_overlap.comm.every_rank import gathered
from dlrm_overlap.comm.reach import location_of

_HEADER = np.dtype(np.int64)
"""the size in bytes of the message that follows"""
# Limit of a message's numbers: Linux writes up to PIPE_BUF bytes atomically.
_MAX_BYTES = select.PIPE_BUF - _HEADER.itemsize
# Capacity of a pipe: a rank may be four reductions ahead of a peer that does not read, and writes must not block.
_MAX_MESSAGES = 8


class Work(Protocol):
    """A reduction in flight, as torch.distributed's `Work`."""

    def wait(self, timeout: timedelta) -> Any:
        """Wait on the host until the numbers are the maxima.

        Raises RuntimeError if the reduction has failed, or after `timeout`; then `wait` may be called again.
        """

    def is_completed(self) -> bool: ...


class AsyncMaxReduce:
    """Replaces integers by their maxima over ranks. All ranks must begin their reductions in the same order."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        """Connect the ranks, two or more; a collective."""
        self._ranks, self._pipes = group, _connected(group)
        self._pending = deque[_PipeReduction]()
        if self._pipes is not None:
            weakref.finalize(self, _close, [end for pipe in self._pipes.values() for end in pipe])

    def begin(self, numbers: torch.Tensor) -> Work:
        """Start to replace `numbers`, [n] int64 on the CPU, in place by the maxima.

        Do not read or change `numbers` until `wait` of the returned work has succeeded.
        """
        if self._pipes is None or numbers.nbytes > _MAX_BYTES:
            work = dist.all_reduce(numbers, dist.ReduceOp.MAX, group=self._gloo, async_op=True)
            assert work is not None
            return work
        array = numbers.numpy()
        header = np.array([array.nbytes], _HEADER)
        for pipe in self._pipes.values():
            with suppress(BrokenPipeError):  # `wait` reports that the peer has ended
                os.writev(pipe.to_rank, [header.data, array.data])
        self._pending.append(_PipeReduction(array, self._pipes, self._pending))
        return self._pending[-1]

    @cached_property
    def _gloo(self) -> Any:
        ranks = dist.get_process_group_ranks(self._ranks)
        # A group of its own, since these reductions come in no fixed order among the other collectives.
        return dist.new_group(ranks, backend="gloo", use_local_synchronization=True)


class _Pipes(NamedTuple):
    from_rank: int
    to_rank: int


class _PipeReduction:
    """A reduction over the ranks of one machine, which first completes all earlier ones."""

    def __init__(self, numbers: np.ndarray, pipes: Mapping[int, _Pipes], pending: "deque[_PipeReduction]") -> None:
        self._numbers, self._missing, self._pending = numbers, list(pipes.items()), pending
        self._has_failed = False
        self._deadline = Deadline(default_pg_timeout.total_seconds())

    def wait(self, timeout: timedelta) -> None:
        """See `Work.wait`; `timeout` applies to each message."""
        while self._missing:
            self._pending[0]._take(timeout.total_seconds())

    def is_completed(self) -> bool:
        return self._has_failed or not self._missing

    def _take(self, timeout_s: float) -> None:
        rank, pipe = self._missing[-1]
        if not _is_readable(pipe.from_rank, timeout_s):
            if self._deadline.is_over():
                self._fail()
            raise RuntimeError(f"rank {rank} has not answered for {self._deadline.waited_s:.0f} s")
        header = os.read(pipe.from_rank, _HEADER.itemsize)
        size = int(np.frombuffer(header, _HEADER)[0]) if header else 0
        if size != self._numbers.nbytes:
            self._fail()
            other = f"has other features: it sends {size} bytes, not {self._numbers.nbytes}"
            raise RuntimeError(f"rank {rank} {other if header else 'has ended'}")
        theirs = np.frombuffer(os.read(pipe.from_rank, size), self._numbers.dtype)
        np.maximum(self._numbers, theirs, out=self._numbers)
        self._missing.pop()
        if not self._missing:
            self._pending.popleft()

    def _fail(self) -> None:
        """Let all pending reductions fail: a later one would read the messages of this one."""
        for each in self._pending:
            each._has_failed = True


def _is_readable(pipe: int, timeout_s: float) -> bool:
    """Wait up to `timeout_s` until there is something to read or the writer has ended."""
    poll = select.poll()
    poll.register(pipe, select.POLLIN)
    return bool(poll.poll(1000 * timeout_s))


def _connected(group: dist.ProcessGroup) -> dict[int, _Pipes] | None:
    """Return the pipes to each other rank, None if some rank cannot open them; a collective."""
    rank, made = group.rank(), dict[int, tuple[int, int]]()
    to_rank = dict[int, int]()
    is_open = True
    try:
        for peer in range(group.size()):
            if peer != rank:
                made[peer] = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
                is_open &= fcntl.fcntl(made[peer][0], fcntl.F_GETPIPE_SZ) >= _MAX_MESSAGES * select.PIPE_BUF
    except OSError:  # too many open files
        is_open = False
    machine = location_of(torch.device("cpu")).machine
    every = gathered((machine, {peer: _address_of(write) for peer, (_, write) in made.items()}), group)
    is_open &= len({machine for machine, _ in every}) == 1
    try:
        for peer, (_, addresses) in enumerate(every if is_open else ()):
            if peer != rank:
                to_rank[peer] = _open(*addresses[rank])
    except (OSError, KeyError):  # containers on one machine may not see each other's processes
        is_open = False
    # Barrier: a rank closes its writing ends only after all ranks have opened them.
    are_open = all(gathered(is_open, group))
    _close(write for _, write in made.values())
    if are_open:
        return {peer: _Pipes(read, to_rank[peer]) for peer, (read, _) in made.items()}
    _close([*(read for read, _ in made.values()), *to_rank.values()])
    return None


def _address_of(end: int) -> tuple[str, tuple[int, int]]:
    return f"/proc/{os.getpid()}/fd/{end}", _identity(os.fstat(end))


def _open(path: str, expected: tuple[int, int]) -> int:
    """Open a pipe for writing; raises OSError unless it is the `expected` one."""
    # Checked before opening: in another container this process id may be another process, and its file a device.
    if _identity(os.stat(path)) != expected:
        raise FileNotFoundError(path)
    return os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)


def _identity(found: os.stat_result) -> tuple[int, int]:
    return found.st_dev, found.st_ino


def _close(ends: Iterable[int]) -> None:
    for end in ends:
        os.close(end)
