"""The beginning of a call between ranks, and the sums at the end of a reduce-scatter (see `dense.gemm.windows`)."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from dlrm_overlap.kernels.compiled import INTERPRETED, specialised
from dlrm_overlap.kernels.dense.arguments import LINE
from dlrm_overlap.kernels.flags import Flags
from dlrm_overlap.kernels.primitives import count_and_signal, wait_for_flags
from dlrm_overlap.kernels.tuning import power_of_2

_MAX_SUM_PROGRAMS, _SUM_WARPS = 1056, 8  # eight programs a multiprocessor, as many as its registers hold


@triton.jit(do_not_specialize=["rank", "world_size", "timeout"])
def _begin_call(
    done,  # [W, 1] int64, this rank's flags
    counts,  # [W] int32: 1 for each peer
    clock,  # [1] int64
    status,
    rank,
    world_size,
    timeout: tl.int64,
    PEERS: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Wait until the flags `done` have reached `clock`, then increase the clock by one; the grid is one program.

    Order: acquires the flags at system scope, so later work of the stream comes after all reads of the peers' last
    call.

    Example: clock 6. Once the peers' flags have reached 6, the clock is 7.
    """
    epoch = tl.load(clock)
    wait_for_flags(done, counts, 1, 0, rank, world_size, epoch, timeout, status, PEERS, INTERPRETED)
    tl.store(clock, epoch + 1)


def begin_call(done: Flags, rank: int) -> None:
    """Make the current stream wait until all peers have finished the previous call, and begin the next epoch."""
    world_size = done.local.shape[0]
    kernel = specialised(_begin_call, num_warps=1, PEERS=power_of_2(world_size), INTERPRETED=INTERPRETED)
    kernel(1, (), done.local, done.counts, done.clock, done.status, rank, world_size, done.timeout)


class Parts(NamedTuple):
    window: torch.Tensor
    """[W * lines * LINE] float16 or bfloat16: rank w's partial products begin at element w * lines * LINE"""
    lines: int
    """lines of `LINE` elements per rank"""
    out: torch.Tensor
    """[lines * LINE]; the first rows * columns elements are the sums"""
    columns: int
    bias: torch.Tensor | None
    """[columns] of the window's dtype"""
    relu: bool


@triton.jit(do_not_specialize=["rank", "lines", "begin", "end", "columns"], do_not_specialize_on_alignment=["bias"])
def _sum_parts(
    window,  # [W, lines * LINE]: partial products of each rank
    out,  # [lines * LINE]
    bias,  # [columns]
    peers_done,  # [W] int64: address of each rank's flags [W, 1]
    counted,  # [1] int32, 0 before and after
    clock,  # [1] int64
    rank,
    lines: tl.int64,
    begin: tl.int64,  # first element / 8
    end: tl.int64,  # end of the elements / 8
    columns,
    LAST: tl.constexpr,
    BIAS: tl.constexpr,
    RELU: tl.constexpr,
    WORLD_SIZE: tl.constexpr,
    PEERS: tl.constexpr,
    LINE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Store the sums of the elements [8 * begin, 8 * end) to `out`, as program p of P the blocks p, p + P, ..

    Memory: reads 16 bytes a lane from each rank's part. Sums are float32, in the order of the ranks; then come the bias
    of column i % columns if BIAS, and relu if RELU.

    Order: an earlier kernel of the stream has waited for the flags of the partial products. If LAST, the last program
    sets element `rank` of every rank's flags `done` to `clock`: a release at system scope, after all reads here and in
    earlier kernels of the stream. A rank that has acquired it may overwrite the window.

    Example: begin 0, end 1, columns 4, window 1 2 3 4 5 6 7 8 of rank 0, ones of rank 1, bias 1 0 0 0: 3 3 4 5 7 7 8 9.
    """
    for block in range(tl.program_id(0), tl.cdiv((end - begin) * 8, BLOCK), tl.num_programs(0)):
        base, lane = begin * 8 + block * BLOCK, tl.arange(0, BLOCK)
        at = base + lane
        mask = at < end * 8
        # Add up the ranks' partial products in the order of the ranks.
        total = tl.load(window + at, mask=mask, other=0.0).to(tl.float32)  # [BLOCK]
        for peer in tl.static_range(1, WORLD_SIZE):
            total += tl.load(window + peer * lines * LINE + at, mask=mask, other=0.0).to(tl.float32)
        if BIAS:
            column = ((base % columns).to(tl.int32) + lane) % columns  # one 64-bit division a block
            total += tl.load(bias + column, mask=mask, other=0.0).to(tl.float32)
        if RELU:
            total = tl.maximum(total, 0.0, propagate_nan=tl.PropagateNan.ALL)
        tl.store(out + at, total.to(out.dtype.element_ty), mask=mask)
    # Count this program (acquire and release, GPU scope); the last one sets the flags, a release at system scope.
    if LAST:
        count_and_signal(counted, peers_done, rank, WORLD_SIZE, tl.load(clock), PEERS)


def sum_parts(parts: Parts, done: Flags, counted: torch.Tensor, rank: int, rows: tuple[int, int], last: bool) -> None:
    """Write the rows [begin, end) of `parts.out`, on the current stream; `begin` is a multiple of 8.

    If these are the `last` rows, sets this rank's flag `done` at every rank. `counted` [1] int32 is 0 before and after.
    """
    world_size, block = done.local.shape[0], _SUM_WARPS * 32 * 8
    kernel = specialised(
        _sum_parts, num_warps=_SUM_WARPS, LAST=last, BIAS=parts.bias is not None, RELU=parts.relu,
        WORLD_SIZE=world_size, PEERS=power_of_2(world_size), LINE=LINE, BLOCK=block,
    )  # fmt: skip
    assert rows[0] % 8 == 0, "16 bytes a lane"
    begin, end = rows[0] * parts.columns // 8, -(-rows[1] * parts.columns // 8)
    programs = max(1, min(_MAX_SUM_PROGRAMS, -(-(end - begin) * 8 // block)))
    kernel(
        programs, (parts.out.dtype,),
        parts.window, parts.out, parts.out if parts.bias is None else parts.bias, done.addresses, counted, done.clock,
        rank, parts.lines, begin, end, parts.columns,
    )  # fmt: skip
