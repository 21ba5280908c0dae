"""The kernel of products with communication inside, which computes tiles in an order and waits or signals for each."""

import triton
import triton.language as tl

from dlrm_overlap.kernels.primitives import wait_for_few


@triton.jit
def tile_at(tile, blocks, columns, owners, world_size, GROUP: tl.constexpr, ORDER: tl.constexpr):
    """Return (owner, block, column) of the tile at a position in the order of the tiles.

    The shards have `blocks` blocks of rows each, and are visited as `owners` [W] int32 names them:

        own_first     one after the other, as shards arrive; the first one is the rank's own
        remote_first  one after the other; the last one is the rank's own, during which nothing is left to send
        balanced      block 0 of all, then block 1 of all, ..: links and multiprocessors are busy all the time

    GROUP blocks that follow each other in this order are computed together, column after column, so that they share
    blocks in L2; but the rank's own blocks share a group with those of peers in the balanced order alone.

    Example: owners 1 0, 2 blocks each, 3 columns, GROUP 2, own_first: owner, block, column are 1 0 0, 1 1 0, 1 0 1,
    1 1 1, 1 0 2, 1 1 2, then 0 0 0, 0 1 0 and so forth.
    """
    first, rows = 0, blocks * world_size
    if ORDER == "own_first":
        first = tl.where(tile < blocks * columns, 0, blocks)
        rows = tl.where(tile < blocks * columns, blocks, rows)
    elif ORDER == "remote_first":
        remote = blocks * (world_size - 1)
        first = tl.where(tile < remote * columns, 0, remote)
        rows = tl.where(tile < remote * columns, remote, rows)
    within = tile - first * columns
    first += within // (GROUP * columns) * GROUP
    height = tl.minimum(GROUP, rows - first)
    within = within % (GROUP * columns)
    position = first + within % height
    turn, block = position // blocks, position % blocks
    if ORDER == "balanced":
        turn, block = position % world_size, position // world_size
    return tl.load(owners + turn), block, within // height


@triton.jit
def _multiply(left, weight, begin, k, accumulator, BY_K: tl.constexpr, INTERPRETED: tl.constexpr):
    """Return `accumulator` + left @ right, where right is the block of `weight` at column `begin` and from `k` on."""
    right = weight.load([begin, k]).T if BY_K else weight.load([k, begin])
    if INTERPRETED:  # which multiplies the bits of bfloat16 as integers
        left, right = left.to(tl.float32), right.to(tl.float32)
    return tl.dot(left, right, accumulator)


@triton.jit
def _await_rows(
    ready, owner, first, rank, shard_rows, slot_rows, slots, epoch, timeout, status,
    BLOCK_M: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Wait until the owner's rows [first, first + BLOCK_M) are there, unless they are the rank's own; return 0."""
    slot = first // slot_rows
    count = (tl.minimum(first + BLOCK_M, shard_rows) - 1) // slot_rows - slot + 1
    count = tl.where(owner == rank, 0, count)
    return wait_for_few(ready, slots, owner * slots + slot, 1, count, rank, epoch, timeout, status, 2, INTERPRETED)


@triton.jit
def _store_tile(
    accumulator, out, bias, targets, owner, first, begin, shard_rows, n,
    SCATTER: tl.constexpr, BIAS: tl.constexpr, ACTIVATION: tl.constexpr, TYPE: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Store a tile of the owner's rows from `first` on, columns from `begin` on; see `tile_product`.

    Its columns go through shared memory in two halves.
    """
    if SCATTER:
        target = tl.multiple_of(tl.load(targets + owner).to(tl.pointer_type(TYPE)), 16) + first.to(tl.int64) * n
    else:
        target = out + (owner * shard_rows + first).to(tl.int64) * n
    down = tl.arange(0, BLOCK_M)
    width: tl.constexpr = BLOCK_N // 2
    parts = accumulator.reshape(BLOCK_M, 2, width).permute(0, 2, 1).split()
    for part in tl.static_range(2):
        across = begin + part * width + tl.arange(0, width)
        total = parts[part]
        if BIAS:
            total += tl.load(bias + across, mask=across < n, other=0).to(tl.float32)[None, :]
        if ACTIVATION == "relu":
            total = tl.maximum(total, 0.0, propagate_nan=tl.PropagateNan.ALL)
        inside = (first + down < shard_rows)[:, None] & (across < n)[None, :]
        tl.store(target + down[:, None] * n + across[None, :], total.to(TYPE), mask=inside)


@triton.jit
def _count_tile(
    done, peers_ready, owner, first, rank, shard_rows, columns, slot_rows, slots, epoch,
    BLOCK_M: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Count a tile that all threads have stored; raise its region's flag at the owner if it is the last."""
    region = first // slot_rows
    rows = tl.minimum(slot_rows, shard_rows - region * slot_rows)
    counter = done + owner * tl.cdiv(shard_rows, slot_rows) + region
    tl.debug_barrier()  # all threads have stored before one of them counts the tile
    if tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == tl.cdiv(rows, BLOCK_M) * columns - 1:
        tl.store(counter, 0)  # as the next launch must find it
        flags = tl.load(peers_ready + owner).to(tl.pointer_type(tl.int64))
        # By the thread that has counted, so without another barrier.
        tl.atomic_xchg(flags + rank * slots + region, epoch, sem="release", scope="sys")


@triton.jit(
    do_not_specialize=[
        "rank", "world_size", "shard_rows", "n_eighths", "k_eighths", "slot_rows", "slots", "timeout",
    ],
    do_not_specialize_on_alignment=["bias"],
)  # fmt: skip
def tile_product(
    out, bias, targets, owners, peers_ready, ready, done, clock, status, x, weight,
    rank, world_size, shard_rows, n_eighths, k_eighths, slot_rows, slots,
    timeout: tl.int64,
    GATHER: tl.constexpr, SCATTER: tl.constexpr, BY_K: tl.constexpr, BIAS: tl.constexpr, ACTIVATION: tl.constexpr,
    TYPE: tl.constexpr, ORDER: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Compute activation(x @ weight^T + bias) in the tiles p, p + P, .. of program p of P, in the order of `tile_at`.

    Memory: `x` describes [W * shard_rows, K], of which rank w owns the rows from w * shard_rows on, and `weight` [N,
    K], or [K, N] where not BY_K; both of TYPE, read by TMA, which reads 0 after their ends. N and K are `n_eighths`
    and `k_eighths` times 8. Products are summed up in float32, along K, by one program. `bias` [N] is read if BIAS.
    The result is rounded once, to TYPE, and stored 16 bytes a lane: to `out` [W * shard_rows, N]; or, if SCATTER, to
    [shard_rows, N] in the owner's memory, whose address is in `targets` [W].

    A slot of flags stands for `slot_rows` rows of a shard: at least BLOCK_M, and a multiple of that if SCATTER.

    Order: if GATHER, the program waits, unless the rows are the rank's own, for the flags of the one or two slots that
    a tile's rows are in, element (owner, i) of `ready` [W, slots], until they have reached `clock` [1]. It acquires
    them at system scope. A fence lets TMA, which is another proxy, see the acquired stores; the tile's coordinates are
    computed from the flags' values, too, so no load is moved before. If SCATTER, the program stores a tile, passes a
    barrier, and counts the tile in `done` [W, regions], a region being a slot's rows (acquire and release, GPU scope).
    Whoever completes a region sets the count back to 0 and raises element (rank, i) of the owner's flags, whose address
    is in `peers_ready` [W], to `clock`: a release at system scope, which covers the stores of all that have counted.
    The own region has a flag, too.

    Example: SCATTER, rank 0 of 2, shards of 512 rows, tiles of 128 rows, N of 2 tiles, slots of 256 rows. The tiles of
    rows 512 .. 767, 2 * 2 of them, go to rows 0 .. 255 in rank 1's memory; the fourth that is counted raises element
    (0, 0) of rank 1's flags.
    """
    n, turns = n_eighths * 8, tl.cdiv(k_eighths * 8, BLOCK_K)
    blocks = tl.cdiv(shard_rows, BLOCK_M)
    columns = tl.cdiv(n, BLOCK_N)
    epoch = tl.load(clock) if GATHER or SCATTER else 0
    for tile in range(tl.program_id(0), blocks * world_size * columns, tl.num_programs(0)):
        owner, first, begin = tile_at(tile, blocks, columns, owners, world_size, GROUP, ORDER)
        first *= BLOCK_M
        begin *= BLOCK_N
        row = owner * shard_rows + first
        if GATHER:
            row += _await_rows(
                ready, owner, first, rank, shard_rows, slot_rows, slots, epoch, timeout, status,
                BLOCK_M, INTERPRETED,
            )  # fmt: skip
        accumulator = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for turn in range(turns):
            left = x.load([row, turn * BLOCK_K])
            accumulator = _multiply(left, weight, begin, turn * BLOCK_K, accumulator, BY_K, INTERPRETED)
        _store_tile(
            accumulator, out, bias, targets, owner, first, begin, shard_rows, n,
            SCATTER, BIAS, ACTIVATION, TYPE, BLOCK_M, BLOCK_N,
        )  # fmt: skip
        if SCATTER:
            _count_tile(
                done, peers_ready, owner, first, rank, shard_rows, columns, slot_rows, slots, epoch,
                BLOCK_M, INTERPRETED,
            )  # fmt: skip
