"""The products of `product` on Hopper: one warp loads, two groups of four warps multiply and store, in Gluon.

The loads of the next tile are under way while a tile is stored, and a tile that waits for its rows stops the loads
alone, not the products of loaded blocks. A group of warps, of which each computes half of a tile's rows, waits
for nobody but the loads. Source: the division of labour of CUTLASS's cooperative kernels (Thakkar et al.).
"""

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from dlrm_overlap.kernels.gemm.order import tile_at
from dlrm_overlap.kernels.primitives import EXPIRED, clock, fence_proxy, record, stop, time_since

GROUPS = 2
"""of four warps, that share a tile's rows"""
LOAD_REGISTERS, PRODUCT_REGISTERS = 24, 232


@triton.jit
def _await_flag(ready, index, slots, rank, epoch, timeout, status):
    """Wait, as a warp, until element `index` of `ready` [W, slots] has reached `epoch`; see `primitives.await_few`.

    Returns:
        0, computed from the acquired value.
    """
    flag = ready + index
    began = clock(0, False)
    waited = began - began
    seen = tl.atomic_add(flag, 0, sem="relaxed", scope="sys")
    while (seen < epoch) & (waited <= timeout):
        seen = tl.atomic_add(flag, 0, sem="relaxed", scope="sys")
        waited = time_since(began, 0, False, True)
    if seen < epoch:
        record(status, EXPIRED, rank, index // slots, index % slots, epoch, seen)
        stop(rank)
    # The result has to be used: the compiler drops an addition of 0 whose result is not, its order included.
    return tl.minimum(tl.atomic_add(flag, 0, sem="acquire", scope="sys") - epoch, 0).to(tl.int32)


@gluon.jit
def _load(
    x, weight, left, right, full, empty, owners, ready, status,
    rank, world_size, shard_rows, blocks, columns, turns, slot_rows, slots, epoch, timeout,
    GATHER: gl.constexpr, BY_K: gl.constexpr, ORDER: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr, GROUP: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Load the blocks of all tiles of this program, stage after stage, each when its last blocks are multiplied."""
    stage = 0
    phase = 1  # all stages are empty
    for tile in range(gl.program_id(0), blocks * world_size * columns, gl.num_programs(0)):
        owner, block, column = tile_at(tile, blocks, columns, owners, world_size, GROUP, ORDER)
        first = block * BLOCK_M
        row = owner * shard_rows + first
        begin = column * BLOCK_N
        if GATHER:  # noqa: SIM102  decided when it is compiled
            if owner != rank:
                last = gl.minimum(first + BLOCK_M, shard_rows) - 1
                for slot in range(first // slot_rows, last // slot_rows + 1):
                    row += _await_flag(ready, owner * slots + slot, slots, rank, epoch, timeout, status)
                row = fence_proxy(row)
        for turn in range(turns):
            mbarrier.wait(empty.index(stage), phase)
            mbarrier.expect(full.index(stage), (BLOCK_M + BLOCK_N) * BLOCK_K * 2)
            tma.async_copy_global_to_shared(x, [row, turn * BLOCK_K], full.index(stage), left.index(stage))
            if BY_K:
                tma.async_copy_global_to_shared(weight, [begin, turn * BLOCK_K], full.index(stage), right.index(stage))
            else:
                tma.async_copy_global_to_shared(weight, [turn * BLOCK_K, begin], full.index(stage), right.index(stage))
            stage += 1
            if stage == STAGES:
                stage = 0
                phase ^= 1


@gluon.jit
def _count_tile(
    peers_ready, done, owners, tile, rank, world_size, shard_rows, blocks, columns, slot_rows, slots, epoch,
    ORDER: gl.constexpr, BLOCK_M: gl.constexpr, GROUP: gl.constexpr, GROUPS: gl.constexpr,
):  # fmt: skip
    """Count a tile that this group of warps has stored; raise its region's flag at the owner if it is the last."""
    owner, block, _ = tile_at(tile, blocks, columns, owners, world_size, GROUP, ORDER)
    region = block * BLOCK_M // slot_rows
    rows = gl.minimum(slot_rows, shard_rows - region * slot_rows)
    counter = done + owner * gl.cdiv(shard_rows, slot_rows) + region
    tl.debug_barrier()  # of the group: all its threads have stored before one of them counts
    if gl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == GROUPS * gl.cdiv(rows, BLOCK_M) * columns - 1:
        gl.store(counter, 0)  # as the next launch must find it
        flags = gl.load(peers_ready + owner).to(gl.pointer_type(gl.int64))
        gl.atomic_xchg(flags + rank * slots + region, epoch, sem="release", scope="sys")


@gluon.jit
def _multiply_and_store(
    out, bias, targets, owners, peers_ready, done, left, right, full, empty,
    rank, world_size, shard_rows, n, blocks, columns, turns, slot_rows, slots, epoch,
    SCATTER: gl.constexpr, BY_K: gl.constexpr, BIAS: gl.constexpr, ACTIVATION: gl.constexpr, TYPE: gl.constexpr,
    ORDER: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, GROUP: gl.constexpr, STAGES: gl.constexpr,
    GROUPS: gl.constexpr, HERE: gl.constexpr,
):  # fmt: skip
    """Compute the rows of group HERE of all tiles of this program, and store them as `portable.product_in_triton` does.

    A tile is counted by each of the GROUPS.
    """
    ROWS: gl.constexpr = BLOCK_M // GROUPS
    WIDTH: gl.constexpr = BLOCK_N // 2
    product: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_N, 16]
    )
    vectors: gl.constexpr = gl.BlockedLayout([1, 8], [32 * 8 // WIDTH, WIDTH // 8], [4, 1], [1, 0])  # 16 bytes a lane
    stage = 0
    phase = 0
    for tile in range(gl.program_id(0), blocks * world_size * columns, gl.num_programs(0)):
        owner, block, column = tile_at(tile, blocks, columns, owners, world_size, GROUP, ORDER)
        total = gl.zeros((ROWS, BLOCK_N), gl.float32, product)
        for turn in range(turns):
            mbarrier.wait(full.index(stage), phase)
            own = left.index(stage).slice(HERE * ROWS, ROWS)
            other = right.index(stage)
            if BY_K:
                other = other.permute((1, 0))
            total = warpgroup_mma(own, other, total, use_acc=turn > 0, is_async=True)
            total = warpgroup_mma_wait(1, deps=[total])  # this one runs on; that of the stage before is through
            mbarrier.arrive(empty.index((stage + STAGES - 1) % STAGES), pred=turn > 0)
            stage += 1
            if stage == STAGES:
                stage = 0
                phase ^= 1
        total = warpgroup_mma_wait(0, deps=[total])
        mbarrier.arrive(empty.index((stage + STAGES - 1) % STAGES))
        if SCATTER:  # noqa: SIM102  decided when it is compiled
            if tile >= gl.num_programs(0):  # the tile before, whose stores have had the time of this one's products
                _count_tile(
                    peers_ready, done, owners, tile - gl.num_programs(0), rank, world_size, shard_rows, blocks, columns,
                    slot_rows, slots, epoch, ORDER, BLOCK_M, GROUP, GROUPS,
                )  # fmt: skip
        first = block * BLOCK_M
        if SCATTER:
            target = gl.multiple_of(gl.load(targets + owner).to(gl.pointer_type(TYPE)), 16) + first.to(gl.int64) * n
        else:
            target = out + (owner * shard_rows + first).to(gl.int64) * n
        down = HERE * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, vectors))
        inside = (first + down < shard_rows)[:, None]
        parts = total.reshape(ROWS, 2, WIDTH).permute(0, 2, 1).split()  # two go through shared memory to the stores
        for part in gl.static_range(2):
            begin = column * BLOCK_N + part * WIDTH
            some = parts[part]
            if BIAS:
                shift = begin + gl.arange(0, WIDTH, gl.SliceLayout(0, some.type.layout))
                some = some + gl.expand_dims(gl.load(bias + shift, mask=shift < n, other=0).to(gl.float32), 0)
            if ACTIVATION == "relu":
                some = gl.maximum(some, 0.0, propagate_nan=tl.PropagateNan.ALL)
            across = begin + gl.arange(0, WIDTH, gl.SliceLayout(0, vectors))
            rounded = gl.convert_layout(some.to(TYPE), vectors)
            gl.store(target + down[:, None] * n + across[None, :], rounded, mask=inside & (across < n)[None, :])
    if SCATTER:
        tiles = blocks * world_size * columns
        last = gl.program_id(0) + (tiles - 1 - gl.program_id(0)) // gl.num_programs(0) * gl.num_programs(0)
        _count_tile(
            peers_ready, done, owners, last, rank, world_size, shard_rows, blocks, columns, slot_rows, slots, epoch,
            ORDER, BLOCK_M, GROUP, GROUPS,
        )  # fmt: skip


@gluon.jit(
    do_not_specialize=[
        "rank", "world_size", "shard_rows", "n_eighths", "k_eighths", "slot_rows", "slots", "timeout",
    ],
    do_not_specialize_on_alignment=["bias"],
)  # fmt: skip
def product_on_hopper(
    out, bias, targets, owners, peers_ready, ready, done, clock, status, x, weight,
    rank, world_size, shard_rows, n_eighths, k_eighths, slot_rows, slots,
    timeout: tl.int64,
    GATHER: gl.constexpr, SCATTER: gl.constexpr, BY_K: gl.constexpr, BIAS: gl.constexpr, ACTIVATION: gl.constexpr,
    TYPE: gl.constexpr, ORDER: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr,
    GROUP: gl.constexpr, STAGES: gl.constexpr, GROUPS: gl.constexpr,
    LOAD_REGISTERS: gl.constexpr, PRODUCT_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Compute what `portable.product_in_triton` does, with the same arguments, memory and order; see there.

    Memory: STAGES blocks of both matrices lie in shared memory. `full` and `empty` are barriers of each stage.

    Order: if GATHER, the warp that loads waits for a tile's flags and acquires them; a fence lets TMA, which is another
    proxy, see the acquired stores. It waits for `empty` of a stage and has TMA fill it, which completes `full`. Both
    groups of warps wait for `full`, multiply, and arrive at `empty` when their product of the stage is complete. They
    store and, if SCATTER, count their half of a tile each, when they have multiplied the next one: its stores, which
    the count releases, have arrived at the peer by then. The count that completes a region is that of both halves of
    all its tiles.

    Example: STAGES 2, 3 blocks along K: the first two are loaded; the third is loaded into stage 0 once both groups
    have multiplied the first, while the second is multiplied.
    """
    n = n_eighths * 8
    turns = gl.cdiv(k_eighths * 8, BLOCK_K)
    blocks = gl.cdiv(shard_rows, BLOCK_M)
    columns = gl.cdiv(n, BLOCK_N)
    epoch = timeout
    if GATHER or SCATTER:
        epoch = gl.load(clock)
    left = gl.allocate_shared_memory(TYPE, [STAGES, BLOCK_M, BLOCK_K], x.layout)
    right = gl.allocate_shared_memory(
        TYPE, [STAGES, BLOCK_N, BLOCK_K] if BY_K else [STAGES, BLOCK_K, BLOCK_N], weight.layout
    )
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=GROUPS)
    fence_async_shared()
    gl.warp_specialize(
        [
            (
                _multiply_and_store,
                (
                    out, bias, targets, owners, peers_ready, done, left, right, full, empty,
                    rank, world_size, shard_rows, n, blocks, columns, turns, slot_rows, slots, epoch,
                    SCATTER, BY_K, BIAS, ACTIVATION, TYPE, ORDER, BLOCK_M, BLOCK_N, GROUP, STAGES, GROUPS, 0,
                ),
            ),
            (
                _multiply_and_store,
                (
                    out, bias, targets, owners, peers_ready, done, left, right, full, empty,
                    rank, world_size, shard_rows, n, blocks, columns, turns, slot_rows, slots, epoch,
                    SCATTER, BY_K, BIAS, ACTIVATION, TYPE, ORDER, BLOCK_M, BLOCK_N, GROUP, STAGES, GROUPS, 1,
                ),
            ),
            (
                _load,
                (
                    x, weight, left, right, full, empty, owners, ready, status,
                    rank, world_size, shard_rows, blocks, columns, turns, slot_rows, slots, epoch, timeout,
                    GATHER, BY_K, ORDER, BLOCK_M, BLOCK_N, BLOCK_K, GROUP, STAGES,
                ),
            ),
        ],
        [4, 1],
        [PRODUCT_REGISTERS, LOAD_REGISTERS],
    )  # fmt: skip
