"""Ids to the owners of their rows, without the host: each rank publishes the ids of its samples in a window of its own,
and the owners read their tables' ids out of the ranks' windows.

A window is int32: the ids of T features, feature after feature, bag after bag; then their weights if they have some,
float32, that of an id `weights_at` words after it; then, from word `offsets_at` on, the offsets [T * b + 1] of the bags
among them. The ids arrive as the lookup takes them (`Bags`): those of the owner's F feature shards, each with rank 0's
bags first. A pair is a shard and a rank that its ids come from, pair number shard * W + rank.

Where lengths are not known beforehand, `place_ids` finds each pair's ids; otherwise the host has done so, once and for
all. `pull_ids` then copies them, and checks them on the way.

Example: W = 2, b = 2; rank 0 publishes bags f: [5] [], g: [7, 7] [1], rank 1 f: [] [9], g: [2] []. The owner of g finds
pair 0 at source 1 with 3 ids and pair 1 at source 1 with 1 id, which arrive from 0 and from 3 on: values 7 7 1 2,
offsets 0 2 3 4 4.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from dlrm_overlap.kernels.compiled import specialised
from dlrm_overlap.kernels.primitives import BAD_ARRIVAL, OVERFLOW, record

_PAIRS = 1024  # that the program of _place_ids looks at side by side
_NUM_WARPS = 4
BLOCK_IDS = 2048  # of a task of _pull_ids

# Columns of the task table [tasks, 3] int32.
SHARD = tl.constexpr(0)
SOURCE_RANK = tl.constexpr(1)
BLOCK_NUMBER = tl.constexpr(2)
TASK_COLUMNS = tl.constexpr(3)


@triton.jit
def _count(offsets, key, samples, mask):
    """Return the number of ids of each feature `key` [N] among those whose bags have `offsets`."""
    begin = tl.load(offsets + key * samples, mask=mask, other=0)
    return tl.load(offsets + (key + 1) * samples, mask=mask, other=0) - begin


@triton.jit(do_not_specialize=["world_size", "shards", "keys", "samples", "offsets_at", "total"])
def _place_ids(
    windows, requested, capacities, sources, counts, arrivals, status,
    world_size, shards, keys, samples, offsets_at, total,
    LENGTHS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Find where the ids of each pair are in their rank's window and where they arrive; the grid is one program.

    Memory: the program reads, from the window of every rank, the offsets at which the features begin. Of each pair it
    writes the first id's offset in the window to `sources`, the number of ids to `counts`, and where they arrive to
    `arrivals`, all int32; at their end `arrivals` [shards * W + 1] has the number of all ids that arrive. Where a rank
    brings more ids of a feature than `capacities` [T] allow, or fewer than none, the program writes a record of it by
    way of `status`, and lets no id of the step arrive. Every rank looks at all features of all ranks, so that every
    rank has that record. Without LENGTHS, these are known, and the program only checks that every rank has
    published `total` ids, a number that is in the word at `offsets_at`.

    Order: the kernel follows the wait for the ranks' flags on the stream, so it reads published ids. Its end
    orders its stores for `_pull_ids`.

    Example: see the module. `sources` 1 1, `counts` 3 1, `arrivals` 0 3 4.
    """
    beyond = 0
    for begin in range(0, world_size * keys, BLOCK):
        i = begin + tl.arange(0, BLOCK)
        mask = i < world_size * keys
        key = i // world_size
        window = tl.load(windows + i % world_size, mask=mask, other=0).to(tl.pointer_type(tl.int32))
        if LENGTHS:
            count = _count(window + offsets_at, key, samples, mask)
            most = tl.load(capacities + key, mask=mask, other=0)
            wrong = (count > most) | (count < 0)
        else:
            count = tl.load(window + offsets_at, mask=mask, other=0)
            most = total + tl.zeros_like(count)
            wrong = count != most
        worst = tl.max(tl.where(mask & wrong, i, -1), 0)
        if worst >= 0:
            seen = tl.sum(tl.where(i == worst, count, 0), 0)
            allowed = tl.sum(tl.where(i == worst, most, 0), 0)
            record(status, OVERFLOW, worst % world_size, worst // world_size, seen, allowed.to(tl.int64), 0)
            beyond = 1
    if LENGTHS:
        arrived = 0
        for begin in range(0, world_size * shards, BLOCK):
            i = begin + tl.arange(0, BLOCK)
            mask = i < world_size * shards
            key = tl.load(requested + i // world_size, mask=mask, other=0)
            window = tl.load(windows + i % world_size, mask=mask, other=0).to(tl.pointer_type(tl.int32))
            count = tl.where(beyond > 0, 0, _count(window + offsets_at, key, samples, mask))
            tl.store(sources + i, tl.load(window + offsets_at + key * samples, mask=mask, other=0), mask=mask)
            tl.store(counts + i, count, mask=mask)
            tl.store(arrivals + i, arrived + tl.cumsum(count, 0) - count, mask=mask)
            arrived += tl.sum(count, 0)
        tl.store(arrivals + world_size * shards, arrived)


@triton.jit(do_not_specialize=["world_size", "shards", "samples", "offsets_at", "weights_at", "capacity"])
def _pull_ids(
    tasks, windows, requested, rows, sources, counts, arrivals, values, offsets, weights, status,
    world_size, shards, samples, offsets_at, weights_at, capacity: tl.int64,
    LENGTHS: tl.constexpr, WEIGHTED: tl.constexpr, CHECK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Do one task: copy BLOCK ids of one pair, and the offsets of as many of its bags, to where they arrive.

    Memory: the program reads ids and, with LENGTHS, offsets from one rank's window, this rank's or a peer's. It stores
    the ids to `values`, WEIGHTED their weights to `weights`, and to `offsets` [(shards + 1) * W * b + 1] the offset of
    each bag among all that arrive. With CHECK it takes id 0 for one outside its table, whose size is the absolute value
    in `rows` [shards], and records the last such id by way of `status`, unless that value is negative. A task of shard
    number `shards` fills `values` with zeros after the ids that have arrived, up to `capacity`, and gives the zeros to
    the bags of one feature more, in equal shares: the sort of the ids needs their number to be always the same.

    Order: no two programs store to one address; the kernel follows `_place_ids`, and its end orders its stores for the
    lookup. Published ids stay until each has seen this rank's flag of the next step.

    Example: see the module; capacity 6. The task of pair 1 stores id 2 to values[3], and offsets 3 4 to offsets[2] and
    offsets[3]. The fill stores zeros to values[4] and values[5], and offsets 4 4 5 5 6 from offsets[4] on.
    """
    task = tasks + tl.program_id(0) * TASK_COLUMNS
    shard = tl.load(task + SHARD)
    source = tl.load(task + SOURCE_RANK)
    i = tl.load(task + BLOCK_NUMBER) * BLOCK + tl.arange(0, BLOCK)
    if shard < shards:
        window = tl.load(windows + source).to(tl.pointer_type(tl.int32))
        pair = shard * world_size + source
        first = tl.load(sources + pair)
        into = tl.load(arrivals + pair)
        count = tl.load(counts + pair)
        live = i < count
        ids = tl.load(window + first + i, mask=live, other=0)
        if CHECK:
            recorded = tl.load(rows + shard)
            table_rows = tl.abs(recorded)
            outside = live & ((ids < 0) | (ids >= table_rows))
            worst = tl.max(tl.where(outside, i, -1), 0)
            if (worst >= 0) & (recorded >= 0):
                wrong = tl.sum(tl.where(i == worst, ids, 0), 0)
                record(status, BAD_ARRIVAL, shard, source, worst, wrong.to(tl.int64), table_rows.to(tl.int64))
            ids = tl.where(outside, 0, ids)
        tl.store(values + into + i, ids, mask=live)
        if WEIGHTED:
            weight = tl.load(window + weights_at + first + i, mask=live, other=0)
            tl.store(weights + into + i, weight.to(tl.float32, bitcast=True), mask=live)
        if LENGTHS:
            bag = i < samples
            key = tl.load(requested + shard)
            begin = tl.load(window + offsets_at + key * samples + i, mask=bag, other=0)
            tl.store(offsets + pair * samples + i, into + tl.minimum(begin - first, count), mask=bag)
    else:
        arrived = tl.load(arrivals + shards * world_size).to(tl.int64)
        at = arrived + i
        tl.store(values + at, tl.zeros_like(at).to(tl.int32), mask=at < capacity)
        batch = world_size * samples
        share = arrived + (capacity - arrived) * i // batch
        tl.store(offsets + shards * batch + i, share.to(tl.int32), mask=i <= batch)


class Arrivals(NamedTuple):
    """Where the ids of each pair are; for lengths that are not known beforehand, as `place_ids` finds them."""

    sources: torch.Tensor
    """[F * W] int32: the first id in its rank's window"""
    counts: torch.Tensor
    """[F * W] int32"""
    arrivals: torch.Tensor
    """[F * W + 1] int32: where the pair's ids arrive, and the number of all"""


class Published(NamedTuple):
    """The ranks' published ids, and the features that the caller asks for."""

    windows: torch.Tensor
    """[W] int64: the address of each rank's window"""
    offsets_at: int
    """word of a window where its offsets begin"""
    weights_at: int
    """words from an id to its weight, where ids have weights"""
    requested: torch.Tensor
    """[F] int32: the feature of each of this rank's shards"""
    rows: torch.Tensor
    """[F] int32: rows of each shard's table, negative if ids outside it are not recorded"""
    capacities: torch.Tensor
    """[T] int32: the most ids of a rank's batch, of each feature"""


def pull_tasks(capacities: Sequence[int], world_size: int, samples: int, padded: int, block: int) -> list[list[int]]:
    """Return the rows of the task table: all blocks of all pairs, shard after shard, ranks in turns.

    Args:
        capacities: of each of the owner's shards, the most ids that one rank brings.
        world_size: number of ranks, W.
        samples: of a rank, b.
        padded: the most ids that arrive, where they are padded to so many; 0 where they are not.
        block: ids of a task.
    """
    tasks = []
    for shard, capacity in enumerate(capacities):
        blocks = -(-max(capacity, samples) // block)
        tasks += [[shard, rank, number] for number in range(blocks) for rank in range(world_size)]
    if padded:
        blocks = -(-max(padded, world_size * samples + 1) // block)
        tasks += [[len(capacities), 0, number] for number in range(blocks)]
    return tasks


def place_ids(
    published: Published, arrivals: Arrivals, status: torch.Tensor, samples: int, lengths: bool, total: int
) -> None:
    """Find where the ids of each pair are and where they arrive, after the wait for the ranks' flags.

    Args:
        arrivals: overwritten if `lengths`.
        status: where a batch that is not as it must be is recorded, see `Flags`.
        samples: of a rank, b.
        lengths: whether the lengths of bags are not known beforehand.
        total: where they are, the ids of a rank's batch.
    """
    kernel = specialised(_place_ids, num_warps=_NUM_WARPS, LENGTHS=lengths, BLOCK=_PAIRS)
    world_size = published.windows.numel()
    kernel(
        1, (),
        published.windows, published.requested, published.capacities, *arrivals, status,
        world_size, published.requested.numel(), published.capacities.numel(), samples, published.offsets_at, total,
    )  # fmt: skip


def pull_ids(
    published: Published,
    arrivals: Arrivals,
    tasks: torch.Tensor,
    values: torch.Tensor,
    offsets: torch.Tensor,
    weights: torch.Tensor | None,
    status: torch.Tensor,
    samples: int,
    lengths: bool,
    check: bool,
    block: int = BLOCK_IDS,
) -> None:
    """Copy the ids of this rank's shards out of the ranks' windows.

    Args:
        arrivals: of each pair.
        tasks: [tasks, 3] int32, of `pull_tasks`.
        values: [capacity] int32, overwritten.
        offsets: [(F + 1) * W * b + 1] int32, overwritten if `lengths`; otherwise they are known and are there already.
        weights: [capacity] float32, overwritten where ids are; None: ids have none.
        status: where an id outside its table is recorded, see `Flags`.
        samples: of a rank, b.
        lengths: whether offsets are copied, too, and `values` is padded to its whole length.
        check: whether ids are held against the rows of their tables.
        block: ids of a task.
    """
    kernel = specialised(
        _pull_ids, num_warps=_NUM_WARPS, LENGTHS=lengths, WEIGHTED=weights is not None, CHECK=check, BLOCK=block
    )
    world_size = published.windows.numel()
    kernel(
        tasks.shape[0], (),
        tasks, published.windows, published.requested, published.rows, *arrivals, values, offsets,
        values if weights is None else weights, status,
        world_size, published.requested.numel(), samples, published.offsets_at, published.weights_at, values.numel(),
    )  # fmt: skip
