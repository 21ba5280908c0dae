"""Messages between hosts in parts: a part is put into the peer's heap when it is ready, and awaited by itself.

A message is made of rows, in *runs*: of pooled embeddings a run is the samples of one rank of the receiving host, a
gradient has one run. Each run is cut into parts of the same number of rows, but for its last; a part never holds rows
of two runs. Each part has a signal of its own, which is raised to the epoch of the step, and never reset.
"""

from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from dlrm_overlap.kernels import network
from dlrm_overlap.kernels.arguments import power_of_2
from dlrm_overlap.kernels.compiled import INTERPRETED, CompiledKernel
from dlrm_overlap.kernels.network import Network

PART_BYTES = 64 * 1024  # of a part, about: 400 Gb/s send it in 1.3 us, longer than a put takes to issue
_LEAST_ROWS = 8  # of a part: a task of pooling, which has at most 2, lies in one part
_NUM_WARPS = 8


class Parts(NamedTuple):
    """How a message is cut, alike at both ends, which derive it from the sizes that both know."""

    rows: int
    """of a part, a power of two; less at the end of a run"""
    each: int
    """parts of the longest run; part i of run r is number r * each + i of the message"""

    @staticmethod
    def of(longest: int, row_bytes: int) -> "Parts":
        """Return how a message of rows of `row_bytes` is cut whose longest run has `longest` rows.

        Example: runs of up to 3000 rows of 1000 bytes: parts of 64 rows, up to 47 a run.
        """
        fit = max(1, PART_BYTES // max(1, row_bytes))
        rows = max(_LEAST_ROWS, 1 << (fit.bit_length() - 1))
        return Parts(rows, max(1, -(-longest // rows)))


class Outgoing(NamedTuple):
    """A message in this rank's heap, and where it goes: places in a peer's heap, as addresses in this rank's."""

    address: int
    """of its first row, which is where kernels stage it"""
    shift_bytes: int
    """from there to its place at the peer"""
    signals: int
    """address of the signal of its first part"""
    peer: int


class Incoming(NamedTuple):
    """A message that arrives in this rank's heap."""

    address: int
    signals: int
    source: int
    """the rank that sends it"""


class Waiting(NamedTuple):
    """How a wait for a signal is bounded, and where one that expires is recorded."""

    timeout: int
    """in ns; in turns under the interpreter"""
    status: torch.Tensor
    """[1 + kinds] int64 on the device, see `Record.status`"""


@triton.jit(
    do_not_specialize=["rank", "peer", "rows", "row_bytes", "part_rows", "address", "shift", "signals", "epoch"]
)
def _put_message(
    heaps, clock_word, rank, peer, rows, row_bytes, part_rows,
    address: tl.int64, shift: tl.int64, signals: tl.int64, epoch: tl.int64,
    FORM: tl.constexpr,
):  # fmt: skip
    """Put part p of a message of one run, which has been staged, as program p.

    Memory: the program reads its part of this rank's heap, and stores it and its signal in the heap of `peer`.

    Order: the message has been staged by earlier kernels of the stream. See `network.put_signal`.

    Example: 20 rows of 64 bytes, parts of 8: program 2 puts rows 16 .. 19, 256 bytes, and raises signal 2.

    Source: the puts between hosts of Chen et al. 2024.
    """
    first = tl.program_id(0) * part_rows
    size_bytes = tl.minimum(part_rows, rows - first).to(tl.int64) * row_bytes
    source = address + first.to(tl.int64) * row_bytes
    signal = signals + tl.program_id(0).to(tl.int64) * 8
    epoch = epoch + tl.load(clock_word)
    network.put_signal(heaps, rank, peer, source, source + shift, size_bytes, signal, epoch, FORM)


@triton.jit(do_not_specialize=["rank", "source", "parts", "signals", "epoch", "timeout"])
def _await_message(
    clock_word, status, rank, source, parts, signals: tl.int64, epoch: tl.int64, timeout: tl.int64,
    LANES: tl.constexpr, FORM: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Await the first `parts` parts of a message, as one program.

    Memory: the parts' signals in this rank's heap are read.

    Order: see `network.await_signals`. Kernels that follow on the stream see all of the message.

    Example: 300 parts, LANES 256: parts 0 .. 255 first, then 256 .. 299.
    """
    words = signals.to(tl.pointer_type(tl.int64))
    epoch = epoch + tl.load(clock_word)
    for first in range(0, parts, LANES):
        count = tl.minimum(LANES, parts - first)
        network.await_signals(words, first, count, rank, source, epoch, timeout, status, LANES, FORM, INTERPRETED)


_PUT_ARGUMENTS = (
    "heaps", "clock_word", "rank", "peer", "rows", "row_bytes", "part_rows",
    "address", "shift", "signals", "epoch",
)  # fmt: skip
_AWAIT_ARGUMENTS = ("clock_word", "status", "rank", "source", "parts", "signals", "epoch", "timeout")


@lru_cache
def _putting(form: str, options: tuple) -> CompiledKernel:
    return CompiledKernel(_put_message, _PUT_ARGUMENTS, {"FORM": form}, num_warps=_NUM_WARPS, **dict(options))


@lru_cache
def _awaiting(form: str, lanes: int, options: tuple) -> CompiledKernel:
    constants = {"LANES": lanes, "FORM": form, "INTERPRETED": INTERPRETED}
    return CompiledKernel(_await_message, _AWAIT_ARGUMENTS, constants, num_warps=1, **dict(options))


def put_message(
    heap: Network, message: Outgoing, rows: int, row_bytes: int, parts: Parts, clock: torch.Tensor, epoch: int
) -> None:
    """Put a message of one run that has been staged, part by part, each with its signal.

    Args:
        rows: of the message; with 0 its first part is its signal alone.
        row_bytes: of a row, a multiple of 16.
        clock: [1] int64; the signals are raised to `epoch` + `clock`.
    """
    kernel = _putting(heap.form, heap.options())
    kernel(
        max(1, -(-rows // parts.rows)), (),
        heap.heaps, clock, heap.rank, message.peer, rows, row_bytes, parts.rows,
        message.address, message.shift_bytes, message.signals, epoch,
    )  # fmt: skip


def await_message(
    heap: Network, message: Incoming, rows: int, parts: Parts, waiting: Waiting, clock: torch.Tensor, epoch: int
) -> None:
    """Make the current stream wait for a message of one run; arguments as of `put_message`.

    A wait that lasts longer than `waiting.timeout` is recorded and stops the GPU's work.
    """
    count = max(1, -(-rows // parts.rows))
    kernel = _awaiting(heap.form, min(256, power_of_2(count)), heap.options())
    kernel(
        1, (),
        clock, waiting.status, heap.rank, message.source, count, message.signals, epoch, waiting.timeout,
    )  # fmt: skip
