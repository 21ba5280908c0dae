"""Rows updated once each: read, their gradients summed in float32, updated, written.

The ids are known long before their gradients, and so is all that follows from them. Sorted by row, the ids of a touched
row are one run; `prepare` says where each id's gradient will lie, and cuts runs that are too long into pieces, so that
a row which is in every bag costs no more than rows which are in one each. `update_rows` then takes the pieces, whose
sums the last of a run adds up, and the other runs: short ones side by side, longer ones each by a whole program. Every
sum has one order: two updates give the same bits.

Example: ids of rows  a b c c c c c c c d,  runs cut at 3: pieces  c c c | c c c | c,  summed by three programs, of
which the last adds the three sums and updates c; others update a, b and d.
"""

from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from dlrm_overlap.kernels.arguments import power_of_2
from dlrm_overlap.kernels.backward.rounding import rounded
from dlrm_overlap.kernels.backward.row_runs import DONE, PIECE_IDS, PIECES, PreparedRuns, piece_ids_of
from dlrm_overlap.kernels.compiled import TYPES, CompiledKernel

_PROGRAMS = 1 << 15  # at most, each taking one task after the other
_ROW_ELEMENTS = 256  # of a warp: rows side by side
_BESIDE_IDS = 16  # longer runs have a program to themselves: one after the other, their ids take too long
_TILE_ELEMENTS = 512  # of a warp: gradients of one run in flight


@triton.jit
def _sum_gradients(
    gradient, places, scales, first, length,
    TILE: tl.constexpr, ANY_MEAN: tl.constexpr, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr,
):  # fmt: skip
    """Return the sum [BLOCK_DIM] float32 of the gradients of ids [first, first + length)."""
    column = tl.arange(0, BLOCK_DIM)
    total = tl.zeros((TILE, BLOCK_DIM), tl.float32)
    for turn in range(0, length, TILE):
        i = first + turn + tl.arange(0, TILE)
        live = i < first + length
        at = tl.load(places + i, mask=live, other=0).to(tl.int64)[:, None] * 4 + column[None, :]
        rows = tl.load(gradient + at, mask=live[:, None] & (column < DIM)[None, :], other=0.0).to(tl.float32)
        if ANY_MEAN:
            rows = rows * tl.load(scales + i, mask=live, other=0.0)[:, None]
        total += rows
    return tl.sum(total, 0)


@triton.jit
def _elements(first, key, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr):
    """Return where the elements of the rows of `key` [N] lie: [N, BLOCK_DIM], the row of key 0 at unit `first`."""
    return (first + key * (DIM // 4))[:, None] * 4 + tl.arange(0, BLOCK_DIM)[None, :]


@triton.jit
def _load_rows(
    weights, states, weight_at, state_at, key, mask,
    OPTIMIZER: tl.constexpr, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr,
):  # fmt: skip
    """Return the rows of `key` [N] int64 [N, BLOCK_DIM] float32 and their state: [N, BLOCK_DIM], or [N] if row-wise."""
    both = mask[:, None] & (tl.arange(0, BLOCK_DIM) < DIM)[None, :]
    weight = tl.load(weights + _elements(weight_at, key, DIM, BLOCK_DIM), mask=both, other=0.0).to(tl.float32)
    state = weight
    if OPTIMIZER == "adagrad":
        state = tl.load(states + _elements(state_at, key, DIM, BLOCK_DIM), mask=both, other=0.0)
    elif OPTIMIZER == "rowwise_adagrad":
        state = tl.load(states + state_at + key, mask=mask, other=0.0)
    return weight, state


@triton.jit
def _store_rows(
    weights, states, weight_at, state_at, key, mask, weight, state, total, lr, eps, seed,
    OPTIMIZER: tl.constexpr, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, WEIGHT: tl.constexpr, STOCHASTIC: tl.constexpr,
):  # fmt: skip
    """Store what `_load_rows` has returned, updated by the gradients `total` [N, BLOCK_DIM]."""
    both = mask[:, None] & (tl.arange(0, BLOCK_DIM) < DIM)[None, :]
    if OPTIMIZER == "sgd":
        step = lr * total
    elif OPTIMIZER == "adagrad":
        state += total * total
        tl.store(states + _elements(state_at, key, DIM, BLOCK_DIM), state, mask=both)
        step = lr * total / (tl.sqrt_rn(state) + eps)
    else:
        state += tl.sum(tl.where(both, total * total, 0.0), 1) / DIM
        tl.store(states + state_at + key, state, mask=mask)
        step = (lr / (tl.sqrt_rn(state) + eps))[:, None] * total
    at = _elements(weight_at, key, DIM, BLOCK_DIM)
    tl.store(weights + at, rounded(weight - step, at, seed, WEIGHT, STOCHASTIC), mask=both)


@triton.jit
def _update_row(
    run, total, run_keys, weights, states, weight_at, state_at, lr, eps, seed,
    OPTIMIZER: tl.constexpr, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, WEIGHT: tl.constexpr, STOCHASTIC: tl.constexpr,
):  # fmt: skip
    """Update the row of `run` by the sum `total` [BLOCK_DIM] of its gradients."""
    one = tl.arange(0, 1)
    key = tl.load(run_keys + run + one).to(tl.int64)
    weight, state = _load_rows(weights, states, weight_at, state_at, key, one == 0, OPTIMIZER, DIM, BLOCK_DIM)
    _store_rows(
        weights, states, weight_at, state_at, key, one == 0, weight, state, total[None, :],
        lr, eps, seed, OPTIMIZER, DIM, BLOCK_DIM, WEIGHT, STOCHASTIC,
    )  # fmt: skip


@triton.jit
def _update_piece(
    piece, run, run_keys, run_starts, places, scales, shared, piece_first, gradient, weights, states, parts,
    weight_at, state_at, lr, eps, seed,
    TILE: tl.constexpr, PIECE_IDS: tl.constexpr, ANY_MEAN: tl.constexpr, OPTIMIZER: tl.constexpr, DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr, WEIGHT: tl.constexpr, STOCHASTIC: tl.constexpr,
):  # fmt: skip
    """Sum a piece of a long run; who sums its last one adds up all, in their order, and updates the row."""
    column = tl.arange(0, BLOCK_DIM)
    first_piece = tl.load(piece_first + piece).to(tl.int64)
    start = tl.load(run_starts + run)
    length = tl.load(run_starts + run + 1) - start
    ids = piece_ids_of(length, PIECE_IDS)
    skipped = (piece - first_piece).to(tl.int32) * ids
    piece_sum = _sum_gradients(
        gradient, places, scales, start + skipped, tl.minimum(ids, length - skipped), TILE, ANY_MEAN, DIM, BLOCK_DIM
    )
    tl.store(parts + piece * DIM + column, piece_sum, mask=column < DIM)
    count = tl.cdiv(length, ids)
    done = shared + DONE + first_piece
    tl.debug_barrier()  # all threads have stored before one of them counts the piece
    if tl.atomic_add(done, 1, sem="acq_rel", scope="gpu") == count - 1:
        tl.debug_barrier()  # no thread reads what others stored before the one that acquired
        tl.store(done, 0)
        total = tl.zeros((TILE, BLOCK_DIM), tl.float32)
        for turn in range(0, count, TILE):
            part = turn + tl.arange(0, TILE)
            mask = (part < count)[:, None] & (column < DIM)[None, :]
            total += tl.load(parts + (first_piece + part)[:, None] * DIM + column[None, :], mask=mask, other=0.0)
        _update_row(
            run, tl.sum(total, 0), run_keys, weights, states, weight_at, state_at, lr, eps, seed,
            OPTIMIZER, DIM, BLOCK_DIM, WEIGHT, STOCHASTIC,
        )  # fmt: skip


@triton.jit
def _update_runs(
    run, live, run_keys, run_starts, places, scales, gradient, weights, states,
    weight_at, state_at, lr, eps, seed,
    RUNS: tl.constexpr, BESIDE_IDS: tl.constexpr, ANY_MEAN: tl.constexpr,
    OPTIMIZER: tl.constexpr, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, WEIGHT: tl.constexpr,
    STOCHASTIC: tl.constexpr,
):  # fmt: skip
    """Update the rows of runs `run` [RUNS], where `live` and of up to BESIDE_IDS ids; return the ids of the longest."""
    column = tl.arange(0, BLOCK_DIM)
    start = tl.load(run_starts + run, mask=live, other=0)
    length = tl.load(run_starts + run + 1, mask=live, other=0) - start
    longest = tl.max(length, 0)
    live = live & (length <= BESIDE_IDS)
    length = tl.where(live, length, 0)
    key = tl.load(run_keys + run, mask=live, other=0).to(tl.int64)
    # Asked for first: the rows come while the gradients are summed.
    weight, state = _load_rows(weights, states, weight_at, state_at, key, live, OPTIMIZER, DIM, BLOCK_DIM)
    total = tl.zeros((RUNS, BLOCK_DIM), tl.float32)
    for turn in range(0, tl.max(length, 0), 2):
        # Two of each run at a time, both places asked for before the first gradient.
        i = start + turn
        here, next_too = turn < length, turn + 1 < length
        place = tl.load(places + i, mask=here, other=0).to(tl.int64)[:, None] * 4 + column[None, :]
        next_place = tl.load(places + i + 1, mask=next_too, other=0).to(tl.int64)[:, None] * 4 + column[None, :]
        rows = tl.load(gradient + place, mask=here[:, None] & (column < DIM)[None, :], other=0.0).to(tl.float32)
        next_rows = tl.load(gradient + next_place, mask=next_too[:, None] & (column < DIM)[None, :], other=0.0)
        next_rows = next_rows.to(tl.float32)
        if ANY_MEAN:
            rows = rows * tl.load(scales + i, mask=here, other=0.0)[:, None]
            next_rows = next_rows * tl.load(scales + i + 1, mask=next_too, other=0.0)[:, None]
        total += rows
        total += next_rows
    _store_rows(
        weights, states, weight_at, state_at, key, live, weight, state, total,
        lr, eps, seed, OPTIMIZER, DIM, BLOCK_DIM, WEIGHT, STOCHASTIC,
    )  # fmt: skip
    return longest


@triton.jit(noinline=True)  # a call is rare here, and inlined it takes registers from the runs side by side
def _update_run(
    run, run_keys, run_starts, places, scales, gradient, weights, states,
    weight_at, state_at, lr, eps, seed,
    TILE: tl.constexpr, BESIDE_IDS: tl.constexpr, PIECE_IDS: tl.constexpr, ANY_MEAN: tl.constexpr,
    OPTIMIZER: tl.constexpr, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, WEIGHT: tl.constexpr,
    STOCHASTIC: tl.constexpr,
):  # fmt: skip
    """Update the row of `run` by a whole program, if it is too long for others beside it and yet not cut."""
    start = tl.load(run_starts + run)
    length = tl.load(run_starts + run + 1) - start
    if (length > BESIDE_IDS) & (length <= PIECE_IDS):
        total = _sum_gradients(gradient, places, scales, start, length, TILE, ANY_MEAN, DIM, BLOCK_DIM)
        _update_row(
            run, total, run_keys, weights, states, weight_at, state_at, lr, eps, seed,
            OPTIMIZER, DIM, BLOCK_DIM, WEIGHT, STOCHASTIC,
        )  # fmt: skip


_INTEGERS = ["range_index", "weight_at", "state_at", "lr", "eps", "seed"]


@triton.jit(do_not_specialize=_INTEGERS)
def _update_rows(
    run_keys,
    run_starts,
    places,
    scales,
    shared,
    piece_run,
    piece_first,
    bounds,
    gradient,
    weights,
    states,
    parts,
    range_index,
    weight_at: tl.int64,
    state_at: tl.int64,
    lr,
    eps,
    seed,
    RUNS: tl.constexpr,
    BESIDE_IDS: tl.constexpr,
    TILE: tl.constexpr,
    PIECE_IDS: tl.constexpr,
    ANY_MEAN: tl.constexpr,
    OPTIMIZER: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    WEIGHT: tl.constexpr,
    STOCHASTIC: tl.constexpr,
):
    """Take task after task of one range, program p of P the tasks p, p + P, ..: pieces of long runs, then other runs.

    A task is a piece, whose gradients are summed, or RUNS consecutive runs side by side, whose rows are updated. The
    program reads keys, places and factors that `prepare` has left, and gradients from this rank's window; it rewrites
    the rows of `weights` and `states` whose runs it completes, each row by one program alone; sums of pieces go to
    `parts` [pieces, DIM].

    Order: the kernel follows the wait for the gradients' flags on the stream. A piece's sum is stored, then, behind a
    barrier, counted in `shared` (acquire and release, GPU scope); who counts a run's last piece sees all sums, sets the
    count back to 0 and updates the row. Pieces come first, since they take longest. Other tasks share nothing.

    Example: runs a, b, c, d of 1, 1, 7 and 1 ids, PIECE_IDS 3, RUNS 2. Tasks 0, 1 and 2 sum the pieces of c, of 3, 3
    and 1 ids, and the last to finish updates c; task 3 updates a and b; task 4 updates d, and leaves c alone.
    """
    begin = tl.load(bounds + range_index)
    end = tl.load(bounds + range_index + 1)
    pieces = tl.load(shared + PIECES)
    for task in range(tl.program_id(0), pieces + tl.cdiv(end - begin, RUNS), tl.num_programs(0)):
        if task < pieces:
            run = tl.load(piece_run + task).to(tl.int64)
            if (run >= begin) & (run < end):
                _update_piece(
                    task, run, run_keys, run_starts, places, scales, shared, piece_first, gradient, weights, states,
                    parts, weight_at, state_at, lr, eps, seed,
                    TILE, PIECE_IDS, ANY_MEAN, OPTIMIZER, DIM, BLOCK_DIM, WEIGHT, STOCHASTIC,
                )  # fmt: skip
        else:
            first = begin + (task - pieces) * RUNS
            runs = first + tl.arange(0, RUNS)
            longest = _update_runs(
                runs, runs < end, run_keys, run_starts, places, scales, gradient, weights, states,
                weight_at, state_at, lr, eps, seed,
                RUNS, BESIDE_IDS, ANY_MEAN, OPTIMIZER, DIM, BLOCK_DIM, WEIGHT, STOCHASTIC,
            )  # fmt: skip
            if longest > BESIDE_IDS:
                for run in range(first, tl.minimum(first + RUNS, end)):
                    _update_run(
                        run, run_keys, run_starts, places, scales, gradient, weights, states,
                        weight_at, state_at, lr, eps, seed,
                        TILE, BESIDE_IDS, PIECE_IDS, ANY_MEAN, OPTIMIZER, DIM, BLOCK_DIM, WEIGHT, STOCHASTIC,
                    )  # fmt: skip


class RowRange(NamedTuple):
    """Rows that are updated alike: of one dim, type and optimizer."""

    index: int
    """in `Positions.boundaries`"""
    weights: torch.Tensor
    """any shape, float32, float16 or bfloat16, of which the rows are a part; updated in place"""
    states: torch.Tensor
    """the same of the optimizer's state, float32; anything under SGD"""
    weight_at: int
    """where key 0 would lie in the weights, in units of 4 elements, if the range began there"""
    state_at: int
    """the same in the state; under row-wise Adagrad, which has one number a row, in elements"""
    dim: int
    """D, a multiple of 4, at most 1024"""
    any_mean: bool
    optimizer: str
    """sgd | adagrad | rowwise_adagrad"""
    stochastic_rounding: bool = False
    """of rows that are not float32"""


class Rule(NamedTuple):
    """The optimizer's numbers at one step."""

    lr: float
    eps: float = 0.0
    seed: int = 0
    """of stochastic rounding, int32"""


@lru_cache
def _updating(
    dim: int, weights: torch.dtype, any_mean: bool, optimizer: str, stochastic: bool, piece_ids: int
) -> CompiledKernel:
    block = power_of_2(dim)
    warps = max(1, block // 256)
    constants = {
        "RUNS": min(8, max(1, _ROW_ELEMENTS // block)),
        "BESIDE_IDS": min(_BESIDE_IDS, piece_ids),
        "TILE": max(1, _TILE_ELEMENTS * warps // block),
        "PIECE_IDS": piece_ids,
        "ANY_MEAN": any_mean,
        "OPTIMIZER": optimizer,
        "DIM": dim,
        "BLOCK_DIM": block,
        "WEIGHT": TYPES[weights],
        "STOCHASTIC": stochastic and weights != torch.float32,
    }
    return CompiledKernel(_update_rows, {"num_warps": warps}, constants)


def update_rows(
    runs: PreparedRuns, rows: RowRange, gradient: torch.Tensor, rule: Rule, piece_ids: int = PIECE_IDS
) -> None:
    """Update each touched row of a range, once, by the sum of its bags' gradients, in place.

    Args:
        gradient: [D_local * B] of the wire's type: [B, D] a piece, see `gradient_exchange`.
        piece_ids: as `prepare` was given.
    """
    assert gradient.numel() <= 2**33, (
        f"a gradient window of {gradient.numel()} elements: places, int32, count fours of up to 2^33"
    )
    count, most = runs.places.numel(), runs.piece_run.numel()
    form = _updating(rows.dim, rows.weights.dtype, rows.any_mean, rows.optimizer, rows.stochastic_rounding, piece_ids)
    form(
        min(_PROGRAMS, -(-count // form.constants["RUNS"]) + most) if count else 0,
        (runs.run_keys.dtype, gradient.dtype),
        *runs,
        gradient,
        rows.weights,
        rows.states,
        torch.empty(most * rows.dim, dtype=torch.float32, device=gradient.device),
        rows.index,
        rows.weight_at,
        rows.state_at,
        rule.lr,
        rule.eps,
        rule.seed,
    )
