"""Messages between nodes in groups of rows: each group is put into the peer's heap when it is complete.

A message has a *run* of rows for each rank of the receiving node, cut into groups of the same number of rows, except
the last. The put of a group sets its own signal to the epoch after the data has arrived: nothing is reset, and puts may
overtake each other.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from dlrm_overlap.kernels.compiled import INTERPRETED, CompiledKernel, specialised
from dlrm_overlap.kernels.grouping import group_rows
from dlrm_overlap.kernels.network import AT_LEAST, Network, put_signal, signal_wait
from dlrm_overlap.kernels.primitives import EXPIRED, poll, record, stop

_MIN_ROWS = 8  # of a group: so the rows of a pooling task, 8 at most, are in one group
_LANES = 128  # groups that a program waits for at a time, a thread each


class Groups(NamedTuple):
    """How a message is cut, derived from sizes that both sender and receiver know."""

    rows: int
    """rows of a group, a multiple of 8"""
    each: int
    """groups of the longest run; group i of run r has number r * each + i"""

    @staticmethod
    def of(longest: int, row_bytes: int, aggregate_bytes: int) -> "Groups":
        """Return how to cut a message whose longest run has `longest` rows."""
        rows = group_rows(row_bytes, aggregate_bytes, _MIN_ROWS)
        return Groups(rows, max(1, -(-longest // rows)))


class Outgoing(NamedTuple):
    """A message in this rank's heap and its destination in a peer's, as addresses in this rank's heap."""

    shift_bytes: int
    """bytes from where kernels stage the message to where it arrives"""
    signals: int
    """address of its first group's signal"""
    peer: int


class Waiting(NamedTuple):
    timeout: int
    """ns; turns under the interpreter"""
    status: torch.Tensor


@triton.jit(do_not_specialize=["rank", "peer", "signal", "epoch"])
def _send_signal(
    heaps,  # [W] int64, addresses
    clock_word,  # [1] int64
    rank,
    peer,
    signal: tl.int64,
    epoch: tl.int64,
    FORM: tl.constexpr,
):
    """Set a signal in the heap of `peer` to `epoch` + `clock_word`; the grid is one program."""
    nothing = tl.zeros((), tl.int64)
    put_signal(heaps, rank, peer, signal, signal, nothing, signal, epoch + tl.load(clock_word), FORM)


@triton.jit(do_not_specialize=["rank", "source", "group_rows", "each", "signals", "epoch", "timeout"])
def _wait_message(
    clock_word,  # [1] int64
    status,
    first_sample,  # [runs + 1] int32: run r has rows [first_sample[r], first_sample[r + 1])
    rank,
    source,  # the rank that sends
    group_rows,
    each,  # groups of the longest run
    signals: tl.int64,  # address of the first group's signal
    epoch: tl.int64,
    timeout: tl.int64,  # ns; turns under the interpreter
    LANES: tl.constexpr,
    FORM: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Wait for the groups of run p of a message, as program p, with a lane for each group; see `wait_for_flags`.

    Memory: reads the signals from number p * `each` on. No signal is set to a later epoch before this wait has ended.

    Order: acquires at system scope, then a barrier. NVSHMEM's wait also makes visible what a network card has written.
    """
    run = tl.program_id(0)
    groups = tl.cdiv(tl.load(first_sample + run + 1) - tl.load(first_sample + run), group_rows)
    words = signals.to(tl.pointer_type(tl.int64)) + run * each
    epoch = epoch + tl.load(clock_word)
    for begin in range(0, groups, LANES):
        at = begin + tl.arange(0, LANES)
        waiting = at < groups
        flags = words + tl.where(waiting, at, 0)
        # Read relaxed, all lanes at once: one read takes about a microsecond.
        if poll(flags, waiting, epoch, timeout, INTERPRETED) < epoch:
            # The wait has expired: record the signal of the earliest epoch.
            seen = tl.load(flags, mask=waiting, other=epoch, volatile=True)  # [LANES]
            missing = run * each + begin + tl.argmin(seen, 0)
            record(status, EXPIRED, rank, source, missing, epoch, tl.min(seen, 0))
            if not INTERPRETED:
                tl.debug_barrier()  # no warp stops the kernel before the record is written
                stop(rank)
        elif FORM == "nvshmem":
            # NVSHMEM's wait acquires the signal; lanes without a group wait for 0 and return at once.
            value = tl.where(waiting, epoch, 0)
            signal_wait(flags.to(tl.int64), tl.zeros_like(at) + AT_LEAST, value)
        else:
            tl.atomic_add(flags, tl.zeros((LANES,), tl.int64), mask=waiting, sem="acquire", scope="sys")
    tl.debug_barrier()  # no thread reads a group before the threads that acquired its signal


def _wait_kernel(heap: Network) -> CompiledKernel:
    return specialised(
        _wait_message, num_warps=_LANES // 32, **heap.options(),
        LANES=_LANES, FORM=heap.form, INTERPRETED=INTERPRETED,
    )  # fmt: skip


def send_signal(heap: Network, message: Outgoing, clock: torch.Tensor, epoch: int) -> None:
    """Set the signal of a message's first group to `epoch` + `clock` [1] int64, for a message without rows."""
    kernel = specialised(_send_signal, num_warps=1, **heap.options(), FORM=heap.form)
    kernel(1, (), heap.heaps, clock, heap.rank, message.peer, message.signals, epoch)


def wait_message(
    heap: Network,
    source: int,
    signals: int,
    groups: Groups,
    waiting: Waiting,
    clock: torch.Tensor,
    epoch: int,
    first_sample: torch.Tensor,
) -> None:
    """Make the current stream wait until the signals of a message have reached `epoch` + `clock` [1] int64.

    A wait that lasts longer than `waiting.timeout` is recorded and stops the GPU's work. `signals` is the address of
    the first group's signal; `first_sample` [runs + 1] int32 are the first samples of the runs, and the end.
    """
    _wait_kernel(heap)(
        first_sample.numel() - 1, (),
        clock, waiting.status, first_sample, heap.rank, source, groups.rows, groups.each,
        signals, epoch, waiting.timeout,
    )  # fmt: skip
