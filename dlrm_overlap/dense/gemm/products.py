"""The ways to run a product with its communication inside; one object of an owner runs them.

    serial     the collective, then the product, or the other way round: NCCL's, or gloo's on CPUs
    copies     products of cuBLAS, part by part; copy engines send rows, or partial products
    tiles      one kernel of our own, whose tiles wait for their rows or go to their owner
    triggered  as tiles, but copy engines send the partial products that the kernel has counted as complete
    auto       copies, or serial where few bytes travel or copies cannot run, see `rule`

All but the first are between GPUs, of float16 or bfloat16; tiles and triggered take N and K that are multiples of 8.
"""

import logging
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from dlrm_overlap.config import InputError
from dlrm_overlap.dense.gemm import serial
from dlrm_overlap.dense.gemm.layer import Finish, ProductLayer

if TYPE_CHECKING:
    from dlrm_overlap.dense.gemm.windows import ProductWindows

log = logging.getLogger("dlrm_overlap")

# Of an H200 over NVLink, bfloat16: cuBLAS, and copies of 64 MB to each of three peers.
_FLOP_PER_US, _SENT_BYTES_PER_US = 800e6, 394e3
_FEW_BYTES = 8e6


def rule(gathers: bool, rows: int, columns: int, inner: int, world_size: int) -> tuple[str, int]:
    """Return the way that `auto` takes where copies can run, and into how many parts any way cuts a rank's rows.

    Flags, copies and the kernels that wait for them take some 20 us however little there is to send, so few bytes
    travel serially. One part suits a call whose product takes longer than its links, since all copies but the first or
    the last are hidden. Held against the rows of docs/results/gemm.md.

    Args:
        gathers: whether the product follows an all-gather, or comes before a reduce-scatter.
        rows: of the product, those of all ranks, M.
        columns: of the product on this rank, N.
        inner: over which the product sums on this rank, K.
        world_size: W.

    Example: 2 ranks, an all-gather of 32768 rows of K 4096 in bfloat16. Each rank sends 134 MB in 341 us. With N 2048
    the product takes 687 us: copies, 1 part. With N 512 it takes 172: copies, 4 parts.
    """
    sent_bytes = (world_size - 1) * rows // world_size * (inner if gathers else columns) * 2
    is_hidden = 2 * rows * columns * inner / _FLOP_PER_US >= sent_bytes / _SENT_BYTES_PER_US
    return "serial" if sent_bytes < _FEW_BYTES else "copies", 1 if is_hidden else 4


class ParallelProducts:
    """Both operators on the tensors of one device between the ranks of one group, without autograd.

    All ranks make the same calls in the same order, on one stream or on streams that are ordered one after the other.
    The first call of a size makes its memory, for which ranks wait for each other, so it may not be within a capture. A
    copy of layers shares it; another model's windows outlive this one's.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, wait_timeout_s: float = 600.0) -> None:
        """Take the bound of a wait for a peer."""
        self.group, self.device, self.wait_timeout_s = group, device, wait_timeout_s
        self.rank, self.world_size = group.rank(), group.size()
        self.order: AbstractContextManager[object] = nullcontext()
        """entered around all communication, to order it within a captured step"""
        self.windows: ProductWindows | None = None
        """made at the first call between GPUs that is not serial"""
        self._reaches_peers = device.type == "cuda" and self.world_size > 1

    def __deepcopy__(self, memo: dict[int, Any]) -> "ParallelProducts":
        return self

    def all_gather_matmul(
        self, x_shard: torch.Tensor, layer: ProductLayer, way: str, keep: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the output of `operators.all_gather_matmul` and, if `keep`, the gathered rows [M, K]."""
        x_shard = _at_16_bytes(x_shard)
        way, parts = self._choose(True, len(x_shard) * self.world_size, x_shard, layer, way)
        if way == "serial":
            return serial.gather(self.group, x_shard, layer, keep)
        from dlrm_overlap.dense.gemm import gathers  # needs Triton, which a CPU does not

        gather = gathers.copied if way == "copies" else gathers.tiled
        return gather(self._opened(), x_shard, layer, parts, keep)

    def begin_reduce_scatter(self, x: torch.Tensor, layer: ProductLayer, way: str) -> Finish:
        """Begin `operators.matmul_reduce_scatter`; the function that is returned, called once, returns its output.

        Work that is issued in between runs beside the communication.
        """
        x = _at_16_bytes(x)
        way, parts = self._choose(False, len(x), x, layer, way)
        if way == "serial":
            return serial.scatter(self.group, x, layer)
        from dlrm_overlap.dense.gemm import scatters  # needs Triton, which a CPU does not

        scatter = {"copies": scatters.copied, "tiles": scatters.tiled, "triggered": scatters.triggered}[way]
        return scatter(self._opened(), x, layer, parts)

    def _choose(self, gathers: bool, rows: int, x: torch.Tensor, layer: ProductLayer, way: str) -> tuple[str, int]:
        """Return the way of a call, and into how many parts it cuts a rank's rows."""
        columns, inner = layer.weight.shape
        ruled, parts = rule(gathers, rows, columns, inner, self.world_size)
        if way != "auto":
            return way, parts
        halves = x.dtype in (torch.float16, torch.bfloat16)
        if ruled == "copies" and halves and self._reaches_peers and self.windows is None:
            try:
                self._opened()
            except InputError as error:  # on every rank
                log.warning("products of divided layers run serially, since %s", error)
                self._reaches_peers = False
        return ruled if halves and self._reaches_peers else "serial", parts

    def _opened(self) -> "ProductWindows":
        """Return the windows, made at the first call; a collective.

        Raises:
            InputError: on every rank, if there is no room, or the ranks do not reach each other's memory.
        """
        if self.windows is None:
            from dlrm_overlap.dense.gemm.windows import ProductWindows

            self.windows = ProductWindows(self.group, self.device, self.wait_timeout_s)
        return self.windows

    def check(self) -> None:
        """Raise the error that a wait on the GPU has recorded; waits for nothing.

        Raises:
            ExchangeTimeoutError: if a peer has not come in time, naming both ranks.
        """
        if self.windows is not None:
            self.windows.check()

    def close(self) -> None:
        """Give all memory back, once all that was issued is done. All ranks call this; the next call begins anew."""
        if self.windows is not None:
            self.windows.close()
        self.windows = None


def _at_16_bytes(x: torch.Tensor) -> torch.Tensor:
    """Return the rows contiguous, from a multiple of 16 bytes on, as TMA reads them."""
    x = x.contiguous()
    return x.clone() if x.data_ptr() % 16 else x
