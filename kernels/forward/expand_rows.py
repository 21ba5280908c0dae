"""Rows expanded to where they are named: of rows that have arrived once each, a copy for every id that names one.

Example: rows a, b, c and places 2 0 2 -1 give c a c and a row of zeros.
"""

import torch
import triton
import triton.language as tl

from dlrm_overlap.kernels.compiled import specialised
from dlrm_overlap.kernels.tuning import power_of_2

_TASK_ELEMENTS = 2048  # of a program's rows
_NUM_WARPS = 4


@triton.jit(do_not_specialize=["count"])
def _expand_rows(rows, places, expanded, count, ROWS: tl.constexpr, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr):
    """Copy the rows that ROWS of `places` name.

    Memory: the program reads ROWS of `places` [count] int32 and as many `rows` [n, DIM], and stores them to `expanded`
    [count, DIM], of the same type; zeros where a place is negative. No two programs store to one row.

    Order: the kernel comes after the wait for the peers' flags on the stream.

    Source: ours. TorchRec expands by `index_select` what its index deduplication has left out.
    """
    i = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK_DIM)[None, :]
    place = tl.load(places + i, mask=i < count, other=-1).to(tl.int64)
    inside = (column < DIM) & (i < count)[:, None]
    row = tl.load(rows + place[:, None] * DIM + column, mask=inside & (place >= 0)[:, None], other=0.0)
    tl.store(expanded + i[:, None] * DIM + column, row, mask=inside)


def expand_rows(rows: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Return the row that each place names, or zeros where it is negative.

    Args:
        rows: [n, D] float32, bfloat16 or float16, contiguous.
        places: [m] int32.

    Returns:
        [m, D], of the type of the rows.
    """
    assert rows.is_contiguous()
    expanded = rows.new_empty(places.numel(), rows.shape[1])
    dim, block = rows.shape[1], power_of_2(rows.shape[1])
    here = max(1, _TASK_ELEMENTS // block)
    kernel = specialised(_expand_rows, num_warps=_NUM_WARPS, ROWS=here, DIM=dim, BLOCK_DIM=block)
    kernel(-(-places.numel() // here), (rows.dtype,), rows, places, expanded, places.numel())
    return expanded
