"""The elementwise maximum of integers over ranks, computed by the ranks' CPUs while the GPUs work.

The ranks of one machine send each other their numbers through pipes: on a machine with 4 x H200 all had them after
50 us by sockets, which are as fast as pipes, where gloo's all-reduce takes 560, longer than a small step. gloo computes
the maxima if the ranks are on several machines, or if there are more numbers than a pipe takes at once, as for models
with hundreds of features, whose steps are longer.

The pipes have no names, so that no other user's process can connect to a rank. A rank opens the pipes of its peers
through /proc/<process id>/fd, which only processes of the same user may do, as in `comm.arena.HostArena`.
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
from dlrm_overlap.comm.reach import place_of

_HEADER = np.dtype(np.int64)
"""in front of a message: the number of its bytes"""
# Of a message's numbers. The kernel writes up to PIPE_BUF bytes as a whole or not at all.
_MOST_BYTES = select.PIPE_BUF - _HEADER.itemsize
_MOST_MESSAGES = 8  # in a pipe: a rank may be four questions ahead of a peer that does not read, and no write may wait


class Work(Protocol):
    """A question that is under way, as torch.distributed's `Work`."""

    def wait(self, timeout: timedelta) -> Any:
        """Wait until the greatest numbers are there.

        Raises:
            RuntimeError: if that takes longer than `timeout`, and then it can be waited for once more; or if it has
                failed, and then it is completed.
        """

    def is_completed(self) -> bool:
        """Return whether the numbers are there, or never will be."""
        ...


class AsyncMaxReduce:
    """Puts the greatest numbers of a group's ranks in place of each rank's own. All ranks ask in the same order."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        """Take the ranks, two or more; a collective."""
        self._ranks, self._pipes = group, _connected(group)
        self._asked = deque[_Question]()
        if self._pipes is not None:
            weakref.finalize(self, _close, [end for pipe in self._pipes.values() for end in pipe])

    def begin(self, numbers: torch.Tensor) -> Work:
        """Begin to find the greatest of each of `numbers`, [n] int64 on the CPU; n is the same on all ranks."""
        if self._pipes is None or numbers.nbytes > _MOST_BYTES:
            work = dist.all_reduce(numbers, dist.ReduceOp.MAX, group=self._gloo, async_op=True)
            assert work is not None
            return work
        array = numbers.numpy()
        header = np.array([array.nbytes], _HEADER)
        for pipe in self._pipes.values():
            with suppress(BrokenPipeError):  # a wait for its answer reports that it has ended
                os.writev(pipe.to_rank, [header.data, array.data])
        self._asked.append(_Question(array, self._pipes, self._asked))
        return self._asked[-1]

    @cached_property
    def _gloo(self) -> Any:
        """A group of the ranks; the first access is a collective."""
        ranks = dist.get_process_group_ranks(self._ranks)
        # Another order among the collectives of the ranks' own group would mix up two of them.
        return dist.new_group(ranks, backend="gloo", use_local_synchronization=True)


class _Pipes(NamedTuple):
    """The file descriptors of the pipes between this rank and another one."""

    from_rank: int
    """the reading end of the pipe that the other rank writes to"""
    to_rank: int
    """the writing end of the pipe that the other rank reads"""


class _Question:
    """A question to the ranks of one machine. Answers to earlier ones, which come first, are taken as well."""

    def __init__(self, numbers: np.ndarray, pipes: Mapping[int, _Pipes], asked: "deque[_Question]") -> None:
        self._numbers, self._late, self._asked = numbers, list(pipes.items()), asked
        self._has_failed = False
        self._deadline = Deadline(default_pg_timeout.total_seconds())

    def wait(self, timeout: timedelta) -> None:
        """Take the answers that are not there yet, see `Work`; `timeout` is for each of them."""
        while self._late:
            self._asked[0]._take(timeout.total_seconds())

    def is_completed(self) -> bool:
        """See `Work`."""
        return self._has_failed or not self._late

    def _take(self, timeout_s: float) -> None:
        rank, pipe = self._late[-1]
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
        self._late.pop()
        if not self._late:
            self._asked.popleft()

    def _fail(self) -> None:
        """Complete all questions: later ones get no answer before this one does."""
        for each in self._asked:
            each._has_failed = True


def _is_readable(pipe: int, timeout_s: float) -> bool:
    """Wait until there is something to read, or the writer has ended; return whether that took up to `timeout_s`."""
    poll = select.poll()
    poll.register(pipe, select.POLLIN)
    return bool(poll.poll(1000 * timeout_s))


def _connected(group: dist.ProcessGroup) -> dict[int, _Pipes] | None:
    """Return the pipes to each other rank, None if some rank cannot open those of the others; a collective.

    Each rank makes the pipes that it reads, one for each other rank, which opens the writing end.
    """
    rank, made = group.rank(), dict[int, tuple[int, int]]()
    to_rank = dict[int, int]()
    is_open = True
    try:
        for peer in range(group.size()):
            if peer != rank:
                made[peer] = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
                is_open &= fcntl.fcntl(made[peer][0], fcntl.F_GETPIPE_SZ) >= _MOST_MESSAGES * select.PIPE_BUF
    except OSError:  # too many open files
        is_open = False
    machine = place_of(torch.device("cpu")).machine
    every = gathered((machine, {peer: _place_of(write) for peer, (_, write) in made.items()}), group)
    is_open &= len({machine for machine, _ in every}) == 1
    try:
        for peer, (_, places) in enumerate(every if is_open else ()):
            if peer != rank:
                to_rank[peer] = _open(*places[rank])
    except (OSError, KeyError):  # containers of one machine may not see each other's processes
        is_open = False
    # No rank closes its writing ends before all ranks have opened them.
    are_open = all(gathered(is_open, group))
    _close(write for _, write in made.values())
    if are_open:
        return {peer: _Pipes(read, to_rank[peer]) for peer, (read, _) in made.items()}
    _close([*(read for read, _ in made.values()), *to_rank.values()])
    return None


def _place_of(end: int) -> tuple[str, tuple[int, int]]:
    """Return where a peer finds an end of a pipe of this process, and the pipe's identity."""
    return f"/proc/{os.getpid()}/fd/{end}", _identity(os.fstat(end))


def _open(path: str, expected: tuple[int, int]) -> int:
    """Open a pipe for writing.

    Raises:
        OSError: if it cannot be opened, or is not the `expected` one.
    """
    # Not before this is known: in another container the process of that id may be another one, and its file a device.
    if _identity(os.stat(path)) != expected:
        raise FileNotFoundError(path)
    return os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)


def _identity(found: os.stat_result) -> tuple[int, int]:
    return found.st_dev, found.st_ino


def _close(ends: Iterable[int]) -> None:
    for end in ends:
        os.close(end)
