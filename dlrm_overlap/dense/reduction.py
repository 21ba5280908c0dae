"""The mean over the ranks of ranges of the flat gradient by a collective, and how it is made by stores."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from dlrm_overlap.comm.counters import Counters
from dlrm_overlap.config import EmbeddingConfig
from dlrm_overlap.dense.flat import FlatParameters


class StoreOptions(NamedTuple):
    """How gradients are reduced by stores."""

    programs: int = 16
    """of 32 warps, of the kernel that fills the links, on GPUs"""
    piece_elements: int = 4 << 20
    """about so many are reduced at once, and updated while the next ones travel"""
    wait_timeout_s: float = EmbeddingConfig.wait_timeout_s
    """bound of a wait for a peer"""


class CollectiveReduction:
    """Replaces ranges of the flat gradient by their mean over the ranks, by the group's all-reduce: NCCL's or gloo's.

    All ranks make the same calls.
    """

    counters: Sequence[Counters] = ()

    def __init__(self, flat: FlatParameters, group: dist.ProcessGroup, dtype: torch.dtype) -> None:
        """Reduce the gradient of `flat`; `dtype` is the type in which it is sent and added up, float32 or bfloat16."""
        self._gradients, self._group = flat.gradients.tensor[: flat.shared_end], group
        self._ranks = dist.get_world_size(group)
        self._sent = None if dtype == torch.float32 else torch.empty_like(self._gradients, dtype=dtype)
        self._ranges: Sequence[tuple[int, int]] = ()

    def cut(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Take the ranges, in elements; every step reduces all of them, in their order, each by one all-reduce."""
        self._ranges = ranges

    @torch.no_grad()
    def reduce(self, number: int) -> None:
        """Replace range `number` of the gradient by its mean over the ranks, on the current stream."""
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
        """Make the current stream wait for all ranges, which arrive as one piece.

        Args:
            stream: where `reduce` was called; None on a CPU.

        Yields:
            How many elements, from the first on, have arrived.
        """
        if stream is not None:
            torch.cuda.current_stream(self._gradients.device).wait_stream(stream)
        yield self._gradients.numel()

    def check(self) -> None:
        """Do nothing: collectives record no fault."""

    def close(self) -> None:
        """Do nothing: there is no memory that peers see."""
