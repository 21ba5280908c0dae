"""The mean over the ranks of a flat tensor, by loads and stores of the ranks' memory: each averages a share of it.

A range of the tensor is cut into a share a rank. The owner of a share reads it from all ranks, adds it up in the order
of the ranks, and stores the mean at all of them. So every rank gets the same bits, and (W - 1) / W of the range leaves
and reaches a rank twice, which is the least that an all-reduce can do. Kernels are given numbers of lines, of LINE
elements each, so that the compiler knows what divides the numbers of elements.

Example: two ranks, a range of 4 elements, rank 0 has 1 2 3 4 and rank 1 has 5 6 7 8. Rank 0 reads 1 2 and 5 6, and
stores 3 4 to the first half of both ranks' ranges; rank 1 reads 3 4 and 7 8, and stores 5 6 to the second half.
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
_LANE_BYTES = 64  # in flight of all ranks together: with more, the compiler keeps to 32 registers, and loads in turns


@triton.jit(do_not_specialize=["rank", "lines", "scale", "slot", "epoch"])
def _average_share(
    shares, peers_ready, counted, clock, rank, lines, scale, slot, epoch: tl.int64,
    WORLD_SIZE: tl.constexpr, PEERS: tl.constexpr, TYPE: tl.constexpr, LINE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Store `scale` times the sum of a share over the ranks to all ranks, as program p of P the blocks p, p + P, ..

    Memory: `shares` [W] int64 holds the addresses of `lines` * LINE elements of TYPE each: the share that the caller
    owns, as it is in rank w's memory. The program reads its blocks from all ranks, 16 bytes a lane, and adds them up in
    float32 in the order of the ranks. It stores each mean over what it has read, at all ranks, from the next rank on,
    so that not all ranks store to one.

    Order: whoever launches this has awaited the flags by which the ranks say that their gradients are there and may be
    overwritten; the end of that kernel orders them. A block is stored by the program that has read it, after it has.
    The program then passes a barrier and counts itself (acquire and release, GPU scope). Whoever counts last has so
    acquired what the others have released, and releases all of it with element `slot` of every rank's flags, raised to
    `epoch` + `clock` [1] at system scope. Who has acquired that flag reads the mean, and knows that this rank touches
    the share no more.

    Example: two ranks; rank 1 owns a share of 2 lines of 64 elements, BLOCK 64, P 1. It reads elements 0 .. 63 from
    both ranks, stores their mean to rank 0 and to itself, does the same for 64 .. 127, and raises its flag at both.

    Source: the all-reduce as a reduce-scatter and an all-gather (Thakur, Rabenseifner and Gropp, Optimization of
    Collective Communication Operations in MPICH, 2005, section 4.5), each step by direct loads or stores.
    """
    elements = lines * LINE
    for block in range(tl.program_id(0), tl.cdiv(elements, BLOCK), tl.num_programs(0)):
        at = block * BLOCK + tl.arange(0, BLOCK)
        mask = at < elements
        share = tl.multiple_of(tl.load(shares).to(tl.pointer_type(TYPE)), 16)
        total = tl.load(share + at, mask=mask, other=0.0).to(tl.float32)
        for peer in tl.static_range(1, WORLD_SIZE):
            share = tl.multiple_of(tl.load(shares + peer).to(tl.pointer_type(TYPE)), 16)
            total += tl.load(share + at, mask=mask, other=0.0).to(tl.float32)
        mean = (total * scale).to(TYPE)
        for turn in tl.static_range(WORLD_SIZE):
            peer = (rank + 1 + turn) % WORLD_SIZE
            share = tl.multiple_of(tl.load(shares + peer).to(tl.pointer_type(TYPE)), 16)
            tl.store(share + at, mean, mask=mask)
    count_and_signal(counted, peers_ready, slot, WORLD_SIZE, epoch + tl.load(clock), PEERS)


def lane_elements(world_size: int, dtype: torch.dtype) -> int:
    """Return how many elements of each rank a lane of `_average_share` reads at a time: 32 bytes of two, then 16."""
    return max(16, power_of_2(_LANE_BYTES // world_size + 1) // 2) // dtype.itemsize


def _averaging(world_size: int, dtype: torch.dtype) -> CompiledKernel:
    lanes = NUM_WARPS * 32
    return specialised(
        _average_share, num_warps=NUM_WARPS,
        WORLD_SIZE=world_size, PEERS=power_of_2(world_size), TYPE=TYPES[dtype], LINE=LINE,
        BLOCK=lanes * lane_elements(world_size, dtype),
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
    """Store the mean over the ranks of this rank's share to all ranks, then raise its flag `slot` at every rank.

    Args:
        shares: [W] int64: addresses of the share at each rank, multiples of 16 bytes; the mean is stored over it.
        dtype: of the gradients there, float32 or bfloat16; the sum is float32 in either case.
        lines: of the share, of `LINE` elements each; where it has none, the flag alone is raised.
        flags: which say at every rank how far this rank is; the last program to end raises one.
        counted: [1] int32: programs of the running kernel that are through; 0 before and after. Kernels that share it
            run one after the other.
        rank: of the caller.
        slot: of the flags that is raised to `epoch` + `flags.clock`.
        programs: of 32 warps each: links need few, and the rest of the GPU stays free.
    """
    world_size = shares.numel()
    _averaging(world_size, dtype)(
        programs, (),
        shares, flags.addresses, counted, flags.clock,
        rank, lines, 1 / world_size, rank * flags.local.shape[1] + slot, epoch,
    )  # fmt: skip
