"""Products of matrices with communication inside: tiles wait for rows that peers send, or are stored at peers.

A persistent kernel computes x @ weight^T tile by tile, by TMA and wgmma on Hopper. The rows of x, or of the result,
are in W shards, one a rank. In a gathered product a tile waits until its rows have arrived, and tiles whose rows are
here already come first. In a scattered product a tile is stored straight into the window of the rank that owns its
rows, and the program that completes a region of rows raises the region's flag there. Source: Flux (Chang et al.,
arXiv 2406.06858, section 3), whose kernels do the first in the prologue and the second in the epilogue.
"""

from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from dlrm_overlap.kernels.compiled import INTERPRETED, TYPES, CompiledKernel
from dlrm_overlap.kernels.gemm.arguments import Destinations, Signals, Tiling
from dlrm_overlap.kernels.primitives import await_few, barrier

ALIGNED = 8
"""elements that must divide N and K: 16 bytes of a type of 2, as TMA and the stores ask for"""


@triton.jit
def tile_at(tile, blocks, columns, rank, world_size, step, GROUP: tl.constexpr, ORDER: tl.constexpr):
    """Return (owner, block, column) of the tile at a position in the order of the tiles.

    The shards have `blocks` blocks of rows each. They are visited in one of three orders, b the block's number:

        own_first     the rank's own, then those of rank + step, rank + 2 * step, ..: as shards arrive
        remote_first  those of rank + step, .., the rank's own last: nothing is left to send in the last part
        balanced      block 0 of rank + step, block 0 of rank + 2 * step, .., block 1 of rank + step, ..: links and
                      multiprocessors are busy all the time

    GROUP blocks that follow each other in this order are computed together, column after column, so that they share
    what is in L2; but the rank's own blocks share a group with those of peers in the balanced order alone.

    Example: rank 1 of 2, 2 blocks each, 3 columns, GROUP 2, own_first: owner, block, column are 1 0 0, 1 1 0, 1 0 1,
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
    if ORDER == "balanced":
        turn, block = position % world_size + 1, position // world_size
    else:
        turn, block = position // blocks, position % blocks
        if ORDER == "remote_first":
            turn += 1
    return (rank + turn * step) % world_size, block, within // height


@triton.jit
def _parts(accumulator, PARTS: tl.constexpr):
    """Return the accumulator's columns in PARTS equal parts, 1 or 2, which go through shared memory one by one."""
    if PARTS == 1:
        return (accumulator, accumulator)
    rows: tl.constexpr = accumulator.shape[0]
    width: tl.constexpr = accumulator.shape[1] // PARTS
    return accumulator.reshape(rows, PARTS, width).permute(0, 2, 1).split()


@triton.jit
def _multiply(left, weight, begin, k, accumulator, BY_K: tl.constexpr, INTERPRETED: tl.constexpr):
    """Return `accumulator` + left @ right, where right is the block of `weight` at column `begin` and from `k` on."""
    right = weight.load([begin, k]).T if BY_K else weight.load([k, begin])
    if INTERPRETED:  # which multiplies the bits of bfloat16 as integers
        left, right = left.to(tl.float32), right.to(tl.float32)
    return tl.dot(left, right, accumulator)


@triton.jit
def _store_tile(
    accumulator, out, bias, windows, owner, first, begin, rank, shard_rows, n,
    SCATTER: tl.constexpr, BIAS: tl.constexpr, ACTIVATION: tl.constexpr, TYPE: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Store a tile of the owner's rows from `first` on, columns from `begin` on; see `_product`."""
    if SCATTER:
        target = tl.multiple_of(tl.load(windows + owner).to(tl.pointer_type(TYPE)), 16)
        target += (rank * shard_rows + first).to(tl.int64) * n
    else:
        target = out + (owner * shard_rows + first).to(tl.int64) * n
    down = tl.arange(0, BLOCK_M)
    width: tl.constexpr = BLOCK_N // PARTS
    parts = _parts(accumulator, PARTS)
    for part in tl.static_range(PARTS):
        across = begin + part * width + tl.arange(0, width)
        total = parts[part]
        if BIAS:
            total += tl.load(bias + across, mask=across < n, other=0).to(tl.float32)[None, :]
        if ACTIVATION == "relu":
            total = tl.maximum(total, 0)
        inside = (first + down < shard_rows)[:, None] & (across < n)[None, :]
        tl.store(target + down[:, None] * n + across[None, :], total.to(TYPE), mask=inside)


@triton.jit
def _count_tile(
    done, peers_ready, owner, first, rank, shard_rows, columns, slot_rows, slots, first_slot, epoch,
    BLOCK_M: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Count a tile that all threads have stored; raise its region's flag at the owner if it is the last."""
    region = first // slot_rows
    rows = tl.minimum(slot_rows, shard_rows - region * slot_rows)
    counter = done + owner * tl.cdiv(shard_rows, slot_rows) + region
    one = barrier(1, INTERPRETED)  # all threads have stored before one of them counts the tile
    if tl.atomic_add(counter, one, sem="acq_rel", scope="gpu") == tl.cdiv(rows, BLOCK_M) * columns - 1:
        tl.store(counter, 0)  # as the next launch must find it
        flags = tl.load(peers_ready + owner).to(tl.pointer_type(tl.int64))
        # By the thread that has counted, so without another barrier.
        tl.atomic_xchg(flags + rank * slots + first_slot + region, epoch, sem="release", scope="sys")


@triton.jit(
    do_not_specialize=[
        "rank", "world_size", "shard_rows", "n_eighths", "k_eighths", "step", "slot_rows", "slots", "first_slot",
        "epoch", "timeout",
    ]
)  # fmt: skip
def _product(
    out, bias, windows, peers_ready, ready, done, clock, status, x, weight,
    rank, world_size, shard_rows, n_eighths, k_eighths, step, slot_rows, slots, first_slot,
    epoch: tl.int64, timeout: tl.int64,
    GATHER: tl.constexpr, SCATTER: tl.constexpr, BY_K: tl.constexpr, BIAS: tl.constexpr, ACTIVATION: tl.constexpr,
    TYPE: tl.constexpr, ORDER: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr, PARTS: tl.constexpr, FLATTEN: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Compute activation(x @ weight^T + bias) in the tiles p, p + P, .. of program p of P, in the order of `tile_at`.

    Memory: `x` describes [W * shard_rows, K], of which rank w owns the rows from w * shard_rows on, and `weight` [N,
    K], or [K, N] where not BY_K; both of TYPE, read by TMA, which reads 0 behind their ends. N and K are `n_eighths`
    and `k_eighths` times 8. Products are summed up in float32, along K, by one program. `bias` [N] is read if BIAS.
    The result is rounded once, to TYPE, and stored 16 bytes a lane: to `out` [W * shard_rows, N]; or, if SCATTER, into
    slot `rank` of the owner's window [W, shard_rows, N], whose address is in `windows`.

    A slot of flags stands for `slot_rows` rows of a shard, a multiple of BLOCK_M if SCATTER.

    Order: if GATHER, the program awaits the flags of all slots that a tile's rows are in, element (owner, first_slot +
    i) of `ready` [W, slots], and acquires them at system scope. A fence lets TMA, which is another proxy, see what has
    been acquired. The tile's coordinates depend on what has been seen, so the loads of a loop that is pipelined across
    tiles cannot come before. If SCATTER, the program stores a tile, passes a barrier, and counts the tile in `done` [W,
    regions], a region being a slot's rows (acquire and release, GPU scope). Whoever completes a region sets the count
    back to 0 and raises element (rank, first_slot + i) of the owner's flags to `epoch` + `clock` [1], a release at
    system scope, which covers the stores of all that have counted. The own region's flag is raised like the others.

    Example: SCATTER, rank 0 of 2, shards of 512 rows, tiles of 128 rows, N of 2 tiles, slots of 256 rows. The tiles of
    rows 512 .. 767, 2 * 2 of them, go to rows 0 .. 255 of slot 0 of rank 1's window; the fourth that is counted raises
    flag (0, first_slot) there.
    """
    n, turns = n_eighths * 8, tl.cdiv(k_eighths * 8, BLOCK_K)
    blocks = tl.cdiv(shard_rows, BLOCK_M)
    columns = tl.cdiv(n, BLOCK_N)
    expected = epoch + tl.load(clock) if GATHER or SCATTER else epoch
    accumulator = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    if FLATTEN:
        tile = tl.program_id(0) - tl.num_programs(0)
        tiles = tl.cdiv(blocks * world_size * columns - tl.program_id(0), tl.num_programs(0))
        turn = turns - 1
        owner, first, begin, row = 0, 0, 0, 0
        for _ in range(tiles * turns):
            turn = tl.where(turn == turns - 1, 0, turn + 1)
            if turn == 0:
                tile += tl.num_programs(0)
                owner, first, begin = tile_at(tile, blocks, columns, rank, world_size, step, GROUP, ORDER)
                first *= BLOCK_M
                begin *= BLOCK_N
                row = owner * shard_rows + first
                if GATHER:
                    slot = first // slot_rows
                    count = (tl.minimum(first + BLOCK_M, shard_rows) - 1) // slot_rows - slot + 1
                    slot += owner * slots + first_slot
                    row += await_few(ready, slots, slot, 1, count, rank, expected, timeout, status, 2, INTERPRETED)
            left = x.load([row, turn * BLOCK_K])
            accumulator = _multiply(left, weight, begin, turn * BLOCK_K, accumulator, BY_K, INTERPRETED)
            if turn == turns - 1:
                _store_tile(
                    accumulator, out, bias, windows, owner, first, begin, rank, shard_rows, n,
                    SCATTER, BIAS, ACTIVATION, TYPE, BLOCK_M, BLOCK_N, PARTS,
                )  # fmt: skip
                if SCATTER:
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
                        first_slot,
                        expected,
                        BLOCK_M,
                        INTERPRETED,
                    )
                accumulator = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    else:
        for tile in range(tl.program_id(0), blocks * world_size * columns, tl.num_programs(0)):
            owner, first, begin = tile_at(tile, blocks, columns, rank, world_size, step, GROUP, ORDER)
            first *= BLOCK_M
            begin *= BLOCK_N
            row = owner * shard_rows + first
            if GATHER:
                slot = first // slot_rows
                count = (tl.minimum(first + BLOCK_M, shard_rows) - 1) // slot_rows - slot + 1
                slot += owner * slots + first_slot
                row += await_few(ready, slots, slot, 1, count, rank, expected, timeout, status, 2, INTERPRETED)
            accumulator = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
            for turn in range(turns):
                left = x.load([row, turn * BLOCK_K])
                accumulator = _multiply(left, weight, begin, turn * BLOCK_K, accumulator, BY_K, INTERPRETED)
            _store_tile(
                accumulator, out, bias, windows, owner, first, begin, rank, shard_rows, n,
                SCATTER, BIAS, ACTIVATION, TYPE, BLOCK_M, BLOCK_N, PARTS,
            )  # fmt: skip
            if SCATTER:
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
                    first_slot,
                    expected,
                    BLOCK_M,
                    INTERPRETED,
                )


_ARGUMENTS = (
    "out", "bias", "windows", "peers_ready", "ready", "done", "clock", "status", "x", "weight",
    "rank", "world_size", "shard_rows", "n_eighths", "k_eighths", "step", "slot_rows", "slots", "first_slot",
    "epoch", "timeout",
)  # fmt: skip


class _Kind(NamedTuple):
    """What a kernel of products is compiled for, beside its tiling."""

    gather: bool
    scatter: bool
    by_k: bool
    bias: bool
    activation: str
    dtype: torch.dtype
    order: str


@lru_cache
def _compiled(kind: _Kind, tiling: Tiling) -> CompiledKernel:
    constants = {
        "GATHER": kind.gather,
        "SCATTER": kind.scatter,
        "BY_K": kind.by_k,
        "BIAS": kind.bias,
        "ACTIVATION": kind.activation,
        "TYPE": TYPES[kind.dtype],
        "ORDER": kind.order,
        "BLOCK_M": tiling.block_m,
        "BLOCK_N": tiling.block_n,
        "BLOCK_K": tiling.block_k,
        "GROUP": tiling.group,
        "PARTS": tiling.parts,
        "FLATTEN": tiling.flatten,
        "INTERPRETED": INTERPRETED,
    }
    return CompiledKernel(_product, _ARGUMENTS, constants, num_warps=tiling.num_warps, num_stages=tiling.stages)


def fits(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Return whether the kernels take such matrices: 2 bytes an element, rows of whole 16 bytes at multiples of 16."""
    (_, k), n = x.shape, weight.shape[0]
    return (
        x.dtype == weight.dtype
        and x.dtype in (torch.bfloat16, torch.float16)
        and k % ALIGNED == 0
        and n % ALIGNED == 0
        and x.is_contiguous()
        and (weight.is_contiguous() or weight.t().is_contiguous())
        and x.data_ptr() % 16 == 0
        and weight.data_ptr() % 16 == 0
    )


def _programs(device: torch.device, tiles: int, programs: int | None) -> int:
    """Return the number of programs: as many as multiprocessors, unless that is more than tiles or `programs`."""
    if device.type != "cuda":
        return min(tiles, programs or 2)
    return min(tiles, programs or torch.cuda.get_device_properties(device).multi_processor_count)


def _launch(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str,
    out: torch.Tensor | None,
    destinations: Destinations | None,
    signals: Signals | None,
    rank: int,
    world_size: int,
    step: int,
    tiling: Tiling,
    programs: int | None,
) -> None:
    """Launch `_product` on the current stream, scattered if there are destinations, else gathered if there are signals.

    What the kernel is compiled not to touch is given as `x`, an address like any other.
    """
    assert fits(x, weight), "ask `fits` first"
    (m, k), n, by_k = x.shape, weight.shape[0], weight.is_contiguous()
    assert m % world_size == 0, f"{m} rows are not shards of {world_size} ranks"
    shard_rows, scatter = m // world_size, destinations is not None
    order = destinations.order if destinations is not None else "own_first"
    kind = _Kind(signals is not None and not scatter, scatter, by_k, bias is not None, activation, x.dtype, order)
    windows, done = (destinations.windows, destinations.done) if destinations is not None else (x, x)
    if signals is not None:
        flags, first_slot, slot_rows, epoch = signals
        assert not scatter or slot_rows % tiling.block_m == 0, f"{slot_rows} rows: not whole tiles of {tiling.block_m}"
        ready, slots, timeout = flags.local, flags.local.shape[1], flags.timeout
        peers_ready, clock, status = flags.addresses, flags.clock, flags.status
    else:
        peers_ready = ready = clock = status = x
        first_slot, slot_rows, epoch, slots, timeout = 0, shard_rows, 0, 1, 0
    rows = TensorDescriptor.from_tensor(x, [tiling.block_m, tiling.block_k])
    if by_k:
        columns = TensorDescriptor.from_tensor(weight, [tiling.block_n, tiling.block_k])
    else:
        columns = TensorDescriptor.from_tensor(weight.t(), [tiling.block_k, tiling.block_n])
    tiles = -(-shard_rows // tiling.block_m) * world_size * -(-n // tiling.block_n)
    given = x if bias is None else bias
    _compiled(kind, tiling)(
        _programs(x.device, tiles, programs), (given.dtype,),
        x if out is None else out, given, windows, peers_ready, ready, done, clock, status, rows, columns,
        rank, world_size, shard_rows, n // ALIGNED, k // ALIGNED, step, slot_rows, slots, first_slot,
        epoch, timeout,
    )  # fmt: skip


def product(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str,
    out: torch.Tensor,
    tiling: Tiling = Tiling(),  # noqa: B008  a NamedTuple of numbers
    programs: int | None = None,
) -> None:
    """Compute out = activation(x @ weight^T + bias) on the current stream, without communication.

    Args:
        x: [M, K] contiguous, bfloat16 or float16, K a multiple of 8.
        weight: [N, K] of the type of `x`, it or its transpose contiguous, N a multiple of 8; see `fits`.
        bias: [N] of any float type, or None.
        activation: none | relu.
        out: [M, N] contiguous, of the type of `x`.
        tiling: how the product is cut.
        programs: of the grid; None takes one a multiprocessor.
    """
    _launch(x, weight, bias, activation, out, None, None, 0, 1, 1, tiling, programs)


def gathered_product(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str,
    out: torch.Tensor,
    rank: int,
    signals: Signals,
    step: int = 1,
    tiling: Tiling = Tiling(),  # noqa: B008
    programs: int | None = None,
) -> None:
    """Compute out = activation(x @ weight^T + bias) on the current stream, while shards of x arrive.

    All shards have flags, the rank's own too. A wait that lasts longer than `flags.timeout` is recorded and stops the
    GPU's work. Rows must arrive without a multiprocessor of this GPU, or by a kernel that is resident before this one.

    Args:
        x: [M, K] as for `product`: this rank's window, of which shard w, M / W rows, is brought there by rank w.
        weight: [N, K] as for `product`.
        bias: [N] of any float type, or None.
        activation: none | relu.
        out: [M, N] contiguous, of the type of `x`.
        rank: of the caller, whose own shard is computed first.
        signals: that rows are there; of any number of rows each.
        step: 1 or -1: after its own shard the rank takes those of rank + step, rank + 2 * step, ..; best the order in
            which they arrive.
        tiling: how the product is cut.
        programs: of the grid; None takes one a multiprocessor.
    """
    world_size = signals.flags.local.shape[0]
    _launch(x, weight, bias, activation, out, None, signals, rank, world_size, step % world_size, tiling, programs)


def scattered_product(
    x: torch.Tensor,
    weight: torch.Tensor,
    rank: int,
    destinations: Destinations,
    signals: Signals,
    tiling: Tiling = Tiling(),  # noqa: B008
    programs: int | None = None,
) -> None:
    """Store this rank's part of x @ weight^T into the windows of the ranks that own its rows, and raise their flags.

    The kernel waits for nobody, so it needs no other to be resident. `reduce_windows` adds the parts up.

    Args:
        x: [M, K] as for `product`, K being this rank's part of the sum; rank w owns the rows [w * M / W, ..).
        weight: [N, K] as for `product`.
        rank: of the caller.
        destinations: where the tiles go.
        signals: the flags that are raised, each once a slot's rows are there; a slot has whole tiles.
        tiling: how the product is cut.
        programs: of the grid; None takes one a multiprocessor.
    """
    world_size = signals.flags.local.shape[0]
    _launch(x, weight, None, "none", None, destinations, signals, rank, world_size, 1, tiling, programs)
