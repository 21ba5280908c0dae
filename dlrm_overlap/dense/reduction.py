"""The mean over the ranks of ranges of the flat gradient: what every reduction does, and that by a collective."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist

from dlrm_overlap.comm.counters import Counters
from dlrm_overlap.dense.flat import FlatParameters


class Reduction(ABC):
    """Replaces ranges of the flat gradient by their mean over the ranks. All ranks make the same calls."""

    counters: Sequence[Counters] = ()
    """what a captured step advances with the others'"""

    @abstractmethod
    def cut(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Take the ranges, in elements; every step reduces all of them, in their order."""

    @abstractmethod
    def reduce(self, number: int) -> None:
        """Reduce range `number` on the current stream."""

    @abstractmethod
    def arrivals(self, stream: torch.cuda.Stream | None) -> Iterator[int]:
        """Make the current stream wait for the reduced gradient, piece by piece, once all ranges are under way.

        Args:
            stream: where `reduce` was called; None on a CPU.

        Yields:
            How many elements, from the first on, have arrived.
        """

    def check(self) -> None:  # noqa: B027  collectives record nothing
        """Raise what a kernel has recorded; never waits for the device."""

    def close(self) -> None:  # noqa: B027  nor have they anything to release
        """Let go of memory that peers see. No rank may be in a step."""


class CollectiveReduction(Reduction):
    """Reduces by the all-reduce of the process group: NCCL's on GPUs, gloo's on CPUs."""

    def __init__(self, flat: FlatParameters, group: dist.ProcessGroup, dtype: torch.dtype) -> None:
        """Take what is reduced, and the type in which it is sent and added up, float32 or bfloat16."""
        self._gradients, self._group = flat.gradients.tensor[: flat.shared_end], group
        self._ranks = dist.get_world_size(group)
        self._sent = None if dtype == torch.float32 else torch.empty_like(self._gradients, dtype=dtype)
        self._ranges: Sequence[tuple[int, int]] = ()

    def cut(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Take the ranges, each of which one all-reduce takes."""
        self._ranges = ranges

    @torch.no_grad()
    def reduce(self, number: int) -> None:
        """Replace a range of the gradient by its mean over the ranks."""
        begin, end = self._ranges[number]
        gradient = self._gradients[begin:end]
        if self._sent is None and gradient.is_cuda:
            dist.all_reduce(gradient, dist.ReduceOp.AVG, group=self._group)  # gloo has no mean
        elif self._sent is None:
            gradient.div_(self._ranks)
            dist.all_reduce(gradient, group=self._group)
        else:
            sent = self._sent[begin:end]
            torch.mul(gradient, 1 / self._ranks, out=sent)  # one kernel, which divides in float32
            dist.all_reduce(sent, group=self._group)
            gradient.copy_(sent)

    def arrivals(self, stream: torch.cuda.Stream | None) -> Iterator[int]:
        """Make the current stream wait for all ranges, which arrive as one piece."""
        if stream is not None:
            torch.cuda.current_stream(self._gradients.device).wait_stream(stream)
        yield self._gradients.numel()
