"""Device building blocks: features of ids, the task order, flags with bounded waits, and records for the host.

Memory order, the same in every kernel. Producer: all threads store; a barrier, `tl.debug_barrier()`; one thread
releases a flag or a count. Consumer: one thread acquires it; a barrier; all threads load. A scope has to include the
two threads that synchronise, and no others (PTX ISA, sections 8.7 and 8.9.4): system scope between ranks, GPU scope
between programs of one GPU, also for stores into a peer's memory. Causality order is transitive (8.9.5): a release also
covers everything that its thread has acquired. Unless a kernel says otherwise, no two of its programs share an element
that one of them stores.

Example: program A stores into a peer's window, and counts itself by a release at GPU scope. Program B counts last,
acquires the count, and signals the peer by a release at system scope. The peer acquires the flag, so A's store precedes
its loads.
"""

import triton
import triton.language as tl
from triton.language.extra import cuda, hip

from dlrm_overlap.kernels.target import has_tma, is_amd, num_threads

# Kinds of records. Each has a lock in `status`, and a row in the host's [kinds, 8] int64, whose word 0 is written last.
RECORD_WORDS = tl.constexpr(8)
EXPIRED = tl.constexpr(1)  # words 1 ..: waiting rank, peer, slot, expected epoch, seen epoch
BAD_ID = tl.constexpr(2)  # words 1 ..: index of the feature in its input, sample, rows of its table
OVERFLOW = tl.constexpr(3)  # words 1 ..: rank that has too many ids, the feature, their number, the capacity
BAD_ARRIVAL = tl.constexpr(4)  # words 1 ..: shard, source rank, index among its ids there, id, rows of its table

_AMD_TICK_NS = tl.constexpr(10)  # of s_memrealtime, which counts at 100 MHz on CDNA 3 (gfx942)


@triton.jit
def feature_of(offsets, position, mask, samples, features, HALVINGS: tl.constexpr):
    """Return [N]: the first feature whose bags end after `position` [N]; `features` if none does."""
    low = tl.zeros_like(position)
    high = low + features
    for _ in range(HALVINGS):
        searching = mask & (low < high)
        middle = (low + high) // 2
        ended = tl.load(offsets + (middle + 1) * samples, mask=searching, other=0) <= position
        low = tl.where(searching & ended, middle + 1, low)
        high = tl.where(searching & (ended == 0), middle, high)
    return low


@triton.jit
def task_at(
    position,
    rank,
    world_size,
    features,
    blocks,
    SCHEDULE: tl.constexpr,
):
    """Return (destination, feature, block) of the task at `position`, in the order of `schedule`."""
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
    """Write the record of KIND for the host, unless there is one already.

    Memory: `status` [1 + kinds] int64 holds the address of the records in host memory, then a lock for each kind, since
    not every bus supports atomics on host memory.

    Order: words 1 .. 5, then word 0, by which the host knows the record.
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
    """Return the GPU's time in ns, or `turn` under the interpreter."""
    if INTERPRETED:
        return tl.full((), 0, tl.int64) + turn
    elif is_amd():
        return hip.memrealtime() * _AMD_TICK_NS
    else:
        return cuda.globaltimer()


@triton.jit
def signal_flag(flag, epoch):
    """Store `epoch` to `flag`, here or at a peer, after everything that this program has stored or acquired."""
    tl.debug_barrier()  # all threads have stored before one of them releases
    tl.atomic_xchg(flag, epoch, sem="release", scope="sys")


@triton.jit
def signal_flags(peers_ready, slot, world_size, epoch, PEERS: tl.constexpr):
    """Store `epoch` to element `slot` of every rank's flags, at the addresses `peers_ready` [W]; see `signal_flag`."""
    peer = tl.arange(0, PEERS)
    mask = peer < world_size
    # [PEERS]
    flags = tl.load(peers_ready + peer, mask=mask, other=0).to(tl.pointer_type(tl.int64))
    tl.debug_barrier()  # all threads have stored before a lane releases each flag
    tl.atomic_xchg(flags + slot, tl.zeros((PEERS,), tl.int64) + epoch, mask=mask, sem="release", scope="sys")


@triton.jit
def count_and_signal(counted, peers_ready, slot, world_size, epoch, PEERS: tl.constexpr):
    """Count this program in `counted` [1] int32, 0 before and after; the last one signals `slot` at every rank.

    Order: the count acquires what all others have released, and the signal, at system scope, releases it.
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
    """Return the ns since `began`, a result of `clock`; turns, under the interpreter.

    All threads use the first one's time: a warp that decided by its own could stop the kernel before the record is
    written. If ALONE, other warps do something else, and the warp uses its own.
    """
    waited = clock(turn, INTERPRETED) - began
    if not (INTERPRETED or ALONE) and cuda.num_warps() > 1:
        waited = tl.max(tl.where(tl.arange(0, num_threads()) == 0, waited, 0), 0)
    return waited


@triton.jit
def poll(flags, mask, epoch, timeout, INTERPRETED: tl.constexpr):
    """Return `epoch` once all `flags` [N] in `mask` have reached it, or the least of them after `timeout`.

    All threads of the program call it. Order: none, the caller acquires the flags.
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
    """Wait until the flags [first, first + BLOCK) of `ready` [W, slots] that are in use have reached `epoch`.

    The first counts[w] flags of row w, which rank w signals, are in use. After `timeout` ns (turns, under the
    interpreter) the program records the missing flag and stops the kernel, which would otherwise use old values.

    Order: acquires at system scope, then a barrier.
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
    """Wait for `count` flags of `ready`, at most LANES: first, first + apart, ..; see `wait_for_flags`.

    A proxy fence follows, so that reads by TMA also come after. The result is 0, computed from the flags: code that
    must come after the wait can depend on it.
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
    if has_tma():
        value = tl.inline_asm_elementwise(
            "{ fence.proxy.async.global; mov.u32 $0, $1; }", "=r,r", [value], dtype=tl.int32, is_pure=False, pack=1
        )
    return value


@triton.jit
def stop(value):
    """Stop the kernel: later work on this GPU does not start, and the host's next call fails with an error."""
    if is_amd():
        tl.inline_asm_elementwise(
            "s_waitcnt vmcnt(0)\ns_trap 2\nv_mov_b32 $0, $1", "=v,v", [value], dtype=tl.int32, is_pure=False, pack=1
        )
    else:
        tl.inline_asm_elementwise(
            "{ fence.sc.sys; trap; mov.u32 $0, $1; }", "=r,r", [value], dtype=tl.int32, is_pure=False, pack=1
        )
