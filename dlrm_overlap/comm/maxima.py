"""The greatest of some numbers over ranks, found by their CPUs beside the steps.

On one machine each rank writes its numbers to memory that the others read. Gloo's all-reduce takes longer than a small
step (docs/lab.md): it finds them between machines, and where they are more than the memory holds, as of models with
hundreds of features, whose steps are longer.
"""

import time
from datetime import timedelta
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

from dlrm_overlap.comm.arena import HostArena, Region
from dlrm_overlap.comm.patience import Patience
from dlrm_overlap.config import InputError

_MOST = 511  # numbers of a question
_SOON_S = 1e-3  # in which a wait sleeps for no time at all: the shortest sleep is as long as an answer takes
_KEPT = 8  # questions, of which a rank may be four ahead of a peer that has not read


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
        self._ranks, self._asked = group, 0
        self._memory: list[tuple[np.ndarray, np.ndarray]] = []
        """by rank, the last questions, each with how many numbers it has in front of them; and how many were asked"""
        regions = {"questions": Region((_KEPT, 1 + _MOST), torch.int64), "asked": Region((1,), torch.int64)}
        try:
            arena = HostArena(regions, group, torch.device("cpu"))
        except InputError:  # ranks of several machines, or of containers that share no memory
            return
        for rank in range(group.size()):
            self._memory.append((arena.view("questions", rank).numpy(), arena.view("asked", rank).numpy()))

    def begin(self, numbers: torch.Tensor) -> Work:
        """Begin to find the greatest of each of `numbers`, [n] int64 on the CPU; n is the same on all ranks."""
        if not self._memory or numbers.numel() > _MOST:
            work = dist.all_reduce(numbers, dist.ReduceOp.MAX, group=self._gloo, async_op=True)
            assert work is not None
            return work
        questions, asked = self._memory[self._ranks.rank()]
        self._asked += 1
        question = questions[self._asked % _KEPT]
        question[0], question[1 : 1 + numbers.numel()] = numbers.numel(), numbers.numpy()
        asked[0] = self._asked  # after the numbers: the processor stores in order, see `HostArena`
        return _Question(numbers.numpy(), self._asked, self._memory)

    @cached_property
    def _gloo(self) -> Any:
        """A group of the ranks; the first access is a collective."""
        ranks = dist.get_process_group_ranks(self._ranks)
        # Another order among the collectives of the ranks' own group would mix up two of them.
        return dist.new_group(ranks, backend="gloo", use_local_synchronization=True)


class _Question:
    """A question to the ranks of one machine."""

    def __init__(self, numbers: np.ndarray, number: int, memory: list[tuple[np.ndarray, np.ndarray]]) -> None:
        self._numbers, self._number, self._late = numbers, number, list(enumerate(memory))
        self._has_failed = False
        self._patience = Patience(default_pg_timeout.total_seconds())

    def wait(self, timeout: timedelta) -> None:
        """Take the answers that are not there yet, see `Work`."""
        patience = Patience(timeout.total_seconds())
        while self._late:
            rank, (questions, asked) = self._late[-1]
            while asked[0] < self._number:
                self._has_failed = self._patience.is_over()
                if patience.is_over() or self._has_failed:
                    raise RuntimeError(f"rank {rank} has not answered for {self._patience.waited_s:.0f} s")
                time.sleep(20e-6 if patience.waited_s > _SOON_S else 0)
            theirs = questions[self._number % _KEPT]
            count = int(theirs[0])
            if count != self._numbers.size:
                self._has_failed = True
                raise RuntimeError(f"rank {rank} has other features: {count} numbers, not {self._numbers.size}")
            np.maximum(self._numbers, theirs[1 : 1 + count], out=self._numbers)
            self._late.pop()

    def is_completed(self) -> bool:
        """See `Work`."""
        return self._has_failed or not self._late
