"""Products of matrices with communication inside: tiles wait for rows that peers send, or are stored at peers.

A persistent kernel computes x @ weight^T by TMA and wgmma on Hopper. The rows of x (gathered), or of the result
(scattered), are in W shards, one per rank.

Source: Flux (Chang et al., arXiv 2406.06858).
"""

from typing import Any, NamedTuple

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from dlrm_overlap.kernels.compiled import INTERPRETED, TYPES, CompiledKernel, specialised
from dlrm_overlap.kernels.flags import Flags
from dlrm_overlap.kernels.gemm.tiles import TileOptions, tile_product

ALIGNED = 8
"""divides N and K: 16 bytes of a 2-byte dtype, as TMA and the stores need"""


class Tiling(NamedTuple):
    block_m: int = 128
    block_n: int = 256
    block_k: int = 64
    """columns of x and of the weight that are read at a time"""
    group: int = 8
    """blocks of rows that are computed together"""

    def slot_rows(self, rows: int, parts: int) -> int:
        """Return how many of a shard's rows have one flag, if cut into at most `parts` parts of whole tiles.

        Example: 1000 rows in 3 parts, tiles of 128 rows: 384.
        """
        return -(-rows // (parts * self.block_m)) * self.block_m


class TileSignals(NamedTuple):
    flags: Flags
    """element (w, i) covers rows [i * slot_rows, (i + 1) * slot_rows) of a shard: rows that rank w has sent, or this
    rank's rows that w has multiplied. They are set to `clock`; `counts` is not used"""
    slot_rows: int


class Destinations(NamedTuple):
    """Where a scattered product stores its tiles."""

    targets: torch.Tensor
    """[W] int64: address of [M / W, N] in each rank's memory, a multiple of 16"""
    done: torch.Tensor
    """[W * regions] int32, regions = ceil(M / W / slot_rows): tiles of each region that are stored; 0 before and after.
    Launches that share it must not overlap
    """
    order: str = "balanced"
    """remote_first | balanced, see `tiles.tile_at`"""


TILING = Tiling()


def _compiled(tiling: Tiling, **kind: Any) -> CompiledKernel:
    options = TileOptions(**kind, **tiling._asdict(), interpreted=INTERPRETED)
    return specialised(tile_product, num_warps=8, num_stages=4, OPTIONS=options)


def for_tma(weight: torch.Tensor) -> torch.Tensor:
    """Return the weight, or a copy that TMA can read: it or its transpose contiguous, 16-byte aligned."""
    if weight.data_ptr() % 16 == 0 and (weight.is_contiguous() or weight.t().is_contiguous()):
        return weight
    return weight.clone(memory_format=torch.contiguous_format)


def _programs(device: torch.device, tiles: int) -> int:
    return min(tiles, torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2)


def product(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor | Destinations,
    rank: int,
    owners: torch.Tensor,
    signals: TileSignals,
    bias: torch.Tensor | None = None,
    activation: str = "none",
    tiling: Tiling = TILING,
) -> None:
    """Compute activation(x @ weight^T + bias) on the current stream, with the communication before or after it.

    If `out` is a tensor, the product is gathered: its tiles wait for the peers' shards of x, which must arrive without
    a multiprocessor of this GPU, since the kernel may occupy all. An expired wait (`flags.timeout`) is recorded and
    stops the GPU's work. If `out` is `Destinations`, it is scattered: partial products are stored at the ranks that own
    their rows, for `calls.sum_parts` to add up, and the kernel waits for nobody.

    Args:
        x: [M, K] contiguous, bfloat16 or float16, K a multiple of 8; shard w, M / W rows, belongs to rank w.
        weight: [N, K] of the dtype of `x`, N a multiple of 8; see `for_tma`.
        out: [M, N] contiguous, of the dtype of `x`, or destinations.
        owners: [W] int32, the order of the shards: the rank itself, then its peers as their rows arrive; if scattered,
            the peers first.
        signals: flags of arriving rows, or of stored ones; then a slot has whole tiles.
        bias, activation: [N] of any float type, none | relu; not if scattered.
    """
    (m, k), n, by_k, world_size = x.shape, weight.shape[0], weight.is_contiguous(), owners.numel()
    assert x.dtype == weight.dtype in (torch.bfloat16, torch.float16), f"{x.dtype}, {weight.dtype}: not two bytes"
    assert k % ALIGNED == n % ALIGNED == x.data_ptr() % 16 == 0, "TMA reads whole 16 bytes at multiples of 16"
    assert x.is_contiguous(), "and contiguous rows"
    assert for_tma(weight) is weight, "call `for_tma` first"
    assert m % world_size == 0, f"{m} rows are not shards of {world_size} ranks"
    (flags, slot_rows), shard_rows = signals, m // world_size
    scatter = isinstance(out, Destinations)
    # x is passed for tensors that this variant does not access.
    given, (targets, done, order) = (x, out) if isinstance(out, Destinations) else (out, (x, x, "own_first"))
    assert slot_rows % tiling.block_m == 0, f"{slot_rows} rows: not whole tiles of {tiling.block_m}"
    rows = TensorDescriptor.from_tensor(x, [tiling.block_m, tiling.block_k])
    if by_k:
        columns = TensorDescriptor.from_tensor(weight, [tiling.block_n, tiling.block_k])
    else:
        columns = TensorDescriptor.from_tensor(weight.t(), [tiling.block_k, tiling.block_n])
    tiles = -(-shard_rows // tiling.block_m) * world_size * -(-n // tiling.block_n)
    added = x if bias is None else bias
    kernel = _compiled(
        tiling, gather=not scatter, scatter=scatter, by_k=by_k, bias=bias is not None, activation=activation,
        dtype=TYPES[x.dtype], order=order,
    )  # fmt: skip
    kernel(
        _programs(x.device, tiles), (added.dtype,),
        given, added, targets, owners, flags.addresses, flags.local, done, flags.clock, flags.status, rows, columns,
        rank, world_size, shard_rows, n // ALIGNED, k // ALIGNED, slot_rows, flags.local.shape[1],
        flags.timeout,
    )  # fmt: skip
