"""How a call between ranks begins, when windows may be written to, and how a reduce-scatter ends, with sums.

A call is an epoch, which lies in one word of the device's memory, the clock. A rank that has waited for DONE e - 1 of
every peer may store to any rank's memory in call e, see `dense.gemm.windows`.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from dlrm_overlap.kernels.compiled import INTERPRETED, specialised
from dlrm_overlap.kernels.dense.arguments import LINE
from dlrm_overlap.kernels.flags import Flags
from dlrm_overlap.kernels.primitives import count_and_signal, wait_for_flags
from dlrm_overlap.kernels.tuning import power_of_2

_SUM_PROGRAMS, _SUM_WARPS = 1056, 8  # at most: eight programs a multiprocessor, whose registers hold as many


@triton.jit(do_not_specialize=["rank", "world_size", "timeout"])
def _begin_call(
    done, counts, clock, status, rank, world_size, timeout: tl.int64, PEERS: tl.constexpr, INTERPRETED: tl.constexpr
):
    """Wait for the flags DONE of the epoch that `clock` has, then raise the clock by one; the grid is one program.

    Memory: `done` [W, 1] int64 are this rank's flags, which wait for row w if counts[w]. `clock` [1] int64.

    Order: the flags are acquired at system scope, so later work of the stream comes after all reads of the peers in
    the call before. The end of the kernel orders those that read the clock.

    Example: clock 6. Once the peers' flags have reached 6, the clock is 7.
    """
    epoch = tl.load(clock)
    wait_for_flags(done, counts, 1, 0, rank, world_size, epoch, timeout, status, PEERS, INTERPRETED)
    tl.store(clock, epoch + 1)


def begin_call(done: Flags, rank: int) -> None:
    """Make the current stream wait until all peers are through with the call before, and raise the clock by one."""
    world_size = done.local.shape[0]
    kernel = specialised(_begin_call, num_warps=1, PEERS=power_of_2(world_size), INTERPRETED=INTERPRETED)
    kernel(1, (), done.local, done.counts, done.clock, done.status, rank, world_size, done.timeout)


class Parts(NamedTuple):
    """The partial products, and their sums."""

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

    Order: the stream has waited for the flags of the partial products before; the end of that kernel orders them.
    If LAST, the program that ends last raises element `rank` of every rank's flags DONE, whose addresses are in
    `peers_done`, to `clock` [1]: a release at system scope, after all reads here and in earlier kernels of the
    stream. Who has acquired it may overwrite the window. `counted` [1] is 0 before and after.

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
        count_and_signal(counted, peers_done, rank, WORLD_SIZE, tl.load(clock), PEERS)


def sum_parts(parts: Parts, done: Flags, counted: torch.Tensor, rank: int, rows: tuple[int, int], last: bool) -> None:
    """Write the rows [begin, end) of `parts.out`, on the current stream; the beginning is a multiple of 8.

    `counted` [1] int32 are the programs of the running kernel that are through, 0 before and after. Where `last` says
    that no other rows follow, the flag `done` of `rank`, that it has read its window, is raised at every rank.
    """
    world_size, block = done.local.shape[0], _SUM_WARPS * 32 * 8
    kernel = specialised(
        _sum_parts, num_warps=_SUM_WARPS, LAST=last, BIAS=parts.bias is not None, RELU=parts.relu,
        WORLD_SIZE=world_size, PEERS=power_of_2(world_size), LINE=LINE, BLOCK=block,
    )  # fmt: skip
    assert rows[0] % 8 == 0, "16 bytes a lane"
    begin, end = rows[0] * parts.columns // 8, -(-rows[1] * parts.columns // 8)
    programs = max(1, min(_SUM_PROGRAMS, -(-(end - begin) * 8 // block)))
    kernel(
        programs, (parts.out.dtype,),
        parts.window, parts.out, parts.out if parts.bias is None else parts.bias, done.addresses, counted, done.clock,
        rank, parts.lines, begin, end, parts.columns,
    )  # fmt: skip
