"""Products of matrices with communication inside: tiles wait for rows that peers send, or are stored at peers.

A persistent kernel computes x @ weight^T tile by tile, by TMA and wgmma on Hopper. The rows of x, or of the result,
are in W shards, one a rank. In a gathered product a tile waits until its rows have arrived, and tiles whose rows are
here already come first. In a scattered product a tile is stored straight into the window of the rank that owns its
rows, and the program that completes a region of rows raises the region's flag there. Source: Flux (Chang et al.,
arXiv 2406.06858, section 3), whose kernels do the first in the prologue and the second in the epilogue.
"""

from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from dlrm_overlap.kernels.compiled import INTERPRETED, TYPES, CompiledKernel
from dlrm_overlap.kernels.gemm.arguments import Destinations, Signals, Tiling
from dlrm_overlap.kernels.gemm.order import tile_at
from dlrm_overlap.kernels.primitives import await_few, barrier

TILING = Tiling()
ALIGNED = 8
"""elements that must divide N and K: 16 bytes of a type of 2, as TMA and the stores ask for"""


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
def _await_rows(
    ready, owner, first, rank, shard_rows, slot_rows, slots, epoch, timeout, status,
    BLOCK_M: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Wait until the owner's rows [first, first + BLOCK_M) are there, unless they are the rank's own; return 0."""
    slot = first // slot_rows
    count = (tl.minimum(first + BLOCK_M, shard_rows) - 1) // slot_rows - slot + 1
    count = tl.where(owner == rank, 0, count)
    return await_few(ready, slots, owner * slots + slot, 1, count, rank, epoch, timeout, status, 2, INTERPRETED)


@triton.jit
def _store_tile(
    accumulator, out, bias, targets, owner, first, begin, shard_rows, n,
    SCATTER: tl.constexpr, BIAS: tl.constexpr, ACTIVATION: tl.constexpr, TYPE: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Store a tile of the owner's rows from `first` on, columns from `begin` on; see `_product`."""
    if SCATTER:
        target = tl.multiple_of(tl.load(targets + owner).to(tl.pointer_type(TYPE)), 16) + first.to(tl.int64) * n
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
    one = barrier(1, INTERPRETED)  # all threads have stored before one of them counts the tile
    if tl.atomic_add(counter, one, sem="acq_rel", scope="gpu") == tl.cdiv(rows, BLOCK_M) * columns - 1:
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
def _product(
    out, bias, targets, owners, peers_ready, ready, done, clock, status, x, weight,
    rank, world_size, shard_rows, n_eighths, k_eighths, slot_rows, slots,
    timeout: tl.int64,
    GATHER: tl.constexpr, SCATTER: tl.constexpr, BY_K: tl.constexpr, BIAS: tl.constexpr, ACTIVATION: tl.constexpr,
    TYPE: tl.constexpr, ORDER: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr, PARTS: tl.constexpr, FLATTEN: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Compute activation(x @ weight^T + bias) in the tiles p, p + P, .. of program p of P, in the order of `tile_at`.

    Memory: `x` describes [W * shard_rows, K], of which rank w owns the rows from w * shard_rows on, and `weight` [N,
    K], or [K, N] where not BY_K; both of TYPE, read by TMA, which reads 0 behind their ends. N and K are `n_eighths`
    and `k_eighths` times 8. Products are summed up in float32, along K, by one program. `bias` [N] is read if BIAS.
    The result is rounded once, to TYPE, and stored 16 bytes a lane: to `out` [W * shard_rows, N]; or, if SCATTER, to
    [shard_rows, N] in the owner's memory, whose address is in `targets` [W].

    A slot of flags stands for `slot_rows` rows of a shard: at least BLOCK_M, and a multiple of that if SCATTER.

    Order: if GATHER, the program awaits, unless the rows are the rank's own, the flags of the one or two slots that a
    tile's rows are in, element (owner, i) of `ready` [W, slots], until they have reached `clock` [1], and acquires them
    at system scope. A fence lets TMA, which is another proxy, see what has
    been acquired. The tile's coordinates depend on what has been seen, so the loads of a loop that is pipelined across
    tiles cannot come before. If SCATTER, the program stores a tile, passes a barrier, and counts the tile in `done` [W,
    regions], a region being a slot's rows (acquire and release, GPU scope). Whoever completes a region sets the count
    back to 0 and raises element (rank, i) of the owner's flags, whose address is in `peers_ready` [W], to `clock`: a
    release at system scope, which covers the stores of all that have counted. The own region has a flag, too.

    Example: SCATTER, rank 0 of 2, shards of 512 rows, tiles of 128 rows, N of 2 tiles, slots of 256 rows. The tiles of
    rows 512 .. 767, 2 * 2 of them, go to rows 0 .. 255 in rank 1's memory; the fourth that is counted raises element
    (0, 0) of rank 1's flags.
    """
    n, turns = n_eighths * 8, tl.cdiv(k_eighths * 8, BLOCK_K)
    blocks = tl.cdiv(shard_rows, BLOCK_M)
    columns = tl.cdiv(n, BLOCK_N)
    epoch = tl.load(clock) if GATHER or SCATTER else 0
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
                owner, first, begin = tile_at(tile, blocks, columns, owners, world_size, GROUP, ORDER)
                first *= BLOCK_M
                begin *= BLOCK_N
                row = owner * shard_rows + first
                if GATHER:
                    row += _await_rows(
                        ready, owner, first, rank, shard_rows, slot_rows, slots, epoch, timeout, status,
                        BLOCK_M, INTERPRETED,
                    )  # fmt: skip
            left = x.load([row, turn * BLOCK_K])
            accumulator = _multiply(left, weight, begin, turn * BLOCK_K, accumulator, BY_K, INTERPRETED)
            if turn == turns - 1:
                _store_tile(
                    accumulator, out, bias, targets, owner, first, begin, shard_rows, n,
                    SCATTER, BIAS, ACTIVATION, TYPE, BLOCK_M, BLOCK_N, PARTS,
                )  # fmt: skip
                if SCATTER:
                    _count_tile(
                        done, peers_ready, owner, first, rank, shard_rows, columns, slot_rows, slots, epoch,
                        BLOCK_M, INTERPRETED,
                    )  # fmt: skip
                accumulator = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    else:
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
                SCATTER, BIAS, ACTIVATION, TYPE, BLOCK_M, BLOCK_N, PARTS,
            )  # fmt: skip
            if SCATTER:
                _count_tile(
                    done, peers_ready, owner, first, rank, shard_rows, columns, slot_rows, slots, epoch,
                    BLOCK_M, INTERPRETED,
                )  # fmt: skip


_ARGUMENTS = (
    "out", "bias", "targets", "owners", "peers_ready", "ready", "done", "clock", "status", "x", "weight",
    "rank", "world_size", "shard_rows", "n_eighths", "k_eighths", "slot_rows", "slots",
    "timeout",
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
    }
    if tiling.specialised:
        from dlrm_overlap.kernels.gemm import hopper

        constants |= {
            "STAGES": tiling.stages,
            "GROUPS": hopper.GROUPS,
            "LOAD_REGISTERS": hopper.LOAD_REGISTERS,
            "PRODUCT_REGISTERS": hopper.PRODUCT_REGISTERS,
        }
        return CompiledKernel(hopper.product_on_hopper, _ARGUMENTS, constants, num_warps=4)
    constants |= {"FLATTEN": tiling.flatten, "INTERPRETED": INTERPRETED}
    return CompiledKernel(_product, _ARGUMENTS, constants, num_warps=tiling.num_warps, num_stages=tiling.stages)


def _descriptor(matrix: torch.Tensor, rows: int, columns: int, tiling: Tiling) -> Any:
    """Return what TMA reads blocks of [rows, columns] of a contiguous matrix by."""
    if not tiling.specialised:
        return TensorDescriptor.from_tensor(matrix, [rows, columns])
    from triton.experimental.gluon.language import NVMMASharedLayout
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as LaidOut

    layout = NVMMASharedLayout.get_default_for([rows, columns], TYPES[matrix.dtype])
    return LaidOut.from_tensor(matrix, [rows, columns], layout)


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
    rank: int,
    owners: torch.Tensor | None,
    signals: Signals | None,
    destinations: Destinations | None,
    tiling: Tiling,
    programs: int | None,
) -> None:
    """Launch `_product` on the current stream; with signals it is gathered, with destinations, too, scattered.

    What the kernel is compiled not to touch is given as `x`, an address like any other.
    """
    assert fits(x, weight), "ask `fits` first"
    (m, k), n, by_k = x.shape, weight.shape[0], weight.is_contiguous()
    world_size = 1 if owners is None else owners.numel()
    assert m % world_size == 0, f"{m} rows are not shards of {world_size} ranks"
    shard_rows, order = m // world_size, "alone" if signals is None else "own_first"
    peers_ready = ready = clock = status = targets = done = x
    slot_rows, slots, timeout = shard_rows, 1, 0
    if signals is not None:
        flags, slot_rows = signals
        ready, slots, timeout = flags.local, flags.local.shape[1], flags.timeout
        peers_ready, clock, status = flags.addresses, flags.clock, flags.status
        assert slot_rows >= min(tiling.block_m, shard_rows), f"{slot_rows} rows: a tile has {tiling.block_m}"
    if destinations is not None:
        targets, done, order = destinations
        assert slot_rows % tiling.block_m == 0, f"{slot_rows} rows: not whole tiles of {tiling.block_m}"
    scatter = destinations is not None
    kind = _Kind(signals is not None and not scatter, scatter, by_k, bias is not None, activation, x.dtype, order)
    tiling = tiling if x.is_cuda else tiling._replace(specialised=False)
    rows = _descriptor(x, tiling.block_m, tiling.block_k, tiling)
    if by_k:
        columns = _descriptor(weight, tiling.block_n, tiling.block_k, tiling)
    else:
        columns = _descriptor(weight.t(), tiling.block_k, tiling.block_n, tiling)
    tiles = -(-shard_rows // tiling.block_m) * world_size * -(-n // tiling.block_n)
    given, turns = x if bias is None else bias, x if owners is None else owners
    _compiled(kind, tiling)(
        _programs(x.device, tiles, programs), (given.dtype,),
        x if out is None else out, given, targets, turns, peers_ready, ready, done, clock, status, rows, columns,
        rank, world_size, shard_rows, n // ALIGNED, k // ALIGNED, slot_rows, slots,
        timeout,
    )  # fmt: skip


def product(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str,
    out: torch.Tensor,
    tiling: Tiling = TILING,
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
    _launch(x, weight, bias, activation, out, 0, None, None, None, tiling, programs)


def gathered_product(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str,
    out: torch.Tensor,
    rank: int,
    owners: torch.Tensor,
    signals: Signals,
    tiling: Tiling = TILING,
    programs: int | None = None,
) -> None:
    """Compute out = activation(x @ weight^T + bias) on the current stream, while the peers' shards of x arrive.

    A wait that lasts longer than `flags.timeout` is recorded and stops the GPU's work. Rows have to arrive without a
    multiprocessor of this GPU, since the kernel may hold all of them: by copy engines, or by stores of the peers.

    Args:
        x: [M, K] as for `product`, of which shard w, M / W rows, is rank w's. The own one is there.
        weight: [N, K] as for `product`.
        bias: [N] of any float type, or None.
        activation: none | relu.
        out: [M, N] contiguous, of the type of `x`.
        rank: of the caller.
        owners: [W] int32: the order of the shards; the rank itself, then its peers, best as their rows arrive.
        signals: of `rank`, that the peers' rows are there; a slot has at least the rows of a tile.
        tiling: how the product is cut.
        programs: of the grid; None takes one a multiprocessor.
    """
    _launch(x, weight, bias, activation, out, rank, owners, signals, None, tiling, programs)


def scattered_product(
    x: torch.Tensor,
    weight: torch.Tensor,
    rank: int,
    owners: torch.Tensor,
    signals: Signals,
    destinations: Destinations,
    tiling: Tiling = TILING,
    programs: int | None = None,
) -> None:
    """Store this rank's part of x @ weight^T at the ranks that own its rows, and raise their flags.

    The kernel waits for nobody. What is at an owner's is added up there by `sum_parts`.

    Args:
        x: [M, K] as for `product`, K being this rank's part of the sum; rank w owns the rows [w * M / W, ..).
        weight: [N, K] as for `product`.
        rank: of the caller.
        owners: [W] int32: the order of the owners; the peers, then the rank itself.
        signals: the flags that are raised, each once a slot's rows are there; a slot has whole tiles.
        destinations: where the tiles go.
        tiling: how the product is cut.
        programs: of the grid; None takes one a multiprocessor.
    """
    _launch(x, weight, None, "none", None, rank, owners, signals, destinations, tiling, programs)
