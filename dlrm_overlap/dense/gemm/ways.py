"""What every way of a product with its communication inside does, and the plain one: first the one, then the other."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.nn import functional

from dlrm_overlap.dense.gemm.linear import Layer, activate
from dlrm_overlap.kernels.gemm.reference import sum_parts

# Names since torch 2.13, and before.
all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

Finish = Callable[[], torch.Tensor]
"""makes the current stream wait for what has been begun, and returns it; called once"""


class Problem(NamedTuple):
    """A product and its communication, alike on all ranks."""

    operator: str
    """all_gather | reduce_scatter"""
    rows: int
    """of the product, those of all ranks, M"""
    columns: int
    """of the product on this rank, N"""
    inner: int
    """over which the product sums on this rank, K"""
    dtype: torch.dtype
    bias: bool
    activation: str
    keep: bool = False
    """whether the gathered rows are to be returned, too; never of a reduce-scatter"""

    @property
    def call(self) -> str:
        """The function of `operators` that asks for it."""
        return "all_gather_matmul" if self.operator == "all_gather" else "matmul_reduce_scatter"

    def __str__(self) -> str:
        """Return the problem as one of its ranks would write it."""
        sizes, bias = f"M {self.rows}, N {self.columns}, K {self.inner}", ", bias" if self.bias else ""
        kept = ", rows kept" if self.keep else ""
        return f"{self.call}({sizes}, {self.dtype}{bias}, {self.activation}{kept})"


class Products(ABC):
    """One way to run both operators between the ranks of a group, without autograd.

    All ranks make the same calls in the same order, on one stream or on streams that are ordered one behind the other.
    """

    name: str
    """as the operators' argument `way` has it"""
    parts: tuple[int, ...] = (1,)
    """into how many parts a rank's rows may be cut; each number is a candidate of the tuner"""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.group, self.device = group, device
        self.rank, self.world_size = group.rank(), group.size()

    def prepare(self, problem: Problem, parts: int) -> None:  # noqa: B027  not every way needs anything
        """Make memory and load kernels for a problem, before its first call; a collective, never within a capture.

        Raises:
            InputError: on every rank, if there is no room.
        """

    def fault(self, problem: Problem) -> str:
        """Return why this way cannot run a problem, or an empty text."""
        return ""

    def parts_for(self, problem: Problem) -> tuple[int, ...]:
        """Return what the tuner tries for a problem."""
        return self.parts

    @abstractmethod
    def all_gather_matmul(
        self, x_shard: torch.Tensor, layer: Layer, parts: int, keep: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return what `layer` makes of all rows, [M, N], and these [M, K] if `keep`; see `operators`."""

    @abstractmethod
    def begin_reduce_scatter(self, x: torch.Tensor, layer: Layer, parts: int) -> Finish:
        """Begin `operators.matmul_reduce_scatter`; what returns [M / W, N] is to be called once, on the same stream.

        Whatever is issued in between runs beside the communication.
        """

    def check(self) -> None:  # noqa: B027  collectives record nothing
        """Raise what a kernel has recorded; waits for nothing.

        Raises:
            ExchangeTimeoutError: if a peer has not come in time.
        """

    def close(self) -> None:  # noqa: B027  nor have they anything to release
        """Give memory back; all ranks call this, when all that was issued is done."""


class Serial(Products):
    """The collective of the process group, then the product; or the product, then the collective.

    The only way on CPUs, and the only one in float32. On GPUs NCCL adds the partial products up, in the products' type
    and in an order of its own, the same every time; on CPUs they are added up in float32 in the order of the ranks.
    """

    name = "serial"

    def all_gather_matmul(
        self, x_shard: torch.Tensor, layer: Layer, parts: int, keep: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Gather, then multiply."""
        x = x_shard.new_empty(self.world_size * x_shard.shape[0], x_shard.shape[1])
        all_gather(x, x_shard.contiguous(), group=self.group)
        out = functional.linear(x, layer.weight, layer.bias)
        return activate(out, layer._replace(bias=None)), x if keep else None

    def begin_reduce_scatter(self, x: torch.Tensor, layer: Layer, parts: int) -> Finish:
        """Multiply and begin to reduce."""
        partial = functional.linear(x, layer.weight)
        if self.device.type == "cpu":
            return self._begin_on_host(partial, layer)
        out = partial.new_empty(partial.shape[0] // self.world_size, partial.shape[1])
        work = reduce_scatter(out, partial, group=self.group, async_op=True)

        def finish() -> torch.Tensor:
            work.wait()
            return activate(out, layer)

        return finish

    def _begin_on_host(self, partial: torch.Tensor, layer: Layer) -> Finish:
        """Exchange the partial products, which gloo cannot add up in an order that is told."""
        received = torch.empty_like(partial)
        work = dist.all_to_all_single(received, partial, group=self.group, async_op=True)
        assert work is not None

        def finish() -> torch.Tensor:
            work.wait()
            parts = received.unflatten(0, (self.world_size, len(received) // self.world_size))
            return sum_parts(parts, layer.bias, layer.activation == "relu")

        return finish
