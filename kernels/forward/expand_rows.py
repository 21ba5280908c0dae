"""Copies rows: each distinct row has arrived once, and every id that names it gets a copy.

Example: rows a, b, c and slots 2 0 2 -1 give c a c and a row of zeros.
"""

import torch
import triton
import triton.language as tl

from dlrm_overlap.kernels.compiled import specialised
from dlrm_overlap.kernels.tuning import power_of_2

_TASK_ELEMENTS = 2048  # per program
_NUM_WARPS = 4


@triton.jit(do_not_specialize=["count"])
def _expand_rows(
    rows,  # [n, DIM]
    slots,  # [count] int32
    expanded,  # [count, DIM]
    count,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    """Copy the rows that ROWS of `slots` name; zeros where a slot is negative.

    Order: on the stream, the kernel follows the wait for the peers' flags.
    """
    i = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK_DIM)[None, :]
    slot = tl.load(slots + i, mask=i < count, other=-1).to(tl.int64)
    inside = (column < DIM) & (i < count)[:, None]
    # [ROWS, BLOCK_DIM]
    row = tl.load(rows + slot[:, None] * DIM + column, mask=inside & (slot >= 0)[:, None], other=0.0)
    tl.store(expanded + i[:, None] * DIM + column, row, mask=inside)


def expand_rows(rows: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Return the row of each of `slots` [m] int32, [m, D], or zeros for a negative one.

    `rows` [n, D] are float32, bfloat16 or float16, contiguous.
    """
    assert rows.is_contiguous()
    expanded = rows.new_empty(slots.numel(), rows.shape[1])
    dim, block = rows.shape[1], power_of_2(rows.shape[1])
    here = max(1, _TASK_ELEMENTS // block)
    kernel = specialised(_expand_rows, num_warps=_NUM_WARPS, ROWS=here, DIM=dim, BLOCK_DIM=block)
    kernel(-(-slots.numel() // here), (rows.dtype,), rows, slots, expanded, slots.numel())
    return expanded
