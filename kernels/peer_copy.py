"""A kernel that stores rows of any type into the memory of other ranks, and then signals each rank."""

from math import gcd
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from dlrm_overlap.kernels.compiled import CompiledKernel, specialised
from dlrm_overlap.kernels.primitives import count_and_signal
from dlrm_overlap.kernels.tuning import power_of_2

PROGRAMS = 64
"""of 16 warps; 16 or 32 programs are up to 10% slower on H200 (docs/results/collectives.md)"""
_NUM_WARPS = 16
_LANE_BYTES = 64  # bytes in flight a lane
WORDS = {1: (tl.int8, 1), 2: (tl.int16, 1), 4: (tl.int32, 1), 8: (tl.int32, 2), 16: (tl.int32, 4)}
"""bytes that divide every address and size -> type of elements, elements a lane moves at a time"""


class Rows(NamedTuple):
    """The rows that one rank sends: one to each of the other ranks, and to itself if `own`."""

    source: torch.Tensor
    """contiguous: all rows, or the one row that goes to all ranks"""
    stride: int
    """bytes between the rows; 0 if one row goes to all"""
    row_bytes: int
    """0: only the flags are set"""
    targets: torch.Tensor
    """[W] int64: address of each rank's memory, a multiple of 16"""
    offset: int
    """byte of the memory where this rank's row begins"""
    own: bool

    @property
    def word(self) -> int:
        """Return the largest power of two, up to 16, that divides every address and size in bytes."""
        return gcd(16, self.source.data_ptr(), self.stride, self.row_bytes, self.offset)


class RowFlags(NamedTuple):
    """The flag that the last program of a launch sets at every rank."""

    addresses: torch.Tensor
    """[W] int64: address of each rank's flags [W, 1] int64; row w belongs to rank w"""
    counted: torch.Tensor
    """[1] int32: finished programs, 0 before and after; kernels that share it must not overlap"""
    clock: torch.Tensor
    """[1] int64: epoch that the flag is set to"""


@triton.jit(do_not_specialize=["source", "rank", "world_size", "destinations", "stride", "words", "offset"])
def _store_rows(
    targets,  # [W] int64: address of each rank's memory
    peers_ready,  # [W] int64: address of each rank's flags [W, 1]
    counted,  # [1] int32, 0 before and after
    clock,  # [1] int64
    source: tl.int64,  # address of the row for rank 0
    rank,
    world_size,
    destinations,
    stride: tl.int64,  # bytes from one rank's row to the next
    words: tl.int64,  # of WORD bytes, in a row
    offset: tl.int64,  # byte of each target where this rank's row goes
    PEERS: tl.constexpr,
    TYPE: tl.constexpr,
    VECTOR: tl.constexpr,  # elements of TYPE in a word
    WORD: tl.constexpr,  # bytes; divides all addresses
    BLOCK: tl.constexpr,
):
    """Store a row to each of the next `destinations` ranks, as program p of P the tasks p, p + P, ..

    A task is a block of BLOCK elements of one row. Tasks alternate between the ranks, from the next one on, so that no
    two ranks send to the same peer, and local stores overlap with remote ones.

    Order: the program that ends last sets element `rank` of every rank's flags to `clock`: a release at system scope
    that covers the stores of all programs.

    Example: rank 1 of 3, two blocks a row: 2a 0a 1a 2b 0b 1b, where 2a is the first block of rank 2's row.
    """
    elements = words * VECTOR
    for task in range(tl.program_id(0), destinations * tl.cdiv(elements, BLOCK), tl.num_programs(0)):
        peer = (rank + 1 + task % destinations) % world_size
        at = (task // destinations) * BLOCK + tl.arange(0, BLOCK)
        mask = at < elements
        row = tl.multiple_of((source + peer * stride).to(tl.pointer_type(TYPE)), WORD)
        target = tl.multiple_of((tl.load(targets + peer) + offset).to(tl.pointer_type(TYPE)), WORD)
        tl.store(target + at, tl.load(row + at, mask=mask), mask=mask)  # [BLOCK]
    # Count this program (acquire and release, GPU scope); the last one sets the flags, a release at system scope.
    count_and_signal(counted, peers_ready, rank, world_size, tl.load(clock), PEERS)


def _compiled(world_size: int, word: int) -> CompiledKernel:
    kind, vector = WORDS[word]
    lane_elements = min(_LANE_BYTES, 8 * word) * vector // word
    return specialised(
        _store_rows, num_warps=_NUM_WARPS,
        PEERS=power_of_2(world_size), TYPE=kind, VECTOR=vector, WORD=word, BLOCK=_NUM_WARPS * 32 * lane_elements,
    )  # fmt: skip


def store_rows(rows: Rows, flags: RowFlags, rank: int, programs: int = PROGRAMS) -> None:
    """Store this rank's rows at the other ranks, then set its flag to `flags.clock` at every rank.

    All ranks give the same `rows`, except the source.
    """
    world_size, kernel = rows.targets.numel(), _compiled(rows.targets.numel(), rows.word)
    elements = rows.row_bytes // rows.word * kernel.constants["VECTOR"]
    tasks = (world_size - 1 + rows.own) * -(-elements // kernel.constants["BLOCK"])
    kernel(
        max(1, min(programs, tasks)), (),
        rows.targets, flags.addresses, flags.counted, flags.clock,
        rows.source.data_ptr(), rank, world_size, world_size - 1 + rows.own, rows.stride, rows.row_bytes // rows.word,
        rows.offset,
    )  # fmt: skip
