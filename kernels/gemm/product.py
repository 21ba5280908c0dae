"""Products of matrices with communication inside: tiles wait for rows that peers send, or are stored at peers.

A persistent kernel computes x @ weight^T tile by tile, by TMA and wgmma on Hopper. The rows of x, or of the result,
are in W shards, one a rank. In a gathered product a tile waits until its rows have arrived, and tiles whose rows are
here already come first. In a scattered product a tile is stored straight into the window of the rank that owns its
rows, and the program that completes a region of rows raises the region's flag there. Source: Flux (Chang et al.,
arXiv 2406.06858), whose kernels do the first in the prologue and the second in the epilogue.
"""

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from dlrm_overlap.kernels.compiled import INTERPRETED, TYPES, CompiledKernel, specialised
from dlrm_overlap.kernels.flags import Flags
from dlrm_overlap.kernels.gemm.portable import product_in_triton

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
    """blocks of rows that are computed together, see `order.tile_at`"""
    specialised: bool = True
    """on Hopper by `hopper.product_on_hopper`, which has warps that load and others that multiply; elsewhere, and if
    not, by `portable.product_in_triton`"""

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
    """of the shards: remote_first | balanced, see `order.tile_at`"""


TILING = Tiling()
_STAGES = 4  # reads of both matrices that are under way at once, with the one that is used


def _compiled(tiling: Tiling, **kind: Any) -> CompiledKernel:
    """Return the kernel of a tiling, with the other constants of both kernels."""
    constants = kind | {name.upper(): value for name, value in tiling._asdict().items()}
    if not constants.pop("SPECIALISED"):
        return specialised(product_in_triton, num_warps=8, num_stages=_STAGES, **constants, INTERPRETED=INTERPRETED)
    from dlrm_overlap.kernels.gemm import hopper

    return specialised(
        hopper.product_on_hopper, num_warps=4, **constants, STAGES=_STAGES, GROUPS=hopper.GROUPS,
        LOAD_REGISTERS=hopper.LOAD_REGISTERS, PRODUCT_REGISTERS=hopper.PRODUCT_REGISTERS,
    )  # fmt: skip


def _descriptor(matrix: torch.Tensor, rows: int, columns: int, tiling: Tiling) -> Any:
    """Return the descriptor by which TMA reads blocks of [rows, columns] of a contiguous matrix."""
    if not tiling.specialised:
        return TensorDescriptor.from_tensor(matrix, [rows, columns])
    from triton.experimental.gluon.language import NVMMASharedLayout
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as LaidOut

    layout = NVMMASharedLayout.get_default_for([rows, columns], TYPES[matrix.dtype])
    return LaidOut.from_tensor(matrix, [rows, columns], layout)


def laid_out(weight: torch.Tensor) -> torch.Tensor:
    """Return a weight that TMA can read: it or its transpose contiguous, at a multiple of 16 bytes."""
    if weight.data_ptr() % 16 == 0 and (weight.is_contiguous() or weight.t().is_contiguous()):
        return weight
    return weight.clone(memory_format=torch.contiguous_format)


@lru_cache
def _on_hopper(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


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
    tiling = tiling._replace(specialised=tiling.specialised and _on_hopper(x.device))
    rows = _descriptor(x, tiling.block_m, tiling.block_k, tiling)
    if by_k:
        columns = _descriptor(weight, tiling.block_n, tiling.block_k, tiling)
    else:
        columns = _descriptor(weight.t(), tiling.block_k, tiling.block_n, tiling)
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
