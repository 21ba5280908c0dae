"""The sum over the ranks of their partial products, with bias and relu, in one pass over what lies in a rank's window.

Example: two ranks, rows of 3 columns. The window has 1 2 3 of rank 0 and 10 -20 30 of rank 1, the bias is 1 1 1. The
sums are 12 -17 34; behind a relu they are 12 0 34.
"""

from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from dlrm_overlap.kernels.arguments import power_of_2
from dlrm_overlap.kernels.compiled import CompiledKernel
from dlrm_overlap.kernels.dense.arguments import LINE
from dlrm_overlap.kernels.flags import Flags
from dlrm_overlap.kernels.primitives import count_and_raise

PROGRAMS = 1056
"""at most: eight a multiprocessor of an H200, whose registers hold as many"""
_NUM_WARPS = 8


class Parts(NamedTuple):
    """What is added up."""

    window: torch.Tensor
    """[W * lines * LINE] float16 or bfloat16: rank w's partial products begin at element w * lines * LINE"""
    lines: int
    """of `LINE` elements, between the beginnings of two ranks' partial products"""
    out: torch.Tensor
    """[lines * LINE] of the window's type, of which the first rows * columns are the sums"""
    columns: int
    bias: torch.Tensor | None
    """[columns] of the window's type"""
    relu: bool


@triton.jit(do_not_specialize=["rank", "lines", "begin", "end", "columns"], do_not_specialize_on_alignment=["bias"])
def _sum_parts(
    window, out, bias, peers_done, counted, clock,
    rank, lines: tl.int64, begin: tl.int64, end: tl.int64, columns,
    LAST: tl.constexpr, BIAS: tl.constexpr, RELU: tl.constexpr, WORLD_SIZE: tl.constexpr, PEERS: tl.constexpr,
    LINE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Store the sums of the elements [8 * begin, 8 * end) to `out`, as program p of P the blocks p, p + P, ..

    Memory: element i of rank w is `window`[w * lines * LINE + i]. The program reads its blocks of all ranks, 16 bytes a
    lane, adds them up in float32 in the order of the ranks, adds `bias`[i % columns] if BIAS, takes the greater of that
    and 0 if RELU, and stores element i of `out`.

    Order: whoever launches this has awaited the flags behind the partial products; the end of that kernel orders them.
    If LAST, the program that ends last raises element `rank` of every rank's flags DONE, whose addresses are in
    `peers_done`, to `clock` [1]: a release at system scope, behind all that has been read here, in earlier kernels of
    the stream, too. Who has acquired it may overwrite the window. `counted` [1] is 0 before and after.

    Example: begin 0, end 1, columns 4, window 1 2 3 4 5 6 7 8 of rank 0, ones of rank 1, bias 1 0 0 0: 3 3 4 5 7 7 8 9.
    """
    for block in range(tl.program_id(0), tl.cdiv((end - begin) * 8, BLOCK), tl.num_programs(0)):
        base, lane = begin * 8 + block * BLOCK, tl.arange(0, BLOCK)
        at = base + lane
        mask = at < end * 8
        total = tl.load(window + at, mask=mask, other=0.0).to(tl.float32)
        for peer in tl.static_range(1, WORLD_SIZE):
            total += tl.load(window + peer * lines * LINE + at, mask=mask, other=0.0).to(tl.float32)
        if BIAS:
            column = ((base % columns).to(tl.int32) + lane) % columns  # one division of 64 bits, not one a lane
            total += tl.load(bias + column, mask=mask, other=0.0).to(tl.float32)
        if RELU:
            total = tl.maximum(total, 0.0, propagate_nan=tl.PropagateNan.ALL)
        tl.store(out + at, total.to(out.dtype.element_ty), mask=mask)
    if LAST:
        count_and_raise(counted, peers_done, rank, WORLD_SIZE, tl.load(clock), PEERS)


_ARGUMENTS = (
    "window", "out", "bias", "peers_done", "counted", "clock",
    "rank", "lines", "begin", "end", "columns",
)  # fmt: skip


@lru_cache
def _summing(world_size: int, last: bool, bias: bool, relu: bool) -> CompiledKernel:
    constants = {
        "LAST": last,
        "BIAS": bias,
        "RELU": relu,
        "WORLD_SIZE": world_size,
        "PEERS": power_of_2(world_size),
        "LINE": LINE,
        "BLOCK": _NUM_WARPS * 32 * 8,
    }
    return CompiledKernel(_sum_parts, _ARGUMENTS, constants, num_warps=_NUM_WARPS)


def sum_parts(parts: Parts, done: Flags, counted: torch.Tensor, rank: int, rows: tuple[int, int], last: bool) -> None:
    """Write some rows of `parts.out`, on the current stream.

    Args:
        parts: of all rows.
        done: the flags that say that this rank has read its window.
        counted: [1] int32 of the running kernel's programs, see `CallFlags`.
        rank: of the caller.
        rows: [begin, end); the beginning is a multiple of 8.
        last: whether no other rows follow: the flag is raised at every rank then.
    """
    world_size = done.local.shape[0]
    kernel = _summing(world_size, last, parts.bias is not None, parts.relu)
    assert rows[0] % 8 == 0, "16 bytes a lane"
    begin, end = rows[0] * parts.columns // 8, -(-rows[1] * parts.columns // 8)
    programs = max(1, min(PROGRAMS, -(-(end - begin) * 8 // kernel.constants["BLOCK"])))
    kernel(
        programs, (parts.out.dtype,),
        parts.window, parts.out, parts.out if parts.bias is None else parts.bias, done.addresses, counted, done.clock,
        rank, parts.lines, begin, end, parts.columns,
    )  # fmt: skip
