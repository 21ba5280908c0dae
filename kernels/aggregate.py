"""The aggregator on the device: who finishes a part of a message learns which parts it has to put.

`grouping` has the rule, and explains parts and groups. A program counts the rows that it has finished of a part; the
one that counts the last rows marks the part finished in its group, and applies the rule. No program waits for
another. Nobody else takes the parts that one takes, and none is left over:

- A group's finished parts are bits of one word, which programs set by an atomic. These have one order, and whoever
  sets the last bit sees all others, so it takes all that has not left.
- Pieces that have left are bits of another word. A program that is to take some sets their bits by one atomic, and
  puts those that were not set before. So each part is put once, also by programs that apply the rule at once.

Both words hold the epoch in their upper half, and are raised to an epoch by a maximum: words of an earlier one count as
0. So nothing is ever reset, and an epoch may be skipped.

**At the receiver** each part has a signal word. A put of n parts sets the word of its first one to epoch * 256 + n,
after its data. Whoever needs a message begins at the first word of each group: it has the number of parts that have
come with it, and so which word comes next, until all parts of the group have come (`await_parts`). Puts may overtake
each other, since none covers another's data.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from dlrm_overlap.kernels.network import AT_LEAST, signal_wait
from dlrm_overlap.kernels.primitives import EXPIRED, clock, poll, record, stop

_LANES = tl.constexpr(32)  # `grouping.GROUP_PARTS`
_COUNT_BITS = tl.constexpr(8)  # of a signal word
_EPOCH_BIT = tl.constexpr(32)  # of a word of bits
_NO_BOUND = 1 << 62


class Gathered(NamedTuple):
    """The state of a message's parts while they are finished; kept from epoch to epoch."""

    counts: torch.Tensor
    """[n] int32: finished rows of each part"""
    done: torch.Tensor
    """[n] int64: the epoch and the finished parts of each group"""
    sent: torch.Tensor
    """[n] int64: the same of those that have left"""
    stamps: torch.Tensor
    """[n] int64: when each part was finished"""
    longest_wait: int
    """of a finished part, in ns"""

    @staticmethod
    def of(parts: int, longest_wait_us: float | None, device: torch.device) -> "Gathered":
        """Return words for up to so many parts; a wait of None has no bound."""
        counts = torch.zeros(parts, dtype=torch.int32, device=device)
        done, sent, stamps = (torch.zeros(parts, dtype=torch.int64, device=device) for _ in range(3))
        wait = _NO_BOUND if longest_wait_us is None else round(longest_wait_us * 1e3)
        return Gathered(counts, done, sent, stamps, wait)


@triton.jit
def _bits(count):
    """Return the `count` lowest bits, set."""
    return (tl.full((), 1, tl.int64) << count) - 1


@triton.jit
def finish_part(
    done, sent, stamps, part, parts, group_parts, epoch, longest_wait, turn, INTERPRETED: tl.constexpr
):  # fmt: skip
    """Mark a part finished; return which parts of its group this program has to put now, bits of an int64.

    Bit i stands for the group's part i, of up to `group_parts`; all groups together have `parts`. What the program has
    stored or acquired is the part, after a barrier. The longest wait is in ns; in turns under the interpreter, where
    `turn` is the time.

    Memory: `done` and `sent` [groups] int64 are the words of bits, 0 before the first epoch, which is 1 or more.
    `stamps` [parts] int64 get the times at which parts are finished. An epoch has 31 bits.

    Order: the part's time is stored before its bit is set (acquire and release, GPU scope). Who sees a bit so sees the
    time and what is in the part. Who takes parts acquires and releases at system scope, so that a network card sees
    them, too. A barrier follows, so that all threads may read the data that one thread has acquired.

    Example: groups of 4, epoch 5. Two programs finish parts 1 and 0 and get 0, as none is due. `done` is 5 << 32 | 3.
    A third finishes 3 when part 1 has waited for too long: it gets the bits 0, 1 and 3, and `sent` has the same. The
    one that finishes 2 sees 15 in `done`, whatever the time, asks for all four, and gets bit 2.
    """
    group = part // group_parts
    first = group * group_parts
    lane = tl.arange(0, _LANES)
    tag = epoch.to(tl.int64) << _EPOCH_BIT
    whole = _bits(tl.minimum(group_parts, parts - first))
    bit = tl.full((), 1, tl.int64) << (part - first)
    tl.store(stamps + part, clock(turn, INTERPRETED))
    tl.debug_barrier()
    tl.atomic_max(done + group, tag, sem="relaxed", scope="gpu")
    finished = (tl.atomic_or(done + group, bit, sem="acq_rel", scope="gpu") | bit) & whole
    # All threads must decide alike. A clock, or a word that others change, is one thing to one warp and another to the
    # next; the stamp that one thread has stored, and an atomic's result, are the same to all.
    now = tl.load(stamps + part, volatile=True)
    # A word that is no longer true counts fewer parts that have left: then the wait is taken for longer than it is.
    word = tl.atomic_add(sent + group, 0, sem="relaxed", scope="gpu")
    gone = tl.where(word >= tag, word & whole, 0)
    waiting = ((finished & ~gone) >> lane) & 1
    oldest = tl.min(tl.load(stamps + first + lane, mask=waiting != 0, other=now, volatile=True), 0)
    mine = tl.zeros((), tl.int64)
    if (finished == whole) | (now - oldest >= longest_wait):
        tl.atomic_max(sent + group, tag, sem="relaxed", scope="gpu")
        # At system scope, since a network card may read the parts next.
        mine = finished & ~tl.atomic_or(sent + group, finished, sem="acq_rel", scope="sys")
        tl.debug_barrier()
    return mine


@triton.jit
def finish_rows(
    counts, amount, whole, done, sent, stamps, part, parts, group_parts, epoch, longest_wait, turn,
    INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Count `amount` finished rows of a part; who makes them `whole` finishes it. Return as `finish_part`, or 0.

    Memory: `counts` [parts] int32 are the finished rows of each part, 0 before and after all launches of an epoch;
    the rest is `finish_part`'s.

    Order: a barrier, so that all threads have stored; the count (release, GPU scope); by who makes it whole, an acquire
    at GPU scope. An acquire empties the multiprocessor's L1, so the others go without.

    Example: parts of 8 rows of 3 features, counted 2 at a time. Of 12 programs, the one that finds 22 sets the count
    to 0 and finishes the part. The others get 0.
    """
    mine = tl.zeros((), tl.int64)
    tl.debug_barrier()
    if tl.atomic_add(counts + part, amount, sem="release", scope="gpu") + amount == whole:
        tl.atomic_xchg(counts + part, 0, sem="acquire", scope="gpu")
        mine = finish_part(
            done, sent, stamps, part, parts, group_parts, epoch, longest_wait, turn, INTERPRETED
        )  # fmt: skip
    return mine


@triton.jit
def next_put(mine):
    """Return the first range of consecutive parts among the bits `mine`, not 0: first, count, and the other bits.

    Example: bits 0, 1 and 3: first 0, count 2, and bit 3 is left.
    """
    lane = tl.arange(0, _LANES)
    first = tl.min(tl.where(((mine >> lane) & 1) != 0, lane, _LANES), 0)
    count = tl.min(tl.where((((mine >> first) >> lane) & 1) == 0, lane, _LANES), 0)
    return first, count, mine & ~(_bits(count) << first)


@triton.jit
def put_signal_value(epoch, count):
    """Return the signal word of the first part of a put of `count` parts."""
    return (epoch.to(tl.int64) << _COUNT_BITS) + count


@triton.jit
def await_parts(
    signals, first, parts, group_parts, rank, peer, epoch, timeout, status,
    LANES: tl.constexpr, FORM: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Wait until `parts` parts of a message have come, from part `first` on, with which a run begins.

    A lane takes a group, so that groups are looked at side by side: a look takes about a microsecond. When `timeout` ns
    have passed for a signal (turns, under the interpreter), the program records which is missing and stops the kernel,
    as `primitives.await_flags` does for a flag.

    Memory: `signals` [parts] int64 are those of the message of `peer` for one window, in this rank's memory. Words of
    a later epoch do not come before this one's are awaited no more.

    Order: signals are read relaxed until they have come. Then they are acquired at system scope, of NVSHMEM by its own
    wait, which makes the bytes visible that a network card has written. A barrier follows, so that no thread reads a
    part before the threads that acquired.

    Example: groups of 4, epoch 5, parts 0 .. 6 are awaited. Signals 0 and 4 are 5 * 256 + 4 and 5 * 256 + 1: parts
    0 .. 4 have come. Signal 5 becomes 5 * 256 + 2: so have 5 and 6.
    """
    least = epoch.to(tl.int64) << _COUNT_BITS
    expired = False
    for begin in range(0, tl.cdiv(parts, group_parts), LANES):
        at = first + (begin + tl.arange(0, LANES)) * group_parts
        end = tl.minimum(at + group_parts, first + parts)
        at, expired = _next_signals(
            signals, at, end, expired, least, rank, peer, epoch, timeout, status, LANES, FORM, INTERPRETED
        )  # fmt: skip
        if tl.max(end - at, 0) > 0:  # some groups have left as several puts
            for _ in range(1, group_parts):
                at, expired = _next_signals(
                    signals, at, end, expired, least, rank, peer, epoch, timeout, status, LANES, FORM, INTERPRETED
                )  # fmt: skip
    tl.debug_barrier()


@triton.jit
def _next_signals(
    signals, at, end, expired, least, rank, peer, epoch, timeout, status,
    LANES: tl.constexpr, FORM: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Await and acquire the signals `at` [LANES] where these are below `end`; return which come next in each group.

    Nothing is awaited where a wait has expired, which is returned second.
    """
    waiting = at < end
    if (tl.max(waiting.to(tl.int32), 0) != 0) & (not expired):
        flags = signals + tl.where(waiting, at, 0)
        if poll(flags, waiting, least, timeout, INTERPRETED) < least:
            seen = tl.load(flags, mask=waiting, other=least, volatile=True)
            lane = tl.argmin(seen, 0)
            missing = tl.sum(tl.where(tl.arange(0, LANES) == lane, at, 0), 0)
            record(status, EXPIRED, rank, peer, missing, epoch, tl.min(seen, 0) >> _COUNT_BITS)
            if not INTERPRETED:
                tl.debug_barrier()  # no warp stops the kernel before the one that writes the record
                stop(rank)
            expired = True
        else:
            if FORM == "nvshmem":
                value = tl.where(waiting, least, 0)  # a lane that awaits nothing is through at once
                signal_wait(flags.to(tl.int64), tl.zeros_like(at) + AT_LEAST, value)
                seen = tl.load(flags, mask=waiting, other=0, volatile=True)
            else:
                seen = tl.atomic_add(flags, tl.zeros((LANES,), tl.int64), mask=waiting, sem="acquire", scope="sys")
            at += tl.where(waiting, seen - least, 0).to(tl.int32)
    return at, expired
