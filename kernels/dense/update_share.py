"""Updates a rank's share of the dense parameters by the mean gradient of all ranks, and stores it at all ranks.

It does what `all_reduce` and then `update` do, but each weight is updated on one rank only, and bfloat16 weights are
sent instead of float32 gradients. Lines have LINE elements.
"""

import torch
import triton
import triton.language as tl

from dlrm_overlap.kernels.compiled import TYPES, CompiledKernel, specialised
from dlrm_overlap.kernels.dense.all_reduce import MOST_UNROLLED, NUM_WARPS, lane_elements
from dlrm_overlap.kernels.dense.arguments import FACTORS, LINE, FlatUpdate, SharedWeights
from dlrm_overlap.kernels.dense.update import updated_weights
from dlrm_overlap.kernels.flags import Flags
from dlrm_overlap.kernels.primitives import count_and_signal
from dlrm_overlap.kernels.tuning import power_of_2

_FACTORS = tl.constexpr(FACTORS)


@triton.jit
def _load_gradient(gradients, peer, at, mask, TYPE: tl.constexpr):
    gradient = tl.multiple_of(tl.load(gradients + peer).to(tl.pointer_type(TYPE)), 16)
    return tl.load(gradient + at, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _store_weight(everywhere, shadows, peer, at, weight, mask, in_float32, SHADOW: tl.constexpr):
    shadow = tl.multiple_of(tl.load(shadows + peer).to(tl.pointer_type(SHADOW)), 16)
    tl.store(shadow + at, weight.to(SHADOW), mask=mask)
    float32 = tl.multiple_of(tl.load(everywhere + peer).to(tl.pointer_type(tl.float32)), 16)
    tl.store(float32 + at, weight, mask=mask & in_float32)


@triton.jit(do_not_specialize=["rank", "first", "lines", "scale", "slot", "epoch"])
def _update_share(
    weights,  # [n] float32
    state,  # [n] float32: the optimizer's first state, if any
    square,  # [n] float32: its second state, if any
    rows,  # [n / LINE] int32: row of `factors` of each line; -1 leaves the line unchanged
    factors,  # [R, 8] float32
    float32_lines,  # [n / LINE] int32: 1 for lines whose float32 weights are stored at all ranks
    gradients,  # [W] int64: address of the gradient [n] of each rank, of type TYPE
    everywhere,  # [W] int64: of the weights
    shadows,  # [W] int64: of the shadow [n], of type SHADOW
    peers_ready,  # [W] int64: of the flags
    counted,  # [1] int32, 0 before and after
    clock,  # [1] int64
    rank,
    first,  # line of the share
    lines,  # of the share
    scale,
    slot,
    epoch: tl.int64,
    KIND: tl.constexpr,  # a key of `STATES`
    DECAYS: tl.constexpr,
    SHADOW: tl.constexpr,
    WORLD_SIZE: tl.constexpr,
    PEERS: tl.constexpr,
    TYPE: tl.constexpr,
    LINE: tl.constexpr,
    BLOCK: tl.constexpr,
    UNROLLED: tl.constexpr,
):
    """Update a share of the weights, and store it at all ranks, as program p of P the blocks p, p + P, ..

    Memory: sums are float32, in the order of the ranks. This rank's weights and states are written; of a peer's memory
    the shadow, and the weights of `float32_lines`, at the next rank first, so that ranks store to different peers.
    Results have the bits of `_average_share` and then `_update_parameters`.

    Order: an earlier kernel of the stream has waited for the ranks' flags: their gradients are ready, and they no
    longer read the old weights. The last program sets element `slot` of every rank's flags to `epoch` + `clock`, a
    release at system scope that covers all stores. A rank that has acquired it may read the new weights; this rank no
    longer reads its gradient.

    Example: SGD at learning rate 1. Rank 0 of 2 owns weights 0 0 of 0 0 0 0. Its gradients of these are 1 2, and rank
    1's are 5 6, so rank 0 stores -3 -4 at both ranks.

    Source: Rajbhandari, Rasley, Ruwase and He, ZeRO (arXiv 1910.02054), section 5.1.
    """
    ROWS: tl.constexpr = BLOCK // LINE
    for block in range(tl.program_id(0), tl.cdiv(lines, ROWS), tl.num_programs(0)):
        index = block * ROWS + tl.arange(0, ROWS)  # [ROWS], of lines
        line = (first + index).to(tl.int64)
        at = line[:, None] * LINE + tl.arange(0, LINE)[None, :]  # [ROWS, LINE]
        row = tl.load(rows + line, mask=index < lines, other=-1)[:, None]  # [ROWS, 1]
        in_float32 = tl.load(float32_lines + line, mask=index < lines, other=0)[:, None] == 1
        mask = (row >= 0) & (tl.arange(0, LINE)[None, :] >= 0)
        # Add up the gradients of all ranks, in the order of the ranks.
        total = _load_gradient(gradients, 0, at, mask, TYPE)
        if UNROLLED:
            for peer in tl.static_range(1, WORLD_SIZE):
                total += _load_gradient(gradients, peer, at, mask, TYPE)
        else:
            for peer in tl.range(1, WORLD_SIZE, loop_unroll_factor=8):
                total += _load_gradient(gradients, peer, at, mask, TYPE)
        # Round the mean: the compiler cannot fuse this product with a sum of the update, because it is fused already.
        gradient = tl.fma(total, tl.zeros_like(total) + scale, tl.zeros_like(total)).to(TYPE).to(tl.float32)
        # Take the optimizer's step.
        weight = tl.load(weights + at, mask)
        ours = factors + tl.maximum(row, 0) * _FACTORS
        weight = updated_weights(weight, gradient, state, square, at, mask, ours, KIND, DECAYS)
        tl.store(weights + at, weight, mask)
        # Store the weights at all ranks.
        if UNROLLED:
            for turn in tl.static_range(WORLD_SIZE):
                peer = (rank + 1 + turn) % WORLD_SIZE
                _store_weight(everywhere, shadows, peer, at, weight, mask, in_float32, SHADOW)
        else:
            for turn in tl.range(0, WORLD_SIZE):
                peer = (rank + 1 + turn) % WORLD_SIZE
                _store_weight(everywhere, shadows, peer, at, weight, mask, in_float32, SHADOW)
    # Count this program (acquire and release, GPU scope); the last one sets the flags, a release at system scope.
    count_and_signal(counted, peers_ready, slot, WORLD_SIZE, epoch + tl.load(clock), PEERS)


def _compiled(update: FlatUpdate, world_size: int, dtype: torch.dtype) -> CompiledKernel:
    assert update.shadow is not None
    return specialised(
        _update_share, num_warps=NUM_WARPS,
        KIND=update.kind, DECAYS=update.decays, SHADOW=TYPES[update.shadow.dtype],
        WORLD_SIZE=world_size, PEERS=power_of_2(world_size), TYPE=TYPES[dtype], LINE=LINE,
        BLOCK=NUM_WARPS * 32 * lane_elements(world_size, dtype), UNROLLED=world_size <= MOST_UNROLLED,
    )  # fmt: skip


def update_share(
    update: FlatUpdate,
    shared: SharedWeights,
    dtype: torch.dtype,
    first: int,
    lines: int,
    flags: Flags,
    counted: torch.Tensor,
    rank: int,
    slot: int,
    epoch: int,
    programs: int,
) -> None:
    """Update this rank's share by the mean gradient, store it at all ranks, then set its flag `slot` at every rank.

    Args:
        update: counted by `begin_update` on this stream; it has a shadow. Its gradients are not used.
        dtype: float32 or bfloat16, of the gradients.
        first: line at which the share begins.
        lines: of the share; 0: only the flag is set.
        counted: [1] int32, 0 before and after. Kernels that share it must not overlap.
    """
    world_size = shared.gradients.numel()
    # Pass the weights for tensors that the kernel of this kind does not read.
    state, square = (*update.states, update.weights, update.weights)[:2]
    _compiled(update, world_size, dtype)(
        programs, (),
        update.weights, state, square, update.rows, update.factors, shared.float32_lines,
        shared.gradients, shared.weights, shared.shadows, flags.addresses, counted, flags.clock,
        rank, first, lines, 1 / world_size, rank * flags.local.shape[1] + slot, epoch,
    )  # fmt: skip
