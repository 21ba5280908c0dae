"""Runs products with communication inside, in one of the ways of `docs/architecture/step.md`.

The way `auto` means copies, or serial if few bytes are sent or copies cannot run. All ways but serial run only between
NVIDIA GPUs, in float16 or bfloat16; tiles and triggered need Hopper or later, and N and K that are multiples of 8.
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

# Measured on H200 over NVLink, bfloat16: cuBLAS, and copies of 64 MB to each of three peers.
_FLOP_PER_US, _SENT_BYTES_PER_US = 800e6, 394e3
_FEW_BYTES = 8e6
_HOPPER = 9, 0


def rule(gathers: bool, rows: int, columns: int, inner: int, world_size: int) -> tuple[str, int]:
    """Return the way that `auto` means if copies can run, and into how many parts any way cuts a rank's rows.

    Flags, copies and waits take about 20 us, so few bytes are sent serially. One part suffices if the product takes
    longer than sending over the links (docs/results/gemm.md).

    Args:
        gathers: whether the product follows an all-gather; otherwise it precedes a reduce-scatter.
        rows, columns, inner: M on all ranks; N and K on this rank.
    """
    # For 2-byte elements: what this rank sends, and whether its links take less time than the product.
    sent_bytes = (world_size - 1) * rows // world_size * (inner if gathers else columns) * 2
    is_hidden = 2 * rows * columns * inner / _FLOP_PER_US >= sent_bytes / _SENT_BYTES_PER_US
    return "serial" if sent_bytes < _FEW_BYTES else "copies", 1 if is_hidden else 4


class ParallelProducts:
    """Runs the two operators of `operators`, without autograd, between the ranks of one group.

    All ranks make the same calls in the same order, on one stream or on ordered streams. The first call of a size is a
    collective that allocates memory, so it may not be captured. A deep copy of a layer shares this object.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, wait_timeout_s: float = 600.0) -> None:
        self.group, self.device, self.wait_timeout_s = group, device, wait_timeout_s
        self.rank, self.world_size = group.rank(), group.size()
        self.order: AbstractContextManager[object] = nullcontext()
        """context in which the operators issue all communication, to order it within a captured step"""
        self.windows: ProductWindows | None = None
        self._on_gpus = device.type == "cuda" and torch.version.hip is None
        self._reaches_peers = self._on_gpus and self.world_size > 1

    def __deepcopy__(self, memo: dict[int, Any]) -> "ParallelProducts":
        return self

    def all_gather_matmul(
        self, x_shard: torch.Tensor, layer: ProductLayer, way: str, keep: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the output of `operators.all_gather_matmul` and, if `keep`, the gathered rows [M, K]."""
        x_shard = _aligned(x_shard)
        way, parts = self._choose(True, len(x_shard) * self.world_size, x_shard, layer, way)
        if way == "serial":
            return serial.gather(self.group, x_shard, layer, keep)
        from dlrm_overlap.dense.gemm import gathers  # imports Triton, which CPUs do not need

        gather = gathers.copied if way == "copies" else gathers.tiled
        return gather(self._open_windows(), x_shard, layer, parts, keep)

    def begin_reduce_scatter(self, x: torch.Tensor, layer: ProductLayer, way: str) -> Finish:
        """Begin `operators.matmul_reduce_scatter`. The returned function, to be called once, returns the output."""
        x = _aligned(x)
        way, parts = self._choose(False, len(x), x, layer, way)
        if way == "serial":
            return serial.scatter(self.group, x, layer)
        from dlrm_overlap.dense.gemm import scatters  # imports Triton, which CPUs do not need

        scatter = {"copies": scatters.copied, "tiles": scatters.tiled, "triggered": scatters.triggered}[way]
        return scatter(self._open_windows(), x, layer, parts)

    def _choose(self, gathers: bool, rows: int, x: torch.Tensor, layer: ProductLayer, way: str) -> tuple[str, int]:
        columns, inner = layer.weight.shape
        ruled, parts = rule(gathers, rows, columns, inner, self.world_size)
        if way != "auto":
            self._require(way)
            return way, parts
        is_half = x.dtype in (torch.float16, torch.bfloat16)
        if ruled == "copies" and is_half and self._reaches_peers and self.windows is None:
            try:
                self._open_windows()
            except InputError as error:  # on every rank
                log.warning("products of divided layers run serially, since %s", error)
                self._reaches_peers = False
        return ruled if is_half and self._reaches_peers else "serial", parts

    def _require(self, way: str) -> None:
        if way != "serial" and torch.version.hip is not None:
            raise InputError(
                f"way: {way} on AMD GPUs; products with communication inside need NVIDIA's copies and kernels, so take "
                f"serial"
            )
        if way in ("tiles", "triggered") and self._on_gpus:
            found = torch.cuda.get_device_capability(self.device)
            if found < _HOPPER:
                raise InputError(
                    f"way: {way} on a GPU of compute capability {found[0]}.{found[1]}, but its kernel reads by TMA, "
                    f"which GPUs have from 9.0 on; take copies, serial or auto"
                )

    def _open_windows(self) -> "ProductWindows":
        if self.windows is None:
            from dlrm_overlap.dense.gemm.windows import ProductWindows

            self.windows = ProductWindows(self.group, self.device, self.wait_timeout_s)
        return self.windows

    def check(self) -> None:
        """Raise the recorded `ExchangeTimeoutError` of a wait, if any; does not wait for the GPU."""
        if self.windows is not None:
            self.windows.check()

    def close(self) -> None:
        """Wait for all issued work, then free all memory; a collective."""
        if self.windows is not None:
            self.windows.close()
        self.windows = None


def _aligned(x: torch.Tensor) -> torch.Tensor:
    """Return the rows contiguous and 16-byte aligned, as TMA reads them."""
    x = x.contiguous()
    return x.clone() if x.data_ptr() % 16 else x
