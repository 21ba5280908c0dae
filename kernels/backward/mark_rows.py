"""Marks the rows that a step updates, a bit for each row, from the sorted ids of `Preparation`."""

import torch
import triton
import triton.language as tl

from dlrm_overlap.kernels.backward.row_runs import PreparedRuns
from dlrm_overlap.kernels.compiled import specialised
from dlrm_overlap.kernels.launches import Launch

_BLOCK = 1024
_MAX_PROGRAMS = 512
_NUM_WARPS = 4


@triton.jit(do_not_specialize=["ranges", "tables"])
def _mark_rows(
    run_keys,  # these two as in `PreparedRuns`
    bounds,
    shifts,  # [tables, 2] int64
    words,  # [n] int32
    ranges,
    tables,
    BLOCK: tl.constexpr,
):
    """Set the bit of each key of the runs [bounds[0], bounds[ranges]), as program p of P the blocks p, p + P, ...

    Memory: row t of `shifts` has the first key of table t, ascending, and the number that is added to a key of the
    table to give its bit. Bit b is bit b % 32 of words[b // 32]. Bits are only set.

    Order: relaxed atomics, since only later kernels of the stream read the words. A bit that is seen set needs no
    atomic; one that another program sets meanwhile is set twice.

    Example: tables of 10 and 20 rows whose bits begin at 0 and 32 have the shifts (0, 0) and (10, 22); key 13 is row 3
    of the second, and has bit 35.
    """
    begin = tl.load(bounds)
    end = tl.load(bounds + ranges)
    for first in range(begin + tl.program_id(0) * BLOCK, end, tl.num_programs(0) * BLOCK):
        run = first + tl.arange(0, BLOCK)
        live = run < end
        key = tl.load(run_keys + run, mask=live, other=0).to(tl.int64)  # [BLOCK]
        bit = key
        for table in range(tables):
            first_key = tl.load(shifts + 2 * table)
            bit = tl.where(key >= first_key, key + tl.load(shifts + 2 * table + 1), bit)
        mask = tl.full((BLOCK,), 1, tl.int32) << (bit % 32).to(tl.int32)
        seen = tl.load(words + bit // 32, mask=live, other=0)  # [BLOCK]
        tl.atomic_or(words + bit // 32, mask, mask=live & ((seen & mask) == 0), sem="relaxed")


class RowMarking:
    """Marks the rows that one input's ids name. Only one thread may call it at a time."""

    def __init__(self, words: torch.Tensor, shifts: torch.Tensor) -> None:
        """Take `words` [n] int32 and `shifts` [tables, 2] int64 on the ids' device, see `_mark_rows`."""
        self._words, self._shifts = words, shifts
        self._launches: dict[torch.dtype, Launch] = {}

    def __call__(self, runs: PreparedRuns) -> None:
        keys, bounds = runs.run_keys, runs.bounds
        launch = self._launches.get(keys.dtype)
        if launch is None:
            arguments = keys, bounds, self._shifts, self._words, bounds.numel() - 1, self._shifts.shape[0]
            kernel = specialised(_mark_rows, num_warps=_NUM_WARPS, BLOCK=_BLOCK)
            launch = Launch(kernel, None, (keys.dtype,), arguments, changing=("run_keys", "bounds"))
            self._launches[keys.dtype] = launch
        launch(keys, bounds, programs=min(_MAX_PROGRAMS, -(-keys.numel() // _BLOCK)))
