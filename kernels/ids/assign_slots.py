"""The kernels of `map_ids` for ids without a slot: which are admitted, and which slots they take."""

import triton
import triton.language as tl

from dlrm_overlap.kernels.ids.probing import (
    ACTIVE,
    ADMIT_AFTER,
    ADMIT_BELOW,
    CELLS,
    COLUMNS,
    DISTANCE_LFU,
    EMPTY,
    EVICTED,
    FAR,
    FIRST_SEGMENT,
    FIRST_SLOT,
    GREATEST,
    INITIALS,
    INSERTED,
    LFU,
    MISSING,
    NO_POLICY,
    OPEN,
    POLICY,
    PROBES,
    SEGMENT,
    SEGMENTS,
    SIZE,
    TABLE,
    TTL,
    WRITES,
    add_total,
    bucket_of,
    digest,
    id_at,
    listed,
    mix,
    murmur,
)
from dlrm_overlap.kernels.wide_ids import remainder


@triton.jit
def _segment_of(hash, feature, bucket, mask):
    """Return [N], three: the number of segments of a bucket, the segment within the bucket, and the segment."""
    segments = tl.load(feature + SEGMENTS, mask=mask, other=1)
    home = remainder(hash, tl.load(feature + OPEN, mask=mask, other=1))
    within = tl.where(segments > 1, home // SEGMENT, 0)
    return segments, within, tl.load(feature + FIRST_SEGMENT, mask=mask, other=0) + bucket * segments + within


@triton.jit
def _cells(segment, mixed):
    """Return [N], two: the counters of ids in the sketch, which are their segment's."""
    first = segment * CELLS + (mixed >> 32).to(tl.int64) % CELLS
    return first, segment * CELLS + (mixed & 0xFFFFFFFF).to(tl.int64) % CELLS


@triton.jit(do_not_specialize_on_alignment=["low", "high"])
def _sight(
    low,
    high,
    infos,
    sketch,
    taken,
    counters,
    missing,
    missing_feature,
    STRIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Count the sightings of the listed ids, as program p of P the blocks p, p + P, .. of BLOCK."""
    total = tl.load(counters + MISSING)
    for begin in range(tl.program_id(0) * BLOCK, total, tl.num_programs(0) * BLOCK):
        _, mask, i, feature = listed(missing, missing_feature, infos, begin, total, BLOCK)
        sights = mask & (tl.load(feature + WRITES, mask=mask, other=0) > 0) & (tl.load(taken) > 0)
        sights = sights & (tl.load(feature + ADMIT_AFTER, mask=mask, other=0) > 1)
        id = id_at(low, high, i, sights, STRIDE)
        _, bucket = bucket_of(id, feature, sights)
        _, _, segment = _segment_of(murmur(id), feature, bucket, sights)
        first, second = _cells(segment, mix(id))
        tl.atomic_add(sketch + first, 1, mask=sights, sem="relaxed")
        tl.atomic_add(sketch + second, 1, mask=sights & (second != first), sem="relaxed")


@triton.jit(do_not_specialize=["set_bits", "most_segments"], do_not_specialize_on_alignment=["low", "high"])
def _choose(
    low,
    high,
    infos,
    sketch,
    waiting,
    heads,
    taken,
    counters,
    missing,
    missing_feature,
    following,  # [count] int32: the next new id of the segment, plus 1
    new_ids,  # [count] int64
    twin,  # [count] int32: the place in the list of the id that is chained for this one; -1 if it is not admitted
    slot_of,  # [count] int32
    claimed,  # [count] int64
    members,  # [2 ** set_bits] int32, 0 between steps: places of the list, plus 1
    member_of,  # [count] int32: where a place is in `members`; -1 if nowhere
    active,  # [3 * most_segments] int32
    set_bits,
    most_segments,
    STRIDE: tl.constexpr,
    SKETCH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Chain the listed ids that are admitted, once each, by segment; as program p of P the blocks p, p + P, ...

    Memory: `members` is a hash set with open addressing. Of equal ids one is chained; which one makes no difference.

    Order: atomics are relaxed, since all that is read after them was written by earlier kernels.
    """
    total = tl.load(counters + MISSING)
    top = ((1 << set_bits) - 1).to(tl.int64)
    for begin in range(tl.program_id(0) * BLOCK, total, tl.num_programs(0) * BLOCK):
        k, mask, i, feature = listed(missing, missing_feature, infos, begin, total, BLOCK)
        id = id_at(low, high, i, mask, STRIDE)
        hash = murmur(id)
        mixed = mix(id)
        _, bucket = bucket_of(id, feature, mask)
        segments, within, segment = _segment_of(hash, feature, bucket, mask)
        # Admission.
        wanted = mask & (id != EMPTY) & (tl.load(feature + WRITES, mask=mask, other=0) > 0) & (tl.load(taken) > 0)
        wanted = wanted & ((mixed >> 32).to(tl.int64) < tl.load(feature + ADMIT_BELOW, mask=mask, other=0))
        if SKETCH:
            first, second = _cells(segment, mixed)
            after = tl.load(feature + ADMIT_AFTER, mask=mask, other=1)
            counted = wanted & (after > 1)
            seen = tl.load(sketch + first, mask=counted, other=0)
            seen = tl.minimum(seen, tl.load(sketch + second, mask=counted, other=0))
            wanted = wanted & ((after <= 1) | (seen >= after))
        # One of equal ids.
        table = tl.load(feature + FIRST_SLOT, mask=mask, other=0)
        at = ((hash >> 8).to(tl.int64) + table) & top
        looking = wanted
        of = tl.full((BLOCK,), -1, tl.int32)
        more = 1
        for _ in range(0, 64):
            if more > 0:
                # A lane that has finished compares with -1, which no word holds.
                word = tl.atomic_cas(members + at, tl.where(looking, 0, -1), tl.where(looking, k + 1, 0), sem="relaxed")
                of = tl.where(looking & (word == 0), k, of)
                other = tl.maximum(word - 1, 0)
                there = looking & (word > 0)
                its = infos + tl.load(missing_feature + other, mask=there, other=0).to(tl.int64) * COLUMNS
                at_other = tl.load(missing + other, mask=there, other=0).to(tl.int64)
                equal = there & (id_at(low, high, at_other, there, STRIDE) == id)
                equal = equal & (tl.load(its + FIRST_SLOT, mask=there, other=-1) == table)
                of = tl.where(equal, other, of)
                looking = there & (equal == 0)
                at = tl.where(looking, (at + 1) & top, at)
                more = tl.max(looking.to(tl.int32), 0)
        chosen = wanted & (of == k)
        tl.store(twin + k, of, mask=mask)
        tl.store(slot_of + k, tl.zeros_like(k) - 1, mask=chosen)
        tl.store(claimed + k, tl.zeros_like(i) - 1, mask=mask)
        tl.store(member_of + k, tl.where(chosen, at, -1).to(tl.int32), mask=mask)
        # Its segment's chain.
        before = tl.atomic_add(waiting + segment, 1, mask=chosen, sem="relaxed")
        head = tl.atomic_xchg(heads + segment, k + 1, mask=chosen, sem="relaxed")
        tl.store(following + k, head, mask=chosen)
        tl.store(new_ids + k, id, mask=chosen)
        phase = tl.where((segments > 1) & (within == segments - 2 + segments % 2), 2, within % 2)
        opens = chosen & (before == 0)
        place = tl.atomic_add(counters + ACTIVE + phase, 1, mask=opens, sem="relaxed")
        tl.store(active + phase * most_segments + place, segment.to(tl.int32), mask=opens)


@triton.jit
def _order(id):
    """Return the key by which new ids take slots; the greatest int64 only for `EMPTY`."""
    return mix(id + 1).to(tl.int64, bitcast=True) ^ GREATEST


@triton.jit(do_not_specialize=["phase", "most_segments"])
def _assign(
    infos,
    ids,
    digests,
    used_at,
    times,
    counts,
    waiting,
    heads,
    clock,
    totals,
    counters,
    missing_feature,
    following,
    new_ids,
    slot_of,  # [count] int32: the slot in its bucket that an id gets
    active,
    claimed,  # [count] int64
    claimed_tables,  # [count] int32
    origins,  # [count] int64
    evicted,  # [count] int64
    phase,
    most_segments,
    TIMES: tl.constexpr,
    COUNTS: tl.constexpr,
    LANES: tl.constexpr,
):
    """Give slots to the new ids of segments, as program p of P the active segments p, p + P, ...

    An id takes the first empty slot that it probes, or else the one that the policy chooses among those that neither
    this step nor the last one has used. Of more new ids than `SEGMENT`, or `WHOLE` in a bucket with more slots, those
    with the least keys are considered.

    Memory: a lane has a new id, and another one's slot: it loads the slot's old id and stores the new one. Segments of
    other phases, whose slots overlap, do not run at the same time.
    """
    step = tl.load(clock).to(tl.int32)
    now = tl.load(clock + 1)
    lane = tl.arange(0, LANES)
    for number in range(tl.program_id(0), tl.load(counters + ACTIVE + phase), tl.num_programs(0)):
        segment = tl.load(active + phase * most_segments + number).to(tl.int64)
        count = tl.load(waiting + segment)
        k = tl.load(heads + segment) - 1
        feature = infos + tl.load(missing_feature + k).to(tl.int64) * COLUMNS
        open = tl.load(feature + OPEN).to(tl.int32)
        probes = tl.load(feature + PROBES).to(tl.int32)
        policy = tl.load(feature + POLICY)
        segments = tl.load(feature + SEGMENTS)
        relative = segment - tl.load(feature + FIRST_SEGMENT)
        begin = (relative % segments).to(tl.int32) * SEGMENT
        first = tl.load(feature + FIRST_SLOT) + relative // segments * tl.load(feature + SIZE)
        # Collect the new ids, at most `limit`.
        limit = tl.where(open > SEGMENT, LANES, SEGMENT)
        keys = tl.full((LANES,), GREATEST, tl.int64)
        new = tl.zeros((LANES,), tl.int64)
        place_of = tl.zeros((LANES,), tl.int32)
        for turn in range(0, count):
            id = tl.load(new_ids + k)
            following_k = tl.load(following + k) - 1
            key = _order(id)
            place = lane == turn
            if turn >= limit:
                worst = tl.max(tl.where(lane < limit, keys, -GREATEST), 0)
                place = (keys == worst) & (key < worst)
            keys = tl.where(place, key, keys)
            new = tl.where(place, id, new)
            place_of = tl.where(place, k, place_of)
            k = following_k
        hash = murmur(new)
        home = remainder(hash, open).to(tl.int32) - begin  # [LANES]
        # Load the slots that they may take.
        slot = begin + lane
        slot = tl.where(slot >= open, slot - open, slot)
        inside = lane < tl.minimum(open, LANES)
        slot = tl.where(inside, slot, 0)
        at = first + slot  # [LANES]
        empty = inside & (tl.load(digests + at, mask=inside, other=0) == 0)
        used = tl.load(used_at + at, mask=inside, other=0)
        score = used.to(tl.int64)
        if TIMES:
            score = tl.load(times + at, mask=inside, other=0).to(tl.int64)
        may_go = inside & (empty == 0) & (used < step - 1) & (policy != NO_POLICY) & ((policy != TTL) | (score < now))
        if COUNTS:
            sightings = tl.load(counts + at, mask=inside, other=0).to(tl.int64)
            score = tl.where(policy == LFU, (sightings << 32) + score, score)
            age = (step - used + 1).to(tl.int64)
            score = tl.where(policy == DISTANCE_LFU, (sightings << 24) // tl.maximum(age, 1), score)
        # Assign them, the least key first.
        got = tl.full((LANES,), -1, tl.int32)
        claims = 0
        for _ in range(0, tl.minimum(count, limit)):
            its = keys == tl.min(keys, 0)
            keys = tl.where(its, GREATEST, keys)
            distance = lane - tl.sum(tl.where(its, home, 0), 0)
            distance = tl.where((segments == 1) & (distance < 0), distance + open, distance)
            near = (distance >= 0) & (distance < probes)
            nearest = tl.min(tl.where(near & empty, distance, FAR), 0)
            if nearest == FAR:
                victims = near & may_go
                least = tl.min(tl.where(victims, score, GREATEST), 0)
                nearest = tl.min(tl.where(victims & (score == least), distance, FAR), 0)
            if nearest < FAR:
                taken = near & (distance == nearest)
                got = tl.where(its, tl.sum(tl.where(taken, slot, 0), 0), got)
                empty = empty & (taken == 0)
                may_go = may_go & (taken == 0)
                claims += 1
        placed = got >= 0
        at = first + got
        before = tl.load(ids + at, mask=placed, other=EMPTY)
        tl.store(ids + at, new, mask=placed)
        tl.store(digests + at, digest(hash), mask=placed)
        tl.store(used_at + at, tl.zeros_like(lane) + step, mask=placed)
        if TIMES:
            tl.store(times + at, tl.zeros_like(lane) - 1, mask=placed)
        if COUNTS:
            tl.store(counts + at, tl.zeros_like(lane), mask=placed)
        tl.store(slot_of + place_of, got, mask=placed)
        tl.store(waiting + segment, 0)
        tl.store(heads + segment, 0)
        # Claim them.
        tl.store(claimed + place_of, at, mask=placed)
        tl.store(claimed_tables + place_of, tl.zeros_like(lane) + tl.load(feature + TABLE).to(tl.int32), mask=placed)
        size = tl.load(feature + SIZE)
        initials = tl.load(feature + INITIALS)
        origin = relative // segments * size + open + remainder(hash, size - open)
        if initials > 0:
            origin = remainder(mix(new), initials)
        tl.store(origins + place_of, origin, mask=placed)
        tl.store(evicted + place_of, before, mask=placed)
        add_total(totals, INSERTED, claims)
        add_total(totals, EVICTED, tl.sum((placed & (before != EMPTY)).to(tl.int32), 0))
