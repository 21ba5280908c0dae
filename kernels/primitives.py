"""Device building blocks: the task order, pooling, flags with bounded waits, and records the host reads.

Memory order, used everywhere: all threads store; `tl.debug_barrier()` orders the program's stores before what one
thread does next; that thread releases. The other side: one acquire, a barrier, then loads. Peers are reached at system
scope, programs of one GPU at GPU scope; the chain is cumulative, so a release also covers what was acquired before it.

That holds wherever the stores lie, a peer's memory included. A scope has to include the two threads that synchronise,
and no others (PTX ISA, sections 8.7 and 8.9.4); base causality order, which every such pair extends, is transitive
(8.9.5, whose note calls this cumulativity). Example: a thread of program A stores into a peer's window; a barrier,
whose scope is A, orders that before A's count, a release at GPU scope; program B, which counts last, acquires at GPU
scope and raises the peer's flag, a release at system scope; the peer acquires it. Each pair is within its scope, so
the store precedes the peer's loads. Were it otherwise, no thread could answer for its program's stores behind a
barrier either.
"""

import triton
import triton.language as tl
from triton.language.extra import cuda

# Columns of the feature table [F, 5] int64, one row a feature that the launch pools.
ADDRESS = tl.constexpr(0)  # of its table's first row
ROWS = tl.constexpr(1)  # of its table
COLUMN = tl.constexpr(2)  # of the window, where its pooled embedding goes
POSITION = tl.constexpr(3)  # of its bags: bag of sample s is offsets[POSITION * B + s]
MEAN = tl.constexpr(4)  # 1: divide by the number of ids
FEATURE_COLUMNS = tl.constexpr(5)

# Kinds of status records, each with a lock, and with words of its own in the host's [kinds, 8] int64. Word 0 of a kind
# is written last.
RECORD_WORDS = tl.constexpr(8)
EXPIRED = tl.constexpr(1)  # words 1 ..: waiting rank, peer, slot, expected epoch, seen epoch
BAD_ID = tl.constexpr(2)  # words 1 ..: position of the feature, sample, rows of its table


@triton.jit
def task_at(position, rank, world_size, features, blocks, SCHEDULE: tl.constexpr):
    """Return (destination, feature, block) of the task at `position`: `schedule.TaskGrid.task_at` on the device."""
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
def pool(
    values,
    offsets,
    feature,
    sample,
    live,
    batch,
    status,
    BAGS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    UNROLL: tl.constexpr,
    WEIGHT: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    CHECK: tl.constexpr,
):
    """Return the pooled embeddings [BAGS, BLOCK_DIM] float32 of samples `sample` [BAGS] where `live`, else zeros.

    Sums run in the order of the ids, in float32. UNROLL rows of each bag are in flight at a time. With CHECK, an id
    outside its table is recorded and replaced by 0, in `values` too, since the backward reads it there. A table has at
    least one row: masked ids read as 0.
    """
    weight = tl.load(feature + ADDRESS).to(tl.pointer_type(WEIGHT))
    weight = tl.multiple_of(weight, ALIGNMENT)
    rows = tl.load(feature + ROWS)
    bag = tl.load(feature + POSITION) * batch + sample
    start = tl.load(offsets + bag, mask=live, other=0)
    length = tl.load(offsets + bag + 1, mask=live, other=0) - start
    ids = values + start
    column = tl.arange(0, BLOCK_DIM)
    total = tl.zeros((BAGS, BLOCK_DIM), tl.float32)
    wrong = tl.zeros((BAGS,), tl.int32)
    longest = tl.max(length, 0)
    for first in range(0, longest, UNROLL):
        for turn in tl.static_range(UNROLL):
            here = first + turn < length
            row = tl.load(ids + first + turn, mask=here, other=0).to(tl.int64)
            if CHECK:
                outside = row.to(tl.uint64, bitcast=True) >= rows.to(tl.uint64, bitcast=True)
                wrong = wrong | outside.to(tl.int32)
                row = tl.where(outside, 0, row)
            at = weight + row[:, None] * DIM + column[None, :]
            mask = here[:, None] & (column < DIM)[None, :]
            total += tl.load(at, mask=mask, other=0.0).to(tl.float32)
    if CHECK:
        worst = tl.max(tl.where(wrong > 0, bag.to(tl.int64), -1), 0)
        if worst >= 0:
            record(status, BAD_ID, worst // batch, worst % batch, rows, 0, 0)
            # Only now: a store in the loop would keep the compiler from loading the ids that follow ahead of it.
            for each in range(0, longest):
                row = tl.load(ids + each, mask=each < length, other=0).to(tl.int64)
                outside = row.to(tl.uint64, bitcast=True) >= rows.to(tl.uint64, bitcast=True)
                tl.store(ids + each, tl.zeros_like(row).to(values.dtype.element_ty), mask=outside)
    if tl.load(feature + MEAN) != 0:
        scale = 1.0 / tl.maximum(length, 1).to(tl.float32)
        total = total * scale[:, None]
    return total


@triton.jit
def record(status, KIND: tl.constexpr, a, b, c, d, e):
    """Write the status record of KIND, if there is none yet: words 1 .. 5, then word 0, in memory that the host polls.

    `status` [1 + kinds] int64 holds the address of the host's records and a lock a kind in device memory: atomics on
    host memory are not to be had on every bus. A kind's record leaves the others' alone: after a bad id that did not
    stop the run, a wait that expires is told all the same.

    Example: BAD_ID of (3, 9, 50), the first of its kind, takes status[2] from 0 to 1, writes words 9 .. 13, takes it to
    2 and writes word 8; another BAD_ID takes it to 3 and writes nothing.
    """
    lock = status + KIND
    if tl.atomic_add(lock, 1) == 0:
        words = tl.load(status).to(tl.pointer_type(tl.int64)) + (KIND - 1) * RECORD_WORDS
        tl.store(words + 1, a.to(tl.int64))
        tl.store(words + 2, b.to(tl.int64))
        tl.store(words + 3, c.to(tl.int64))
        tl.store(words + 4, d)
        tl.store(words + 5, e)
        tl.atomic_add(lock, 1, sem="acq_rel", scope="sys")  # the host must not see word 0 before the rest
        tl.store(words, KIND)


@triton.jit
def clock(turn, INTERPRETED: tl.constexpr):
    """Return the time in ns; under the interpreter, which has no clock, the turn."""
    return tl.full((), 0, tl.int64) + turn if INTERPRETED else cuda.globaltimer()


@triton.jit
def multiprocessor(INTERPRETED: tl.constexpr):
    """Return the number of the multiprocessor that runs this program; 0 under the interpreter."""
    return tl.full((), 0, tl.int32) if INTERPRETED else cuda.smid()


@triton.jit
def raise_flag(flag, epoch):
    """Store `epoch` at `flag`, in this GPU's memory or a peer's, after all that this program has stored or acquired."""
    tl.debug_barrier()
    tl.atomic_xchg(flag, epoch, sem="release", scope="sys")


@triton.jit
def raise_flags(peers_ready, slot, world_size, epoch, PEERS: tl.constexpr):
    """Store `epoch` in slot `slot` of every rank's flags, in the same order as `raise_flag`."""
    peer = tl.arange(0, PEERS)
    mask = peer < world_size
    flags = tl.load(peers_ready + peer, mask=mask, other=0).to(tl.pointer_type(tl.int64))
    tl.debug_barrier()
    tl.atomic_xchg(flags + slot, tl.zeros((PEERS,), tl.int64) + epoch, mask=mask, sem="release", scope="sys")


@triton.jit
def oldest_epoch(flags, mask, epoch, SEM: tl.constexpr):
    """Return the least epoch at `flags` [N] where `mask`, at most `epoch`, read with order `SEM`."""
    # An atomic, since the compiler takes a load out of the loop, volatile or not.
    seen = tl.atomic_add(flags, tl.zeros_like(flags.to(tl.int64)), mask=mask, sem=SEM, scope="sys")
    return tl.min(tl.where(mask, seen, epoch), 0)


@triton.jit
def await_flags(
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

    Of source w only the first counts[w] flags are in use. When `timeout` ns have passed (turns, under the interpreter),
    record which flag was missing and stop the kernel: to go on would be to train on what lay in the window before.
    """
    index = first + tl.arange(0, BLOCK)
    source = index // slots
    mask = source < world_size
    mask = mask & (index % slots < tl.load(counts + source, mask=mask, other=0))
    flags = ready + index
    began = clock(0, INTERPRETED)
    turn = 0
    waited = began - began
    oldest = oldest_epoch(flags, mask, epoch, "relaxed")
    while (oldest < epoch) & (waited <= timeout):
        oldest = oldest_epoch(flags, mask, epoch, "relaxed")
        turn += 1
        waited = clock(turn, INTERPRETED) - began
    if oldest < epoch:
        seen = tl.load(flags, mask=mask, other=epoch, volatile=True)
        missing = first + tl.argmin(tl.where(mask, seen, epoch), 0)
        record(status, EXPIRED, rank, missing // slots, missing % slots, epoch, tl.load(ready + missing))
        if not INTERPRETED:
            stop(turn)
    # Acquired once at the end: each time empties the multiprocessor's L1, where others still pool.
    oldest_epoch(flags, mask, epoch, "acquire")
    tl.debug_barrier()  # no thread reads the windows before those that acquired


@triton.jit
def stop(value):
    """Stop the kernel with an error that the host sees at its next call, this GPU's later work never starting."""
    tl.inline_asm_elementwise(
        "{ fence.sc.sys; trap; mov.u32 $0, $1; }", "=r,r", [value], dtype=tl.int32, is_pure=False, pack=1
    )
