"""The first and the last kernel of `map_ids`: they replace the ids that have a slot by rows, then the listed others."""

import triton
import triton.language as tl

from dlrm_overlap.kernels.ids.probing import (
    COLUMNS,
    FIRST_SLOT,
    LIFETIME,
    MISSING,
    NO_ROOM,
    NOT_ADMITTED,
    OPEN,
    SIZE,
    WRITES,
    add_total,
    bucket_of,
    digest,
    id_at,
    listed,
    murmur,
    probe,
)
from dlrm_overlap.kernels.primitives import feature_of
from dlrm_overlap.kernels.wide_ids import remainder


@triton.jit
def _mark(used_at, times, counts, slot, feature, clock, uses, mask, TIMES: tl.constexpr, COUNTS: tl.constexpr):
    """Note that this step uses slots, where `uses`, and count a sighting of their ids, where `mask`."""
    step = tl.load(clock).to(tl.int32)
    # Thousands of ids may name one slot: store only what is not noted yet.
    stale = uses & (tl.load(used_at + slot, mask=uses, other=0) != step)
    tl.store(used_at + slot, tl.zeros_like(slot).to(tl.int32) + step, mask=stale)
    if TIMES:
        time = (tl.load(clock + 1) + tl.load(feature + LIFETIME, mask=mask, other=0)).to(tl.int32)
        older = mask & (tl.load(times + slot, mask=mask, other=0) < time)
        tl.atomic_max(times + slot, time, mask=older, sem="relaxed")
    if COUNTS:
        tl.atomic_add(counts + slot, 1, mask=mask, sem="relaxed")


@triton.jit(
    do_not_specialize=["count", "samples", "features"],
    do_not_specialize_on_alignment=["low", "high", "out", "offsets"],
)
def _find(
    low,  # [count * STRIDE] int32: lower words of the ids
    high,  # [count * STRIDE] int32: upper words
    out,  # [count] int32 or int64; may be `low`
    offsets,  # [features * samples + 1], of the bags
    infos,  # [features + 2, 17] int64
    ids,  # these seven as in `MapState`, digests as int32
    digests,
    used_at,
    times,
    counts,
    clock,
    taken,
    counters,  # [5] int32
    missing,  # [count] int32
    missing_feature,  # [count] int32
    slot_of,  # [count] int32: the first empty slot that a listed id probes, or -1
    count,
    samples,
    features,
    STRIDE: tl.constexpr,
    TRAIN: tl.constexpr,
    TIMES: tl.constexpr,
    COUNTS: tl.constexpr,
    HALVINGS: tl.constexpr,
    IDS: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Replace the ids that have a slot, of IDS ids, by rows, and list the positions of the others.

    Memory: ids of padding stay. With TRAIN, slots are marked as used; programs that mark one slot store the same.

    Order: the atomics are relaxed: they count, or hand out places of a list whose order does not matter.
    """
    i = tl.program_id(0).to(tl.int64) * IDS + tl.arange(0, IDS)
    mask = i < count
    number = feature_of(offsets, i, mask, samples, features, HALVINGS)
    feature = infos + number * COLUMNS
    size = tl.load(feature + SIZE, mask=mask, other=0)
    live = mask & (size > 0)
    id = id_at(low, high, i, live, STRIDE)
    here, bucket = bucket_of(id, feature, live)
    row = bucket * size
    first = tl.load(feature + FIRST_SLOT, mask=live, other=0) + row
    slot, vacant = probe(ids, digests, id, murmur(id), first, feature, here, IDS, ALIGNED)
    found = here & (slot >= 0)
    if TRAIN:
        uses = found & (tl.load(taken) > 0)
        writes = uses & (tl.load(feature + WRITES, mask=uses, other=0) > 0)
        _mark(used_at, times, counts, first + slot, feature, clock, uses, writes, TIMES, COUNTS)
    # An id whose bucket is elsewhere was sent to the wrong rank, which the layout excludes.
    value = tl.where(found, row + slot, 0)
    tl.store(out + i, value.to(out.dtype.element_ty), mask=live & (found | (here == 0)))
    lost = here & (slot < 0)
    losses = tl.sum(lost.to(tl.int32), 0)
    if losses > 0:
        at = tl.atomic_add(counters + MISSING, losses, sem="relaxed") + tl.cumsum(lost.to(tl.int32), 0) - 1
        tl.store(missing + at, i.to(tl.int32), mask=lost)
        tl.store(missing_feature + at, number.to(tl.int32), mask=lost)
        tl.store(slot_of + at, vacant, mask=lost)


@triton.jit(do_not_specialize_on_alignment=["low", "high", "out"])
def _replace(
    low,
    high,
    out,
    infos,
    ids,
    digests,
    used_at,
    times,
    counts,
    clock,
    taken,
    totals,
    counters,
    missing,
    missing_feature,
    twin,  # these five as in `_claim` and `_evict`
    slot_of,
    claimed,
    members,
    member_of,
    STRIDE: tl.constexpr,
    TRAIN: tl.constexpr,
    TIMES: tl.constexpr,
    COUNTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Store the ids of claimed slots and replace the listed ids by rows; as program p of P the blocks p, p + P, ...

    Parameters without a comment are as in `_find` or `MapState`. The row of an id without a slot is one of its bucket's
    reserved slots or, if there is none, the first slot that it probes, which another id may have.

    Memory: clears what `_claim` has stored to `members`.
    """
    total = tl.load(counters + MISSING)
    for begin in range(tl.program_id(0) * BLOCK, total, tl.num_programs(0) * BLOCK):
        k, mask, i, feature = listed(missing, missing_feature, infos, begin, total, BLOCK)
        id = id_at(low, high, i, mask, STRIDE)
        hash = murmur(id)
        _, bucket = bucket_of(id, feature, mask)
        size = tl.load(feature + SIZE, mask=mask, other=0)
        open = tl.load(feature + OPEN, mask=mask, other=1)
        spare = tl.where(size > open, open + remainder(hash, size - open), remainder(hash, open))
        if TRAIN:
            of = tl.load(twin + k, mask=mask, other=-1)
            wanted = of >= 0
            slot = tl.load(slot_of + of, mask=wanted, other=-1)
            found = slot >= 0
            first = tl.load(feature + FIRST_SLOT, mask=mask, other=0) + bucket * size
            spare = tl.where(found, slot, spare)
            # Another id's row must not be given away while this step's update still uses it.
            uses = found | (mask & (size == open) & (tl.load(taken) > 0))
            _mark(used_at, times, counts, first + spare, feature, clock, uses, found, TIMES, COUNTS)
            claims = found & (tl.load(claimed + k, mask=found, other=-1) >= 0)
            tl.store(ids + first + slot, id, mask=claims)
            tl.store(digests + first + slot, digest(hash), mask=claims)
            writes = mask & (tl.load(feature + WRITES, mask=mask, other=0) > 0) & (tl.load(taken) > 0)
            add_total(totals, NOT_ADMITTED, tl.sum((writes & (wanted == 0)).to(tl.int32), 0))
            add_total(totals, NO_ROOM, tl.sum((wanted & (slot < 0)).to(tl.int32), 0))
            member = tl.load(member_of + k, mask=mask, other=-1)
            tl.store(members + member, tl.zeros_like(member), mask=member >= 0)
        tl.store(out + i, (bucket * size + spare).to(out.dtype.element_ty), mask=mask)
