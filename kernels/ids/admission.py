"""The kernels of `map_ids` that count sightings of ids without a slot, and which of these ids are admitted.

A segment's sketch is a count-min sketch (Cormode and Muthukrishnan, 2005) with one row of CELLS counters: an id has two
of them, and the smaller one is at least its sightings since they were halved. Once a segment's counters add up to a
limit, all of them are halved, as TinyLFU does (Einziger et al., 2017): else they would grow until every id looks as if
it had been seen before.
"""

import triton
import triton.language as tl

from dlrm_overlap.kernels.ids.probing import (
    ADMIT_AFTER,
    ADMIT_BELOW,
    CELLS,
    EMPTY,
    FULL,
    HALVE_AT,
    MISSING,
    WRITES,
    bucket_of,
    id_at,
    listed,
    mix,
    murmur,
    segment_of,
)


@triton.jit
def _cells(segment, mixed):
    """Return [N], two: the counters of ids in the sketch, which are their segment's."""
    first = segment * CELLS + (mixed >> 32).to(tl.int64) % CELLS
    return first, segment * CELLS + (mixed & 0xFFFFFFFF).to(tl.int64) % CELLS


@triton.jit
def _may_be_admitted(id, mixed, feature, taken, mask):
    """Return [N]: which of the listed ids get a slot, once they have been seen often enough."""
    wanted = mask & (id != EMPTY) & (tl.load(feature + WRITES, mask=mask, other=0) > 0) & (tl.load(taken) > 0)
    return wanted & ((mixed >> 32).to(tl.int64) < tl.load(feature + ADMIT_BELOW, mask=mask, other=0))


@triton.jit(do_not_specialize_on_alignment=["low", "high"])
def _sight(
    low,
    high,
    infos,
    sketch,
    sketch_sums,
    taken,
    counters,
    missing,
    missing_feature,
    full,  # [count] int32: receives the segments whose counters must be halved
    full_at,  # [count] int32: and `halve_at` of each
    STRIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Count the sightings of the listed ids, as program p of P the blocks p, p + P, .. of BLOCK.

    Parameters without a comment are as in `_find` or `MapState`.

    Order: atomics are relaxed, since their results are only counted. Of all lanes that add to a sum, one finds that it
    reaches `halve_at`.
    """
    total = tl.load(counters + MISSING)
    for begin in range(tl.program_id(0) * BLOCK, total, tl.num_programs(0) * BLOCK):
        k, mask, i, feature = listed(missing, missing_feature, infos, begin, total, BLOCK)
        id = id_at(low, high, i, mask, STRIDE)
        mixed = mix(id)
        sights = _may_be_admitted(id, mixed, feature, taken, mask)
        sights = sights & (tl.load(feature + ADMIT_AFTER, mask=mask, other=0) > 1)
        _, bucket = bucket_of(id, feature, sights)
        _, _, segment = segment_of(murmur(id), feature, bucket, sights)
        # Count each id in its two cells, or in one if they are the same.
        first, second = _cells(segment, mixed)
        tl.atomic_add(sketch + first, 1, mask=sights, sem="relaxed")
        tl.atomic_add(sketch + second, 1, mask=sights & (second != first), sem="relaxed")
        # List the segments whose sums have reached their limits.
        halve_at = tl.load(feature + HALVE_AT, mask=sights, other=0).to(tl.int32)
        sums = sights & (halve_at > 0)
        added = tl.where(second != first, 2, 1)
        before = tl.atomic_add(sketch_sums + segment, added, mask=sums, sem="relaxed")
        fills = sums & (before < halve_at) & (before + added >= halve_at)
        number = tl.atomic_add(counters + FULL + tl.zeros_like(k), 1, mask=fills, sem="relaxed")
        tl.store(full + number, segment.to(tl.int32), mask=fills)
        tl.store(full_at + number, halve_at, mask=fills)


@triton.jit
def _halve(sketch, sketch_sums, counters, full, full_at):
    """Halve the counters of the segments in `full` until their sum is less than `full_at`.

    Program p of P takes the segments p, p + P, ...
    """
    cell = tl.arange(0, CELLS)
    for number in range(tl.program_id(0), tl.load(counters + FULL), tl.num_programs(0)):
        segment = tl.load(full + number).to(tl.int64)
        halve_at = tl.load(full_at + number)
        seen = tl.load(sketch + segment * CELLS + cell)  # [CELLS]
        total = tl.sum(seen, 0)
        while total >= halve_at:
            seen = seen >> 1
            total = tl.sum(seen, 0)
        tl.store(sketch + segment * CELLS + cell, seen)
        tl.store(sketch_sums + segment, total)


@triton.jit
def is_admitted(id, mixed, feature, taken, sketch, segment, mask, SKETCH: tl.constexpr):
    """Return [N]: which of the listed ids may get a slot."""
    wanted = _may_be_admitted(id, mixed, feature, taken, mask)
    if SKETCH:
        first, second = _cells(segment, mixed)
        after = tl.load(feature + ADMIT_AFTER, mask=mask, other=1)
        counted = wanted & (after > 1)
        seen = tl.load(sketch + first, mask=counted, other=0)
        seen = tl.minimum(seen, tl.load(sketch + second, mask=counted, other=0))
        wanted = wanted & ((after <= 1) | (seen >= after))
    return wanted
