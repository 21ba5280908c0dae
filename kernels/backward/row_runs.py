"""What follows from the ids alone, found out before any gradient is here: see `row_update`, which needs it."""

from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from dlrm_overlap.kernels.arguments import power_of_2
from dlrm_overlap.kernels.compiled import CompiledKernel

# Columns of the position table [positions, 4] int64; offsets count units of 4 elements.
START_AT = tl.constexpr(0)  # column of D_local where the piece begins
UNITS = tl.constexpr(1)  # of a row, D / 4
MEAN = tl.constexpr(2)  # 1: divide by the number of ids
FIRST_KEY = tl.constexpr(3)  # of its table: key = first key + row
POSITION_COLUMNS = tl.constexpr(4)

# Words of the state that the programs of an update share; all but the first are zero before and after it.
PIECES = tl.constexpr(0)  # pieces in all
DONE = tl.constexpr(1)  # from here on, finished pieces of the run whose first piece has this number

_CUT_RUNS = 128  # that a program of _cut_runs, a warp, looks at side by side
PIECE_IDS = 128  # longer runs are cut into pieces of so many ids; very long ones into more than that


@triton.jit(do_not_specialize=["ids", "batch", "bits"], do_not_specialize_on_alignment=["offsets"])
def _place_gradients(
    infos,
    offsets,
    positions,
    scales,
    ids: tl.int64,
    batch: tl.int64,
    bits,
    ANY_MEAN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Replace each id's position and sample by where its bag's gradient lies, in units of 4 elements."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = i < ids
    info = tl.load(infos + i, mask=mask, other=0).to(tl.uint32, bitcast=True)
    position = (info >> bits).to(tl.int64)
    sample = (info & ((1 << bits) - 1)).to(tl.int64)
    entry = positions + position * POSITION_COLUMNS
    at = tl.load(entry + START_AT, mask=mask, other=0) * batch + sample * tl.load(entry + UNITS, mask=mask, other=0)
    tl.store(infos + i, at.to(tl.int32), mask=mask)
    if ANY_MEAN:
        mean = mask & (tl.load(entry + MEAN, mask=mask, other=0) != 0)
        bag = offsets + position * batch + sample
        length = tl.load(bag + 1, mask=mean, other=1) - tl.load(bag, mask=mean, other=0)
        tl.store(scales + i, 1.0 / length.to(tl.float32), mask=mask)


@triton.jit(do_not_specialize=["ranges"])
def _find_ranges(run_keys, run_count, boundaries, bounds, ranges, BLOCK: tl.constexpr):
    """Find the first run of a key that is at least `boundaries` [ranges]: `bounds` [ranges]."""
    i = tl.arange(0, BLOCK)
    mask = i < ranges
    boundary = tl.load(boundaries + i, mask=mask, other=0)
    low = tl.zeros((BLOCK,), tl.int64)
    high = low + tl.load(run_count)
    for _ in range(0, 40):
        middle = (low + high) // 2
        searching = low < high
        less = searching & (tl.load(run_keys + middle, mask=searching, other=0) < boundary)
        high = tl.where(searching & (less == 0), middle, high)
        low = tl.where(less, middle + 1, low)
    tl.store(bounds + i, low, mask=mask)


@triton.jit
def _cut_runs(run_starts, run_count, shared, piece_run, piece_first, PIECE_IDS: tl.constexpr, BLOCK: tl.constexpr):
    """Cut runs of more than PIECE_IDS ids: of piece i, `piece_run` [i] is its run, `piece_first` the run's first."""
    runs = tl.load(run_count)
    for block in range(tl.program_id(0), tl.cdiv(runs, BLOCK), tl.num_programs(0)):
        run = block * BLOCK + tl.arange(0, BLOCK)
        mask = run < runs
        start = tl.load(run_starts + run, mask=mask, other=0)
        length = tl.load(run_starts + run + 1, mask=mask, other=0) - start
        count = tl.where(length > PIECE_IDS, tl.cdiv(length, piece_ids_of(length, PIECE_IDS)), 0)
        total = tl.sum(count, 0)
        if total > 0:
            first = tl.atomic_add(shared, total, sem="relaxed", scope="gpu") + tl.cumsum(count, 0) - count
            waiting = count > 0
            for _ in range(0, tl.sum(waiting.to(tl.int32), 0)):  # a run at a time, its pieces side by side
                number = tl.min(tl.where(waiting, run, runs), 0)
                chosen = run == number
                pieces = tl.sum(tl.where(chosen, count, 0), 0)
                begin = tl.sum(tl.where(chosen, first, 0), 0)
                for turn in range(0, pieces, BLOCK):
                    piece = turn + tl.arange(0, BLOCK)
                    tl.store(piece_run + begin + piece, number, mask=piece < pieces)
                    tl.store(piece_first + begin + piece, begin, mask=piece < pieces)
                waiting = waiting & (run != number)


@triton.jit
def piece_ids_of(length, PIECE_IDS: tl.constexpr):
    """Return the ids of a piece of a run of `length`: a run has no more pieces than a piece has ids, up to 2^24."""
    ids = tl.where(length > PIECE_IDS * PIECE_IDS, PIECE_IDS * 4, PIECE_IDS)
    ids = tl.where(length > PIECE_IDS * PIECE_IDS * 16, PIECE_IDS * 16, ids)
    return tl.where(length > PIECE_IDS * PIECE_IDS * 256, PIECE_IDS * 64, ids)


class SortedIds(NamedTuple):
    """The ids of one input, in the order of the rows they name, and their runs: those of one row."""

    run_keys: torch.Tensor
    """[at least runs] int32 or int64, ascending: of each run, its table's first key + its row"""
    run_starts: torch.Tensor
    """[at least runs + 1] int32: run i has the ids [run_starts[i], run_starts[i + 1])"""
    run_count: torch.Tensor
    """[1] int32"""
    infos: torch.Tensor
    """[n] int32, of each id the bag that holds it: position << bits | sample; ascending within a run"""
    bits: int
    offsets: torch.Tensor
    """[positions * B + 1] int32 or int64, of the bags"""
    samples: int
    """of all ranks, B"""


class Positions(NamedTuple):
    """The features of an input."""

    entries: torch.Tensor
    """[positions, 4] int64: first column of the piece in D_local and its dim, both in units of 4; mean; first key"""
    any_mean: bool
    boundaries: torch.Tensor
    """[ranges + 1] int64, ascending: the first key of each range of rows that are updated alike, and the end"""


class PreparedRuns(NamedTuple):
    """What an update needs to know of its ids."""

    run_keys: torch.Tensor
    run_starts: torch.Tensor
    places: torch.Tensor
    """[n] int32: where the gradient of the id's bag lies, in units of 4 elements"""
    scales: torch.Tensor
    """[n] float32: factors of the gradients, where a bag is a mean; else anything"""
    shared: torch.Tensor
    piece_run: torch.Tensor
    piece_first: torch.Tensor
    bounds: torch.Tensor
    """[ranges + 1] int64: the first run of each range, and the end"""


@lru_cache
def _placing(any_mean: bool) -> CompiledKernel:
    return CompiledKernel(_place_gradients, {"num_warps": 4}, {"ANY_MEAN": any_mean, "BLOCK": 1024})


@lru_cache
def _finding(ranges: int) -> CompiledKernel:
    return CompiledKernel(_find_ranges, {"num_warps": 1}, {"BLOCK": power_of_2(ranges)})


@lru_cache
def _cutting(piece_ids: int) -> CompiledKernel:
    return CompiledKernel(_cut_runs, {"num_warps": 1}, {"PIECE_IDS": piece_ids, "BLOCK": _CUT_RUNS})


def prepare(ids: SortedIds, positions: Positions, piece_ids: int = PIECE_IDS) -> PreparedRuns:
    """Find out, before any gradient is here, what `update_rows` needs; `ids.infos` becomes a part of it."""
    count, device = ids.infos.numel(), ids.infos.device
    assert positions.entries.shape[0] * ids.samples < 2**31, "FBGEMM's infos have 32 bits"
    scales = torch.empty(count, device=device) if positions.any_mean else ids.infos
    _placing(positions.any_mean)(
        -(-count // 1024), (ids.offsets.dtype,), ids.infos, ids.offsets, positions.entries, scales, count, ids.samples,
        ids.bits,
    )  # fmt: skip
    bounds = torch.empty_like(positions.boundaries)
    ranges = bounds.numel()
    _finding(ranges)(1, (ids.run_keys.dtype,), ids.run_keys, ids.run_count, positions.boundaries, bounds, ranges)
    most = 4 * (1 + count // (2 * piece_ids))  # more than 2 * count / piece_ids, and halves that are aligned
    shared = torch.zeros(1 + most, dtype=torch.int32, device=device)
    piece_run, piece_first = torch.empty(2, most, dtype=torch.int32, device=device).unbind()
    programs = min(4096, -(-count // _CUT_RUNS))
    _cutting(piece_ids)(programs, (), ids.run_starts, ids.run_count, shared, piece_run, piece_first)
    return PreparedRuns(ids.run_keys, ids.run_starts, ids.infos, scales, shared, piece_run, piece_first, bounds)
