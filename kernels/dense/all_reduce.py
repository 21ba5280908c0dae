"""Averages a flat tensor over the ranks by loads and stores of the ranks' memory, in lines of LINE elements.

(W - 1) / W of the range leaves and reaches each rank twice, the minimum of an all-reduce.
"""

import torch
import triton
import triton.language as tl

from dlrm_overlap.kernels.compiled import TYPES, CompiledKernel, specialised
from dlrm_overlap.kernels.dense.arguments import LINE
from dlrm_overlap.kernels.flags import Flags
from dlrm_overlap.kernels.primitives import count_and_signal
from dlrm_overlap.kernels.tuning import power_of_2

NUM_WARPS = 32
MOST_UNROLLED = 16  # ranks: with 72, unrolled loops spill registers
_LANE_BYTES = 64  # bytes in flight a lane, of all ranks; with more, the compiler loads in turns, to save registers


@triton.jit
def _load_share(shares, peer, at, mask, TYPE: tl.constexpr):
    share = tl.multiple_of(tl.load(shares + peer).to(tl.pointer_type(TYPE)), 16)
    return tl.load(share + at, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _store_share(shares, peer, at, mean, mask, TYPE: tl.constexpr):
    share = tl.multiple_of(tl.load(shares + peer).to(tl.pointer_type(TYPE)), 16)
    tl.store(share + at, mean, mask=mask)


@triton.jit(do_not_specialize=["rank", "lines", "scale", "slot", "epoch"])
def _average_share(
    shares,  # [W] int64: address of the caller's share in each rank's memory
    peers_ready,  # [W] int64: address of each rank's flags
    counted,  # [1] int32, 0 before and after
    clock,  # [1] int64
    rank,
    lines,  # of LINE elements, in the share
    scale,
    slot,
    epoch: tl.int64,
    WORLD_SIZE: tl.constexpr,
    PEERS: tl.constexpr,
    TYPE: tl.constexpr,
    LINE: tl.constexpr,
    BLOCK: tl.constexpr,
    UNROLLED: tl.constexpr,
):
    """Store `scale` times the sum of a share over the ranks to all ranks, as program p of P the blocks p, p + P, ..

    Memory: sums are float32, in the order of the ranks, 16 bytes a lane; the mean overwrites the share, at the next
    rank first, so that ranks store to different peers.

    Order: an earlier kernel of the stream has waited for the ranks' flags: their gradients are ready and may be
    overwritten. The last program sets element `slot` of every rank's flags to `epoch` + `clock`, a release at system
    scope that covers all stores. A rank that has acquired it may read the mean; this rank no longer accesses the share.

    Example: rank 0 of 2 owns elements 1 2 of 1 2 3 4, and rank 1 has 5 6 7 8. Rank 0 stores 3 4 at both ranks.

    Source: Thakur, Rabenseifner and Gropp, Optimization of Collective Communication Operations in MPICH, 2005, section
    4.5.
    """
    elements = lines * LINE
    for block in range(tl.program_id(0), tl.cdiv(elements, BLOCK), tl.num_programs(0)):
        at = block * BLOCK + tl.arange(0, BLOCK)
        mask = at < elements
        # Add up the block of all ranks, in the order of the ranks.
        share = tl.multiple_of(tl.load(shares).to(tl.pointer_type(TYPE)), 16)
        total = tl.load(share + at, mask=mask, other=0.0).to(tl.float32)
        if UNROLLED:
            for peer in tl.static_range(1, WORLD_SIZE):
                total += _load_share(shares, peer, at, mask, TYPE)
        else:
            for peer in tl.range(1, WORLD_SIZE, loop_unroll_factor=8):
                total += _load_share(shares, peer, at, mask, TYPE)
        # Store the mean over the block at all ranks.
        mean = (total * scale).to(TYPE)  # [BLOCK]
        if UNROLLED:
            for turn in tl.static_range(WORLD_SIZE):
                _store_share(shares, (rank + 1 + turn) % WORLD_SIZE, at, mean, mask, TYPE)
        else:
            for turn in tl.range(0, WORLD_SIZE):
                _store_share(shares, (rank + 1 + turn) % WORLD_SIZE, at, mean, mask, TYPE)
    # Count this program (acquire and release, GPU scope); the last one sets the flags, a release at system scope.
    count_and_signal(counted, peers_ready, slot, WORLD_SIZE, epoch + tl.load(clock), PEERS)


def lane_elements(world_size: int, dtype: torch.dtype) -> int:
    """Return the elements of each rank that a lane reads at a time: 32 bytes for two ranks, else 16."""
    return max(16, power_of_2(_LANE_BYTES // world_size + 1) // 2) // dtype.itemsize


def _compiled(world_size: int, dtype: torch.dtype) -> CompiledKernel:
    lanes = NUM_WARPS * 32
    return specialised(
        _average_share, num_warps=NUM_WARPS,
        WORLD_SIZE=world_size, PEERS=power_of_2(world_size), TYPE=TYPES[dtype], LINE=LINE,
        BLOCK=lanes * lane_elements(world_size, dtype), UNROLLED=world_size <= MOST_UNROLLED,
    )  # fmt: skip


def average_share(
    shares: torch.Tensor,
    dtype: torch.dtype,
    lines: int,
    flags: Flags,
    counted: torch.Tensor,
    rank: int,
    slot: int,
    epoch: int,
    programs: int,
) -> None:
    """Store the mean over the ranks of this rank's share to all ranks, then set its flag `slot` at every rank.

    Args:
        shares: [W] int64: address of the share at each rank, a multiple of 16.
        dtype: float32 or bfloat16.
        lines: of the share; 0: only the flag is set.
        counted: [1] int32, 0 before and after. Kernels that share it must not overlap.
    """
    world_size = shares.numel()
    _compiled(world_size, dtype)(
        programs, (),
        shares, flags.addresses, counted, flags.clock,
        rank, lines, 1 / world_size, rank * flags.local.shape[1] + slot, epoch,
    )  # fmt: skip
