"""The mean over the ranks of a flat tensor, by loads and stores of the ranks' memory: each averages a share of it.

A range of the tensor is cut into a share a rank. The owner of a share reads it from all ranks, adds it up in the order
of the ranks, and stores the mean at all of them. So every rank gets the same bits, and (W - 1) / W of the range leaves
and reaches a rank twice, which is the least that an all-reduce can do. Kernels are given numbers of lines, of LINE
elements each, so that the compiler knows what divides the numbers of elements.

The owner finds what it reads by a table of addresses. Either these are the peers' own tensors (pull), or a staging
memory of the owner into which the ranks have stored the share before, by `send_shares` (push).

Example: two ranks, a range of 4 elements, rank 0 has 1 2 3 4 and rank 1 has 5 6 7 8. Rank 0 reads 1 2 and 5 6, and
stores 3 4 to the first half of both ranks' ranges; rank 1 reads 3 4 and 7 8, and stores 5 6 to the second half.
"""

from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
import triton.language as tl

from dlrm_overlap.kernels.arguments import power_of_2
from dlrm_overlap.kernels.compiled import TYPES, CompiledKernel
from dlrm_overlap.kernels.dense.arguments import LINE
from dlrm_overlap.kernels.primitives import count_and_raise

NUM_WARPS = 32
_SENT_LANE_ELEMENTS = 16  # in flight: 64 KiB of float32 a program
_LANE_BYTES = 64  # in flight of all ranks together: with more, the compiler keeps to 32 registers, and loads in turns


@dataclass(frozen=True)
class ShareFlags:
    """The flags at every rank that say how far this rank is, and how the last program to end raises them."""

    addresses: torch.Tensor
    """[W] int64: of each rank's flags, [W, slots] int64, whose row w rank w raises"""
    slots: int
    counted: torch.Tensor
    """[1] int32: programs of the running kernel that are through; 0 before and after. Kernels that share it run one
    after the other"""
    clock: torch.Tensor
    """[1] int64: added to the epoch, as in `flags.Flags`"""


@triton.jit(do_not_specialize=["rank", "lines", "scale", "slot", "epoch"])
def _average_share(
    sources, targets, peers_ready, counted, clock, rank, lines, scale, slot, epoch: tl.int64,
    WORLD_SIZE: tl.constexpr, PEERS: tl.constexpr, TYPE: tl.constexpr, LINE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Store `scale` times the sum of a share over the ranks to all ranks, as program p of P the blocks p, p + P, ..

    Memory: `sources` and `targets` [W] int64 hold addresses of `lines` * LINE elements of TYPE each: the share as rank
    w has given it, here or in its own memory, and where the mean belongs at rank w. The program reads its blocks of all
    sources, 16 bytes a lane, and adds them up in float32 in the order of the ranks. It stores them to all targets, from
    the next rank's on, so that not all ranks store to one. A target may be the source of the same rank: a block is
    stored by the program that has read it, after it has.

    Order: whoever launches this has awaited the flags by which the ranks say that their sources are there and that
    their targets may be overwritten; the end of that kernel orders them. The program that ends last raises element
    `slot` of every rank's flags to `epoch` + `clock` [1]. Who has acquired it reads the mean, and knows that this rank
    reads its sources no more.

    Example: two ranks; rank 1 owns a share of 2 lines of 64 elements, BLOCK 64, P 1. It reads elements 0 .. 63 of both
    sources, stores their mean to rank 0 and to itself, does the same for 64 .. 127, and raises its flag at both.

    Source: the all-reduce as a reduce-scatter and an all-gather (Thakur, Rabenseifner and Gropp, Optimization of
    Collective Communication Operations in MPICH, 2005, section 4.5), each step by direct loads or stores.
    """
    elements = lines * LINE
    for block in range(tl.program_id(0), tl.cdiv(elements, BLOCK), tl.num_programs(0)):
        at = block * BLOCK + tl.arange(0, BLOCK)
        mask = at < elements
        source = tl.multiple_of(tl.load(sources).to(tl.pointer_type(TYPE)), 16)
        total = tl.load(source + at, mask=mask, other=0.0).to(tl.float32)
        for peer in tl.static_range(1, WORLD_SIZE):
            source = tl.multiple_of(tl.load(sources + peer).to(tl.pointer_type(TYPE)), 16)
            total += tl.load(source + at, mask=mask, other=0.0).to(tl.float32)
        mean = (total * scale).to(TYPE)
        for turn in tl.static_range(WORLD_SIZE):
            peer = (rank + 1 + turn) % WORLD_SIZE
            target = tl.multiple_of(tl.load(targets + peer).to(tl.pointer_type(TYPE)), 16)
            tl.store(target + at, mean, mask=mask)
    count_and_raise(counted, peers_ready, slot, WORLD_SIZE, epoch + tl.load(clock), PEERS)


@triton.jit(do_not_specialize=["rank", "world_size", "destinations", "begin", "lines", "share", "slot", "epoch"])
def _send_shares(
    tensor, landings, peers_ready, counted, clock,
    rank, world_size, destinations, begin: tl.int64, lines, share, slot, epoch: tl.int64,
    PEERS: tl.constexpr, TYPE: tl.constexpr, LINE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Store each share of a range to its owner, in TYPE, as program p of P the tasks p, p + P, ..

    A task is a block of one share; owners take turns, from the next rank on.

    Memory: the range is `lines` lines of LINE elements of this rank's `tensor`, from line `begin` on; rank w owns those
    from w * share on, up to `share` of them. They are stored to row `rank` of the owner's landing [W, share * LINE],
    whose address is landings[w]. The shares of the `destinations` next ranks are sent: W - 1 leaves out this rank's.

    Order: no two programs store to one place. The program that ends last raises element `slot` of every rank's flags to
    `epoch` + `clock` [1], which covers what all have stored.

    Example: rank 1 of 2, 3 lines, share 2: lines 0 and 1 go to rank 0's landing, row 1. Its own share is line 2, and is
    sent where destinations is 2.
    """
    blocks = tl.cdiv(share * LINE, BLOCK)
    for task in range(tl.program_id(0), destinations * blocks, tl.num_programs(0)):
        owner = (rank + 1 + task % destinations) % world_size
        at = task // destinations * BLOCK + tl.arange(0, BLOCK)
        mask = at < tl.minimum(share, lines - owner * share) * LINE
        values = tl.load(tensor + (begin + owner * share) * LINE + at, mask=mask, other=0.0)
        landing = tl.multiple_of(tl.load(landings + owner).to(tl.pointer_type(TYPE)), 16)
        tl.store(landing + rank * share * LINE + at, values.to(TYPE), mask=mask)
    count_and_raise(counted, peers_ready, slot, world_size, epoch + tl.load(clock), PEERS)


_AVERAGE_ARGUMENTS = (
    "sources", "targets", "peers_ready", "counted", "clock", "rank", "lines", "scale", "slot", "epoch",
)  # fmt: skip
_SEND_ARGUMENTS = (
    "tensor", "landings", "peers_ready", "counted", "clock",
    "rank", "world_size", "destinations", "begin", "lines", "share", "slot", "epoch",
)  # fmt: skip


def lane_elements(world_size: int, dtype: torch.dtype) -> int:
    """Return how many elements of each rank a lane of `_average_share` reads at a time: 32 bytes of two, then 16."""
    return max(16, power_of_2(_LANE_BYTES // world_size + 1) // 2) // dtype.itemsize


@lru_cache
def _averaging(world_size: int, dtype: torch.dtype) -> CompiledKernel:
    lanes = NUM_WARPS * 32
    constants = {
        "WORLD_SIZE": world_size,
        "PEERS": power_of_2(world_size),
        "TYPE": TYPES[dtype],
        "LINE": LINE,
        "BLOCK": lanes * lane_elements(world_size, dtype),
    }
    return CompiledKernel(_average_share, _AVERAGE_ARGUMENTS, constants, num_warps=NUM_WARPS)


@lru_cache
def _sending(world_size: int, dtype: torch.dtype) -> CompiledKernel:
    lanes = NUM_WARPS * 32
    constants = {
        "PEERS": power_of_2(world_size),
        "TYPE": TYPES[dtype],
        "LINE": LINE,
        "BLOCK": lanes * _SENT_LANE_ELEMENTS,
    }
    return CompiledKernel(_send_shares, _SEND_ARGUMENTS, constants, num_warps=NUM_WARPS)


def average_share(
    sources: torch.Tensor,
    targets: torch.Tensor,
    dtype: torch.dtype,
    lines: int,
    flags: ShareFlags,
    rank: int,
    slot: int,
    epoch: int,
    programs: int,
) -> None:
    """Store the mean over the ranks of this rank's share to all ranks, then raise its flag `slot` at every rank.

    Args:
        sources: [W] int64: addresses of the share as each rank gives it, multiples of 16 bytes.
        targets: [W] int64: addresses of the share's mean at each rank, alike.
        dtype: of all of them, float32 or bfloat16; the sum is float32 in either case.
        lines: of the share, of `LINE` elements each; where it has none, the flag alone is raised.
        rank: of the caller.
        slot: of the flags that is raised to `epoch` + `flags.clock`.
        programs: of 32 warps each: links need few, and the rest of the GPU stays free.
    """
    world_size = sources.numel()
    _averaging(world_size, dtype)(
        programs, (),
        sources, targets, flags.addresses, flags.counted, flags.clock,
        rank, lines, 1 / world_size, rank * flags.slots + slot, epoch,
    )  # fmt: skip


def send_shares(
    tensor: torch.Tensor,
    landings: torch.Tensor,
    dtype: torch.dtype,
    begin: int,
    lines: int,
    share: int,
    own: bool,
    flags: ShareFlags,
    rank: int,
    slot: int,
    epoch: int,
    programs: int,
) -> None:
    """Store the shares of a range of `tensor` to their owners, then raise this rank's flag `slot` at every rank.

    Args:
        tensor: [n] float32, of this rank.
        landings: [W] int64: addresses of each rank's landing [W, share * LINE], multiples of 16 bytes.
        dtype: of the landings, to which elements are rounded: float32 or bfloat16.
        begin: the range's first line, of `LINE` elements.
        lines: of the range.
        share: lines of it that each rank owns, the last ones fewer, or none.
        own: whether this rank's own share is stored, too.
        rank: of the caller.
        slot: of the flags that is raised to `epoch` + `flags.clock`.
        programs: of 32 warps each.
    """
    world_size = landings.numel()
    _sending(world_size, dtype)(
        programs, (),
        tensor, landings, flags.addresses, flags.counted, flags.clock,
        rank, world_size, world_size - 1 + own, begin, lines, share, rank * flags.slots + slot, epoch,
    )  # fmt: skip
