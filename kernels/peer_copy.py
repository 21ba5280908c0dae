"""Rows of any bytes, stored where they belong in the ranks' memory by a kernel that then raises a flag at each."""

from math import gcd
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from dlrm_overlap.kernels.compiled import CompiledKernel, specialised
from dlrm_overlap.kernels.primitives import count_and_signal
from dlrm_overlap.kernels.tuning import power_of_2

PROGRAMS = 64
"""of 16 warps: fewer, 16 or 32, are up to a tenth slower alone on H200, and faster only beside products, where copy
engines are faster still (docs/results/collectives.md)"""
_NUM_WARPS = 16
_LANE_BYTES = 64  # in flight
WORDS = {1: (tl.int8, 1), 2: (tl.int16, 1), 4: (tl.int32, 1), 8: (tl.int32, 2), 16: (tl.int32, 4)}
"""bytes that divide every address and size -> the type of the elements that are moved, and how many a lane at a time"""


class Rows(NamedTuple):
    """The rows that one rank sends: one to each of the other ranks, and to itself if `own`.

    Example: rank 1 of 3 with stride 100, row_bytes 100, offset 4100: bytes 200 .. 299 of the source go to bytes 4100 ..
    of rank 2's memory, 0 .. 99 to those of rank 0's.
    """

    source: torch.Tensor
    """of any type, contiguous: the rows, one after the other, or the one row that goes to all"""
    stride: int
    """bytes between the rows; 0 if one row goes to all"""
    row_bytes: int
    """of a row; where it is 0, the flags alone are raised"""
    targets: torch.Tensor
    """[W] int64: address of each rank's memory, a multiple of 16"""
    offset: int
    """bytes: where in the memory this rank's row begins"""
    own: bool
    """whether this rank's own row is stored, too"""

    @property
    def word(self) -> int:
        """Bytes, a power of two up to 16, that divide every address and size."""
        return gcd(16, self.source.data_ptr(), self.stride, self.row_bytes, self.offset)


class RowFlags(NamedTuple):
    """The flag that the last program of a launch raises at every rank."""

    addresses: torch.Tensor
    """[W] int64: of each rank's flags, [W, 1] int64, whose row w rank w raises"""
    counted: torch.Tensor
    """[1] int32: programs of the running kernel that are through; 0 before and after. Kernels that share it run one
    after the other"""
    clock: torch.Tensor
    """[1] int64: the epoch to which the flag is raised"""


@triton.jit(do_not_specialize=["source", "rank", "world_size", "destinations", "stride", "words", "offset"])
def _store_rows(
    targets, peers_ready, counted, clock,
    source: tl.int64, rank, world_size, destinations, stride: tl.int64, words: tl.int64, offset: tl.int64,
    PEERS: tl.constexpr, TYPE: tl.constexpr, VECTOR: tl.constexpr, WORD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Store a row to each of the `destinations` next ranks, as program p of P the tasks p, p + P, ..

    A task is a block of BLOCK elements of one row; ranks take turns, from the next one on, so that no two ranks send to
    one peer alone, and this rank's own memory, W-th in turn, is busy beside the links.

    Memory: the row for rank w is at the address `source` + w * `stride`, `words` words of WORD bytes, which are VECTOR
    elements of TYPE. It goes to `targets`[w] + `offset`. WORD divides all of these, so a lane moves WORD bytes at a
    time, several times a block.

    Order: no two programs store to one place. The program that ends last raises element `rank` of every rank's flags
    [W, 1], whose addresses are in `peers_ready`, to `clock` [1]: a release at system scope, which covers what all have
    stored. Whoever has acquired it reads the row. `counted` [1] is 0 before and after.

    Example: rank 1 of 3, two blocks a row, destinations 3: 2a 0a 1a 2b 0b 1b, where 2a is the first block of the row
    that goes to rank 2.
    """
    elements = words * VECTOR
    for task in range(tl.program_id(0), destinations * tl.cdiv(elements, BLOCK), tl.num_programs(0)):
        peer = (rank + 1 + task % destinations) % world_size
        at = (task // destinations) * BLOCK + tl.arange(0, BLOCK)
        mask = at < elements
        row = tl.multiple_of((source + peer * stride).to(tl.pointer_type(TYPE)), WORD)
        target = tl.multiple_of((tl.load(targets + peer) + offset).to(tl.pointer_type(TYPE)), WORD)
        tl.store(target + at, tl.load(row + at, mask=mask), mask=mask)
    count_and_signal(counted, peers_ready, rank, world_size, tl.load(clock), PEERS)


def _storing(world_size: int, word: int) -> CompiledKernel:
    kind, vector = WORDS[word]
    lane_elements = min(_LANE_BYTES, 8 * word) * vector // word
    return specialised(
        _store_rows, num_warps=_NUM_WARPS,
        PEERS=power_of_2(world_size), TYPE=kind, VECTOR=vector, WORD=word, BLOCK=_NUM_WARPS * 32 * lane_elements,
    )  # fmt: skip


def store_rows(rows: Rows, flags: RowFlags, rank: int, programs: int = PROGRAMS) -> None:
    """Store this rank's rows at the other ranks, then raise its flag at every rank, all on the current stream.

    Args:
        rows: each with its destination; alike on all ranks but for the source.
        flags: raised to `flags.clock`, after all that is before on the stream, too.
        rank: of the caller.
        programs: at most; of small rows there are fewer, one at least.
    """
    world_size, kernel = rows.targets.numel(), _storing(rows.targets.numel(), rows.word)
    elements = rows.row_bytes // rows.word * kernel.constants["VECTOR"]
    tasks = (world_size - 1 + rows.own) * -(-elements // kernel.constants["BLOCK"])
    kernel(
        max(1, min(programs, tasks)), (),
        rows.targets, flags.addresses, flags.counted, flags.clock,
        rows.source.data_ptr(), rank, world_size, world_size - 1 + rows.own, rows.stride, rows.row_bytes // rows.word,
        rows.offset,
    )  # fmt: skip
