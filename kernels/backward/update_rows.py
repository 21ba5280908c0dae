"""The update of a rank's rows from the gradients in its window: sums in float32, one read and one write of each row.

Programs sum the chunks of long runs, and update short runs side by side, longer ones one at a time. So a row in n bags
costs no more than n rows in one bag each. Sums have a fixed order: equal gradients give equal bits.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from dlrm_overlap.kernels.backward.optimizers import (
    MOST_STATES,
    OPTIMIZERS,
    OptimizerRows,
    RowKind,
    RowPointers,
    Rule,
    load_rows,
    rule_at,
    store_updated_rows,
)
from dlrm_overlap.kernels.backward.row_runs import CHUNK_IDS, CHUNKS, DONE, PreparedRuns, chunk_ids_of
from dlrm_overlap.kernels.compiled import TYPES, CompiledKernel, specialised
from dlrm_overlap.kernels.launches import Launch
from dlrm_overlap.kernels.optimizer_params import STATES
from dlrm_overlap.kernels.tuning import power_of_2

_PROGRAMS = 1 << 15  # upper limit of a launch; each takes one task after the other
_ROW_ELEMENTS = 256  # per warp: elements of the rows that it updates side by side
_SHORT_IDS = 16  # runs of more ids have a program to themselves, which sums several of their ids at a time
_TILE_ELEMENTS = 512  # per warp: elements of one run's gradients that it loads at a time


class RunTiling(NamedTuple):
    runs: int
    """runs that a program updates side by side"""
    short_ids: int
    """largest number of ids of a run that is updated side by side with others"""
    tile: int
    """ids of a longer run that are loaded at a time"""
    chunk_ids: int
    scaled: bool
    """whether gradients have factors"""


class RunPointers(NamedTuple):
    keys: Any
    starts: Any
    gradient_at: Any
    scales: Any
    gradient: Any


@triton.jit
def _update_row(run, total, runs, stored, rule, UPDATE: tl.constexpr, ROW: tl.constexpr):
    one = tl.arange(0, 1)
    key = tl.load(runs.keys + run + one).to(tl.int64)
    weight, state = load_rows(stored, key, one == 0, ROW)
    store_updated_rows(stored, key, one == 0, weight, state, total[None, :], rule, UPDATE, ROW)


@triton.jit
def _sum_gradients(runs, first, length, TILING: tl.constexpr, ROW: tl.constexpr):
    """Return the sum [block_dim] float32 of the gradients of ids [first, first + length).

    Row t of a tile adds ids first + t, first + t + tile, ..; then the rows of the tile are added up.
    """
    column = tl.arange(0, ROW.block_dim)
    total = tl.zeros((TILING.tile, ROW.block_dim), tl.float32)
    for turn in range(0, length, TILING.tile):
        i = first + turn + tl.arange(0, TILING.tile)
        live = i < first + length
        at = tl.load(runs.gradient_at + i, mask=live, other=0).to(tl.int64)[:, None] * 4 + column[None, :]
        # [tile, block_dim]
        rows = tl.load(runs.gradient + at, mask=live[:, None] & (column < ROW.dim)[None, :], other=0.0).to(tl.float32)
        if TILING.scaled:
            rows = rows * tl.load(runs.scales + i, mask=live, other=0.0)[:, None]
        total += rows
    return tl.sum(total, 0)


@triton.jit
def _sum_chunk(
    chunk,
    run,
    runs,
    shared,
    chunk_first,
    chunk_sums,
    stored,
    rule,
    TILING: tl.constexpr,
    UPDATE: tl.constexpr,
    ROW: tl.constexpr,
):
    """Sum the gradients of one chunk of `run`; the program that finishes the run's last chunk updates the row."""
    # Sum the chunk.
    column = tl.arange(0, ROW.block_dim)
    first_chunk = tl.load(chunk_first + chunk).to(tl.int64)
    start = tl.load(runs.starts + run)
    length = tl.load(runs.starts + run + 1) - start
    ids = chunk_ids_of(length, TILING.chunk_ids)
    skipped = (chunk - first_chunk).to(tl.int32) * ids
    chunk_sum = _sum_gradients(runs, start + skipped, tl.minimum(ids, length - skipped), TILING, ROW)
    tl.store(chunk_sums + chunk * ROW.dim + column, chunk_sum, mask=column < ROW.dim)

    # Count it. The last program adds up the run's chunks.
    count = tl.cdiv(length, ids)
    done = shared + DONE + first_chunk
    tl.debug_barrier()  # all threads have stored before one of them counts the chunk
    if tl.atomic_add(done, 1, sem="acq_rel", scope="gpu") == count - 1:
        tl.debug_barrier()  # no thread reads what other programs stored before one has acquired
        tl.store(done, 0)
        total = tl.zeros((TILING.tile, ROW.block_dim), tl.float32)
        for turn in range(0, count, TILING.tile):
            of_run = turn + tl.arange(0, TILING.tile)
            mask = (of_run < count)[:, None] & (column < ROW.dim)[None, :]
            # [tile, block_dim]
            at = (first_chunk + of_run)[:, None] * ROW.dim + column[None, :]
            total += tl.load(chunk_sums + at, mask=mask, other=0.0)
        _update_row(run, tl.sum(total, 0), runs, stored, rule, UPDATE, ROW)


@triton.jit
def _update_runs(
    run,
    live,
    runs,
    stored,
    rule,
    TILING: tl.constexpr,
    UPDATE: tl.constexpr,
    ROW: tl.constexpr,
):
    """Update the rows of the short runs among `run` [runs] where `live`; return the ids of the longest of all runs."""
    column = tl.arange(0, ROW.block_dim)
    start = tl.load(runs.starts + run, mask=live, other=0)
    length = tl.load(runs.starts + run + 1, mask=live, other=0) - start
    longest = tl.max(length, 0)
    live = live & (length <= TILING.short_ids)
    length = tl.where(live, length, 0)
    key = tl.load(runs.keys + run, mask=live, other=0).to(tl.int64)
    # Load the rows first, so that they are in flight while the gradients are summed.
    weight, state = load_rows(stored, key, live, ROW)
    total = tl.zeros((TILING.runs, ROW.block_dim), tl.float32)
    for turn in range(0, tl.max(length, 0), 2):
        # Two ids of each run at a time: both offsets are loaded before the first gradient.
        i = start + turn
        here, next_too = turn < length, turn + 1 < length
        at = tl.load(runs.gradient_at + i, mask=here, other=0).to(tl.int64)[:, None] * 4 + column[None, :]
        next_at = tl.load(runs.gradient_at + i + 1, mask=next_too, other=0).to(tl.int64)[:, None] * 4 + column[None, :]
        # [runs, block_dim]
        rows = tl.load(runs.gradient + at, mask=here[:, None] & (column < ROW.dim)[None, :], other=0.0).to(tl.float32)
        next_rows = tl.load(runs.gradient + next_at, mask=next_too[:, None] & (column < ROW.dim)[None, :], other=0.0)
        next_rows = next_rows.to(tl.float32)
        if TILING.scaled:
            rows = rows * tl.load(runs.scales + i, mask=here, other=0.0)[:, None]
            next_rows = next_rows * tl.load(runs.scales + i + 1, mask=next_too, other=0.0)[:, None]
        total += rows
        total += next_rows
    store_updated_rows(stored, key, live, weight, state, total, rule, UPDATE, ROW)
    return longest


@triton.jit(noinline=True)  # rarely called; inlined, it would take registers from the runs side by side
def _update_run(
    run,
    runs,
    stored,
    rule,
    TILING: tl.constexpr,
    UPDATE: tl.constexpr,
    ROW: tl.constexpr,
):
    """Update the row of one run with the whole program, unless the run is short or cut into chunks."""
    start = tl.load(runs.starts + run)
    length = tl.load(runs.starts + run + 1) - start
    if (length > TILING.short_ids) & (length <= TILING.chunk_ids):
        total = _sum_gradients(runs, start, length, TILING, ROW)
        _update_row(run, total, runs, stored, rule, UPDATE, ROW)


@triton.jit(
    do_not_specialize=["range_index", "weight_at", "first_at", "second_at", "third_at", "step", "seed", "factor"]
)
def _update_rows(
    run_keys,  # these eight as in `PreparedRuns`
    run_starts,
    gradient_at,
    scales,
    shared,
    chunk_run,
    chunk_first,
    bounds,
    gradient,  # see `RowUpdate`
    weights,  # see `OptimizerRows`, also for the states
    first_states,
    second_states,
    third_states,
    chunk_sums,  # [max chunks, dim] float32
    range_index,
    weight_at: tl.int64,
    first_at: tl.int64,
    second_at: tl.int64,
    third_at: tl.int64,
    numbers,  # these five as in `Rule`
    clock,
    step: tl.int64,
    seed: tl.int64,
    factor,
    TILING: tl.constexpr,
    UPDATE: tl.constexpr,
    ROW: tl.constexpr,
):
    """Do the tasks p, p + P, .. of one range of rows, as program p of P: the chunks of long runs, then the other runs.

    A task is one chunk, whose gradients are summed, or `TILING.runs` consecutive runs, whose rows are updated.

    Memory: each row and its states are updated by one program alone.

    Order: on the stream, the kernel follows the wait for the gradients' flags. Programs count a run's stored chunks in
    `shared` (acquire and release, GPU scope); the last one sees the sums of all.

    Example: runs a, b, c and d of 1, 1, 7 and 1 ids, chunks of 3 ids, 2 runs a task. Tasks 0, 1 and 2 sum the chunks of
    c; the last to finish updates c. Task 3 updates a and b, task 4 updates d.
    """
    runs = RunPointers(run_keys, run_starts, gradient_at, scales, gradient)
    stored = RowPointers(
        weights, (first_states, second_states, third_states), weight_at, (first_at, second_at, third_at)
    )
    rule = rule_at(numbers, clock, step, seed, factor)
    begin = tl.load(bounds + range_index)
    end = tl.load(bounds + range_index + 1)
    chunks = tl.load(shared + CHUNKS)
    for task in range(tl.program_id(0), chunks + tl.cdiv(end - begin, TILING.runs), tl.num_programs(0)):
        if task < chunks:
            run = tl.load(chunk_run + task).to(tl.int64)
            if (run >= begin) & (run < end):  # other ranges have chunks too
                _sum_chunk(task, run, runs, shared, chunk_first, chunk_sums, stored, rule, TILING, UPDATE, ROW)
        else:
            first = begin + (task - chunks) * TILING.runs
            side_by_side = first + tl.arange(0, TILING.runs)
            longest = _update_runs(side_by_side, side_by_side < end, runs, stored, rule, TILING, UPDATE, ROW)
            if longest > TILING.short_ids:
                for run in range(first, tl.minimum(first + TILING.runs, end)):
                    _update_run(run, runs, stored, rule, TILING, UPDATE, ROW)


def _runs_a_task(dim: int) -> int:
    return min(8, max(1, _ROW_ELEMENTS // power_of_2(dim)))


def _compiled(
    dim: int,
    weights: torch.dtype,
    scaled: bool,
    optimizer: str,
    stochastic: bool,
    chunk_ids: int,
    reserved: tuple[int, int, int] = (0, 0, 0),
) -> CompiledKernel:
    block = power_of_2(dim)
    warps = max(1, block // 256)
    states = (*STATES[optimizer], *[None] * (MOST_STATES - len(STATES[optimizer])))
    tile = max(1, _TILE_ELEMENTS * warps // block)
    return specialised(
        _update_rows,
        num_warps=warps,
        TILING=RunTiling(_runs_a_task(dim), min(_SHORT_IDS, chunk_ids), tile, chunk_ids, scaled),
        # Not in a tuple: Triton's cache on disk looks for changes in a function that is an argument itself.
        UPDATE=OPTIMIZERS[optimizer],
        ROW=RowKind(states, dim, block, TYPES[weights], stochastic and weights != torch.float32, *reserved),
    )


class RowUpdate:
    """The update of one range of rows: a call updates each row that a step's ids name, in place.

    Make another one when the rows or their states move. Only one thread may call it at a time.
    """

    def __init__(self, rows: OptimizerRows, chunk_ids: int = CHUNK_IDS) -> None:
        """`chunk_ids` is the one given to `Preparation`."""
        self._rows, self._chunk_ids, self._runs_a_task = rows, chunk_ids, _runs_a_task(rows.dim)
        self._launches: dict[tuple[bool, torch.dtype, torch.dtype], Launch] = {}
        """key: whether ids have weights, types of keys and gradient; a call gives all else that differs"""

    def __call__(self, runs: PreparedRuns, gradient: torch.Tensor, rule: Rule) -> None:
        """Update each row of the range that `runs` name, once, by the sum of its bags' gradients.

        `gradient` is this rank's window, [D_local * B] of the wire type, see `push_gradients`; or [B, D_total], if
        `Preparation` was given `row_units`.
        """
        assert gradient.numel() <= 2**33, (
            f"a gradient window of {gradient.numel()} elements: offsets, int32, count fours of up to 2^33"
        )
        chunk_sums = torch.empty(
            runs.chunk_run.numel() * self._rows.dim, dtype=torch.float32, device=self._rows.weights.device
        )
        key = runs.weighted, runs.run_keys.dtype, gradient.dtype
        launch = self._launches.get(key)
        if launch is None:
            launch = self._launches[key] = self._prepare(runs, gradient, chunk_sums, rule)
        ids = runs.gradient_at.numel()
        programs = min(_PROGRAMS, -(-ids // self._runs_a_task) + runs.chunk_run.numel()) if ids else 0
        launch(*runs[:-1], gradient, chunk_sums, *rule, programs=programs)

    def _prepare(self, runs: PreparedRuns, gradient: torch.Tensor, chunk_sums: torch.Tensor, rule: Rule) -> Launch:
        rows, absent = self._rows, MOST_STATES - len(self._rows.states)
        arguments = (
            *runs[:-1],
            gradient,
            rows.weights,
            *rows.states,
            *[rows.weights] * absent,
            chunk_sums,
            rows.index,
            rows.weight_at,
            *rows.state_at,
            *[0] * absent,
            *rule,
        )
        changing = (*PreparedRuns._fields[:-1], "gradient", "chunk_sums", *Rule._fields)
        scaled = rows.any_mean or runs.weighted
        kernel = _compiled(
            rows.dim,
            rows.weights.dtype,
            scaled,
            rows.optimizer,
            rows.stochastic_rounding,
            self._chunk_ids,
            rows.reserved,
        )
        return Launch(kernel, None, (runs.run_keys.dtype, gradient.dtype), arguments, changing)
