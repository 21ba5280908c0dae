"""The sum over the ranks of the parts of a product that they have stored into this rank's window."""

from functools import lru_cache

import torch
import triton
import triton.language as tl

from dlrm_overlap.kernels.arguments import power_of_2
from dlrm_overlap.kernels.compiled import INTERPRETED, CompiledKernel
from dlrm_overlap.kernels.gemm.arguments import Signals
from dlrm_overlap.kernels.primitives import await_few

NUM_WARPS = 8
_LANE_BYTES = 64
"""of each rank's part that a lane reads at a time"""
_GRID = 4
"""programs a multiprocessor"""


@triton.jit(
    do_not_specialize=["rank", "lines", "line_eighths", "slot_rows", "slots", "first_slot", "epoch", "timeout"]
)  # fmt: skip
def _reduce_windows(
    window, bias, out, ready, clock, status, rank, lines, line_eighths, slot_rows, slots, first_slot,
    epoch: tl.int64, timeout: tl.int64,
    WORLD_SIZE: tl.constexpr, PEERS: tl.constexpr, WAIT: tl.constexpr, BIAS: tl.constexpr, ACTIVATION: tl.constexpr,
    BLOCK: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Compute activation(sum over w of window[w] + bias) in the blocks p, p + P, .. of program p of P.

    A block is BLOCK elements of the result, which lie one behind the other, whatever the rows they are in.

    Memory: `window` [W, M / W, N] and `out` [M / W, N] of one type, `lines` = M / W, N = 8 * `line_eighths`; 16 bytes a
    lane. The sum is in float32, in the order of the ranks, so its bits do not depend on who came first. `bias` [N].

    Order: if WAIT, the program awaits, before a block, the flags that all ranks raise for the slots of the block's
    rows, element (w, first_slot + i) of `ready` [W, slots], a slot being `slot_rows` rows, until they have reached
    `epoch` + `clock` [1], and acquires them at system scope; but only when the block's last slot is not the last one
    that it awaited. Slots are awaited in their order, the program's blocks being in the order of the rows.

    Example: W 2, 4 rows of 8 elements, BLOCK 16, slots of 2 rows, one program: it awaits slot 0 of both ranks, adds up
    rows 0 and 1, awaits slot 1 of both, and adds up rows 2 and 3.
    """
    n = line_eighths * 8
    elements = tl.full((), 1, tl.int64) * lines * n
    expected = epoch + tl.load(clock) if WAIT else epoch
    slot = 0  # the first that has not been awaited
    for block in range(tl.program_id(0), tl.cdiv(elements, BLOCK), tl.num_programs(0)):
        begin = tl.full((), BLOCK, tl.int64) * block
        at = begin + tl.arange(0, BLOCK)
        if WAIT:
            end = (tl.minimum(begin + BLOCK, elements) - 1) // n // slot_rows + 1
            while slot < end:
                await_few(
                    ready, slots, first_slot + slot, slots, WORLD_SIZE, rank, expected, timeout, status,
                    PEERS, INTERPRETED,
                )  # fmt: skip
                slot += 1
        inside = at < elements
        total = tl.load(window + at, mask=inside, other=0).to(tl.float32)
        for peer in tl.static_range(1, WORLD_SIZE):
            total += tl.load(window + peer * elements + at, mask=inside, other=0).to(tl.float32)
        if BIAS:
            total += tl.load(bias + at % n, mask=inside, other=0).to(tl.float32)
        if ACTIVATION == "relu":
            total = tl.maximum(total, 0)
        tl.store(out + at, total.to(out.dtype.element_ty), mask=inside)


_ARGUMENTS = (
    "window", "bias", "out", "ready", "clock", "status", "rank", "lines", "line_eighths", "slot_rows", "slots",
    "first_slot", "epoch", "timeout",
)  # fmt: skip


@lru_cache
def _compiled(world_size: int, wait: bool, bias: bool, activation: str, itemsize: int) -> CompiledKernel:
    constants = {
        "WORLD_SIZE": world_size,
        "PEERS": power_of_2(world_size),
        "WAIT": wait,
        "BIAS": bias,
        "ACTIVATION": activation,
        "BLOCK": 64 if INTERPRETED else NUM_WARPS * 32 * _LANE_BYTES // itemsize,
        "INTERPRETED": INTERPRETED,
    }
    return CompiledKernel(_reduce_windows, _ARGUMENTS, constants, num_warps=NUM_WARPS)


def reduce_windows(
    window: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str,
    out: torch.Tensor,
    rank: int,
    signals: Signals | None,
    programs: int | None = None,
) -> None:
    """Compute out = activation(window[0] + .. + window[W - 1] + bias) on the current stream, rounded once.

    A wait that lasts longer than `flags.timeout` is recorded and stops the GPU's work.

    Args:
        window: [W, M / W, N] contiguous, of a float type: this rank's, slot w stored by rank w. N is a multiple of 8.
        bias: [N] of any float type, or None.
        activation: none | relu.
        out: [M / W, N] contiguous, of the window's type.
        rank: of the caller.
        signals: that rows are there, of all ranks; None if what is before on the stream has awaited them.
        programs: of the grid, 8 warps each; None fills the GPU. Beside a product, a few suffice.
    """
    world_size, lines, n = window.shape
    assert n % 8 == 0, f"{n} columns: pass a multiple of 8"
    assert window.is_contiguous(), "pass a contiguous window"
    kernel = _compiled(world_size, signals is not None, bias is not None, activation, window.dtype.itemsize)
    blocks = -(-lines * n // kernel.constants["BLOCK"])
    if programs is None:
        device = window.device
        programs = _GRID * torch.cuda.get_device_properties(device).multi_processor_count if window.is_cuda else 2
    given = window if bias is None else bias
    if signals is not None:
        flags, first_slot, slot_rows, epoch = signals
        ready, clock, status, slots, timeout = (
            flags.local,
            flags.clock,
            flags.status,
            flags.local.shape[1],
            flags.timeout,
        )
    else:
        ready = clock = status = window
        first_slot, slot_rows, epoch, slots, timeout = 0, lines, 0, 1, 0
    kernel(
        min(blocks, programs), (window.dtype, given.dtype),
        window, given, out, ready, clock, status, rank, lines, n // 8, slot_rows, slots,
        first_slot, epoch, timeout,
    )  # fmt: skip
