"""The input_dist of ids without the host: each rank publishes its samples' ids in a window, and owners read them there.

A window is int32. It holds the ids of T features, feature after feature, bag after bag; their weights, if any, as
float32 `weights_at` words after the ids; if a table is one of any id, the ids' high words `high_at` words after them;
and, from word `offsets_at` on, the bags' offsets [T * b + 1]. Ids arrive in the order of `Bags`. Pair shard * W + rank
is one of the owner's F shards and a source rank.

Example: W = 2, b = 2. Rank 0 publishes the bags f: [5] [], g: [7, 7] [1], rank 1 publishes f: [] [9], g: [2] []. The
owner of g finds 3 ids of pair 0 at source 1, which arrive at 0, and 1 id of pair 1 at source 1, which arrives at 3:
values 7 7 1 2, offsets 0 2 3 4 4.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from dlrm_overlap.kernels.compiled import specialised
from dlrm_overlap.kernels.launches import Launch
from dlrm_overlap.kernels.primitives import BAD_ARRIVAL, OVERFLOW, record
from dlrm_overlap.kernels.wide_ids import row_of

_PAIRS = 1024  # pairs that `_locate_ids` handles at a time
_NUM_WARPS = 4
BLOCK_IDS = 2048  # ids of a task of `_pull_ids`
ANY_ID = tl.constexpr(-(2**31))  # in place of the rows of a table of any id

# Columns of the task table [tasks, 3] int32.
SHARD = tl.constexpr(0)
SOURCE_RANK = tl.constexpr(1)
BLOCK_NUMBER = tl.constexpr(2)
TASK_COLUMNS = tl.constexpr(3)


@triton.jit
def _count(offsets, key, samples, mask):
    """Return [N], the number of ids of each feature `key` [N]."""
    begin = tl.load(offsets + key * samples, mask=mask, other=0)
    return tl.load(offsets + (key + 1) * samples, mask=mask, other=0) - begin


@triton.jit(do_not_specialize=["world_size", "shards", "keys", "samples", "offsets_at", "total"])
def _locate_ids(
    windows,  # [W] int64, addresses
    requested,  # [shards] int32: feature of each shard
    capacities,  # [keys] int32: upper limit of ids in a batch of a rank
    sources,  # [shards * W] int32: offset of each pair's first id in the window
    counts,  # [shards * W] int32: ids of each pair
    arrivals,  # [shards * W + 1] int32: where each pair's ids arrive, then the number of all ids
    status,
    world_size,
    shards,
    keys,  # features of all ranks
    samples,
    offsets_at,
    total,  # ids of a rank's batch, without LENGTHS
    LENGTHS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Find where the ids of each pair are in their rank's window and where they arrive; the grid is one program.

    Memory: if a rank has more ids of a feature than its capacity, or fewer than 0, every rank records that, and no id
    of the step arrives. Without LENGTHS, the program only checks that each rank has published `total` ids.

    Order: runs after the wait for the ranks' flags.
    """
    # Check the number of ids of every feature of every rank.
    exceeded = 0
    for begin in range(0, world_size * keys, BLOCK):
        i = begin + tl.arange(0, BLOCK)
        mask = i < world_size * keys
        key = i // world_size
        window = tl.load(windows + i % world_size, mask=mask, other=0).to(tl.pointer_type(tl.int32))
        if LENGTHS:
            count = _count(window + offsets_at, key, samples, mask)  # [BLOCK]
            capacity = tl.load(capacities + key, mask=mask, other=0)  # [BLOCK]
            wrong = (count > capacity) | (count < 0)
        else:
            count = tl.load(window + offsets_at, mask=mask, other=0)  # [BLOCK]
            capacity = total + tl.zeros_like(count)
            wrong = count != capacity
        worst = tl.max(tl.where(mask & wrong, i, -1), 0)
        if worst >= 0:
            seen = tl.sum(tl.where(i == worst, count, 0), 0)
            allowed = tl.sum(tl.where(i == worst, capacity, 0), 0)
            record(status, OVERFLOW, worst % world_size, worst // world_size, seen, allowed.to(tl.int64), 0)
            exceeded = 1
    # Locate the ids of each pair: a running sum over blocks of pairs says where they arrive.
    if LENGTHS:
        arrived = 0
        for begin in range(0, world_size * shards, BLOCK):
            i = begin + tl.arange(0, BLOCK)
            mask = i < world_size * shards
            key = tl.load(requested + i // world_size, mask=mask, other=0)
            window = tl.load(windows + i % world_size, mask=mask, other=0).to(tl.pointer_type(tl.int32))
            count = tl.where(exceeded > 0, 0, _count(window + offsets_at, key, samples, mask))  # [BLOCK]
            tl.store(sources + i, tl.load(window + offsets_at + key * samples, mask=mask, other=0), mask=mask)
            tl.store(counts + i, count, mask=mask)
            tl.store(arrivals + i, arrived + tl.cumsum(count, 0) - count, mask=mask)
            arrived += tl.sum(count, 0)
        tl.store(arrivals + world_size * shards, arrived)


@triton.jit(do_not_specialize=["world_size", "shards", "samples", "offsets_at", "weights_at", "high_at", "capacity"])
def _pull_ids(
    tasks,  # [tasks, 3] int32
    windows,  # [W] int64, addresses
    requested,  # [shards] int32
    rows,  # [shards] int32, negative if ids outside the table are not recorded; with WIDE also ANY_ID
    sources,  # these three as in `_locate_ids`
    counts,
    arrivals,
    values,  # [capacity] int32
    offsets,  # [(shards + 1) * W * samples + 1] int32
    weights,  # [capacity] float32
    high_words,  # [capacity] int32
    status,
    world_size,
    shards,
    samples,
    offsets_at,
    weights_at,
    high_at,
    capacity: tl.int64,
    LENGTHS: tl.constexpr,
    WEIGHTED: tl.constexpr,
    WIDE: tl.constexpr,
    CHECK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Do one task: copy BLOCK ids of one pair, and the offsets of BLOCK of its bags, to where they arrive.

    Memory: with CHECK an id outside its table becomes 0, and the task's last such id is recorded. A task of shard
    number `shards` pads `values` with zeros, so that the number of sorted ids is constant, and divides the zeros evenly
    among the bags of one additional feature. With WIDE the high words of ids of tables of any id arrive, too, and such
    ids are not checked; other high words are 0.

    Order: published ids stay until their rank has seen this rank's flag of the next step.
    """
    task = tasks + tl.program_id(0) * TASK_COLUMNS
    shard = tl.load(task + SHARD)
    source = tl.load(task + SOURCE_RANK)
    i = tl.load(task + BLOCK_NUMBER) * BLOCK + tl.arange(0, BLOCK)
    if shard < shards:
        window = tl.load(windows + source).to(tl.pointer_type(tl.int32))
        # Copy ids, and replace those outside their table.
        pair = shard * world_size + source
        first = tl.load(sources + pair)
        into = tl.load(arrivals + pair)
        count = tl.load(counts + pair)
        live = i < count
        ids = tl.load(window + first + i, mask=live, other=0)  # [BLOCK]
        if WIDE:
            any_id = tl.load(rows + shard) == ANY_ID
            high = tl.load(window + high_at + first + i, mask=live, other=0)  # [BLOCK]
            ids = tl.where(any_id, ids, row_of(ids, high))
            tl.store(high_words + into + i, tl.where(any_id, high, 0), mask=live)
        if CHECK:
            recorded = tl.load(rows + shard)
            table_rows = tl.abs(recorded)
            outside = live & ((ids < 0) | (ids >= table_rows))
            if WIDE:
                outside = outside & (recorded != ANY_ID)
            worst = tl.max(tl.where(outside, i, -1), 0)
            if (worst >= 0) & (recorded >= 0):
                wrong = tl.sum(tl.where(i == worst, ids, 0), 0)
                record(status, BAD_ARRIVAL, shard, source, worst, wrong.to(tl.int64), table_rows.to(tl.int64))
            ids = tl.where(outside, 0, ids)
        tl.store(values + into + i, ids, mask=live)
        if WEIGHTED:
            weight = tl.load(window + weights_at + first + i, mask=live, other=0)  # [BLOCK] bits of float32
            tl.store(weights + into + i, weight.to(tl.float32, bitcast=True), mask=live)
        if LENGTHS:
            # Copy the offsets of bags, moved to where the ids arrive.
            bag = i < samples
            key = tl.load(requested + shard)
            begin = tl.load(window + offsets_at + key * samples + i, mask=bag, other=0)  # [BLOCK]
            tl.store(offsets + pair * samples + i, into + tl.minimum(begin - first, count), mask=bag)
    else:
        # Pad with zeros up to the capacity.
        arrived = tl.load(arrivals + shards * world_size).to(tl.int64)
        at = arrived + i
        tl.store(values + at, tl.zeros_like(at).to(tl.int32), mask=at < capacity)
        if WIDE:
            tl.store(high_words + at, tl.zeros_like(at).to(tl.int32), mask=at < capacity)
        batch = world_size * samples
        share = arrived + (capacity - arrived) * i // batch
        tl.store(offsets + shards * batch + i, share.to(tl.int32), mask=i <= batch)


class Arrivals(NamedTuple):
    sources: torch.Tensor
    """[F * W] int32: offset of each pair's first id in its window"""
    counts: torch.Tensor
    """[F * W] int32: ids of each pair"""
    arrivals: torch.Tensor
    """[F * W + 1] int32: where each pair's ids arrive; then the number of all ids"""


class Published(NamedTuple):
    windows: torch.Tensor
    """[W] int64: address of each rank's window"""
    offsets_at: int
    """word where the bags' offsets begin"""
    weights_at: int
    """words from an id to its weight"""
    requested: torch.Tensor
    """[F] int32: feature of each of this rank's shards"""
    rows: torch.Tensor
    """[F] int32: rows of each shard's table, negative if ids outside are not recorded; ANY_ID for a table of any id"""
    capacities: torch.Tensor
    """[T] int32: upper limit of each feature's ids in a rank's batch"""
    high_at: int = 0
    """words from an id to its high word, if there are any"""


def pull_tasks(capacities: Sequence[int], world_size: int, samples: int, padded: int, block: int) -> list[list[int]]:
    """Return the rows of the task table: all blocks of all pairs, shard after shard, block after block.

    `capacities` has the upper limit of each shard's ids in one rank's batch; `padded` is the number of ids after
    padding, or 0.
    """
    tasks = []
    for shard, capacity in enumerate(capacities):
        blocks = -(-max(capacity, samples) // block)
        tasks += [[shard, rank, number] for number in range(blocks) for rank in range(world_size)]
    if padded:
        blocks = -(-max(padded, world_size * samples + 1) // block)
        tasks += [[len(capacities), 0, number] for number in range(blocks)]
    return tasks


def prepare_locate(
    published: Published, arrivals: Arrivals, status: torch.Tensor, samples: int, lengths: bool, total: int
) -> Launch:
    """Return the launch that finds where the ids of each pair are and arrive; see `_locate_ids`.

    It overwrites `arrivals` if the `lengths` of bags vary; if not, each rank's batch must have `total` ids.
    """
    kernel = specialised(_locate_ids, num_warps=_NUM_WARPS, LENGTHS=lengths, BLOCK=_PAIRS)
    world_size = published.windows.numel()
    arguments = (
        published.windows, published.requested, published.capacities, *arrivals, status,
        world_size, published.requested.numel(), published.capacities.numel(), samples, published.offsets_at, total,
    )  # fmt: skip
    return Launch(kernel, 1, (), arguments)


def prepare_pull(
    published: Published,
    arrivals: Arrivals,
    tasks: torch.Tensor,
    arrived: Sequence[torch.Tensor | None],
    status: torch.Tensor,
    samples: int,
    lengths: bool,
    check: bool,
    block: int = BLOCK_IDS,
) -> Launch:
    """Return the launch that copies the ids of this rank's shards out of the ranks' windows; see `_pull_ids`.

    Args:
        tasks: those of `pull_tasks`.
        arrived: values, offsets, weights and high words, as `arguments_of` takes them, which each call gives again.
            Weights and high words are None if the windows have none.
        lengths: whether the lengths of bags vary. If so, zeros fill `values` up to its length, and offsets are
            overwritten; else offsets stay as they are given.
    """
    values, _, weights, high = arrived
    kernel = specialised(
        _pull_ids, num_warps=_NUM_WARPS, LENGTHS=lengths, WEIGHTED=weights is not None, WIDE=high is not None,
        CHECK=check, BLOCK=block,
    )  # fmt: skip
    assert values is not None, "ids arrive"
    arguments = (
        tasks, published.windows, published.requested, published.rows, *arrivals, *arguments_of(arrived), status,
        published.windows.numel(), published.requested.numel(), samples, published.offsets_at, published.weights_at,
        published.high_at, values.numel(),
    )  # fmt: skip
    return Launch(kernel, tasks.shape[0], (), arguments, ("values", "offsets", "weights", "high_words"))


def arguments_of(arrived: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
    """Return values, offsets, weights and high words as the kernel takes them: with values in place of None."""
    values = arrived[0]
    assert values is not None, "ids arrive"
    return [values if each is None else each for each in arrived]
