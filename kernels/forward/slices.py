"""Arguments of the persistent kernel beside tables and windows: how its results are sent, and the memory that its
programs share; see `put_slices`.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from dlrm_overlap.kernels.forward.pooling import store_rows


@dataclass(frozen=True)
class SliceState:
    """Memory that the programs of the persistent kernel share; `done` and `ticket` are 0 before and after a launch."""

    staging: torch.Tensor
    """[at least W * F * b * D, b rounded up to whole tasks] of the wire's type: pooled embeddings to be put; may be
    empty where `Slices.put` is None"""
    done: torch.Tensor
    """[at least W * F * slices] int32: finished tasks of each slice"""
    ticket: torch.Tensor
    """[3] int32: the next task, the number of programs that have found none left, and the number of tasks that are
    stored, where `Slices.put` is None"""


@dataclass(frozen=True)
class Slices:
    """How the results of the persistent kernel are sent."""

    bags: int
    """bags of a feature in a slice, a multiple of the tuning's task_bags"""
    first_slot: int
    """slice i of the launch's f-th feature is slot first_slot + f * ceil(b / bags) + i at its destination"""
    put: Any
    """None: each task, of which there is at least one, stores straight into the peer's window, and no slice has a flag
    of its own. Or a @triton.jit function with the arguments of `put_by_stores`, which brings a staged slice there"""
    raises: bool = True
    """where `put` is None: this launch raises the rank's flag, slot 0, at every rank, as the last of the stream's"""
    end_wait: bool = True
    """the kernel ends only when all slots of `Flags.counts` have reached the epoch"""


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
