"""The update of a rank's rows from gradients in its window: each row is read once, its gradients are summed in float32,
and it is written once.

The ids are sorted by row; `Preparation` has placed the gradient of each, and cut long runs into chunks. Programs take
one chunk at a time, and sum it; of those that sum the chunks of a run, the last to finish adds up the sums and updates
the row. Programs also take the other runs: short ones side by side, longer ones one by one with the whole program. So a
row that is in n bags costs no more than n rows that are in one bag each. Every sum has a fixed order: two updates of
the same rows by the same gradients give the same bits.

Example: ids of rows  a b c c c c c c c d,  chunks of 3 ids:  c c c | c c c | c  are summed by three programs, of which
the last to finish adds the three sums and updates c; other programs update a, b and d.
"""

import torch
import triton
import triton.language as tl

from dlrm_overlap.kernels.backward.optimizers import (
    MOST_STATES,
    OPTIMIZERS,
    OptimizerRows,
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

_PROGRAMS = 1 << 15  # of a launch, at most; each takes one task after the other
_ROW_ELEMENTS = 256  # of a warp: elements of the rows that it updates side by side
_BESIDE_IDS = 16  # longer runs have a program to themselves, which sums several of their ids at a time
_TILE_ELEMENTS = 512  # of a warp: elements of one run's gradients that it loads at a time


@triton.jit
def _update_row(
    run, total, run_keys, stored, rule,
    UPDATE: tl.constexpr, STATES: tl.constexpr, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, WEIGHT: tl.constexpr,
    STOCHASTIC: tl.constexpr,
):  # fmt: skip
    """Load the row of `run`, update it by `factor` times the sum `total` [BLOCK_DIM] of its gradients, and store it."""
    one = tl.arange(0, 1)
    key = tl.load(run_keys + run + one).to(tl.int64)
    weight, state = load_rows(stored, key, one == 0, STATES, DIM, BLOCK_DIM)
    store_updated_rows(
        stored, key, one == 0, weight, state, total[None, :], rule,
        UPDATE, STATES, DIM, BLOCK_DIM, WEIGHT, STOCHASTIC,
    )  # fmt: skip


@triton.jit
def _sum_gradients(
    gradient, gradient_at, scales, first, length,
    TILE: tl.constexpr, SCALED: tl.constexpr, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr,
):  # fmt: skip
    """Return the sum [BLOCK_DIM] float32 of the gradients of ids [first, first + length), TILE of them at a time.

    Row t of the tile adds up ids first + t, first + t + TILE, ..; then the rows of the tile are added up.
    """
    column = tl.arange(0, BLOCK_DIM)
    total = tl.zeros((TILE, BLOCK_DIM), tl.float32)
    for turn in range(0, length, TILE):
        i = first + turn + tl.arange(0, TILE)
        live = i < first + length
        at = tl.load(gradient_at + i, mask=live, other=0).to(tl.int64)[:, None] * 4 + column[None, :]
        rows = tl.load(gradient + at, mask=live[:, None] & (column < DIM)[None, :], other=0.0).to(tl.float32)
        if SCALED:
            rows = rows * tl.load(scales + i, mask=live, other=0.0)[:, None]
        total += rows
    return tl.sum(total, 0)


@triton.jit
def _sum_chunk(
    chunk, run, run_keys, run_starts, gradient_at, scales, shared, chunk_first, gradient, chunk_sums, stored, rule,
    TILE: tl.constexpr, CHUNK_IDS: tl.constexpr, SCALED: tl.constexpr, UPDATE: tl.constexpr, STATES: tl.constexpr,
    DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, WEIGHT: tl.constexpr, STOCHASTIC: tl.constexpr,
):  # fmt: skip
    """Sum the gradients of one chunk of `run`; if it is the run's last to be finished, update the row as well.

    The program stores the chunk's sum to `chunk_sums` and counts it. The one that counts last adds up the sums of all
    chunks of the run, in an order that is always the same, and updates the row by the total.
    """
    column = tl.arange(0, BLOCK_DIM)
    first_chunk = tl.load(chunk_first + chunk).to(tl.int64)
    start = tl.load(run_starts + run)
    length = tl.load(run_starts + run + 1) - start
    ids = chunk_ids_of(length, CHUNK_IDS)
    skipped = (chunk - first_chunk).to(tl.int32) * ids
    chunk_sum = _sum_gradients(
        gradient, gradient_at, scales, start + skipped, tl.minimum(ids, length - skipped),
        TILE, SCALED, DIM, BLOCK_DIM,
    )  # fmt: skip
    tl.store(chunk_sums + chunk * DIM + column, chunk_sum, mask=column < DIM)
    count = tl.cdiv(length, ids)
    done = shared + DONE + first_chunk
    tl.debug_barrier()  # all threads have stored before one of them counts the chunk
    if tl.atomic_add(done, 1, sem="acq_rel", scope="gpu") == count - 1:
        tl.debug_barrier()  # no thread reads what other programs stored before one has acquired
        tl.store(done, 0)
        total = tl.zeros((TILE, BLOCK_DIM), tl.float32)
        for turn in range(0, count, TILE):
            of_run = turn + tl.arange(0, TILE)
            mask = (of_run < count)[:, None] & (column < DIM)[None, :]
            total += tl.load(chunk_sums + (first_chunk + of_run)[:, None] * DIM + column[None, :], mask=mask, other=0.0)
        _update_row(
            run, tl.sum(total, 0), run_keys, stored, rule,
            UPDATE, STATES, DIM, BLOCK_DIM, WEIGHT, STOCHASTIC,
        )  # fmt: skip


@triton.jit
def _update_runs(
    run, live, run_keys, run_starts, gradient_at, scales, gradient, stored, rule,
    RUNS: tl.constexpr, BESIDE_IDS: tl.constexpr, SCALED: tl.constexpr,
    UPDATE: tl.constexpr, STATES: tl.constexpr, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, WEIGHT: tl.constexpr,
    STOCHASTIC: tl.constexpr,
):  # fmt: skip
    """Update the rows of runs `run` [RUNS] side by side, where `live` and of up to BESIDE_IDS ids.

    Returns the number of ids of the longest of the runs, whether it was updated or not.
    """
    column = tl.arange(0, BLOCK_DIM)
    start = tl.load(run_starts + run, mask=live, other=0)
    length = tl.load(run_starts + run + 1, mask=live, other=0) - start
    longest = tl.max(length, 0)
    live = live & (length <= BESIDE_IDS)
    length = tl.where(live, length, 0)
    key = tl.load(run_keys + run, mask=live, other=0).to(tl.int64)
    # Loaded first, so that the rows are on their way while the gradients are summed.
    weight, state = load_rows(stored, key, live, STATES, DIM, BLOCK_DIM)
    total = tl.zeros((RUNS, BLOCK_DIM), tl.float32)
    for turn in range(0, tl.max(length, 0), 2):
        # Two ids of each run at a time: both offsets are loaded before the first gradient.
        i = start + turn
        here, next_too = turn < length, turn + 1 < length
        at = tl.load(gradient_at + i, mask=here, other=0).to(tl.int64)[:, None] * 4 + column[None, :]
        next_at = tl.load(gradient_at + i + 1, mask=next_too, other=0).to(tl.int64)[:, None] * 4 + column[None, :]
        rows = tl.load(gradient + at, mask=here[:, None] & (column < DIM)[None, :], other=0.0).to(tl.float32)
        next_rows = tl.load(gradient + next_at, mask=next_too[:, None] & (column < DIM)[None, :], other=0.0)
        next_rows = next_rows.to(tl.float32)
        if SCALED:
            rows = rows * tl.load(scales + i, mask=here, other=0.0)[:, None]
            next_rows = next_rows * tl.load(scales + i + 1, mask=next_too, other=0.0)[:, None]
        total += rows
        total += next_rows
    store_updated_rows(
        stored, key, live, weight, state, total, rule,
        UPDATE, STATES, DIM, BLOCK_DIM, WEIGHT, STOCHASTIC,
    )  # fmt: skip
    return longest


@triton.jit(noinline=True)  # rarely called; inlined, it would take registers from the runs side by side
def _update_run(
    run, run_keys, run_starts, gradient_at, scales, gradient, stored, rule,
    TILE: tl.constexpr, BESIDE_IDS: tl.constexpr, CHUNK_IDS: tl.constexpr, SCALED: tl.constexpr,
    UPDATE: tl.constexpr, STATES: tl.constexpr, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, WEIGHT: tl.constexpr,
    STOCHASTIC: tl.constexpr,
):  # fmt: skip
    """Update the row of one run with the whole program, if the run has more than BESIDE_IDS ids and is not cut.

    The program sums several of the run's ids at a time. It leaves alone shorter runs, which `_update_runs` updates, and
    runs of more than CHUNK_IDS ids, which are summed by chunks.
    """
    start = tl.load(run_starts + run)
    length = tl.load(run_starts + run + 1) - start
    if (length > BESIDE_IDS) & (length <= CHUNK_IDS):
        total = _sum_gradients(gradient, gradient_at, scales, start, length, TILE, SCALED, DIM, BLOCK_DIM)
        _update_row(
            run, total, run_keys, stored, rule,
            UPDATE, STATES, DIM, BLOCK_DIM, WEIGHT, STOCHASTIC,
        )  # fmt: skip


@triton.jit(
    do_not_specialize=["range_index", "weight_at", "first_at", "second_at", "third_at", "step", "seed", "factor"]
)
def _update_rows(
    run_keys, run_starts, gradient_at, scales, shared, chunk_run, chunk_first, bounds,
    gradient, weights, first_states, second_states, third_states, chunk_sums, range_index,
    weight_at: tl.int64, first_at: tl.int64, second_at: tl.int64, third_at: tl.int64,
    numbers, clock, step: tl.int64, seed: tl.int64, factor,
    RUNS: tl.constexpr, BESIDE_IDS: tl.constexpr, TILE: tl.constexpr, CHUNK_IDS: tl.constexpr, SCALED: tl.constexpr,
    UPDATE: tl.constexpr, STATES: tl.constexpr, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, WEIGHT: tl.constexpr,
    STOCHASTIC: tl.constexpr,
):  # fmt: skip
    """Do the tasks p, p + P, .. of one range of rows, as program p of P: the chunks of long runs, then the other runs.

    A task is one chunk, whose gradients are summed, or RUNS consecutive runs, whose rows are updated.

    Memory: the program reads the optimizer's `numbers` and the `clock`, see `Rule`, the keys, starts, offsets and
    factors that `Preparation` has left, and the gradients in this rank's `gradient` window. It rewrites the rows in
    `weights` of the runs that it completes, and their states, each row by one program alone, and stores the sums of
    chunks to `chunk_sums` [chunks, DIM].

    Order: on the stream the kernel follows the wait for the gradients' flags. A program stores a chunk's sum, passes a
    barrier, and counts the chunk in `shared` (acquire and release, GPU scope). The program that counts a run's last
    chunk passes another barrier, and so sees the sums of all; it sets the count back to 0 and updates the row. Chunks
    come before other tasks, since they take longest. Other tasks share nothing.

    Example: runs a, b, c and d of 1, 1, 7 and 1 ids, CHUNK_IDS 3, RUNS 2. Tasks 0, 1 and 2 sum the chunks of c, of 3, 3
    and 1 ids; the last of them to finish updates c. Task 3 updates a and b. Task 4 updates d and leaves c alone.

    Source: ours; the ids are sorted by row as in FBGEMM's backward.
    """
    stored = RowPointers(
        weights, (first_states, second_states, third_states), weight_at, (first_at, second_at, third_at)
    )
    rule = rule_at(numbers, clock, step, seed, factor)
    begin = tl.load(bounds + range_index)
    end = tl.load(bounds + range_index + 1)
    chunks = tl.load(shared + CHUNKS)
    for task in range(tl.program_id(0), chunks + tl.cdiv(end - begin, RUNS), tl.num_programs(0)):
        if task < chunks:
            run = tl.load(chunk_run + task).to(tl.int64)
            if (run >= begin) & (run < end):
                _sum_chunk(
                    task, run, run_keys, run_starts, gradient_at, scales, shared, chunk_first, gradient,
                    chunk_sums, stored, rule,
                    TILE, CHUNK_IDS, SCALED, UPDATE, STATES, DIM, BLOCK_DIM, WEIGHT, STOCHASTIC,
                )  # fmt: skip
        else:
            first = begin + (task - chunks) * RUNS
            runs = first + tl.arange(0, RUNS)
            longest = _update_runs(
                runs, runs < end, run_keys, run_starts, gradient_at, scales, gradient, stored, rule,
                RUNS, BESIDE_IDS, SCALED, UPDATE, STATES, DIM, BLOCK_DIM, WEIGHT, STOCHASTIC,
            )  # fmt: skip
            if longest > BESIDE_IDS:
                for run in range(first, tl.minimum(first + RUNS, end)):
                    _update_run(
                        run, run_keys, run_starts, gradient_at, scales, gradient, stored, rule,
                        TILE, BESIDE_IDS, CHUNK_IDS, SCALED, UPDATE, STATES, DIM, BLOCK_DIM, WEIGHT, STOCHASTIC,
                    )  # fmt: skip


def _runs_a_task(dim: int) -> int:
    return min(8, max(1, _ROW_ELEMENTS // power_of_2(dim)))


def _compiled(
    dim: int, weights: torch.dtype, scaled: bool, optimizer: str, stochastic: bool, chunk_ids: int
) -> CompiledKernel:
    block = power_of_2(dim)
    warps = max(1, block // 256)
    states = (*STATES[optimizer], *[None] * (MOST_STATES - len(STATES[optimizer])))
    return specialised(
        _update_rows, num_warps=warps,
        RUNS=_runs_a_task(dim), BESIDE_IDS=min(_BESIDE_IDS, chunk_ids), TILE=max(1, _TILE_ELEMENTS * warps // block),
        CHUNK_IDS=chunk_ids, SCALED=scaled, UPDATE=OPTIMIZERS[optimizer], STATES=states, DIM=dim, BLOCK_DIM=block,
        WEIGHT=TYPES[weights], STOCHASTIC=stochastic and weights != torch.float32,
    )  # fmt: skip


class RowUpdate:
    """The update of one range of rows: called once a step, it updates each row that the step's ids name, in place.

    It keeps its launches, and so holds the rows and their states, which must stay where they are; its owner makes it
    anew when they move. It belongs to one caller, as a `Launch` does.
    """

    def __init__(self, rows: OptimizerRows, chunk_ids: int = CHUNK_IDS) -> None:
        """Take the rows.

        Args:
            rows: the range.
            chunk_ids: as given to `Preparation`.
        """
        self._rows, self._chunk_ids = rows, chunk_ids
        self._launches: dict[tuple[bool, torch.dtype, torch.dtype], Launch] = {}
        """by whether ids have weights, and the types of keys and gradient: each call gives all else that differs"""

    def __call__(self, runs: PreparedRuns, gradient: torch.Tensor, rule: Rule) -> None:
        """Update each row of the range that `runs` name, once, by the sum of its bags' gradients.

        Args:
            runs: of the step's ids.
            gradient: [D_local * B] of the wire's type, this rank's gradient window: [B, D] for each shard, see
                `prepare_push_gradients`. Or, if `Preparation` was given `row_units`, [B, D_total] with such rows.
            rule: the optimizer's numbers at this step.
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
            launch = self._launches[key] = self._prepared(runs, gradient, chunk_sums, rule)
        ids, runs_a_task = runs.gradient_at.numel(), _runs_a_task(self._rows.dim)
        programs = min(_PROGRAMS, -(-ids // runs_a_task) + runs.chunk_run.numel()) if ids else 0
        launch(*runs[:-1], gradient, chunk_sums, *rule, programs=programs)

    def _prepared(self, runs: PreparedRuns, gradient: torch.Tensor, chunk_sums: torch.Tensor, rule: Rule) -> Launch:
        """Return the launch for keys and gradients of these types."""
        rows, absent = self._rows, MOST_STATES - len(self._rows.states)
        arguments = (
            *runs[:-1],
            gradient, rows.weights, *rows.states, *[rows.weights] * absent, chunk_sums,
            rows.index, rows.weight_at, *rows.state_at, *[0] * absent,
            *rule,
        )  # fmt: skip
        changing = (*PreparedRuns._fields[:-1], "gradient", "chunk_sums", *Rule._fields)
        kernel = _compiled(
            rows.dim, rows.weights.dtype, rows.any_mean or runs.weighted, rows.optimizer, rows.stochastic_rounding,
            self._chunk_ids,
        )  # fmt: skip
        return Launch(kernel, None, (runs.run_keys.dtype, gradient.dtype), arguments, changing)
