"""Messages between nodes in groups: each group is put into the peer's heap when it is ready, and awaited by itself.

A message is made of rows, in *runs*, each the samples of one rank of the receiving node. Each run is cut into groups of
the same number of rows, but for its last (`grouping`), so none holds rows of two runs. Each group has a signal of its
own, which its put sets to the epoch after its data. Nothing is ever reset. Puts may overtake each other, since none
covers another's data.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from dlrm_overlap.kernels.compiled import INTERPRETED, CompiledKernel, specialised
from dlrm_overlap.kernels.grouping import group_rows
from dlrm_overlap.kernels.network import AT_LEAST, Network, put_signal, signal_wait
from dlrm_overlap.kernels.primitives import EXPIRED, poll, record, stop

_LEAST_ROWS = 8  # of a group: a task of pooling, which has as many at most, lies in one group
_LANES = 128  # groups that a program awaits at a time, a thread each


class Groups(NamedTuple):
    """How a message is cut, alike at both ends, which derive it from the sizes that both know."""

    rows: int
    """of a group, a multiple of 8; less at the end of a run"""
    each: int
    """groups of the longest run; group i of run r is number r * each + i of the message"""

    @staticmethod
    def of(longest: int, row_bytes: int, aggregate_bytes: int) -> "Groups":
        """Return how a message of rows of `row_bytes` is cut whose longest run has `longest` rows.

        Example: runs of up to 3000 rows of 1000 bytes, 256 KiB a group: groups of 264 rows, up to 12 a run.
        """
        rows = group_rows(row_bytes, aggregate_bytes, _LEAST_ROWS)
        return Groups(rows, max(1, -(-longest // rows)))


class Outgoing(NamedTuple):
    """A message in this rank's heap, and where it goes: places in a peer's heap, as addresses in this rank's."""

    shift_bytes: int
    """from where kernels stage it to its place at the peer"""
    signals: int
    """address of the signal of its first group"""
    peer: int


class Waiting(NamedTuple):
    """How a wait for a signal is bounded, and where one that expires is recorded."""

    timeout: int
    """in ns; in turns under the interpreter"""
    status: torch.Tensor
    """[1 + kinds] int64 on the device, see `Record.status`"""


@triton.jit(do_not_specialize=["rank", "peer", "signal", "epoch"])
def _send_signal(heaps, clock_word, rank, peer, signal: tl.int64, epoch: tl.int64, FORM: tl.constexpr):
    """Set a signal in the heap of `peer` to `epoch` + `clock_word` [1] int64, by one program; see `put_signal`."""
    nothing = tl.zeros((), tl.int64)
    put_signal(heaps, rank, peer, signal, signal, nothing, signal, epoch + tl.load(clock_word), FORM)


@triton.jit(do_not_specialize=["rank", "source", "group_rows", "each", "signals", "epoch", "timeout"])
def _await_message(
    clock_word, status, first_sample, rank, source, group_rows, each,
    signals: tl.int64, epoch: tl.int64, timeout: tl.int64,
    LANES: tl.constexpr, FORM: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Await the groups of run p of a message as program p.

    A lane takes a group, so that signals are looked at side by side: a look takes about a microsecond. When `timeout`
    ns have passed (turns, under the interpreter), the program records which signal is missing and stops the kernel, as
    `primitives.wait_for_flags` does for a flag.

    Memory: the program reads the signals of the run's groups, from number p * `each` on; the run has as many rows as
    `first_sample` [runs + 1] int32 says. Signals of a later epoch do not come before this one's are awaited no more.

    Order: signals are read relaxed until they have come. Then they are acquired at system scope, of NVSHMEM by its own
    wait, which makes the bytes visible that a network card has written. A barrier follows, so that no thread reads a
    group before the threads that acquired. The kernels that follow on the stream see the sender's bytes.

    Example: a run of 20 rows, groups of 16 rows: signals 0 and 1 are awaited.
    """
    run = tl.program_id(0)
    groups = tl.cdiv(tl.load(first_sample + run + 1) - tl.load(first_sample + run), group_rows)
    words = signals.to(tl.pointer_type(tl.int64)) + run * each
    epoch = epoch + tl.load(clock_word)
    for begin in range(0, groups, LANES):
        at = begin + tl.arange(0, LANES)
        waiting = at < groups
        flags = words + tl.where(waiting, at, 0)
        if poll(flags, waiting, epoch, timeout, INTERPRETED) < epoch:
            seen = tl.load(flags, mask=waiting, other=epoch, volatile=True)
            missing = run * each + begin + tl.argmin(seen, 0)
            record(status, EXPIRED, rank, source, missing, epoch, tl.min(seen, 0))
            if not INTERPRETED:
                tl.debug_barrier()  # no warp stops the kernel before the one that writes the record
                stop(rank)
        elif FORM == "nvshmem":
            value = tl.where(waiting, epoch, 0)  # a lane that awaits nothing is through at once
            signal_wait(flags.to(tl.int64), tl.zeros_like(at) + AT_LEAST, value)
        else:
            tl.atomic_add(flags, tl.zeros((LANES,), tl.int64), mask=waiting, sem="acquire", scope="sys")
    tl.debug_barrier()


def _awaiting(heap: Network) -> CompiledKernel:
    return specialised(
        _await_message, num_warps=_LANES // 32, **heap.options(),
        LANES=_LANES, FORM=heap.form, INTERPRETED=INTERPRETED,
    )  # fmt: skip


def send_signal(heap: Network, message: Outgoing, clock: torch.Tensor, epoch: int) -> None:
    """Send the signal of a message's first group alone, where there are no rows.

    Args:
        clock: [1] int64; the signal is set to `epoch` + `clock`.
    """
    kernel = specialised(_send_signal, num_warps=1, **heap.options(), FORM=heap.form)
    kernel(1, (), heap.heaps, clock, heap.rank, message.peer, message.signals, epoch)


def await_message(
    heap: Network,
    source: int,
    signals: int,
    groups: Groups,
    waiting: Waiting,
    clock: torch.Tensor,
    epoch: int,
    first_sample: torch.Tensor,
) -> None:
    """Make the current stream wait for a message, by one program a run.

    A wait that lasts longer than `waiting.timeout` is recorded and stops the GPU's work.

    Args:
        source: the rank that sends it.
        signals: address of the signal of its first group.
        clock: [1] int64; signals are awaited until they have reached `epoch` + `clock`.
        first_sample: [runs + 1] int32: run r has the rows of the samples [first_sample[r], first_sample[r + 1]).
    """
    _awaiting(heap)(
        first_sample.numel() - 1, (),
        clock, waiting.status, first_sample, heap.rank, source, groups.rows, groups.each,
        signals, epoch, waiting.timeout,
    )  # fmt: skip
