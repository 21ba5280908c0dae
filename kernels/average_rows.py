"""The mean of a row over the ranks, by a kernel that awaits the rows itself: one launch between two rounds of copies.

A kernel beside a product that fills the GPU waits for its end. Were the wait, the mean and a hand-shake kernels of
their own, each would wait for one product; this one does so once.
"""

from functools import lru_cache
from math import gcd

import torch
import triton
import triton.language as tl

from dlrm_overlap.kernels import primitives
from dlrm_overlap.kernels.arguments import power_of_2
from dlrm_overlap.kernels.compiled import INTERPRETED, TYPES, CompiledKernel
from dlrm_overlap.kernels.dense.all_reduce import lane_elements
from dlrm_overlap.kernels.flags import Flags

_NUM_WARPS = 16
_PROGRAMS_PER_MULTIPROCESSOR = 2


@triton.jit(do_not_specialize=["rows", "own", "mean", "rank", "words", "scale", "timeout"])
def _average_rows(
    ready, counts, clock, status,
    rows: tl.int64, own: tl.int64, mean: tl.int64, rank, words: tl.int64, scale, timeout: tl.int64,
    WORLD_SIZE: tl.constexpr, PEERS: tl.constexpr, TYPE: tl.constexpr, BYTES: tl.constexpr, VECTOR: tl.constexpr,
    BLOCK: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Await the rows of all ranks, then store `scale` times their sum, as program p of P the blocks p, p + P, ..

    Memory: at `rows` are WORLD_SIZE rows, one after the other, of `words` times VECTOR elements of TYPE, BYTES each;
    row w is rank w's, but that of this rank is at `own`. They are read, added up in float32 in the order of the ranks,
    and stored at `mean`. The three addresses are multiples of VECTOR elements, so a lane moves as many at a time. Of
    this rank's flags `ready` [W, 1] those with `counts` [W] are awaited.

    Order: every program awaits the flags, up to `clock` [1], and acquires them at system scope before it reads: a
    peer's row is seen that was written before its flag. Later kernels on the stream read the mean.

    Example: rank 1 of 2, 3 words of 1 element, rows 1 2 3 - - -, own 5 6 7, scale 0.5: 3 4 5, once the flag is there.
    """
    primitives.await_flags(ready, counts, 1, 0, rank, WORLD_SIZE, tl.load(clock), timeout, status, PEERS, INTERPRETED)
    elements = words * VECTOR
    for block in range(tl.program_id(0), tl.cdiv(elements, BLOCK), tl.num_programs(0)):
        at = block * BLOCK + tl.arange(0, BLOCK)
        mask = at < elements
        total = tl.zeros([BLOCK], tl.float32)
        for peer in tl.static_range(WORLD_SIZE):
            address = tl.where(peer == rank, own, rows + peer * elements * BYTES)
            row = tl.multiple_of(address.to(tl.pointer_type(TYPE)), VECTOR * BYTES)
            total += tl.load(row + at, mask=mask, other=0.0).to(tl.float32)
        target = tl.multiple_of(mean.to(tl.pointer_type(TYPE)), VECTOR * BYTES)
        tl.store(target + at, (total * scale).to(TYPE), mask=mask)


_ARGUMENTS = (
    "ready", "counts", "clock", "status", "rows", "own", "mean", "rank", "words", "scale", "timeout",
)  # fmt: skip


@lru_cache
def _averaging(world_size: int, dtype: torch.dtype, vector: int) -> CompiledKernel:
    constants = {
        "WORLD_SIZE": world_size,
        "PEERS": power_of_2(world_size),
        "TYPE": TYPES[dtype],
        "BYTES": dtype.itemsize,
        "VECTOR": vector,
        "BLOCK": _NUM_WARPS * 32 * lane_elements(world_size, dtype),
        "INTERPRETED": INTERPRETED,
    }
    return CompiledKernel(_average_rows, _ARGUMENTS, constants, num_warps=_NUM_WARPS)


def average_rows(rows: torch.Tensor, own: torch.Tensor, mean: torch.Tensor, flags: Flags, rank: int) -> None:
    """Store the mean of a row over the ranks to `mean`, on the current stream, once all ranks' rows are here.

    A wait that lasts longer than `flags.timeout` is recorded and stops the GPU's work.

    Args:
        rows: [W, n] float32, float16 or bfloat16, contiguous; row `rank` is not read.
        own: [n] of that type, contiguous: this rank's.
        mean: [n] of that type, contiguous; may be none of the others.
        flags: of one slot, which the ranks raise to `flags.clock` after their rows.
        rank: of the caller.
    """
    world_size, elements = rows.shape
    addresses = rows.data_ptr(), own.data_ptr(), mean.data_ptr()
    vector = gcd(16, *addresses, elements * rows.dtype.itemsize) // rows.dtype.itemsize
    kernel = _averaging(world_size, rows.dtype, vector)
    programs = 2  # under the interpreter, one after the other
    if rows.is_cuda:
        count = torch.cuda.get_device_properties(rows.device).multi_processor_count
        programs = _PROGRAMS_PER_MULTIPROCESSOR * count
    blocks = -(-elements // kernel.constants["BLOCK"])
    kernel(
        max(1, min(programs, blocks)), (),
        flags.local, flags.counts, flags.clock, flags.status, *addresses, rank, elements // vector, 1 / world_size,
        flags.timeout,
    )  # fmt: skip
