"""The preparation of an update, from the ids alone: it runs before any gradient has arrived.

A run is the ids of one row, in sorted order; a chunk is a piece of a long run.
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

CHUNK_IDS = 128  # longer runs are cut into chunks of this size, very long ones into larger chunks
_PLACED_IDS = 1024  # per program of _place_gradients
_CUT_RUNS = 128  # runs that a program of _cut_runs, one warp, looks at side by side


@triton.jit(
    do_not_specialize=["words", "ids", "batch", "bits", "row_units"], do_not_specialize_on_alignment=["offsets"]
)
def _place_gradients(
    infos,  # [ids] int32
    offsets,  # [features * batch + 1], of the bags
    input_features,  # [features + 1, 4] int64
    scales,  # [ids] float32
    shared,  # [words] int32
    words,
    ids: tl.int64,
    batch: tl.int64,  # samples of all ranks
    bits,  # of an info that hold the sample
    row_units: tl.int64,
    ANY_MEAN: tl.constexpr,
    WEIGHTED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Replace BLOCK ids' infos, which name their bags, by the offsets of the bags' gradients; and zero `shared`.

    Memory: an info, feature << bits | sample, becomes an offset in units of 4 elements, in the gradient window or, if
    `row_units` is not 0, in a tensor with that number of units for each sample. With ANY_MEAN, `scales` becomes 1 /
    length of each id's bag, or 1 for a sum; with WEIGHTED, it is multiplied by the weights that it holds.

    Example: batch 10, bits 4, a feature 2 of dim 8 whose shard begins at column 12. An id of its sample 5 has info 37 =
    2 << 4 | 5, which becomes 12 / 4 * 10 + 5 * 8 / 4 = 40.
    """
    # Find the gradients: everything is [BLOCK].
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
    # Find their factors.
    if ANY_MEAN:
        mean = mask & (tl.load(entry + MEAN, mask=mask, other=0) != 0)
        bag = offsets + feature * batch + sample
        length = tl.load(bag + 1, mask=mean, other=1) - tl.load(bag, mask=mean, other=0)
        scale = 1.0 / length.to(tl.float32)
        if WEIGHTED:
            scale *= tl.load(scales + i, mask=mask, other=0.0)
        tl.store(scales + i, scale, mask=mask)
    # Zero the shared words.
    for first in range(tl.program_id(0) * BLOCK, words, tl.num_programs(0) * BLOCK):
        word = first + tl.arange(0, BLOCK)
        tl.store(shared + word, 0, mask=word < words)


@triton.jit
def _find_ranges(run_keys, runs, boundaries, bounds, ranges, RANGES: tl.constexpr):
    """Store to `bounds` [ranges] int64 the first run whose key is at least each of `boundaries`."""
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
    run_keys,  # [runs], ascending
    run_starts,  # [runs + 1] int32
    run_count,  # [1] int32
    boundaries,  # [ranges] int64
    shared,  # [1 + max chunks] int32
    chunk_run,  # [max chunks] int32
    chunk_first,  # [max chunks] int32
    bounds,  # [ranges] int64
    ranges,
    CHUNK_IDS: tl.constexpr,
    BLOCK: tl.constexpr,
    RANGES: tl.constexpr,
):
    """Cut runs of more than CHUNK_IDS ids into chunks. Program 0 also finds the runs of each range.

    Memory: takes numbers for its chunks from shared[CHUNKS], and writes for chunk c its run to chunk_run[c] and the
    number of the run's first chunk to chunk_first[c].

    Order: the kernel before has zeroed `shared`. The atomic on shared[CHUNKS] is relaxed, since it only hands out
    numbers: a run's are consecutive, programs get them in no fixed order.

    Example: CHUNK_IDS 3, runs of 1, 7, 2 and 5 ids: chunk_run is 1 1 1 3 3, chunk_first 0 0 0 3 3.
    """
    runs = tl.load(run_count)
    if tl.program_id(0) == 0:
        _find_ranges(run_keys, runs, boundaries, bounds, ranges, RANGES)
    for block in range(tl.program_id(0), tl.cdiv(runs, BLOCK), tl.num_programs(0)):
        # Count the chunks of BLOCK runs.
        run = block * BLOCK + tl.arange(0, BLOCK)
        mask = run < runs
        start = tl.load(run_starts + run, mask=mask, other=0)
        length = tl.load(run_starts + run + 1, mask=mask, other=0) - start
        count = tl.where(length > CHUNK_IDS, tl.cdiv(length, chunk_ids_of(length, CHUNK_IDS)), 0)
        total = tl.sum(count, 0)
        # Number them, and write one run's chunks at a time, side by side.
        if total > 0:
            first = tl.atomic_add(shared, total, sem="relaxed", scope="gpu") + tl.cumsum(count, 0) - count
            waiting = count > 0
            for _ in range(0, tl.sum(waiting.to(tl.int32), 0)):
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
    """Return the ids of a chunk of a run of `length`. Up to 2^26 ids, a run has no more chunks than a chunk has ids."""
    ids = tl.where(length > CHUNK_IDS * CHUNK_IDS, CHUNK_IDS * 4, CHUNK_IDS)
    ids = tl.where(length > CHUNK_IDS * CHUNK_IDS * 16, CHUNK_IDS * 16, ids)
    return tl.where(length > CHUNK_IDS * CHUNK_IDS * 256, CHUNK_IDS * 64, ids)


class SortedIds(NamedTuple):
    run_keys: torch.Tensor
    """[at least runs] int32 or int64, ascending: first key of the run's table + its row"""
    run_starts: torch.Tensor
    """[at least runs + 1] int32: first id of each run"""
    run_count: torch.Tensor
    """[1] int32"""
    infos: torch.Tensor
    """[n] int32: bag of each id, feature << bits | sample, ascending within a run"""
    bits: int
    """bits of an info that hold the sample"""
    offsets: torch.Tensor
    """[features * B + 1] int32 or int64, of the bags"""
    samples: int
    """samples of all ranks"""
    weights: torch.Tensor | None = None
    """[n] float32: factors of the ids' gradients, in the order of the infos"""


class InputFeatures(NamedTuple):
    entries: torch.Tensor
    """[features + 1, 4] int64: see the columns above; the last row is for padding ids"""
    any_mean: bool
    boundaries: torch.Tensor
    """[ranges + 1] int64, ascending: first key of each `RowUpdate`'s rows, and the end"""


class PreparedRuns(NamedTuple):
    """The runs of one input's ids: the first arguments of `RowUpdate`'s kernel, and `weighted`."""

    run_keys: torch.Tensor
    run_starts: torch.Tensor
    gradient_at: torch.Tensor
    """[n] int32: offset of each id's gradient, in units of 4 elements"""
    scales: torch.Tensor
    """[n] float32: factor of each gradient; not read without weights and means"""
    shared: torch.Tensor
    """[1 + max chunks] int32: the number of chunks, then counts of finished ones, 0 between updates"""
    chunk_run: torch.Tensor
    """[max chunks] int32: run of each chunk"""
    chunk_first: torch.Tensor
    """[max chunks] int32: first chunk of each chunk's run"""
    bounds: torch.Tensor
    """[ranges + 1] int64: first run of each range, and the end"""
    weighted: bool

    def record_stream(self, stream: torch.cuda.Stream) -> None:
        """Let freed memory be reused only after the work that is on `stream` when it is freed."""
        for tensor in self[:-1]:
            tensor.record_stream(stream)


class Preparation:
    """The kernels that prepare the update of an input's rows, called once a step, by one thread at a time.

    The ids of all steps have the same types, bags and features, and all or none have weights.
    """

    def __init__(self, ids: SortedIds, features: InputFeatures, row_units: int = 0, chunk_ids: int = CHUNK_IDS) -> None:
        """Prepare the launches, by the ids of any step.

        Args:
            row_units: 0 for gradients in a window; or the units of 4 elements of a row, if they are [B, D_total].
            chunk_ids: see `chunk_ids_of`.
        """
        assert features.entries.shape[0] * ids.samples < 2**31, "FBGEMM's infos have 32 bits"
        assert row_units * ids.samples <= 2**31, "offsets are int32"
        self._features, self._chunk_ids = features, chunk_ids
        runs, ranges = self._allocate(ids), features.boundaries.numel()
        self._place = Launch(
            specialised(
                _place_gradients, num_warps=4, ANY_MEAN=features.any_mean, WEIGHTED=runs.weighted, BLOCK=_PLACED_IDS
            ),
            None,
            (ids.offsets.dtype,),
            (
                ids.infos,
                ids.offsets,
                features.entries,
                runs.scales,
                runs.shared,
                runs.shared.numel(),
                ids.infos.numel(),
                ids.samples,
                ids.bits,
                row_units,
            ),
            changing=("infos", "offsets", "scales", "shared", "words", "ids"),
        )
        self._cut = Launch(
            specialised(_cut_runs, num_warps=1, CHUNK_IDS=chunk_ids, BLOCK=_CUT_RUNS, RANGES=power_of_2(ranges)),
            None,
            (ids.run_keys.dtype,),
            (
                ids.run_keys,
                ids.run_starts,
                ids.run_count,
                features.boundaries,
                runs.shared,
                runs.chunk_run,
                runs.chunk_first,
                runs.bounds,
                ranges,
            ),
            changing=("run_keys", "run_starts", "run_count", "shared", "chunk_run", "chunk_first", "bounds"),
        )

    def _allocate(self, ids: SortedIds) -> PreparedRuns:
        count, device, features = ids.infos.numel(), ids.infos.device, self._features
        scales = ids.weights
        if scales is None:
            scales = torch.empty(count, device=device) if features.any_mean else ids.infos.view(torch.float32)
        most = 4 * (1 + count // (2 * self._chunk_ids))  # more than 2 * count / chunk_ids, and thirds that are aligned
        chunk_run, chunk_first, shared = torch.empty(3 * most + 1, dtype=torch.int32, device=device).split(
            (most, most, most + 1)
        )
        bounds = torch.empty_like(features.boundaries)
        runs, weighted = (ids.run_keys, ids.run_starts, ids.infos), ids.weights is not None
        return PreparedRuns(*runs, scales, shared, chunk_run, chunk_first, bounds, weighted)

    def __call__(self, ids: SortedIds) -> PreparedRuns:
        """Return the runs of `ids`, whose `infos` and `weights` are overwritten."""
        count, runs = ids.infos.numel(), self._allocate(ids)
        programs = max(1, -(-count // _PLACED_IDS))
        self._place(ids.infos, ids.offsets, runs.scales, runs.shared, runs.shared.numel(), count, programs=programs)
        rest = runs.shared, runs.chunk_run, runs.chunk_first, runs.bounds
        programs = max(1, min(4096, -(-count // _CUT_RUNS)))
        self._cut(ids.run_keys, ids.run_starts, ids.run_count, *rest, programs=programs)
        return runs
