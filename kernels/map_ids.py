"""Replaces the ids of a step by the slots of a map, and gives slots to new ids; see `id_map` for the layout.

    _find      ids that have a slot become rows of their table; the positions of the others are listed
    _choose    of the listed ids, those that are admitted, once each, are chained by segment
    _assign    each segment's new ids take empty slots, or slots of ids that are evicted
    _replace   the listed ids become rows, too: their new slots, or the row for ids without a slot

The result does not depend on the order in which programs run. One program assigns the slots of a segment, in the order
of a hash of the new ids. A segment of a large bucket shares slots with the next one, and the last segment may be short.
So `_assign` runs in three phases: for segments of even number, for odd ones, and for the last one of even number, whose
ids may also take slots of segment 0.

Evaluation only finds: it changes nothing in the map.
"""

from functools import partial
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from dlrm_overlap.kernels import id_map, reference_ids
from dlrm_overlap.kernels.compiled import INTERPRETED, specialised
from dlrm_overlap.kernels.id_map import Claims, MapFeature, MapState
from dlrm_overlap.kernels.tuning import power_of_2

_NUM_WARPS = 4
_FIND_IDS = 8 if INTERPRETED else 16  # ids of a program, each with `SEGMENT` digests
_CHOOSE_IDS = 128
_CHOOSE_PROGRAMS, _ASSIGN_PROGRAMS, _REPLACE_PROGRAMS = (2, 2, 2) if INTERPRETED else (528, 2112, 528)
_PHASES = 3

EMPTY = tl.constexpr(id_map.EMPTY)
SEGMENT = tl.constexpr(id_map.SEGMENT)
WHOLE = tl.constexpr(id_map.WHOLE)
CELLS = tl.constexpr(id_map.CELLS)
GREATEST = tl.constexpr(2**63 - 1)
FAR = tl.constexpr(2**31 - 1)

# Columns of the table of features [features + 1 or more, 15] int64.
_column = MapFeature._fields.index
FIRST_SLOT = tl.constexpr(_column("first_slot"))
FIRST_BUCKET = tl.constexpr(_column("first_bucket"))
LOCAL_BUCKETS = tl.constexpr(_column("local_buckets"))
BUCKETS = tl.constexpr(_column("buckets"))
SIZE = tl.constexpr(_column("size"))
OPEN = tl.constexpr(_column("open_slots"))
PROBES = tl.constexpr(_column("probes"))
FIRST_SEGMENT = tl.constexpr(_column("first_segment"))
SEGMENTS = tl.constexpr(_column("segments"))
WRITES = tl.constexpr(_column("writes"))
LIFETIME = tl.constexpr(_column("lifetime"))
ADMIT_AFTER = tl.constexpr(_column("admit_after"))
ADMIT_BELOW = tl.constexpr(_column("admit_below"))
POLICY = tl.constexpr(_column("policy"))
TABLE = tl.constexpr(_column("table"))
COLUMNS = tl.constexpr(len(MapFeature._fields))

LFU = tl.constexpr(int(id_map.Policy.LFU))
DISTANCE_LFU = tl.constexpr(int(id_map.Policy.DISTANCE_LFU))
TTL = tl.constexpr(int(id_map.Policy.TTL))
NO_POLICY = tl.constexpr(int(id_map.Policy.NONE))
INSERTED = tl.constexpr(int(id_map.Totals.INSERTED))
EVICTED = tl.constexpr(int(id_map.Totals.EVICTED))
NOT_ADMITTED = tl.constexpr(int(id_map.Totals.NOT_ADMITTED))
NO_ROOM = tl.constexpr(int(id_map.Totals.NO_ROOM))
FOUND = tl.constexpr(int(id_map.Totals.FOUND))

# Words of the counters of a step, which begin at 0.
MISSING = tl.constexpr(0)
CLAIMED = tl.constexpr(1)
ACTIVE = tl.constexpr(2)  # one for each phase
_COUNTERS = 8


@triton.jit
def _rotated(value, BITS: tl.constexpr):
    return (value << BITS) | (value >> (64 - BITS))


@triton.jit
def _finished(value):
    value = (value ^ (value >> 33)) * 0xFF51AFD7ED558CCD
    value = (value ^ (value >> 33)) * 0xC4CEB9FE1A85EC53
    return value ^ (value >> 33)


@triton.jit
def murmur(id):
    """Return `id_map.murmur` of int64 ids, as uint64."""
    first = _rotated(id.to(tl.uint64, bitcast=True) * 0x87C37B91114253D5, 31) * 0x4CF5AD432745937F
    first = _rotated(first, 27) * 5 + 0x52DCE729
    second = first * 5 + 0x38495AB5
    first = first ^ 16
    second = second ^ 16
    first += second
    second += first
    first = _finished(first)
    second = _finished(second)
    first += second
    return first ^ (second + first)


@triton.jit
def mix(id):
    """Return `id_map.mix` of int64 ids, as uint64."""
    value = id.to(tl.uint64, bitcast=True)
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB
    return value ^ (value >> 31)


@triton.jit
def _remainder(value, divisor):
    """Return uint64 modulo int64, as int64; modulo 1 if `divisor` is 0."""
    return (value % tl.maximum(divisor, 1).to(tl.uint64)).to(tl.int64)


@triton.jit
def _digest(hash):
    return tl.maximum(hash >> 56, 1).to(tl.uint8)


@triton.jit
def _id_at(low, high, position, mask, STRIDE: tl.constexpr):
    word = tl.load(low + position * STRIDE, mask=mask, other=0).to(tl.uint32, bitcast=True)
    return (tl.load(high + position * STRIDE, mask=mask, other=0).to(tl.int64) << 32) | word.to(tl.int64)


@triton.jit
def _feature_of(offsets, position, mask, samples, features, HALVINGS: tl.constexpr):
    """Return [N]: the first feature whose bags end after `position` [N]; `features` if none does."""
    low = tl.zeros_like(position)
    high = low + features
    for _ in range(HALVINGS):
        searching = mask & (low < high)
        middle = (low + high) // 2
        ended = tl.load(offsets + (middle + 1) * samples, mask=searching, other=0) <= position
        low = tl.where(searching & ended, middle + 1, low)
        high = tl.where(searching & (ended == 0), middle, high)
    return low


@triton.jit
def _bucket(id, feature, mask):
    """Return [N], of ids and rows of the table of features: whether the bucket is here, and its number here."""
    bucket = _remainder(id.to(tl.uint64, bitcast=True), tl.load(feature + BUCKETS, mask=mask, other=1))
    bucket -= tl.load(feature + FIRST_BUCKET, mask=mask, other=0)
    here = mask & (bucket >= 0) & (bucket < tl.load(feature + LOCAL_BUCKETS, mask=mask, other=0))
    return here, tl.where(here, bucket, 0)


@triton.jit
def _probe(ids, digests, id, hash, first, feature, live, IDS: tl.constexpr):
    """Return [IDS] int32: the slot in its bucket, which begins at slot `first`, of each live id; -1 without one."""
    lane = tl.arange(0, SEGMENT)[None, :]
    open = tl.load(feature + OPEN, mask=live, other=1)
    probes = tl.load(feature + PROBES, mask=live, other=0)
    open = open.to(tl.int32)
    home = _remainder(hash, open).to(tl.int32)
    slot = home[:, None] + lane  # [IDS, SEGMENT]
    slot = tl.where(slot >= open[:, None], slot - open[:, None], slot)
    inside = live[:, None] & (lane < probes.to(tl.int32)[:, None])
    digest = tl.load((digests + first)[:, None] + slot, mask=inside, other=0)
    alike = inside & (digest == _digest(hash)[:, None])
    found = tl.full((IDS,), -1, tl.int32)
    more = 1
    # A digest of 8 bits is rarely another id's: the second loop has no turns.
    for _ in range(0, 4):
        if more > 0:
            found, alike, more = _try(ids, id, first, home, open, found, alike, lane)
    for _ in range(0, more * SEGMENT):
        if more > 0:
            found, alike, more = _try(ids, id, first, home, open, found, alike, lane)
    return found


@triton.jit
def _try(ids, id, first, home, open, found, alike, lane):
    """Compare the nearest id that is alike, for each id; return whether any is left in addition."""
    distance = tl.min(tl.where(alike, lane, SEGMENT), 1)
    trying = distance < SEGMENT
    slot = home + distance
    slot = tl.where(slot >= open, slot - open, slot)
    same = trying & (tl.load(ids + first + slot, mask=trying, other=EMPTY) == id)
    found = tl.where(same, slot, found)
    alike = alike & (lane > distance[:, None]) & (found < 0)[:, None]
    return found, alike, tl.max(trying.to(tl.int32), 0)


@triton.jit
def _mark(used_at, times, counts, slot, feature, clock, mask, COUNTS: tl.constexpr):
    """Note that this step uses slots."""
    step = tl.load(clock).to(tl.int32)
    # Thousands of ids may name one slot: store only what is not noted yet.
    stale = mask & (tl.load(used_at + slot, mask=mask, other=0) != step)
    tl.store(used_at + slot, tl.zeros_like(slot).to(tl.int32) + step, mask=stale)
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
    infos,  # [features + 1 or more, 15] int64
    ids,  # these six as in `MapState`
    digests,
    used_at,
    times,
    counts,
    clock,
    totals,
    counters,  # [8] int32
    missing,  # [count] int32
    missing_feature,  # [count] int32
    count,
    samples,
    features,
    STRIDE: tl.constexpr,
    TRAIN: tl.constexpr,
    COUNTS: tl.constexpr,
    HALVINGS: tl.constexpr,
    IDS: tl.constexpr,
):
    """Replace those of IDS ids that have a slot by rows, and list the positions of the others.

    Memory: ids of padding stay. With TRAIN, slots are marked as used; programs that mark one slot store the same.

    Order: the atomics are relaxed: they count, or hand out places of a list whose order does not matter.
    """
    i = tl.program_id(0).to(tl.int64) * IDS + tl.arange(0, IDS)
    mask = i < count
    number = _feature_of(offsets, i, mask, samples, features, HALVINGS)
    feature = infos + number * COLUMNS
    size = tl.load(feature + SIZE, mask=mask, other=0)
    live = mask & (size > 0)
    id = _id_at(low, high, i, live, STRIDE)
    here, bucket = _bucket(id, feature, live)
    row = bucket * size
    first = tl.load(feature + FIRST_SLOT, mask=live, other=0) + row
    slot = _probe(ids, digests, id, murmur(id), first, feature, here, IDS)
    found = here & (slot >= 0)
    if TRAIN:
        writes = found & (tl.load(feature + WRITES, mask=found, other=0) > 0)
        _mark(used_at, times, counts, first + slot, feature, clock, writes, COUNTS)
        tl.atomic_add(totals + FOUND, tl.sum(found.to(tl.int64), 0), sem="relaxed")
    # An id whose bucket is elsewhere was sent to the wrong rank, which the layout excludes.
    value = tl.where(found, row + slot, 0)
    tl.store(out + i, value.to(out.dtype.element_ty), mask=live & (found | (here == 0)))
    lost = here & (slot < 0)
    losses = tl.sum(lost.to(tl.int32), 0)
    if losses > 0:
        at = tl.atomic_add(counters + MISSING, losses, sem="relaxed") + tl.cumsum(lost.to(tl.int32), 0) - 1
        tl.store(missing + at, i.to(tl.int32), mask=lost)
        tl.store(missing_feature + at, number.to(tl.int32), mask=lost)


@triton.jit
def _cells(hash, mixed, feature, bucket, mask):
    """Return [N], two: the counters of ids in the sketch; those of a segment are its ids' only."""
    open = tl.load(feature + OPEN, mask=mask, other=1)
    segments = tl.load(feature + SEGMENTS, mask=mask, other=1)
    within = tl.where(segments > 1, _remainder(hash, open) // SEGMENT, 0)
    segment = tl.load(feature + FIRST_SEGMENT, mask=mask, other=0) + bucket * segments + within
    first = segment * CELLS + (mixed >> 32).to(tl.int64) % CELLS
    return segment, first, segment * CELLS + (mixed & 0xFFFFFFFF).to(tl.int64) % CELLS


@triton.jit(do_not_specialize=["mask_bits"], do_not_specialize_on_alignment=["low", "high"])
def _sight(
    low,
    high,
    infos,
    sketch,
    counters,
    missing,
    missing_feature,
    STRIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Count the sightings of the listed ids, as program p of P the blocks p, p + P, .. of BLOCK."""
    total = tl.load(counters + MISSING)
    for begin in range(tl.program_id(0) * BLOCK, total, tl.num_programs(0) * BLOCK):
        k = begin + tl.arange(0, BLOCK)
        mask = k < total
        i = tl.load(missing + k, mask=mask, other=0).to(tl.int64)
        feature = infos + tl.load(missing_feature + k, mask=mask, other=0).to(tl.int64) * COLUMNS
        sights = mask & (tl.load(feature + WRITES, mask=mask, other=0) > 0)
        sights = sights & (tl.load(feature + ADMIT_AFTER, mask=mask, other=0) > 1)
        id = _id_at(low, high, i, sights, STRIDE)
        _, bucket = _bucket(id, feature, sights)
        _, first, second = _cells(murmur(id), mix(id), feature, bucket, sights)
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
    counters,
    missing,
    missing_feature,
    admitted,  # [count] int32: 1 if the id at this place of the list is admitted
    following,  # [count] int32: the next new id of the segment, plus 1
    new_ids,  # [count] int64
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
        k = begin + tl.arange(0, BLOCK)
        mask = k < total
        i = tl.load(missing + k, mask=mask, other=0).to(tl.int64)
        feature = infos + tl.load(missing_feature + k, mask=mask, other=0).to(tl.int64) * COLUMNS
        id = _id_at(low, high, i, mask, STRIDE)
        hash = murmur(id)
        mixed = mix(id)
        _, bucket = _bucket(id, feature, mask)
        segment, first, second = _cells(hash, mixed, feature, bucket, mask)
        # Admission.
        wanted = mask & (id != EMPTY) & (tl.load(feature + WRITES, mask=mask, other=0) > 0)
        wanted = wanted & ((mixed >> 32).to(tl.int64) < tl.load(feature + ADMIT_BELOW, mask=mask, other=0))
        if SKETCH:
            after = tl.load(feature + ADMIT_AFTER, mask=mask, other=1)
            counted = wanted & (after > 1)
            seen = tl.load(sketch + first, mask=counted, other=0)
            seen = tl.minimum(seen, tl.load(sketch + second, mask=counted, other=0))
            wanted = wanted & ((after <= 1) | (seen >= after))
        tl.store(admitted + k, wanted.to(tl.int32), mask=mask)
        # One of equal ids.
        table = tl.load(feature + FIRST_SLOT, mask=mask, other=0)
        at = ((hash >> 8).to(tl.int64) + table) & top
        looking = wanted
        chosen = tl.zeros((BLOCK,), tl.int1)
        more = 1
        for _ in range(0, 64):
            if more > 0:
                # A lane that has finished compares with -1, which no word holds.
                word = tl.atomic_cas(members + at, tl.where(looking, 0, -1), tl.where(looking, k + 1, 0), sem="relaxed")
                chosen = chosen | (looking & (word == 0))
                other = tl.maximum(word - 1, 0)
                there = looking & (word > 0)
                its = infos + tl.load(missing_feature + other, mask=there, other=0).to(tl.int64) * COLUMNS
                at_other = tl.load(missing + other, mask=there, other=0).to(tl.int64)
                equal = there & (_id_at(low, high, at_other, there, STRIDE) == id)
                equal = equal & (tl.load(its + FIRST_SLOT, mask=there, other=-1) == table)
                looking = there & (equal == 0)
                at = tl.where(looking, (at + 1) & top, at)
                more = tl.max(looking.to(tl.int32), 0)
        tl.store(member_of + k, tl.where(chosen, at, -1).to(tl.int32), mask=mask)
        # Its segment's chain.
        before = tl.atomic_add(waiting + segment, 1, mask=chosen, sem="relaxed")
        head = tl.atomic_xchg(heads + segment, k + 1, mask=chosen, sem="relaxed")
        tl.store(following + k, head, mask=chosen)
        tl.store(new_ids + k, id, mask=chosen)
        segments = tl.load(feature + SEGMENTS, mask=mask, other=1)
        within = tl.where(segments > 1, _remainder(hash, tl.load(feature + OPEN, mask=mask, other=1)) // SEGMENT, 0)
        alone = (segments > 1) & (within == segments - 2 + segments % 2)
        phase = tl.where(alone, 2, within % 2)
        opens = chosen & (before == 0)
        place = tl.atomic_add(counters + ACTIVE + phase, 1, mask=opens, sem="relaxed")
        tl.store(active + phase * most_segments + place, segment.to(tl.int32), mask=opens)


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
    active,
    claimed,  # [count] int64
    claimed_tables,  # [count] int32
    evicted,  # [count] int64
    phase,
    most_segments,
    COUNTS: tl.constexpr,
    LANES: tl.constexpr,
):
    """Give slots to the new ids of segments, as program p of P the active segments p, p + P, ...

    An id takes the first empty slot that it probes, or else the one that the policy chooses among those that neither
    this step nor the last one has used. If a segment has more than LANES new ids, those with the least key stay.

    Memory: a segment's programs of other phases, whose slots overlap, do not run at the same time.
    """
    step = tl.load(clock).to(tl.int32)
    now = tl.load(clock + 1)
    lane = tl.arange(0, LANES)
    segments_here = tl.load(counters + ACTIVE + phase)
    for number in range(tl.program_id(0), segments_here, tl.num_programs(0)):
        segment = tl.load(active + phase * most_segments + number).to(tl.int64)
        count = tl.load(waiting + segment)
        k = tl.load(heads + segment) - 1
        # Collect the new ids, at most LANES.
        keys = tl.full((LANES,), GREATEST, tl.int64)
        waiting_ids = tl.zeros((LANES,), tl.int64)
        feature = infos + tl.load(missing_feature + k).to(tl.int64) * COLUMNS
        for turn in range(0, count):
            id = tl.load(new_ids + k)
            key = _order(id)
            worst = tl.max(keys, 0)
            place = ((turn < LANES) & (lane == turn)) | ((turn >= LANES) & (keys == worst) & (key < worst))
            keys = tl.where(place, key, keys)
            waiting_ids = tl.where(place, id, waiting_ids)
            k = tl.load(following + k) - 1
        # Load the slots that they may take.
        open = tl.load(feature + OPEN)
        probes = tl.load(feature + PROBES)
        policy = tl.load(feature + POLICY)
        segments = tl.load(feature + SEGMENTS)
        relative = segment - tl.load(feature + FIRST_SEGMENT)
        begin = relative % segments * SEGMENT
        slot = begin + lane
        slot = tl.where(slot >= open, slot - open, slot)
        inside = lane < tl.minimum(open, LANES)
        slot = tl.where(inside, slot, 0)
        at = tl.load(feature + FIRST_SLOT) + relative // segments * tl.load(feature + SIZE) + slot  # [LANES]
        before = tl.load(ids + at, mask=inside, other=EMPTY)
        used = tl.load(used_at + at, mask=inside, other=0)
        time = tl.load(times + at, mask=inside, other=0).to(tl.int64)
        score = time
        if COUNTS:
            sightings = tl.load(counts + at, mask=inside, other=0).to(tl.int64)
            score = tl.where(policy == LFU, (sightings << 32) + time, score)
            age = (step - used + 1).to(tl.int64)
            score = tl.where(policy == DISTANCE_LFU, (sightings << 24) // tl.maximum(age, 1), score)
        may_go = inside & (used < step - 1) & (policy != NO_POLICY) & ((policy != TTL) | (time < now))
        # Assign them, the least key first.
        after = before
        changed = tl.zeros((LANES,), tl.int1)
        for _ in range(0, tl.minimum(count, LANES)):
            key = tl.min(keys, 0)
            first_one = keys == key
            id = tl.sum(tl.where(first_one, waiting_ids, 0), 0)
            keys = tl.where(first_one, GREATEST, keys)
            distance = lane - (_remainder(murmur(id), open) - begin)
            distance = tl.where((segments == 1) & (distance < 0), distance + open, distance)
            near = inside & (distance >= 0) & (distance < probes)
            nearest = tl.min(tl.where(near & (after == EMPTY), distance, FAR), 0)
            victims = near & may_go & (changed == 0) & (after != EMPTY)
            least = tl.min(tl.where(victims, score, GREATEST), 0)
            victim = tl.min(tl.where(victims & (score == least), distance, FAR), 0)
            taken = near & (distance == tl.where(nearest < FAR, nearest, victim))
            after = tl.where(taken, id, after)
            changed = changed | taken
        tl.store(ids + at, after, mask=changed)
        tl.store(digests + at, _digest(murmur(after)), mask=changed)
        tl.store(used_at + at, tl.zeros_like(lane) + step, mask=changed)
        tl.store(times + at, tl.zeros_like(lane) - 1, mask=changed)
        if COUNTS:
            tl.store(counts + at, tl.zeros_like(lane), mask=changed)
        tl.store(waiting + segment, 0)
        tl.store(heads + segment, 0)
        # List them.
        claims = tl.sum(changed.to(tl.int32), 0)
        into = tl.atomic_add(counters + CLAIMED, claims, sem="relaxed") + tl.cumsum(changed.to(tl.int32), 0) - 1
        tl.store(claimed + into, at, mask=changed)
        tl.store(claimed_tables + into, tl.zeros_like(lane) + tl.load(feature + TABLE).to(tl.int32), mask=changed)
        tl.store(evicted + into, before, mask=changed)
        tl.atomic_add(totals + INSERTED, claims.to(tl.int64), sem="relaxed")
        gone = tl.sum((changed & (before != EMPTY)).to(tl.int64), 0)
        tl.atomic_add(totals + EVICTED, gone, sem="relaxed")


@triton.jit
def _order(id):
    """Return the key by which new ids take slots; the greatest int64 only for `EMPTY`."""
    return mix(id + 1).to(tl.int64, bitcast=True) ^ GREATEST


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
    totals,
    counters,
    missing,
    missing_feature,
    admitted,
    members,
    member_of,
    STRIDE: tl.constexpr,
    TRAIN: tl.constexpr,
    COUNTS: tl.constexpr,
    IDS: tl.constexpr,
):
    """Replace the listed ids by rows, as program p of P the blocks p, p + P, .. of IDS.

    The row of an id without a slot is one of its bucket's reserved slots or, if there is none, the first slot that it
    probes, which another id may have.
    """
    total = tl.load(counters + MISSING)
    for begin in range(tl.program_id(0) * IDS, total, tl.num_programs(0) * IDS):
        k = begin + tl.arange(0, IDS)
        mask = k < total
        i = tl.load(missing + k, mask=mask, other=0).to(tl.int64)
        feature = infos + tl.load(missing_feature + k, mask=mask, other=0).to(tl.int64) * COLUMNS
        id = _id_at(low, high, i, mask, STRIDE)
        hash = murmur(id)
        _, bucket = _bucket(id, feature, mask)
        size = tl.load(feature + SIZE, mask=mask, other=0)
        open = tl.load(feature + OPEN, mask=mask, other=1)
        first = tl.load(feature + FIRST_SLOT, mask=mask, other=0) + bucket * size
        spare = tl.where(size > open, open + _remainder(hash, size - open), _remainder(hash, open))
        if TRAIN:
            wanted = mask & (tl.load(admitted + k, mask=mask, other=0) > 0)
            slot = _probe(ids, digests, id, hash, first, feature, wanted, IDS)
            found = slot >= 0
            _mark(used_at, times, counts, first + slot, feature, clock, found, COUNTS)
            spare = tl.where(found, slot, spare)
            writes = mask & (tl.load(feature + WRITES, mask=mask, other=0) > 0)
            refused = tl.sum((writes & (wanted == 0)).to(tl.int64), 0)
            tl.atomic_add(totals + NOT_ADMITTED, refused, sem="relaxed")
            tl.atomic_add(totals + NO_ROOM, tl.sum((wanted & (slot < 0)).to(tl.int64), 0), sem="relaxed")
            member = tl.load(member_of + k, mask=mask, other=-1)
            tl.store(members + member, tl.zeros_like(member), mask=member >= 0)
        tl.store(out + i, (bucket * size + spare).to(out.dtype.element_ty), mask=mask)


class Features(NamedTuple):
    """The features that a map looks up together."""

    infos: torch.Tensor
    """[features + 1 or more, 15] int64, rows of `MapFeature`; ids after all bags belong to the row after the last"""
    counts: bool
    """whether a policy needs counts"""
    sketch: bool
    """whether some ids are admitted after several sightings"""
    whole: bool
    """whether no bucket has more than one segment"""


class IdSet:
    """A hash set of the ids of one step, as large as the largest step so far."""

    def __init__(self) -> None:
        self._members: torch.Tensor | None = None

    def for_ids(self, count: int, device: torch.device) -> torch.Tensor:
        """Return [a power of two, at least 2 * count] int32, all 0."""
        if self._members is None or self._members.numel() < 2 * count:
            self._members = torch.zeros(power_of_2(2 * max(count, 1)), dtype=torch.int32, device=device)
        return self._members


def map_ids(
    state: MapState,
    features: Features,
    id_set: IdSet,
    low: torch.Tensor,
    high: torch.Tensor,
    out: torch.Tensor,
    offsets: torch.Tensor,
    samples: int,
    train: bool,
) -> Claims | None:
    """Replace ids by rows of their tables on this rank, and return the slots that new ids got; None if not `train`.

    With `train`, `state` counts a step, its slots are marked, and ids that are admitted get slots. Else ids without a
    slot only get the row for them.

    Args:
        low: [n] int32, lower words of the ids, feature after feature; maybe every other word of a tensor.
        high: [n] int32, upper words, with the same stride.
        out: [n] int32 or int64, receives the rows; may be `low`. Ids of features without a map stay as they are.
        offsets: [F * samples + 1] int32 or int64, of the bags of F features.
    """
    if not (low.is_cuda or INTERPRETED):
        return reference_ids.map_ids(state, features, low, high, out, offsets, samples, train)
    ids, digests, used_at, times, counts, sketch, waiting, heads, clock, totals = state
    count, number, device = out.numel(), (offsets.numel() - 1) // samples, low.device
    segments, stride = waiting.numel(), low.stride(0)
    assert stride == high.stride(0), "words of one tensor, or of two alike"
    if train:
        clock[:1].add_(1)
    counters = torch.zeros(_COUNTERS, dtype=torch.int32, device=device)
    room = max(4, -(-count // 4) * 4)  # tensors begin at multiples of 16 bytes
    lists = torch.empty(5 * room, dtype=torch.int32, device=device).split(room)
    missing, missing_feature, admitted, following, member_of = lists
    none = missing[:0]
    slots = counts if features.counts else none
    make = partial(specialised, num_warps=_NUM_WARPS)
    find = make(_find, STRIDE=stride, TRAIN=train, COUNTS=features.counts, HALVINGS=number.bit_length(), IDS=_FIND_IDS)
    words, marks = (low, high), (ids, digests, used_at, times, slots, clock, totals, counters)
    find(
        -(-count // _FIND_IDS), (out.dtype, offsets.dtype),
        *words, out, offsets, features.infos, *marks, missing, missing_feature, count, samples, number,
    )  # fmt: skip
    claims, members = None, none
    if train:
        members = id_set.for_ids(count, device)
        if features.sketch:
            sight = make(_sight, STRIDE=stride, BLOCK=_CHOOSE_IDS)
            sight(_CHOOSE_PROGRAMS, (), *words, features.infos, sketch, counters, missing, missing_feature)
        active = torch.empty(_PHASES * segments, dtype=torch.int32, device=device)
        new_ids, claimed, evicted = torch.empty(3 * room, dtype=torch.int64, device=device).split(room)
        claimed_tables = torch.empty(room, dtype=torch.int32, device=device)
        choose = make(_choose, STRIDE=stride, SKETCH=features.sketch, BLOCK=_CHOOSE_IDS)
        choose(
            _CHOOSE_PROGRAMS, (),
            *words, features.infos, sketch if features.sketch else none, waiting, heads, counters, missing,
            missing_feature, admitted, following, new_ids, members, member_of, active,
            members.numel().bit_length() - 1, segments,
        )  # fmt: skip
        assign = specialised(
            _assign, num_warps=1, COUNTS=features.counts, LANES=id_map.SEGMENT if features.whole else id_map.WHOLE
        )
        for phase in range(1 if features.whole else _PHASES):
            assign(
                _ASSIGN_PROGRAMS, (),
                features.infos, ids, digests, used_at, times, slots, waiting, heads, clock, totals, counters,
                missing_feature, following, new_ids, active, claimed, claimed_tables, evicted, phase, segments,
            )  # fmt: skip
        claims = Claims(claimed, claimed_tables, evicted, counters[1:2])
    replace = make(_replace, STRIDE=stride, TRAIN=train, COUNTS=features.counts, IDS=_FIND_IDS)
    replace(
        _REPLACE_PROGRAMS, (out.dtype,),
        *words, out, features.infos, *marks, missing, missing_feature, admitted, members, member_of,
    )  # fmt: skip
    return claims
