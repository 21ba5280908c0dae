"""The greatest of some numbers over ranks, found by their CPUs beside the steps.

On one machine ranks send each other their numbers by sockets of the kernel: on a host with 4 x H200 all have them after
50 us, where gloo's all-reduce takes 560, which is longer than a small step. Between machines gloo finds them, and where
they are more than sockets hold, as of models with hundreds of features, whose steps are longer.
"""

import socket
import weakref
from collections import deque
from collections.abc import Iterable, Mapping
from contextlib import suppress
from datetime import timedelta
from functools import cached_property
from typing import Any, Protocol
from uuid import uuid4

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

from dlrm_overlap.comm.every_rank import gathered
from dlrm_overlap.comm.patience import Patience
from dlrm_overlap.comm.reach import place_of

# Of a question's numbers. A rank may be four questions ahead of a peer that does not read, and no send may wait: Linux
# has room for seven of so many bytes in a socket of its default size, for one of 70 KB, and for none of 213 KB.
_MOST_BYTES = 4096


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


class Maxima:
    """Puts the greatest numbers of a group's ranks in place of each rank's own. All ranks ask in the same order."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        """Take the ranks, two or more; a collective."""
        self._ranks, self._sockets = group, _connected(group)
        self._asked = deque[_Question]()
        if self._sockets is not None:
            weakref.finalize(self, _close, self._sockets.values())

    def begin(self, numbers: torch.Tensor) -> Work:
        """Begin to find the greatest of each of `numbers`, [n] int64 on the CPU; n is the same on all ranks."""
        if self._sockets is None or numbers.nbytes > _MOST_BYTES:
            work = dist.all_reduce(numbers, dist.ReduceOp.MAX, group=self._gloo, async_op=True)
            assert work is not None
            return work
        array = numbers.numpy()
        for each in self._sockets.values():
            with suppress(BrokenPipeError, ConnectionResetError):  # a wait for its answer reports that it has ended
                each.send(array.data)
        self._asked.append(_Question(array, self._sockets, self._asked))
        return self._asked[-1]

    @cached_property
    def _gloo(self) -> Any:
        """A group of the ranks; the first access is a collective."""
        ranks = dist.get_process_group_ranks(self._ranks)
        # Another order among the collectives of the ranks' own group would mix up two of them.
        return dist.new_group(ranks, backend="gloo", use_local_synchronization=True)


class _Question:
    """A question to the ranks of one machine. Answers to earlier ones, which come first, are taken as well."""

    def __init__(self, numbers: np.ndarray, sockets: Mapping[int, socket.socket], asked: "deque[_Question]") -> None:
        self._numbers, self._late, self._asked = numbers, list(sockets.items()), asked
        self._has_failed = False
        self._patience = Patience(default_pg_timeout.total_seconds())

    def wait(self, timeout: timedelta) -> None:
        """Take the answers that are not there yet, see `Work`; `timeout` is for each of them."""
        while self._late:
            self._asked[0]._take(timeout.total_seconds())

    def is_completed(self) -> bool:
        """See `Work`."""
        return self._has_failed or not self._late

    def _take(self, timeout_s: float) -> None:
        (rank, peer), theirs = self._late[-1], np.empty_like(self._numbers)
        peer.settimeout(timeout_s)
        try:
            size = _receive(peer, theirs)
        except TimeoutError as error:
            if self._patience.is_over():
                self._fail()
            waited_s = self._patience.waited_s
            raise RuntimeError(f"rank {rank} has not answered for {waited_s:.0f} s") from error
        if size != theirs.nbytes:
            self._fail()
            other = f"has other features: it sends {size} bytes, not {theirs.nbytes}"
            raise RuntimeError(f"rank {rank} {other if size else 'has ended'}")
        np.maximum(self._numbers, theirs, out=self._numbers)
        self._late.pop()
        if not self._late:
            self._asked.popleft()

    def _fail(self) -> None:
        """Complete all questions: later ones get no answer before this one does."""
        for each in self._asked:
            each._has_failed = True


def _receive(peer: socket.socket, numbers: np.ndarray) -> int:
    """Receive a peer's next numbers, and return their bytes, all that it has sent of them; 0 if it has ended."""
    try:
        return peer.recv_into(numbers.data, 0, socket.MSG_TRUNC)
    except ConnectionResetError:  # once, of one that has ended before it read all of ours: its last numbers follow
        return peer.recv_into(numbers.data, 0, socket.MSG_TRUNC)


def _connected(group: dist.ProcessGroup) -> dict[int, socket.socket] | None:
    """Return a socket to each other rank of a group, None if they are not of one machine; a collective.

    Each rank connects to those before it, and first sends its number.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)  # which keeps messages apart
    with listener:
        listener.bind(f"\0dlrm_overlap_{uuid4().hex}")  # of no file; unlike all names in other containers
        listener.listen(group.size())
        machine = place_of(torch.device("cpu")).machine
        ranks = gathered((machine, listener.getsockname()), group)
        sockets, is_open = dict[int, socket.socket](), len({machine for machine, _ in ranks}) == 1
        try:
            for rank, (_, name) in enumerate(ranks[: group.rank()] if is_open else ()):
                sockets[rank] = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                sockets[rank].connect(name)
                sockets[rank].send(group.rank().to_bytes(4))
        except OSError:  # containers of one machine may have no way to each other
            is_open = False
        if all(gathered(is_open, group)):
            for _ in ranks[group.rank() + 1 :]:
                peer = listener.accept()[0]
                sockets[int.from_bytes(peer.recv(4))] = peer
            return sockets
        _close(sockets.values())
        return None


def _close(sockets: Iterable[socket.socket]) -> None:
    for each in sockets:
        each.close()
