"""How a call between ranks begins, with rows that peers may read or windows that they may write, and ends, with sums.

A call is an epoch, which lies in one word of the device's memory, the clock. Each rank raises two kinds of flags at
every rank: READY e, some of its rows of call e are there; DONE e, it has read all that it reads of the ranks' memory in
call e. A rank that has waited for DONE e - 1 of every peer may store to any rank's memory in call e.
"""

from dataclasses import dataclass
from functools import lru_cache
from math import gcd
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from dlrm_overlap.kernels.arguments import power_of_2
from dlrm_overlap.kernels.compiled import INTERPRETED, CompiledKernel
from dlrm_overlap.kernels.dense.arguments import LINE
from dlrm_overlap.kernels.flags import Flags
from dlrm_overlap.kernels.peer_copy import WORDS
from dlrm_overlap.kernels.primitives import await_flags, count_and_raise, raise_flags

_PUBLISH_PROGRAMS, _PUBLISH_WARPS = 264, 16  # two programs a multiprocessor of an H200
_LANE_BYTES = 64  # in flight
_SUM_PROGRAMS, _SUM_WARPS = 1056, 8  # at most: eight programs a multiprocessor, whose registers hold as many


@dataclass(frozen=True)
class CallFlags:
    """The flags of a call between ranks."""

    done: Flags
    """[W, 1]: peers are through with the call before; its clock is the epoch"""
    ready: tuple[Flags, ...]
    """[W, slots]; a wait for number s is for the first s + 1 slots of every peer"""
    counted: torch.Tensor
    """[1] int32: programs of the running kernel that are through; 0 before and after"""


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
    await_flags(done, counts, 1, 0, rank, world_size, epoch, timeout, status, PEERS, INTERPRETED)
    tl.store(clock, epoch + 1)


@triton.jit(do_not_specialize=["source", "window", "kept", "rank", "world_size", "slots", "slot", "words", "timeout"])
def _publish_rows(
    done, done_counts, ready, ready_counts, peers_ready, counted, clock, status,
    source: tl.int64, window: tl.int64, kept: tl.int64, rank, world_size, slots, slot, words: tl.int64,
    timeout: tl.int64,
    FIRST: tl.constexpr, KEEP: tl.constexpr, PEERS: tl.constexpr, FLAGS: tl.constexpr, TYPE: tl.constexpr,
    VECTOR: tl.constexpr, WORD: tl.constexpr, BLOCK: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Copy rows to this rank's window, raise a flag at every rank, and wait for those of all, as program p of P.

    Memory: `words` words of WORD bytes, which are VECTOR elements of TYPE, are read at the address `source` and stored
    at `window`, in this rank's memory, and if KEEP at `kept`, too: the blocks p, p + P, .. of BLOCK elements. `clock`
    [1] int64 has the epoch, or, if FIRST, that of the call before, and is then raised by one.

    Order: if FIRST, every program has acquired DONE of the call before of all peers, `done` [W, 1], ahead of its first
    store. All stores come before the program's count (acquire and release, GPU scope); whoever counts last has so
    acquired the others' stores, and releases all of them with element `rank` * `slots` + `slot` of every
    rank's flags. It then stores the clock, which all others have read, and acquires slots 0 .. `slot` of all peers,
    `ready` [W, slots]. So later work of the stream may read the peers' windows.

    Example: rank 0 of 2, FIRST, clock 6, slot 0. Rank 1's DONE has reached 6. The rows are copied; element 0 of both
    ranks' flags READY becomes 7, and the clock; the program waits until rank 1's element 0 here has reached 7.
    """
    epoch = tl.load(clock) + FIRST
    if FIRST:
        await_flags(done, done_counts, 1, 0, rank, world_size, epoch - 1, timeout, status, PEERS, INTERPRETED)
    elements = words * VECTOR
    rows = tl.multiple_of(source.to(tl.pointer_type(TYPE)), WORD)
    target = tl.multiple_of(window.to(tl.pointer_type(TYPE)), WORD)
    second = tl.multiple_of(kept.to(tl.pointer_type(TYPE)), WORD)
    for block in range(tl.program_id(0), tl.cdiv(elements, BLOCK), tl.num_programs(0)):
        at = block * BLOCK + tl.arange(0, BLOCK)
        mask = at < elements
        values = tl.load(rows + at, mask=mask)
        tl.store(target + at, values, mask=mask)
        if KEEP:
            tl.store(second + at, values, mask=mask)
    tl.debug_barrier()
    if tl.atomic_add(counted, 1, sem="acq_rel", scope="gpu") == tl.num_programs(0) - 1:
        tl.store(counted, 0)  # for the next kernel on the stream
        raise_flags(peers_ready, rank * slots + slot, world_size, epoch, PEERS)
        if FIRST:
            tl.store(clock, epoch)
        await_flags(ready, ready_counts, slots, 0, rank, world_size, epoch, timeout, status, FLAGS, INTERPRETED)


_BEGIN_ARGUMENTS = ("done", "counts", "clock", "status", "rank", "world_size", "timeout")
_PUBLISH_ARGUMENTS = (
    "done", "done_counts", "ready", "ready_counts", "peers_ready", "counted", "clock", "status",
    "source", "window", "kept", "rank", "world_size", "slots", "slot", "words",
    "timeout",
)  # fmt: skip


@lru_cache
def _beginning(world_size: int) -> CompiledKernel:
    constants = {"PEERS": power_of_2(world_size), "INTERPRETED": INTERPRETED}
    return CompiledKernel(_begin_call, _BEGIN_ARGUMENTS, constants, num_warps=1)


@lru_cache
def _publishing(world_size: int, slots: int, word: int, first: bool, keep: bool) -> CompiledKernel:
    kind, vector = WORDS[word]
    constants = {
        "FIRST": first,
        "KEEP": keep,
        "PEERS": power_of_2(world_size),
        "FLAGS": power_of_2(world_size * slots),
        "TYPE": kind,
        "VECTOR": vector,
        "WORD": word,
        "BLOCK": _PUBLISH_WARPS * 32 * min(_LANE_BYTES, 8 * word) * vector // word,
        "INTERPRETED": INTERPRETED,
    }
    return CompiledKernel(_publish_rows, _PUBLISH_ARGUMENTS, constants, num_warps=_PUBLISH_WARPS)


def begin_call(flags: CallFlags, rank: int) -> None:
    """Make the current stream wait until all peers are through with the call before, and raise the clock by one."""
    done, world_size = flags.done, flags.done.local.shape[0]
    _beginning(world_size)(1, (), done.local, done.counts, done.clock, done.status, rank, world_size, done.timeout)


def publish_rows(
    rows: torch.Tensor, window: torch.Tensor, kept: torch.Tensor | None, flags: CallFlags, rank: int, slot: int
) -> None:
    """Copy `rows` to `window`, raise READY `slot` at every rank and make the current stream wait for all peers' alike.

    Slot 0 begins a call, as `begin_call` does. A wait that lasts longer than the flags' timeout is recorded and stops
    the GPU's work.

    Args:
        rows: contiguous.
        window: of the shape of `rows`, contiguous, in this rank's part of the memory that all ranks read.
        kept: alike, in any memory, and gets the rows, too; or None.
        flags: of the call.
        rank: of the caller.
        slot: below `slots`; slots are raised in their order.
    """
    kernel, arguments = _launch(rows, window, kept, flags, rank, slot)
    blocks = -(-rows.numel() * rows.dtype.itemsize // _block_bytes(kernel))
    kernel(max(1, min(_PUBLISH_PROGRAMS, blocks)), (), *arguments)


def _block_bytes(kernel: CompiledKernel) -> int:
    return kernel.constants["BLOCK"] // kernel.constants["VECTOR"] * kernel.constants["WORD"]


def _launch(
    rows: torch.Tensor, window: torch.Tensor, kept: torch.Tensor | None, flags: CallFlags, rank: int, slot: int
) -> tuple[CompiledKernel, tuple[Any, ...]]:
    """Return the kernel, and its arguments in the order of `_PUBLISH_ARGUMENTS`, line by line."""
    done, ready, size = flags.done, flags.ready[slot], rows.numel() * rows.dtype.itemsize
    world_size, slots = ready.local.shape
    second = window if kept is None else kept
    word = gcd(16, rows.data_ptr(), window.data_ptr(), second.data_ptr(), size)
    kernel = _publishing(world_size, slots, word, slot == 0, kept is not None)
    return kernel, (
        done.local, done.counts, ready.local, ready.counts, ready.addresses, flags.counted, done.clock, done.status,
        rows.data_ptr(), window.data_ptr(), second.data_ptr(), rank, world_size, slots, slot, size // word,
        done.timeout,
    )  # fmt: skip


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
        count_and_raise(counted, peers_done, rank, WORLD_SIZE, tl.load(clock), PEERS)


_SUM_ARGUMENTS = (
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
        "BLOCK": _SUM_WARPS * 32 * 8,
    }
    return CompiledKernel(_sum_parts, _SUM_ARGUMENTS, constants, num_warps=_SUM_WARPS)


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
    programs = max(1, min(_SUM_PROGRAMS, -(-(end - begin) * 8 // kernel.constants["BLOCK"])))
    kernel(
        programs, (parts.out.dtype,),
        parts.window, parts.out, parts.out if parts.bias is None else parts.bias, done.addresses, counted, done.clock,
        rank, parts.lines, begin, end, parts.columns,
    )  # fmt: skip
