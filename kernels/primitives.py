"""Device building blocks: the task order, flags with bounded waits, and records that the host reads.

Memory order, the same in every kernel. The producer: all threads of a program store; a barrier, `tl.debug_barrier()`,
orders their stores before the next work of one thread; that thread releases a flag or a count. The consumer: one thread
acquires the flag or count; a barrier; then all threads load. Ranks use system scope, programs of one GPU use GPU scope.
The chain is cumulative: a release also covers everything that its thread has acquired before.

This is true wherever the stores go, also in a peer's memory. A scope has to include the two threads that synchronise,
and no others (PTX ISA, sections 8.7 and 8.9.4). Each such pair extends base causality order, which is transitive
(8.9.5, whose note calls this cumulativity).

Example: a thread of program A stores into a peer's window. A barrier of A orders that before A's count, a release at
GPU scope. Program B, which counts last, acquires the count at GPU scope and signals the peer, by a release at system
scope. The peer acquires the flag. Each pair is within its scope, so the store precedes the peer's loads.
"""

import triton
import triton.language as tl
from triton.language.extra import cuda

# Kinds of records. Each has a lock in `status`, and a row in the host's [kinds, 8] int64, whose word 0 is written last.
RECORD_WORDS = tl.constexpr(8)
EXPIRED = tl.constexpr(1)  # words 1 ..: waiting rank, peer, slot, expected epoch, seen epoch
BAD_ID = tl.constexpr(2)  # words 1 ..: index of the feature in its input, sample, rows of its table
OVERFLOW = tl.constexpr(3)  # words 1 ..: rank that has too many ids, the feature, their number, the capacity
BAD_ARRIVAL = tl.constexpr(4)  # words 1 ..: shard, source rank, index among its ids there, id, rows of its table


@triton.jit
def task_at(
    position,
    rank,
    world_size,
    features,
    blocks,
    SCHEDULE: tl.constexpr,
):
    """Return (destination, feature, block) of the task at `position`, scalar or tensor, in the order of `schedule`.

    Example: rank 1 of 3, one feature, two blocks, balanced: position 0 is block 0 for rank 2, position 3 block 1 for
    rank 2, position 4 block 1 for rank 0.
    """
    each = features * blocks
    if SCHEDULE == "balanced":
        turn = position % world_size
        within = position // world_size
    else:
        turn = position // each
        within = position % each
    destination = turn if SCHEDULE == "linear" else (rank + 1 + turn) % world_size
    return destination, within // blocks, within % blocks


@triton.jit
def record(status, KIND: tl.constexpr, a, b, c, d, e):
    """Write the record of KIND, unless there is one already: words 1 .. 5, then word 0.

    Memory: the host polls the records in its own memory. `status` [1 + kinds] int64 is in device memory, since not
    every bus supports atomics on host memory; it holds the address of the records, then a lock for each kind. Kinds are
    independent: a wait that expires is recorded also after a bad id that did not stop the run.

    Order: see the atomics below. A kernel that is stopped loses stores in flight, and any of its warps may stop it.

    Example: BAD_ID of (3, 9, 50), the first of its kind, takes status[2] from 0 to 1, writes words 9 .. 13, takes it to
    2, writes word 8 and takes it to 3. Another BAD_ID takes it to 4 and writes nothing.
    """
    lock = status + KIND
    if tl.atomic_add(lock, 1) == 0:
        words = tl.load(status).to(tl.pointer_type(tl.int64)) + (KIND - 1) * RECORD_WORDS
        tl.store(words + 1, a.to(tl.int64))
        tl.store(words + 2, b.to(tl.int64))
        tl.store(words + 3, c.to(tl.int64))
        tl.store(words + 4, d)
        tl.store(words + 5, e)
        # Acquire and release: a host that sees word 0 sees the rest.
        tl.atomic_add(lock, 1, sem="acq_rel", scope="sys")
        tl.store(words, KIND)
        # Word 0 has arrived in the host's memory before a warp stops the kernel.
        tl.atomic_add(lock, 1, sem="acq_rel", scope="sys")


@triton.jit
def clock(turn, INTERPRETED: tl.constexpr):
    """Return the GPU's time in ns, or `turn` under the interpreter, which has no clock."""
    return tl.full((), 0, tl.int64) + turn if INTERPRETED else cuda.globaltimer()


@triton.jit
def signal_flag(flag, epoch):
    """Store `epoch` to `flag`, here or at a peer, after everything that this program has stored or acquired."""
    tl.debug_barrier()  # all threads have stored before one of them releases
    tl.atomic_xchg(flag, epoch, sem="release", scope="sys")


@triton.jit
def signal_flags(peers_ready, slot, world_size, epoch, PEERS: tl.constexpr):
    """Store `epoch` to element `slot` of every rank's flags, after everything that this program has stored or acquired.

    `peers_ready` [W] int64 holds the address of each rank's flags.
    """
    peer = tl.arange(0, PEERS)
    mask = peer < world_size
    # [PEERS]
    flags = tl.load(peers_ready + peer, mask=mask, other=0).to(tl.pointer_type(tl.int64))
    tl.debug_barrier()  # all threads have stored before a lane releases each flag
    tl.atomic_xchg(flags + slot, tl.zeros((PEERS,), tl.int64) + epoch, mask=mask, sem="release", scope="sys")


@triton.jit
def count_and_signal(counted, peers_ready, slot, world_size, epoch, PEERS: tl.constexpr):
    """Count this program in `counted` [1] int32, 0 before and after; the last one signals `slot` at every rank.

    Order: barrier; count (acquire and release, GPU scope). The program that counts last has acquired what all others
    have released, and releases it with the flags, at system scope.
    """
    tl.debug_barrier()  # all threads have stored before one of them counts the program
    if tl.atomic_add(counted, 1, sem="acq_rel", scope="gpu") == tl.num_programs(0) - 1:
        tl.store(counted, 0)  # for the next kernel on the stream
        signal_flags(peers_ready, slot, world_size, epoch, PEERS)


@triton.jit
def oldest_epoch(flags, mask, epoch, SEM: tl.constexpr):
    """Return the least of `epoch` and the epochs at `flags` [N] where `mask`, read with SEM at system scope."""
    # An atomic, since the compiler moves a load out of the loop, even a volatile one.
    seen = tl.atomic_add(flags, tl.zeros_like(flags.to(tl.int64)), mask=mask, sem=SEM, scope="sys")
    return tl.min(tl.where(mask, seen, epoch), 0)


@triton.jit
def time_since(began, turn, INTERPRETED: tl.constexpr, ALONE: tl.constexpr):
    """Return the ns since `began`, a result of `clock`, the same in all threads; turns, under the interpreter.

    Each warp reads another time. Warps that decide by their own leave a loop at different turns, and one that leaves
    early stops the kernel before the record is written. So all use the first thread's time, unless the warp is ALONE:
    other warps of the program do something else.
    """
    waited = clock(turn, INTERPRETED) - began
    if not (INTERPRETED or ALONE) and cuda.num_warps() > 1:
        waited = tl.max(tl.where(tl.arange(0, cuda.num_threads()) == 0, waited, 0), 0)
    return waited


@triton.jit
def poll(flags, mask, epoch, timeout, INTERPRETED: tl.constexpr):
    """Wait until `flags` [N] have reached `epoch` where `mask`, and return it; or return the least after `timeout`.

    All threads of a program take part and get the same result. The timeout is in ns; in turns under the interpreter.
    Order: none, the flags are read relaxed; the caller acquires them.
    """
    began = clock(0, INTERPRETED)
    turn = 0
    waited = began - began
    oldest = oldest_epoch(flags, mask, epoch, "relaxed")
    while (oldest < epoch) & (waited <= timeout):
        oldest = oldest_epoch(flags, mask, epoch, "relaxed")
        turn += 1
        waited = time_since(began, turn, INTERPRETED, False)
    return oldest


@triton.jit
def wait_for_flags(
    ready,
    counts,
    slots,
    first,
    rank,
    world_size,
    epoch,
    timeout,
    status,
    BLOCK: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Wait until the flags [first, first + BLOCK) of `ready` [W, slots] have reached `epoch`.

    Only the first counts[w] flags of row w, which rank w signals, are in use. After `timeout` ns (turns, under the
    interpreter) the program records which flag is missing and stops the kernel: to go on would be to train on the
    window's old values.

    Order: the flags are read relaxed until all have reached `epoch`, then acquired once, at system scope (barrier).

    Example: slots 3, counts [2, 0], first 0, BLOCK 4: the program waits for elements 0 and 1; 2 and 3 are not in use.
    """
    index = first + tl.arange(0, BLOCK)
    source = index // slots
    mask = source < world_size
    mask = mask & (index % slots < tl.load(counts + source, mask=mask, other=0))
    flags = ready + index
    oldest = poll(flags, mask, epoch, timeout, INTERPRETED)
    if oldest < epoch:
        seen = tl.load(flags, mask=mask, other=epoch, volatile=True)
        missing = first + tl.argmin(tl.where(mask, seen, epoch), 0)
        record(status, EXPIRED, rank, missing // slots, missing % slots, epoch, tl.load(ready + missing))
        if not INTERPRETED:
            tl.debug_barrier()  # no warp stops the kernel before the one that writes the record
            stop(rank)
    # Once, at the end: each acquire empties L1, while other programs of the multiprocessor still pool.
    oldest_epoch(flags, mask, epoch, "acquire")
    tl.debug_barrier()  # no thread reads the windows before the threads that acquired


@triton.jit
def wait_for_few(
    ready,
    slots,
    first,
    apart,
    count,
    rank,
    epoch,
    timeout,
    status,
    LANES: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Wait until `count` flags, at most LANES, of `ready` [W, slots] have reached `epoch`: first, first + apart, ..

    Timeout and order are those of `wait_for_flags`. A proxy fence follows, so that reads by TMA also come after.

    Returns:
        0, computed from the flags: code that must come after the wait can be made to depend on it.

    Example: slot 2 of 4 of all of 3 ranks: first 2, apart 4, count 3 are the elements 2, 6 and 10.
    """
    lane = tl.arange(0, LANES)
    mask = lane < count
    flags = ready + first + lane * apart
    oldest = poll(flags, mask, epoch, timeout, INTERPRETED)
    if oldest < epoch:
        seen = tl.load(flags, mask=mask, other=epoch, volatile=True)
        missing = first + tl.argmin(tl.where(mask, seen, epoch), 0) * apart
        record(status, EXPIRED, rank, missing // slots, missing % slots, epoch, tl.load(ready + missing))
        if not INTERPRETED:
            tl.debug_barrier()  # no warp stops the kernel before the one that writes the record
            stop(rank)
    late = tl.minimum(oldest_epoch(flags, mask, epoch, "acquire") - epoch, 0).to(tl.int32)
    tl.debug_barrier()  # no thread reads arrivals before the threads that acquired
    return late * 0 if INTERPRETED else fence_proxy(late)  # an expired wait does not stop the interpreter


@triton.jit
def fence_proxy(value):
    """Return `value`, after a fence: the thread's reads by TMA also see what it has acquired."""
    return tl.inline_asm_elementwise(
        "{ fence.proxy.async.global; mov.u32 $0, $1; }", "=r,r", [value], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def stop(value):
    """Stop the kernel: later work on this GPU does not start, and the host's next call fails with a CUDA error."""
    tl.inline_asm_elementwise(
        "{ fence.sc.sys; trap; mov.u32 $0, $1; }", "=r,r", [value], dtype=tl.int32, is_pure=False, pack=1
    )
