"""How a program of the persistent kernel puts a finished slice into a peer's window; see `Slices.put`."""

import triton
import triton.language as tl

from dlrm_overlap.kernels.forward.pooling import store_rows


@triton.jit
def put_by_stores(
    staged, window, first, end, column,
    ROWS: tl.constexpr, STRIDE: tl.constexpr, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr,
):  # fmt: skip
    """Put `staged` [end - first, DIM] to the rows [first, end) of a peer's window, by this program's own stores.

    The program copies ROWS rows at a time. A put may return before its data has arrived: the caller raises the slice's
    flag next, by a release at system scope, and so after a barrier of the program.

    Example: first 4, end 7, ROWS 2: rows 0 and 1 of `staged` go to rows 4 and 5 of the window, then row 2 to row 6.
    """
    at = tl.arange(0, BLOCK_DIM)
    for begin in range(first, end, ROWS):
        sample = begin + tl.arange(0, ROWS)
        live = sample < end
        source = staged + (sample - first).to(tl.int64)[:, None] * DIM + at[None, :]
        rows = tl.load(source, mask=live[:, None] & (at < DIM)[None, :])
        store_rows(rows, window, sample, column, live, STRIDE, DIM, BLOCK_DIM)
