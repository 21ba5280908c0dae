"""Contenders of the figure of products with their communication inside: tensors of a shape, and calls on them.

A shape is that of two layers: M samples of all ranks, K features, N hidden units, of which each rank has N / W. The
first layer is `all_gather_matmul`, from this rank's samples [M / W, K] to its part of the hidden units [M, N / W]; the
second is `matmul_reduce_scatter` from there back to [M / W, K].
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.nn import functional

from dlrm_overlap.comm.collectives import PeerCollectives
from dlrm_overlap.config import InputError
from dlrm_overlap.dense.gemm.problem import Layer
from dlrm_overlap.dense.gemm.products import ParallelProducts

Call = Callable[[], torch.Tensor]

_ONLY = {"pushes": "all_gather", "triggered": "reduce_scatter"}  # their other operator is that of copies, or of tiles


class Shape(NamedTuple):
    """Sizes of both layers, see the module."""

    m: int
    k: int
    n: int

    @staticmethod
    def read(text: str) -> "Shape":
        """Return the shape that a text of `GemmRequest.shapes`, such as 4096x12288x49152, names."""
        return Shape(*map(int, text.split("x")))


class Case:
    """One operator at one shape: this rank's tensors, who runs it, and its two parts alone."""

    def __init__(
        self, operator: str, shape: Shape, dtype: torch.dtype, group: dist.ProcessGroup, device: torch.device
    ) -> None:
        """Draw the tensors; W must divide M and N.

        Args:
            operator: all_gather | reduce_scatter.
            shape: of both layers.
            dtype: of all tensors.
            group: the ranks.
            device: of this rank.
        """
        self.operator, self.shape, self.group, self.device = operator, shape, group, device
        ranks, (m, k, n) = group.size(), shape
        generator = torch.Generator(device).manual_seed(group.rank())
        make = partial(torch.randn, generator=generator, device=device, dtype=dtype)
        gather = operator == "all_gather"
        self.x = make(m // ranks, k) if gather else make(m, n // ranks)
        self.weight = (make(n // ranks, k) if gather else make(k, n // ranks)) * self.x.shape[1] ** -0.5
        self.link_bytes = (ranks - 1) * (m // ranks) * k * dtype.itemsize
        """that leave each rank for its peers"""

    def contender(self, name: str, products: ParallelProducts) -> Call | None:
        """Return the call of the contender `name`, or None where it cannot run or has nothing of its own.

        `torch` are the fused operators of torch's symmetric memory; all others are ways of `products`. All ranks call
        this alike.
        """
        if _ONLY.get(name, self.operator) != self.operator:
            return None
        if name == "torch":
            return self._torch() if self.device.type == "cuda" else None
        if self.operator == "all_gather":
            call: Call = lambda: products.all_gather_matmul(self.x, Layer(self.weight), name, keep=False)[0]  # noqa: E731
        else:
            call = lambda: products.begin_reduce_scatter(self.x, Layer(self.weight), name)()  # noqa: E731
        try:
            call()
        except InputError:  # on every rank alike
            return None
        return call

    def _torch(self) -> Call:
        import torch.distributed._symmetric_memory

        operators: Any = torch.ops.symm_mem
        name, turned = self.group.group_name, self.weight.t()
        if self.operator == "all_gather":
            return lambda: operators.fused_all_gather_matmul(self.x, [turned], 0, name, return_A=False)[1][0]
        return lambda: operators.fused_matmul_reduce_scatter(self.x, turned, "sum", 0, name)

    def gathered(self) -> torch.Tensor:
        """Return the rows that the product has: those of all ranks, or for a reduce-scatter this rank's x."""
        if self.operator == "reduce_scatter":
            return self.x
        x = self.x.new_empty(self.shape.m, self.shape.k)
        dist.all_gather_into_tensor(x, self.x, group=self.group)
        return x

    def reference(self) -> torch.Tensor:
        """Return the right output of the operator, computed in float32, as float32."""
        out = functional.linear(self.gathered().float(), self.weight.float())
        if self.operator == "reduce_scatter":
            dist.all_reduce(out, group=self.group)  # gloo has no reduce-scatter
            rows = self.shape.m // self.group.size()
            out = out[self.group.rank() * rows : (self.group.rank() + 1) * rows].clone()
        return out

    def products_alone(self) -> dict[str, Call]:
        """Return the product alone by cuBLAS and, where it takes such matrices, by our kernel."""
        x, turned = self.gathered(), self.weight.t()
        out = x.new_empty(x.shape[0], self.weight.shape[0])
        found: dict[str, Call] = {"cublas": lambda: torch.mm(x, turned, out=out)}
        if self.device.type == "cuda":
            from dlrm_overlap.kernels.gemm.product import fits, product

            if fits(x, self.weight):
                found["triton"] = lambda: (product(x, self.weight, None, "none", out), out)[1]
        return found

    def communication_alone(self, own: PeerCollectives, landing: torch.Tensor) -> dict[str, Call]:
        """Return the collective alone: the process group's and, of an all-gather between GPUs, our own.

        Args:
            own: to gather by.
            landing: uint8, from its `empty`, at least as large as all ranks' rows.
        """
        ranks, (m, k, _) = self.group.size(), self.shape
        rows = torch.zeros(m, k, device=self.device, dtype=self.x.dtype)
        mine = rows[: m // ranks]
        found: dict[str, Call] = {}
        if self.operator == "all_gather":
            source = mine.clone()
            found["collective"] = lambda: (dist.all_gather_into_tensor(rows, source, group=self.group), rows)[1]
        elif self.device.type == "cuda":
            out = mine.clone()
            found["collective"] = lambda: (dist.reduce_scatter_tensor(out, rows, group=self.group), out)[1]
        else:  # as `dense.gemm.serial.SerialScatter` does over gloo
            landing = torch.empty_like(rows)
            found["collective"] = lambda: (dist.all_to_all_single(landing, rows, group=self.group), landing)[1]
        if self.operator == "all_gather" and self.device.type == "cuda":
            sent = mine.clone()
            window = landing[: m * k * sent.dtype.itemsize].view(sent.dtype).view(ranks, m // ranks, k)

            def gather() -> torch.Tensor:
                own.all_gather(window, sent).wait()
                return window

            found["own"] = gather
        return found
