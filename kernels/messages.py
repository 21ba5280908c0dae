"""Messages between hosts in parts: some parts are put into the peer's heap when they are ready, and awaited by
themselves.

A message is made of rows, in *runs*: of pooled embeddings a run is the samples of one rank of the receiving host, a
gradient has one run. Each run is cut into parts of the same number of rows, but for its last, and its parts are
gathered in groups (`grouping`); neither holds rows of two runs. Each part has a signal of its own; a put raises that of
its first part, and none is ever reset (`aggregate`).
"""

from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from dlrm_overlap.kernels.aggregate import await_parts, put_signal_value
from dlrm_overlap.kernels.compiled import INTERPRETED, CompiledKernel
from dlrm_overlap.kernels.grouping import Grouping
from dlrm_overlap.kernels.network import Network, put_signal

_LEAST_ROWS = 8  # of a part: a task of pooling, which has as many at most, lies in one part
_NUM_WARPS = 8
_LANES = 128  # groups that a program awaits at a time, a thread each


class Parts(NamedTuple):
    """How a message is cut, alike at both ends, which derive it from the sizes that both know."""

    rows: int
    """of a part, a power of two; less at the end of a run"""
    each: int
    """parts of the longest run; part i of run r is number r * each + i of the message"""
    group: int
    """parts of a group; the first group of a run begins with the run"""

    @staticmethod
    def of(longest: int, row_bytes: int, aggregate_bytes: int) -> "Parts":
        """Return how a message of rows of `row_bytes` is cut whose longest run has `longest` rows.

        Example: runs of up to 3000 rows of 1000 bytes, 256 KiB a group: parts of 16 rows, up to 188 a run, 17 a group.
        """
        grouping = Grouping.of(longest, row_bytes, aggregate_bytes, _LEAST_ROWS)
        return Parts(grouping.part_units, max(1, grouping.parts), grouping.group_parts)


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
    do_not_specialize=[
        "rank", "peer", "rows", "row_bytes", "part_rows", "group_parts", "address", "shift", "signals", "epoch"
    ]
)  # fmt: skip
def _put_message(
    heaps, clock_word, rank, peer, rows, row_bytes, part_rows, group_parts,
    address: tl.int64, shift: tl.int64, signals: tl.int64, epoch: tl.int64,
    FORM: tl.constexpr,
):  # fmt: skip
    """Put group p of a message of one run, which has been staged, as program p.

    Memory: the program reads its group in this rank's heap, and stores it and its signal in the heap of `peer`.

    Order: the message has been staged by earlier kernels of the stream. See `network.put_signal`.

    Example: 20 rows of 64 bytes, parts of 8, groups of 2: program 0 puts rows 0 .. 15 and raises signal 0 to 2 parts,
    program 1 puts rows 16 .. 19, 256 bytes, and raises signal 2 to 1 part.

    Source: the puts between hosts of Chen et al. 2024.
    """
    first = tl.program_id(0) * group_parts * part_rows
    group_rows = tl.minimum(group_parts * part_rows, rows - first)
    source = address + first.to(tl.int64) * row_bytes
    signal = signals + tl.program_id(0).to(tl.int64) * group_parts * 8
    value = put_signal_value(epoch + tl.load(clock_word), tl.maximum(1, tl.cdiv(group_rows, part_rows)))
    size_bytes = group_rows.to(tl.int64) * row_bytes
    put_signal(heaps, rank, peer, source, source + shift, size_bytes, signal, value, FORM)


@triton.jit(
    do_not_specialize=["rank", "source", "rows", "part_rows", "each", "group_parts", "signals", "epoch", "timeout"]
)  # fmt: skip
def _await_message(
    clock_word, status, first_sample, rank, source, rows, part_rows, each, group_parts,
    signals: tl.int64, epoch: tl.int64, timeout: tl.int64,
    RUNS: tl.constexpr, LANES: tl.constexpr, FORM: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Await the parts of run p of a message as program p.

    Memory: the program reads the signals of the run's parts, from number p * `each` on. With RUNS, the run has as many
    rows as `first_sample` [runs + 1] int32 says; else the message has one run, of `rows` rows, whose first part's
    signal is awaited even if there are none.

    Order: see `aggregate.await_parts`. The kernels that follow on the stream see the sender's bytes.

    Example: 20 rows, parts of 8 rows, groups of 2: signals 0 and 2 are awaited.
    """
    run = tl.program_id(0)
    if RUNS:
        parts = tl.cdiv(tl.load(first_sample + run + 1) - tl.load(first_sample + run), part_rows)
    else:
        parts = tl.maximum(1, tl.cdiv(rows, part_rows))
    words = signals.to(tl.pointer_type(tl.int64))
    epoch = epoch + tl.load(clock_word)
    await_parts(
        words, run * each, parts, group_parts, rank, source, epoch, timeout, status, LANES, FORM, INTERPRETED
    )  # fmt: skip


_PUT_ARGUMENTS = (
    "heaps", "clock_word", "rank", "peer", "rows", "row_bytes", "part_rows", "group_parts",
    "address", "shift", "signals", "epoch",
)  # fmt: skip
_AWAIT_ARGUMENTS = (
    "clock_word", "status", "first_sample", "rank", "source", "rows", "part_rows", "each", "group_parts",
    "signals", "epoch", "timeout",
)  # fmt: skip


@lru_cache
def _putting(form: str, options: tuple) -> CompiledKernel:
    return CompiledKernel(_put_message, _PUT_ARGUMENTS, {"FORM": form}, num_warps=_NUM_WARPS, **dict(options))


@lru_cache
def _awaiting(runs: bool, form: str, options: tuple) -> CompiledKernel:
    constants = {"RUNS": runs, "LANES": _LANES, "FORM": form, "INTERPRETED": INTERPRETED}
    return CompiledKernel(_await_message, _AWAIT_ARGUMENTS, constants, num_warps=_LANES // 32, **dict(options))


def put_message(
    heap: Network, message: Outgoing, rows: int, row_bytes: int, parts: Parts, clock: torch.Tensor, epoch: int
) -> None:
    """Put a message of one run that has been staged, group by group, each with its signal.

    Args:
        rows: of the message; with 0 its first part's signal goes alone.
        row_bytes: of a row, a multiple of 16.
        clock: [1] int64; the signals are raised to `epoch` + `clock`.
    """
    kernel = _putting(heap.form, heap.options())
    kernel(
        max(1, -(-rows // (parts.rows * parts.group))), (),
        heap.heaps, clock, heap.rank, message.peer, rows, row_bytes, parts.rows, parts.group,
        message.address, message.shift_bytes, message.signals, epoch,
    )  # fmt: skip


def await_message(
    heap: Network,
    message: Incoming,
    rows: int,
    parts: Parts,
    waiting: Waiting,
    clock: torch.Tensor,
    epoch: int,
    first_sample: torch.Tensor | None = None,
) -> None:
    """Make the current stream wait for a message, by one program a run; arguments as of `put_message`.

    A wait that lasts longer than `waiting.timeout` is recorded and stops the GPU's work.

    Args:
        first_sample: [runs + 1] int32: run r has the rows of the samples [first_sample[r], first_sample[r + 1]), and
            `rows` is not read; None is one run of `rows` rows.
    """
    kernel = _awaiting(first_sample is not None, heap.form, heap.options())
    kernel(
        1 if first_sample is None else first_sample.numel() - 1, (),
        clock, waiting.status, clock if first_sample is None else first_sample, heap.rank, message.source, rows,
        parts.rows, parts.each, parts.group, message.signals, epoch, waiting.timeout,
    )  # fmt: skip
