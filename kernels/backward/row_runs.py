"""The part of the backward that needs the ids only, and so runs before any gradient has arrived: `Preparation` finds
where the gradient of each id will be, and cuts the runs of rows that many bags name into chunks. `RowUpdate` uses both.

The ids come sorted by row. A run is the ids of one row; a chunk is a part of a long run.

Example: ids of rows  a b c c c c c c c d  make runs a, b, c and d. Cut at 3 ids, c has the chunks  c c c | c c c | c.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from dlrm_overlap.kernels.compiled import specialised
from dlrm_overlap.kernels.launches import Launch
from dlrm_overlap.kernels.tuning import power_of_2

# Columns of the table of an input's features, [features + 1, 4] int64. A unit is 4 elements.
START_AT = tl.constexpr(0)  # column of D_local where the feature's shard begins, in units
UNITS = tl.constexpr(1)  # units of a row, D / 4
MEAN = tl.constexpr(2)  # 1: divide by the number of ids
FIRST_KEY = tl.constexpr(3)  # of its table: the key of a row is the first key + the row
INPUT_FEATURE_COLUMNS = tl.constexpr(4)

# Words of the state that the programs of an update share. All but the first are 0 before and after it.
CHUNKS = tl.constexpr(0)  # number of chunks
DONE = tl.constexpr(1)  # word DONE + c counts the finished chunks of the run whose first chunk is c

CHUNK_IDS = 128  # longer runs are cut into chunks of so many ids; very long ones into larger chunks
_PLACED_IDS = 1024  # that a program of _place_gradients takes
_CUT_RUNS = 128  # runs that a program of _cut_runs, one warp, looks at side by side


@triton.jit(
    do_not_specialize=["words", "ids", "batch", "bits", "row_units"], do_not_specialize_on_alignment=["offsets"]
)
def _place_gradients(
    infos, offsets, input_features, scales, shared, words,
    ids: tl.int64, batch: tl.int64, bits, row_units: tl.int64,
    ANY_MEAN: tl.constexpr, WEIGHTED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Replace each id's info, which names its bag, by the offset of that bag's gradient; BLOCK ids a program. And zero
    the state that the programs of the update share.

    Memory: `infos` [ids] int32 is rewritten in place: feature << bits | sample becomes the offset of the bag's gradient
    in the gradient window or, with `row_units` other than 0, in a tensor with a row of so many units for each sample,
    in units of 4 elements. With ANY_MEAN the program reads the lengths of bags that are means
    from `offsets`, and writes one over the length of each id's bag to `scales` [ids] float32, 1 for a sum; WEIGHTED, it
    multiplies the ids' weights, which are there, by that. Program p of P writes 0 to BLOCK words of `shared` [words]
    int32 from p * BLOCK on, then from (p + P) * BLOCK on, and so forth.

    Order: no two programs share an element; the kernel's end orders all for those that follow on the stream.

    Example: batch 10, bits 4, and a feature 2 of dim 8 whose shard begins at column 12. An id of its sample 5 has info
    2 << 4 | 5 = 37. It becomes 12 / 4 * 10 + 5 * 8 / 4 = 40: the gradient begins at element 160 of the window. With
    rows of 7 units it becomes 12 / 4 + 5 * 7 = 38.
    """
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = i < ids
    info = tl.load(infos + i, mask=mask, other=0).to(tl.uint32, bitcast=True)
    feature = (info >> bits).to(tl.int64)
    sample = (info & ((1 << bits) - 1)).to(tl.int64)
    entry = input_features + feature * INPUT_FEATURE_COLUMNS
    start = tl.load(entry + START_AT, mask=mask, other=0)
    units = tl.load(entry + UNITS, mask=mask, other=0)
    at = tl.where(row_units == 0, start * batch + sample * units, start + sample * row_units)
    tl.store(infos + i, at.to(tl.int32), mask=mask)
    if ANY_MEAN:
        mean = mask & (tl.load(entry + MEAN, mask=mask, other=0) != 0)
        bag = offsets + feature * batch + sample
        length = tl.load(bag + 1, mask=mean, other=1) - tl.load(bag, mask=mean, other=0)
        scale = 1.0 / length.to(tl.float32)
        if WEIGHTED:
            scale *= tl.load(scales + i, mask=mask, other=0.0)
        tl.store(scales + i, scale, mask=mask)
    for first in range(tl.program_id(0) * BLOCK, words, tl.num_programs(0) * BLOCK):
        word = first + tl.arange(0, BLOCK)
        tl.store(shared + word, 0, mask=word < words)


@triton.jit
def _find_ranges(run_keys, runs, boundaries, bounds, ranges, RANGES: tl.constexpr):
    """Find, for each of `boundaries` [ranges] int64, the first of `runs` runs whose key is at least that.

    Each lane searches `run_keys`, which ascend, by halves, and writes one of `bounds` [ranges] int64.

    Example: run keys 3 5 8 9, boundaries 0 5 7 10: bounds 0 1 2 4.
    """
    i = tl.arange(0, RANGES)
    mask = i < ranges
    boundary = tl.load(boundaries + i, mask=mask, other=0)
    low = tl.zeros((RANGES,), tl.int64)
    high = low + runs
    for _ in range(0, 40):
        middle = (low + high) // 2
        searching = low < high
        less = searching & (tl.load(run_keys + middle, mask=searching, other=0) < boundary)
        high = tl.where(searching & (less == 0), middle, high)
        low = tl.where(less, middle + 1, low)
    tl.store(bounds + i, low, mask=mask)


@triton.jit(do_not_specialize=["ranges"])
def _cut_runs(
    run_keys, run_starts, run_count, boundaries, shared, chunk_run, chunk_first, bounds, ranges,
    CHUNK_IDS: tl.constexpr, BLOCK: tl.constexpr, RANGES: tl.constexpr,
):  # fmt: skip
    """Cut runs of more than CHUNK_IDS ids into chunks, as program p of P. Program 0 finds the ranges' runs besides.

    The program looks at BLOCK runs at a time: those from p * BLOCK on, then from (p + P) * BLOCK on, and so forth.

    Memory: the program reads `run_starts` up to the `run_count` [1] runs that are there. It takes numbers for its
    chunks from shared[CHUNKS], and writes of chunk c its run to chunk_run[c] and the number of the run's first chunk
    to chunk_first[c], both int32. For `run_keys`, `boundaries` and `bounds` see `_find_ranges`.

    Order: `shared` was zeroed by the kernel before. The atomic on shared[CHUNKS] is relaxed, since it only hands out
    numbers: those of a run are consecutive, but which program comes first is up to chance. The kernel's end orders the
    rest for those that follow on the stream.

    Example: CHUNK_IDS 3, runs of 1, 7, 2 and 5 ids: the second has 3 chunks and the fourth 2. One program takes numbers
    0 .. 4: chunk_run is 1 1 1 3 3, chunk_first 0 0 0 3 3.
    """
    runs = tl.load(run_count)
    if tl.program_id(0) == 0:
        _find_ranges(run_keys, runs, boundaries, bounds, ranges, RANGES)
    for block in range(tl.program_id(0), tl.cdiv(runs, BLOCK), tl.num_programs(0)):
        run = block * BLOCK + tl.arange(0, BLOCK)
        mask = run < runs
        start = tl.load(run_starts + run, mask=mask, other=0)
        length = tl.load(run_starts + run + 1, mask=mask, other=0) - start
        count = tl.where(length > CHUNK_IDS, tl.cdiv(length, chunk_ids_of(length, CHUNK_IDS)), 0)
        total = tl.sum(count, 0)
        if total > 0:
            first = tl.atomic_add(shared, total, sem="relaxed", scope="gpu") + tl.cumsum(count, 0) - count
            waiting = count > 0
            for _ in range(0, tl.sum(waiting.to(tl.int32), 0)):  # a run at a time, its chunks side by side
                number = tl.min(tl.where(waiting, run, runs), 0)
                chosen = run == number
                chunks = tl.sum(tl.where(chosen, count, 0), 0)
                begin = tl.sum(tl.where(chosen, first, 0), 0)
                for turn in range(0, chunks, BLOCK):
                    chunk = turn + tl.arange(0, BLOCK)
                    tl.store(chunk_run + begin + chunk, number, mask=chunk < chunks)
                    tl.store(chunk_first + begin + chunk, begin, mask=chunk < chunks)
                waiting = waiting & (run != number)


@triton.jit
def chunk_ids_of(length, CHUNK_IDS: tl.constexpr):
    """Return the ids of a chunk of a run of `length`: a run has no more chunks than a chunk has ids, up to 2^24 ids.

    Example: CHUNK_IDS 128. A run of 200 ids has chunks of 128 ids, one of 20,000 ids, more than 128 * 128, has chunks
    of 512.
    """
    ids = tl.where(length > CHUNK_IDS * CHUNK_IDS, CHUNK_IDS * 4, CHUNK_IDS)
    ids = tl.where(length > CHUNK_IDS * CHUNK_IDS * 16, CHUNK_IDS * 16, ids)
    return tl.where(length > CHUNK_IDS * CHUNK_IDS * 256, CHUNK_IDS * 64, ids)


class SortedIds(NamedTuple):
    """The ids of one input, sorted by the rows they name."""

    run_keys: torch.Tensor
    """[at least runs] int32 or int64, ascending: of each run, the first key of its table + its row"""
    run_starts: torch.Tensor
    """[at least runs + 1] int32: run i has the ids [run_starts[i], run_starts[i + 1])"""
    run_count: torch.Tensor
    """[1] int32"""
    infos: torch.Tensor
    """[n] int32, of each id the bag that holds it: feature << bits | sample, ascending within a run"""
    bits: int
    """of an info that hold the sample; the bits above hold the index of the feature in the input"""
    offsets: torch.Tensor
    """[features * B + 1] int32 or int64, of the bags"""
    samples: int
    """of all ranks, B"""
    weights: torch.Tensor | None = None
    """[n] float32, by which the gradient of each id is multiplied, in the order of the infos; None: ids have none"""


class InputFeatures(NamedTuple):
    """The features of one input: where their gradients are in the gradient window, and which rows they name."""

    entries: torch.Tensor
    """[features + 1, 4] int64, a row a feature, the last one of ids that pad their number: the column of D_local where
    its shard begins and its dim, both in units of 4; 1 for a mean or 0 for a sum; the first key of its table"""
    any_mean: bool
    boundaries: torch.Tensor
    """[ranges + 1] int64, ascending: the first key of each range of rows that are updated alike, and the end"""


class PreparedRuns(NamedTuple):
    """The runs of one input's ids, ready for `RowUpdate`: but for the last, the first parameters of its kernel."""

    run_keys: torch.Tensor
    """as in `SortedIds`"""
    run_starts: torch.Tensor
    """as in `SortedIds`"""
    gradient_at: torch.Tensor
    """[n] int32: where the gradient of the id's bag begins in the gradient window, in units of 4 elements"""
    scales: torch.Tensor
    """[n] float32: factor of the gradient, the id's weight and, for a mean, 1 / length; anything, of any type, if ids
    have no weights and the input has no mean"""
    shared: torch.Tensor
    """[1 + most chunks] int32: the number of chunks, then counts of finished ones, 0 between updates"""
    chunk_run: torch.Tensor
    """[most chunks] int32: the run of each chunk"""
    chunk_first: torch.Tensor
    """[most chunks] int32: of each chunk, the first chunk of its run"""
    bounds: torch.Tensor
    """[ranges + 1] int64: the first run of each range, and the end"""
    weighted: bool
    """whether ids have weights"""


class Preparation:
    """Places each id's gradient, finds the runs of each range of rows, and cuts long runs into chunks.

    It needs the ids only, so it can be called before any gradient has arrived: once a step, with ids of the same types,
    bags and features as those that it was made with, and weights if those had some. It belongs to one caller, as a
    `Launch` does.
    """

    def __init__(self, ids: SortedIds, features: InputFeatures, row_units: int = 0, chunk_ids: int = CHUNK_IDS) -> None:
        """Prepare the launches.

        Args:
            ids: of any step.
            features: of the input that has them.
            row_units: 0 where gradients are in a window, shard after shard. Otherwise they are [B, D_total], as a model
                has them, with rows of so many units of 4 elements.
            chunk_ids: ids of a chunk of a run that is not very long; longer runs are cut.
        """
        assert features.entries.shape[0] * ids.samples < 2**31, "FBGEMM's infos have 32 bits"
        assert row_units * ids.samples <= 2**31, "offsets are int32"
        self._features, self._chunk_ids = features, chunk_ids
        made, ranges = self._room(ids), features.boundaries.numel()
        place = (
            ids.infos, ids.offsets, features.entries, made.scales, made.shared, made.shared.numel(),
            ids.infos.numel(), ids.samples, ids.bits, row_units,
        )  # fmt: skip
        changing = "infos", "offsets", "scales", "shared", "words", "ids"
        kernel = specialised(
            _place_gradients, num_warps=4, ANY_MEAN=features.any_mean, WEIGHTED=made.weighted, BLOCK=_PLACED_IDS
        )
        self._place = Launch(kernel, None, (ids.offsets.dtype,), place, changing)
        cut = (
            ids.run_keys, ids.run_starts, ids.run_count, features.boundaries,
            made.shared, made.chunk_run, made.chunk_first, made.bounds, ranges,
        )  # fmt: skip
        changing = "run_keys", "run_starts", "run_count", "shared", "chunk_run", "chunk_first", "bounds"
        kernel = specialised(_cut_runs, num_warps=1, CHUNK_IDS=chunk_ids, BLOCK=_CUT_RUNS, RANGES=power_of_2(ranges))
        self._cut = Launch(kernel, None, (ids.run_keys.dtype,), cut, changing)

    def _room(self, ids: SortedIds) -> PreparedRuns:
        """Return runs whose own tensors are yet to be filled."""
        count, device, features = ids.infos.numel(), ids.infos.device, self._features
        scales = ids.weights
        if scales is None:
            scales = torch.empty(count, device=device) if features.any_mean else ids.infos
        most = 4 * (1 + count // (2 * self._chunk_ids))  # more than 2 * count / chunk_ids, and thirds that are aligned
        chunk_run, chunk_first, shared = torch.empty(3 * most + 1, dtype=torch.int32, device=device).split(
            (most, most, most + 1)
        )
        bounds = torch.empty_like(features.boundaries)
        runs, weighted = (ids.run_keys, ids.run_starts, ids.infos), ids.weights is not None
        return PreparedRuns(*runs, scales, shared, chunk_run, chunk_first, bounds, weighted)

    def __call__(self, ids: SortedIds) -> PreparedRuns:
        """Return the runs of `ids`, whose `infos` become `PreparedRuns.gradient_at`, and `weights` the `scales`."""
        count, made = ids.infos.numel(), self._room(ids)
        programs = max(1, -(-count // _PLACED_IDS))
        self._place(
            ids.infos, ids.offsets, made.scales, made.shared, made.shared.numel(), count, programs=programs
        )  # fmt: skip
        rest = made.shared, made.chunk_run, made.chunk_first, made.bounds
        programs = max(1, min(4096, -(-count // _CUT_RUNS)))
        self._cut(ids.run_keys, ids.run_starts, ids.run_count, *rest, programs=programs)
        return made
