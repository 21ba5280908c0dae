"""Rows updated by atomic additions as their ids come, for comparison with `row_update` (Chen et al. 2024)."""

from functools import lru_cache

import torch
import triton
import triton.language as tl

from dlrm_overlap.kernels.arguments import power_of_2
from dlrm_overlap.kernels.backward.row_runs import FIRST_KEY, MEAN, POSITION_COLUMNS, START_AT, Positions
from dlrm_overlap.kernels.backward.update_rows import RowRange, Rule
from dlrm_overlap.kernels.compiled import TYPES, CompiledKernel


@triton.jit(
    do_not_specialize=["first_position", "blocks", "batch", "weight_at", "lr"],
    do_not_specialize_on_alignment=["values", "offsets"],
)
def _add_to_rows(
    values,
    offsets,
    positions,
    gradient,
    weights,
    first_position,
    blocks,
    batch: tl.int64,
    weight_at: tl.int64,
    lr,
    BAGS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    WEIGHT: tl.constexpr,
):
    """Add -lr times the gradient of each of BAGS bags of one feature to every row that the bag's ids name.

    The program reads the bags' offsets and ids and, from this rank's window, their gradients; rows of `weights` change
    by atomics alone, relaxed, at GPU scope, since other programs add to the same rows. Nothing is ordered but by the
    kernel's beginning, behind the wait for the gradients' flags, and its end: sums depend on who comes first.

    Example: BAGS 2, lr 1, bags [5, 7] and [5] of gradients g and h. Turn 0 adds -g and -h to row 5, turn 1 adds -g to
    row 7. A mean would have added -g / 2.

    Source: Chen et al. 2024, where it is future work.
    """
    column = tl.arange(0, BLOCK_DIM)
    position = (first_position + tl.program_id(0) // blocks).to(tl.int64)
    entry = positions + position * POSITION_COLUMNS
    sample = (tl.program_id(0) % blocks) * BAGS + tl.arange(0, BAGS).to(tl.int64)
    live = sample < batch
    bag = offsets + position * batch + sample
    first = tl.load(bag, mask=live, other=0)
    length = tl.load(bag + 1, mask=live, other=0) - first
    mask = (length > 0)[:, None] & (column < DIM)[None, :]
    at = (tl.load(entry + START_AT) * batch + sample * (DIM // 4))[:, None] * 4 + column[None, :]
    step = tl.load(gradient + at, mask=mask, other=0.0).to(tl.float32) * -lr
    if tl.load(entry + MEAN) != 0:
        step = step * (1.0 / tl.maximum(length, 1).to(tl.float32))[:, None]
    step = step.to(WEIGHT)
    table = weights + (weight_at + tl.load(entry + FIRST_KEY) * (DIM // 4)) * 4
    for turn in range(0, tl.max(length, 0)):
        here = turn < length
        row = tl.load(values + first + turn, mask=here, other=0).to(tl.int64)
        rows = table + row[:, None] * DIM + column[None, :]
        tl.atomic_add(rows, step, mask=here[:, None] & (column < DIM)[None, :], sem="relaxed", scope="gpu")


@lru_cache
def _adding(dim: int, weights: torch.dtype) -> CompiledKernel:
    block = power_of_2(dim)
    constants = {"BAGS": max(1, 256 // block), "DIM": dim, "BLOCK_DIM": block, "WEIGHT": TYPES[weights]}
    return CompiledKernel(_add_to_rows, {"num_warps": max(1, block // 256)}, constants)


def add_to_rows(
    values: torch.Tensor,
    offsets: torch.Tensor,
    samples: int,
    positions: Positions,
    first: int,
    end: int,
    rows: RowRange,
    gradient: torch.Tensor,
    rule: Rule,
) -> None:
    """SGD by atomic additions, id by id in whatever order: not deterministic, for comparison (Chen et al. 2024).

    Args:
        values: [n] int32 or int64, row ids, unsorted.
        offsets: [positions * B + 1] int32 or int64.
        samples: of all ranks, B.
        first: position of the range's first feature.
        end: behind its last.
        gradient: as for `update_rows`.
    """
    assert rows.optimizer == "sgd", "no other optimizer's update is a sum"
    form = _adding(rows.dim, rows.weights.dtype)
    blocks = -(-samples // form.constants["BAGS"])
    form(
        blocks * (end - first),
        (values.dtype, offsets.dtype, gradient.dtype),
        values,
        offsets,
        positions.entries,
        gradient,
        rows.weights,
        first,
        blocks,
        samples,
        rows.weight_at,
        rule.lr,
    )
