"""The update of a rank's rows by atomic additions, id by id and without a sort, for comparison with `update_rows`
(Chen et al. 2024).
"""

from functools import lru_cache

import torch
import triton
import triton.language as tl

from dlrm_overlap.kernels.arguments import power_of_2
from dlrm_overlap.kernels.backward.optimizers import RowRange, Rule
from dlrm_overlap.kernels.backward.row_runs import FIRST_KEY, INPUT_FEATURE_COLUMNS, MEAN, START_AT, InputFeatures
from dlrm_overlap.kernels.compiled import TYPES, CompiledKernel


@triton.jit(
    do_not_specialize=["first_feature", "blocks", "batch", "weight_at", "factor"],
    do_not_specialize_on_alignment=["values", "offsets", "id_weights"],
)
def _add_to_rows(
    values, offsets, id_weights, input_features, gradient, weights, numbers,
    first_feature, blocks, batch: tl.int64, weight_at: tl.int64, factor,
    BAGS: tl.constexpr, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, WEIGHT: tl.constexpr,
):  # fmt: skip
    """Add -lr * factor times the gradient of each of BAGS bags of one feature to every row that the bag's ids name,
    times the id's weight where `id_weights` are float32.

    Memory: the program reads lr, numbers[0], the offsets, ids and weights of its bags and, from this rank's `gradient`
    window, their gradients. It changes rows in `weights` by atomic additions alone, relaxed, at GPU scope, since other
    programs add to the same rows.

    Order: the kernel follows the wait for the gradients' flags on the stream, and its end orders the rows for what
    comes next. Between programs nothing is ordered, so the rounding of a sum depends on who adds first.

    Example: BAGS 2, lr 1, bags [5, 7] and [5] with gradients g and h. Turn 0 adds -g and -h to row 5; turn 1 adds -g to
    row 7. If the feature were a mean, -g / 2 would be added instead of -g.

    Source: Chen et al. 2024, which leave it as future work.
    """
    column = tl.arange(0, BLOCK_DIM)
    feature = (first_feature + tl.program_id(0) // blocks).to(tl.int64)
    entry = input_features + feature * INPUT_FEATURE_COLUMNS
    sample = (tl.program_id(0) % blocks) * BAGS + tl.arange(0, BAGS).to(tl.int64)
    live = sample < batch
    bag = offsets + feature * batch + sample
    first = tl.load(bag, mask=live, other=0)
    length = tl.load(bag + 1, mask=live, other=0) - first
    mask = (length > 0)[:, None] & (column < DIM)[None, :]
    at = (tl.load(entry + START_AT) * batch + sample * (DIM // 4))[:, None] * 4 + column[None, :]
    step = tl.load(gradient + at, mask=mask, other=0.0).to(tl.float32) * factor * -tl.load(numbers)
    if tl.load(entry + MEAN) != 0:
        step = step * (1.0 / tl.maximum(length, 1).to(tl.float32))[:, None]
    table = weights + (weight_at + tl.load(entry + FIRST_KEY) * (DIM // 4)) * 4
    for turn in range(0, tl.max(length, 0)):
        here = turn < length
        row = tl.load(values + first + turn, mask=here, other=0).to(tl.int64)
        rows = table + row[:, None] * DIM + column[None, :]
        part = step
        if id_weights.dtype.element_ty == tl.float32:
            part *= tl.load(id_weights + first + turn, mask=here, other=0.0)[:, None]
        tl.atomic_add(rows, part.to(WEIGHT), mask=here[:, None] & (column < DIM)[None, :], sem="relaxed", scope="gpu")


_ARGUMENTS = (
    "values", "offsets", "id_weights", "input_features", "gradient", "weights", "numbers",
    "first_feature", "blocks", "batch", "weight_at", "factor",
)  # fmt: skip


@lru_cache
def _compiled(dim: int, weights: torch.dtype) -> CompiledKernel:
    block = power_of_2(dim)
    constants = {"BAGS": max(1, 256 // block), "DIM": dim, "BLOCK_DIM": block, "WEIGHT": TYPES[weights]}
    return CompiledKernel(_add_to_rows, _ARGUMENTS, constants, num_warps=max(1, block // 256))


def add_to_rows(
    values: torch.Tensor,
    offsets: torch.Tensor,
    samples: int,
    features: InputFeatures,
    first: int,
    end: int,
    rows: RowRange,
    gradient: torch.Tensor,
    rule: Rule,
    id_weights: torch.Tensor | None = None,
) -> None:
    """Update the rows of a range under SGD by atomic additions, id by id in whatever order; not deterministic.

    Args:
        values: [n] int32 or int64, row ids, unsorted.
        offsets: [features * B + 1] int32 or int64, of the bags.
        samples: of all ranks, B.
        features: of the input that has the bags.
        first: index in the input of the range's first feature.
        end: index after that of its last feature.
        gradient: as for `RowUpdate`.
        id_weights: [n] float32, by which the gradient of each id is multiplied; None: ids have none.
    """
    assert rows.optimizer == "sgd", "no other optimizer's update is a sum"
    kernel = _compiled(rows.dim, rows.weights.dtype)
    blocks = -(-samples // kernel.constants["BAGS"])
    each = values if id_weights is None else id_weights
    kernel(
        blocks * (end - first),
        (values.dtype, offsets.dtype, each.dtype, gradient.dtype),
        values, offsets, each, features.entries, gradient, rows.weights, rule.numbers,
        first, blocks, samples, rows.weight_at, rule.factor,
    )  # fmt: skip
