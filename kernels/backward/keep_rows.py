"""Rows put by as they are behind a step, a few at a time, while steps go on to update them.

A copy of all rows takes longer than a step. So `copy_rows` copies some of them between every two steps, in the order of
their keys, and the update of rows puts by, of those that it has loaded, the ones that the copy has not come to
(`put_by_loaded`); where FBGEMM updates the rows, `keep_rows` runs before. A row is put by once: its mark is the number
of the copy then, and rows with that mark are passed over. When the copy has come to the last row, every row was put by
as it was at the beginning.

Example: rows of keys 0 to 3, copy number 7. Keys 0 and 1 are copied. The next step updates keys 1 and 3: it passes over
1, which the copy has, puts 3 by and marks it 7. The next step updates 3 again: its mark is 7, so it is left alone. Then
`copy_rows` of keys 2 and 3 copies 2 and passes over 3.
"""

from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from dlrm_overlap.kernels.arguments import power_of_2
from dlrm_overlap.kernels.backward.optimizers import RowRange, elements
from dlrm_overlap.kernels.backward.row_runs import PreparedRuns
from dlrm_overlap.kernels.compiled import CompiledKernel

_TILE_ELEMENTS = 1024  # of the rows that a program copies side by side, in each turn


class KeptPlaces(NamedTuple):
    """Where the rows of a range are put by, and how far the copy is."""

    weights: torch.Tensor
    """as those of the range, where rows are put by"""
    states: torch.Tensor
    """the same; any tensor under SGD"""
    marks: torch.Tensor
    """[keys] int32: of each row the number of the copy that has put it by"""
    control: torch.Tensor
    """[2] int64: number of the copy under way, 1 or more, or 0; the first key that it has not come to"""


@triton.jit
def _put_by(
    weights, states, kept_weights, kept_states, marks, copy, key, live, weight_at, state_at,
    OPTIMIZER: tl.constexpr, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr,
):  # fmt: skip
    """Copy the rows of `key` [N] int64 and their states, where `live` and not marked by `copy` yet.

    Each warp loads the marks of its own rows, and one of them stores those of all. So all warps have to be through with
    their loads before: a warp that came late would find its rows marked, and leave them out.
    """
    live = live & (tl.load(marks + key, mask=live, other=0) != copy)
    column = tl.arange(0, BLOCK_DIM)
    both = live[:, None] & (column < DIM)[None, :]
    at = (weight_at + key * (DIM // 4))[:, None] * 4 + column[None, :]
    state, there = at, both  # of SGD, which has none
    if OPTIMIZER == "adagrad":
        state = (state_at + key * (DIM // 4))[:, None] * 4 + column[None, :]
    elif OPTIMIZER == "rowwise_adagrad":
        state, there = state_at + key, live
    row = tl.load(weights + at, mask=both)
    if OPTIMIZER != "sgd":  # loaded before anything is stored, behind which the compiler would have to leave it
        numbers = tl.load(states + state, mask=there)
        tl.store(kept_states + state, numbers, mask=there)
    tl.store(kept_weights + at, row, mask=both)
    tl.debug_barrier()
    tl.store(marks + key, tl.zeros_like(key).to(tl.int32) + copy, mask=live)


@triton.jit
def put_by_loaded(
    weight, state, kept_weights, kept_states, marks, control, weight_at, state_at, key, mask,
    OPTIMIZER: tl.constexpr, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, WEIGHT: tl.constexpr,
):  # fmt: skip
    """Put by what `load_rows` has returned of the rows of `key` [N], where `mask`, the copy under way asks for it.

    That saves to read the rows once more. All warps have loaded the marks before one stores them, as in `_put_by`.
    """
    copy = tl.load(control).to(tl.int32)
    if copy != 0:
        live = mask & (key >= tl.load(control + 1))
        live = live & (tl.load(marks + key, mask=live, other=0) != copy)
        both = live[:, None] & (tl.arange(0, BLOCK_DIM) < DIM)[None, :]
        tl.store(kept_weights + elements(weight_at, key, DIM, BLOCK_DIM), weight.to(WEIGHT), mask=both)
        if OPTIMIZER == "adagrad":
            tl.store(kept_states + elements(state_at, key, DIM, BLOCK_DIM), state, mask=both)
        elif OPTIMIZER == "rowwise_adagrad":
            tl.store(kept_states + state_at + key, state, mask=live)
        tl.debug_barrier()
        tl.store(marks + key, tl.zeros_like(key).to(tl.int32) + copy, mask=live)


@triton.jit(do_not_specialize=["range_index", "weight_at", "state_at"])
def _keep_rows(
    run_keys, bounds, weights, states, kept_weights, kept_states, marks, control,
    range_index, weight_at: tl.int64, state_at: tl.int64,
    ROWS: tl.constexpr, OPTIMIZER: tl.constexpr, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr,
):  # fmt: skip
    """Put by the rows of runs p * ROWS, .. of one range, as program p, then those P * ROWS further on, P programs.

    Memory: reads `control` [2] int64, the number of the copy under way, 0 for none, and the first key that it has not
    come to; the keys of the range's runs; the rows and states of those to be put by, and rewrites them in
    `kept_weights` and `kept_states`, at the same places, and their `marks` [keys] int32.

    Order: on its stream it follows the sort of the ids and comes before the update of the rows; copies of other rows
    come before or after the step. The keys of runs differ, so programs share nothing.
    """
    copy = tl.load(control).to(tl.int32)
    if copy != 0:
        frontier = tl.load(control + 1)
        begin = tl.load(bounds + range_index)
        end = tl.load(bounds + range_index + 1)
        for task in range(tl.program_id(0), tl.cdiv(end - begin, ROWS), tl.num_programs(0)):
            run = begin + task * ROWS + tl.arange(0, ROWS)
            live = run < end
            key = tl.load(run_keys + run, mask=live, other=0).to(tl.int64)
            _put_by(
                weights, states, kept_weights, kept_states, marks, copy, key, live & (key >= frontier),
                weight_at, state_at, OPTIMIZER, DIM, BLOCK_DIM,
            )  # fmt: skip


@triton.jit(do_not_specialize=["first_key", "end_key", "weight_at", "state_at"])
def _copy_rows(
    weights, states, kept_weights, kept_states, marks, control,
    first_key: tl.int64, end_key: tl.int64, weight_at: tl.int64, state_at: tl.int64,
    ROWS: tl.constexpr, OPTIMIZER: tl.constexpr, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr,
):  # fmt: skip
    """Put by the rows of keys first_key + p * ROWS, .. before end_key, as program p.

    Memory: as `_keep_rows`, but for the runs.

    Order: on the stream of the steps, between two of them.
    """
    copy = tl.load(control).to(tl.int32)
    key = first_key + tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    _put_by(
        weights, states, kept_weights, kept_states, marks, copy, key, key < end_key,
        weight_at, state_at, OPTIMIZER, DIM, BLOCK_DIM,
    )  # fmt: skip


_KEPT = ("weights", "states", "kept_weights", "kept_states", "marks", "control")
_KEEP_ARGUMENTS = ("run_keys", "bounds", *_KEPT, "range_index", "weight_at", "state_at")
_COPY_ARGUMENTS = (*_KEPT, "first_key", "end_key", "weight_at", "state_at")


@lru_cache
def _compiled(keeps: bool, dim: int, optimizer: str) -> CompiledKernel:
    block = power_of_2(dim)
    rows = max(1, _TILE_ELEMENTS // block)
    constants = {"ROWS": rows, "OPTIMIZER": optimizer, "DIM": dim, "BLOCK_DIM": block}
    kernel, arguments = (_keep_rows, _KEEP_ARGUMENTS) if keeps else (_copy_rows, _COPY_ARGUMENTS)
    return CompiledKernel(kernel, arguments, constants, num_warps=4)


def keep_rows(programs: int, runs: PreparedRuns, rows: RowRange, kept: KeptPlaces) -> None:
    """Put by the rows of a range that `runs` name and the copy under way, if any, has not come to.

    Args:
        programs: of the launch.
        runs: of the step that is about to update the rows.
        rows: the range.
        kept: where they are put by.
    """
    _compiled(True, rows.dim, rows.optimizer)(
        programs,
        (runs.run_keys.dtype, rows.weights.dtype),
        runs.run_keys, runs.bounds, rows.weights, rows.states, *kept,
        rows.index, rows.weight_at, rows.state_at,
    )  # fmt: skip


def copy_rows(first_key: int, end_key: int, rows: RowRange, kept: KeptPlaces) -> None:
    """Put by the rows of keys [first_key, end_key) of a range, but those that `keep_rows` has put by.

    Args:
        first_key: the first of them.
        end_key: the one behind the last.
        rows: the range.
        kept: where they are put by; a copy is under way.
    """
    kernel = _compiled(False, rows.dim, rows.optimizer)
    kernel(
        -(-(end_key - first_key) // kernel.constants["ROWS"]),
        (rows.weights.dtype,),
        rows.weights, rows.states, *kept,
        first_key, end_key, rows.weight_at, rows.state_at,
    )  # fmt: skip
