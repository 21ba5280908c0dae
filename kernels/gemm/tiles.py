"""The kernel of products with communication inside."""

from typing import NamedTuple

import triton
import triton.language as tl

from dlrm_overlap.kernels.primitives import wait_for_few


class TileOptions(NamedTuple):
    """The compile-time options of `tile_product`; blocks as in `Tiling`."""

    gather: bool
    scatter: bool
    by_k: bool
    """the weight is [N, K], not [K, N]"""
    bias: bool
    activation: str
    """none | relu"""
    dtype: tl.dtype
    order: str
    """own_first | remote_first | balanced, see `tile_at`"""
    block_m: int
    block_n: int
    block_k: int
    group: int
    interpreted: bool


@triton.jit
def tile_at(tile, blocks, columns, owners, world_size, OPTIONS: tl.constexpr):
    """Return (owner, block, column) of the tile at a position in the order of the tiles.

    Each shard has `blocks` blocks of rows. `owners` [W] int32 is the order of the shards:

        own_first     one after the other, as shards arrive; the first one is the rank's own
        remote_first  one after the other; the last one is the rank's own
        balanced      block 0 of all, then block 1 of all, ..: links and multiprocessors are busy all the time

    A group of consecutive blocks is computed column after column, so that its tiles share blocks in L2.

    Example: owners 1 0, 2 blocks each, 3 columns, groups of 2, own_first: owner, block, column are 1 0 0, 1 1 0, 1 0 1,
    1 1 1, 1 0 2, 1 1 2, then 0 0 0, 0 1 0 and so on.
    """
    # The blocks [first, first + rows) that the groups are cut from.
    first, rows = 0, blocks * world_size
    if OPTIONS.order == "own_first":
        first = tl.where(tile < blocks * columns, 0, blocks)
        rows = tl.where(tile < blocks * columns, blocks, rows)
    elif OPTIONS.order == "remote_first":
        remote = blocks * (world_size - 1)
        first = tl.where(tile < remote * columns, 0, remote)
        rows = tl.where(tile < remote * columns, remote, rows)
    # The tile's group, then its block and column in the group.
    within = tile - first * columns
    first += within // (OPTIONS.group * columns) * OPTIONS.group
    height = tl.minimum(OPTIONS.group, rows - first)
    within = within % (OPTIONS.group * columns)
    position = first + within % height
    turn, block = position // blocks, position % blocks
    if OPTIONS.order == "balanced":
        turn, block = position % world_size, position // world_size
    return tl.load(owners + turn), block, within // height


@triton.jit
def _multiply(left, weight, begin, k, accumulator, OPTIONS: tl.constexpr):
    right = weight.load([begin, k]).T if OPTIONS.by_k else weight.load([k, begin])  # [block_k, block_n]
    if OPTIONS.interpreted:  # the interpreter would multiply the bits of bfloat16 as integers
        left, right = left.to(tl.float32), right.to(tl.float32)
    return tl.dot(left, right, accumulator)


@triton.jit
def _wait_for_rows(
    ready,
    owner,
    first,
    rank,
    shard_rows,
    slot_rows,
    slots,
    epoch,
    timeout,
    status,
    OPTIONS: tl.constexpr,
):
    """Wait until the owner's rows [first, first + block_m) have arrived, unless they are the rank's own; return 0."""
    # The rows are in one slot or two.
    slot = first // slot_rows
    count = (tl.minimum(first + OPTIONS.block_m, shard_rows) - 1) // slot_rows - slot + 1
    count = tl.where(owner == rank, 0, count)
    return wait_for_few(
        ready, slots, owner * slots + slot, 1, count, rank, epoch, timeout, status, 2, OPTIONS.interpreted
    )


@triton.jit
def _store_tile(
    accumulator,
    out,
    bias,
    targets,
    owner,
    first,
    begin,
    shard_rows,
    n,
    OPTIONS: tl.constexpr,
):
    if OPTIONS.scatter:
        target = tl.multiple_of(tl.load(targets + owner).to(tl.pointer_type(OPTIONS.dtype)), 16)
        target += first.to(tl.int64) * n
    else:
        target = out + (owner * shard_rows + first).to(tl.int64) * n
    down = tl.arange(0, OPTIONS.block_m)
    # The columns go through shared memory in two parts.
    width: tl.constexpr = OPTIONS.block_n // 2
    parts = accumulator.reshape(OPTIONS.block_m, 2, width).permute(0, 2, 1).split()
    for part in tl.static_range(2):
        across = begin + part * width + tl.arange(0, width)
        total = parts[part]  # [block_m, width]
        if OPTIONS.bias:
            total += tl.load(bias + across, mask=across < n, other=0).to(tl.float32)[None, :]
        if OPTIONS.activation == "relu":
            total = tl.maximum(total, 0.0, propagate_nan=tl.PropagateNan.ALL)
        inside = (first + down < shard_rows)[:, None] & (across < n)[None, :]
        tl.store(target + down[:, None] * n + across[None, :], total.to(OPTIONS.dtype), mask=inside)


@triton.jit
def _count_tile(
    done,
    peers_ready,
    owner,
    first,
    rank,
    shard_rows,
    columns,
    slot_rows,
    slots,
    epoch,
    OPTIONS: tl.constexpr,
):
    region = first // slot_rows
    rows = tl.minimum(slot_rows, shard_rows - region * slot_rows)
    counter = done + owner * tl.cdiv(shard_rows, slot_rows) + region
    tl.debug_barrier()  # all threads have stored before one of them counts the tile
    # Releases this program's stores, and acquires those of all programs that counted before.
    if tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == tl.cdiv(rows, OPTIONS.block_m) * columns - 1:
        tl.store(counter, 0)  # for the next launch
        flags = tl.load(peers_ready + owner).to(tl.pointer_type(tl.int64))
        # Releases all these stores to the owner. The thread that counted sets the flag, so no barrier is needed.
        tl.atomic_xchg(flags + rank * slots + region, epoch, sem="release", scope="sys")


@triton.jit(
    do_not_specialize=["rank", "world_size", "shard_rows", "n_eighths", "k_eighths", "slot_rows", "slots", "timeout"],
    do_not_specialize_on_alignment=["bias"],
)
def tile_product(
    out,  # [W * shard_rows, N], if gathered
    bias,  # [N]
    targets,  # [W] int64: address of [shard_rows, N] at each owner, if scattered
    owners,  # [W] int32
    peers_ready,  # [W] int64: address of each rank's flags [W, slots]
    ready,  # [W, slots] int64, this rank's flags
    done,  # [W, regions] int32, 0 before and after
    clock,  # [1] int64
    status,
    x,  # descriptor of [W * shard_rows, K]; rank w owns the rows from w * shard_rows on
    weight,  # descriptor of [N, K], or [K, N]
    rank,
    world_size,
    shard_rows,
    n_eighths,  # N / 8
    k_eighths,  # K / 8
    slot_rows,  # rows of a shard that have one flag: block_m or more, and a multiple of it if scattered
    slots,
    timeout: tl.int64,
    OPTIONS: tl.constexpr,
):
    """Compute activation(x @ weight^T + bias), as program p of P the tiles p, p + P, .. in the order of `tile_at`.

    Memory: TMA reads both matrices, and 0 after their ends. A tile is added up in float32, along K, rounded once, and
    stored 16 bytes a lane.

    Order: a gathered product waits, before a tile of a peer's rows, until the flags (owner, i) of its one or two slots
    have reached `clock`, and acquires them at system scope; a fence makes the acquired stores visible to TMA. A
    scattered product counts a stored tile in its region, the rows of a slot (acquire and release, GPU scope). The
    program that completes a region, also one of this rank, sets element (rank, i) of the owner's flags to `clock`: a
    release at system scope that covers all stores of the region.

    Example: scattered, rank 0 of 2, shards of 512 rows, tiles of 128 rows, N of 2 tiles, slots of 256 rows. The 2 * 2
    tiles of rows 512 .. 767 go to rows 0 .. 255 in rank 1's memory; the fourth sets element (0, 0) of rank 1's flags.
    """
    BLOCK_M: tl.constexpr = OPTIONS.block_m
    BLOCK_N: tl.constexpr = OPTIONS.block_n
    BLOCK_K: tl.constexpr = OPTIONS.block_k
    n, turns = n_eighths * 8, tl.cdiv(k_eighths * 8, BLOCK_K)
    blocks = tl.cdiv(shard_rows, BLOCK_M)
    columns = tl.cdiv(n, BLOCK_N)
    epoch = tl.load(clock) if OPTIONS.gather or OPTIONS.scatter else 0
    for tile in range(tl.program_id(0), blocks * world_size * columns, tl.num_programs(0)):
        owner, first, begin = tile_at(tile, blocks, columns, owners, world_size, OPTIONS)
        first *= BLOCK_M
        begin *= BLOCK_N
        row = owner * shard_rows + first
        # Wait for the rows. The 0 is computed from the flags' values, so no load moves before the wait.
        if OPTIONS.gather:
            row += _wait_for_rows(
                ready,
                owner,
                first,
                rank,
                shard_rows,
                slot_rows,
                slots,
                epoch,
                timeout,
                status,
                OPTIONS,
            )
        # Multiply.
        accumulator = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for turn in range(turns):
            left = x.load([row, turn * BLOCK_K])  # [BLOCK_M, BLOCK_K]
            accumulator = _multiply(left, weight, begin, turn * BLOCK_K, accumulator, OPTIONS)
        # Store the tile, and signal its region.
        _store_tile(
            accumulator,
            out,
            bias,
            targets,
            owner,
            first,
            begin,
            shard_rows,
            n,
            OPTIONS,
        )
        if OPTIONS.scatter:
            _count_tile(
                done,
                peers_ready,
                owner,
                first,
                rank,
                shard_rows,
                columns,
                slot_rows,
                slots,
                epoch,
                OPTIONS,
            )
