"""Products of matrices with communication inside: tiles wait for rows that peers send, or are stored at peers.

A persistent kernel computes x @ weight^T tile by tile, by TMA and wgmma on Hopper. The rows of x, or of the result,
are in W shards, one a rank. In a gathered product a tile waits until its rows have arrived, and tiles whose rows are
here already come first. In a scattered product a tile is stored straight into the window of the rank that owns its
rows, and the program that completes a region of rows raises the region's flag there. Source: Flux (Chang et al.,
arXiv 2406.06858), whose kernels do the first in the prologue and the second in the epilogue.
"""

from typing import Any, NamedTuple

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from dlrm_overlap.kernels.compiled import INTERPRETED, TYPES, CompiledKernel, specialised
from dlrm_overlap.kernels.flags import Flags
from dlrm_overlap.kernels.gemm.tiles import tile_product

ALIGNED = 8
"""elements that must divide N and K: 16 bytes of a type of 2, as TMA and the stores ask for"""


class Tiling(NamedTuple):
    """How a product is cut into tiles and programs."""

    block_m: int = 128
    """rows of a tile"""
    block_n: int = 256
    """columns of a tile"""
    block_k: int = 64
    """of both matrices that are read at a time"""
    group: int = 8
    """blocks of rows that are computed together, see `tiles.tile_at`"""

    def slot_rows(self, rows: int, parts: int) -> int:
        """Return how many of a shard's rows have one flag, if they are cut into at most `parts` parts of whole tiles.

        Example: 1000 rows in 3 parts, tiles of 128 rows: 384.
        """
        return -(-rows // (parts * self.block_m)) * self.block_m


class Signals(NamedTuple):
    """The flags that go with the rows of the shards, M / W rows each, and are raised to `flags.clock`."""

    flags: Flags
    """element (w, i) of a rank's flags stands for the rows [i * slot_rows, (i + 1) * slot_rows) of a shard: those of
    rank w that have come, or the own ones that w has multiplied; `counts` is not looked at"""
    slot_rows: int


class Destinations(NamedTuple):
    """Where a scattered product stores its tiles."""

    targets: torch.Tensor
    """[W] int64: address of [M / W, N] in each rank's memory, a multiple of 16, for this rank's part of its rows"""
    done: torch.Tensor
    """[W * regions] int32, regions = ceil(M / W / slot_rows): tiles of each region that are stored; 0 before and after.
    Launches that share it run one after the other"""
    order: str = "balanced"
    """of the shards: remote_first | balanced, see `tiles.tile_at`"""


TILING = Tiling()


def _compiled(tiling: Tiling, **kind: Any) -> CompiledKernel:
    constants = kind | {name.upper(): value for name, value in tiling._asdict().items()}
    return specialised(tile_product, num_warps=8, num_stages=4, **constants, INTERPRETED=INTERPRETED)


def laid_out(weight: torch.Tensor) -> torch.Tensor:
    """Return a weight that TMA can read: it or its transpose contiguous, at a multiple of 16 bytes."""
    if weight.data_ptr() % 16 == 0 and (weight.is_contiguous() or weight.t().is_contiguous()):
        return weight
    return weight.clone(memory_format=torch.contiguous_format)


def _programs(device: torch.device, tiles: int) -> int:
    """Return the number of programs: as many as multiprocessors, unless that is more than tiles."""
    return min(tiles, torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2)


def product(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor | Destinations,
    rank: int,
    owners: torch.Tensor,
    signals: Signals,
    bias: torch.Tensor | None = None,
    activation: str = "none",
    tiling: Tiling = TILING,
) -> None:
    """Compute activation(x @ weight^T + bias) on the current stream, with the communication at its one end inside.

    Where `out` is a tensor, the product is gathered: its tiles wait for the peers' shards of x. A wait that lasts
    longer than `flags.timeout` is recorded and stops the GPU's work. Rows have to arrive without a multiprocessor of
    this GPU, since the kernel may hold all of them: by copy engines, or by stores of the peers.

    Where `out` are destinations, it is scattered: this rank's part of the sum is stored at the ranks that own its rows,
    whose flags are raised. The kernel waits for nobody. `calls.sum_parts` adds the parts up at their owner.

    Args:
        x: [M, K] contiguous, bfloat16 or float16, K a multiple of 8, of which shard w, M / W rows, is rank w's. The own
            one is there. If scattered, K is this rank's part of the sum.
        weight: [N, K] of the type of `x`, it or its transpose contiguous, N a multiple of 8; see `laid_out`.
        out: [M, N] contiguous, of the type of `x`, or where the tiles go.
        rank: of the caller.
        owners: [W] int32: the order of the shards: the rank itself, then its peers, best as their rows arrive; if
            scattered, the peers first.
        signals: that the peers' rows are there, or that are raised when a slot's rows are; a slot has whole tiles.
        bias: [N] of any float type, or None, as if scattered.
        activation: none | relu; if scattered, none.
        tiling: how the product is cut.
    """
    (m, k), n, by_k, world_size = x.shape, weight.shape[0], weight.is_contiguous(), owners.numel()
    assert x.dtype == weight.dtype in (torch.bfloat16, torch.float16), f"{x.dtype}, {weight.dtype}: not two bytes"
    assert k % ALIGNED == n % ALIGNED == x.data_ptr() % 16 == 0, "TMA reads whole 16 bytes at multiples of 16"
    assert x.is_contiguous(), "and contiguous rows"
    assert laid_out(weight) is weight, "call `laid_out` first"
    assert m % world_size == 0, f"{m} rows are not shards of {world_size} ranks"
    (flags, slot_rows), shard_rows = signals, m // world_size
    scatter = isinstance(out, Destinations)
    # x stands in for arguments that the variant does not touch, an address like any other.
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
        tiling, GATHER=not scatter, SCATTER=scatter, BY_K=by_k, BIAS=bias is not None, ACTIVATION=activation,
        TYPE=TYPES[x.dtype], ORDER=order,
    )  # fmt: skip
    kernel(
        _programs(x.device, tiles), (added.dtype,),
        given, added, targets, owners, flags.addresses, flags.local, done, flags.clock, flags.status, rows, columns,
        rank, world_size, shard_rows, n // ALIGNED, k // ALIGNED, slot_rows, flags.local.shape[1],
        flags.timeout,
    )  # fmt: skip
