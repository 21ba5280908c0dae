"""The kernels of `map_ids` by which ids without a slot take slots, if they are admitted."""

import triton
import triton.language as tl

from dlrm_overlap.kernels.ids.admission import is_admitted
from dlrm_overlap.kernels.ids.probing import (
    ACTIVE,
    ALL_BITS,
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
    TOP_BIT,
    TTL,
    add_total,
    bucket_of,
    distance_of,
    id_at,
    listed,
    lowest_bit,
    mix,
    murmur,
    segment_of,
    unmix,
    zero_bytes,
)
from dlrm_overlap.kernels.wide_ids import remainder


@triton.jit
def _turn_of(id):
    """Return uint64, different for each id: new ids take slots in this order. `EMPTY` keeps its bits, and is last."""
    return mix(id + 1) ^ ALL_BITS


@triton.jit
def _next_empty(digests, first, slot, open, mask):
    """Return the first slot without a digest from `slot` on, whether there is one, and how many slots were passed.

    Only slots whose digests are in one word are looked at; if none is empty, the slot is the one after them.
    `digests` is int32, and a bucket begins at slot `first`.
    """
    at = first + slot
    skip = (at % 4).to(tl.int32)
    bits = zero_bytes(tl.load(digests + at // 4, mask=mask, other=-1)) >> skip
    bits = bits & ((1 << tl.minimum(open - slot, 4)) - 1)
    passed = tl.where(bits != 0, lowest_bit(bits), tl.minimum(4 - skip, open - slot))
    slot = tl.where(slot + passed >= open, 0, slot + passed)
    return slot, mask & (bits != 0), passed


@triton.jit
def _after(slot, distance, open, mask):
    """Return the next slot that an id probes, and its distance from the id's home, where `mask` is set."""
    following = tl.where(slot + 1 == open, 0, slot + 1)
    return tl.where(mask, following, slot), tl.where(mask, distance + 1, distance)


@triton.jit
def _distance(slot, hash, open):
    """Return the distance of a slot from the home of an id with this hash."""
    return distance_of(slot, remainder(hash, open).to(tl.int32), open)


@triton.jit(do_not_specialize_on_alignment=["low", "high"])
def _insert(
    low,
    high,
    infos,
    ids,
    digests,  # as int32
    sketch,
    taken,
    counters,
    missing,
    missing_feature,
    slot_of,  # [count] int32: from `_find`; then the slot that a listed id was stored to first, or -1
    twin,  # [count] int32: -1 if the id is not admitted
    STRIDE: tl.constexpr,
    SKETCH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Store the listed ids that are admitted to empty slots, as program p of P the blocks p, p + P, .. of BLOCK.

    Each takes the first empty slot that it probes, as if they came one by one in the order of `_turn_of`: an id that
    meets a later one takes its slot, and carries the later one on to the slot that it probes next (Shun and Blelloch,
    Phase-Concurrent Hash Tables for Determinism, SPAA 2014). So the result does not depend on the order of programs.
    Parameters without a comment are as in `_find` or `MapState`.

    Memory: slots that are empty when this begins have `_turn_of` an id afterwards, and their digests stay 0; `_replace`
    stores the ids.

    Order: atomics are relaxed, since nothing but the numbers themselves is handed over.
    """
    total = tl.load(counters + MISSING)
    turns = ids.to(tl.pointer_type(tl.uint64))
    last = tl.full((BLOCK,), EMPTY, tl.int64).to(tl.uint64, bitcast=True)
    for begin in range(tl.program_id(0) * BLOCK, total, tl.num_programs(0) * BLOCK):
        k, mask, i, feature = listed(missing, missing_feature, infos, begin, total, BLOCK)
        id = id_at(low, high, i, mask, STRIDE)
        hash = murmur(id)
        mixed = mix(id)
        _, bucket = bucket_of(id, feature, mask)
        _, _, segment = segment_of(hash, feature, bucket, mask)
        # Which ids are admitted, and the first empty slot that each of them probes.
        wanted = is_admitted(id, mixed, feature, taken, sketch, segment, mask, SKETCH)
        tl.store(twin + k, tl.where(wanted, k, -1), mask=mask)
        open = tl.load(feature + OPEN, mask=mask, other=1).to(tl.int32)
        probes = tl.load(feature + PROBES, mask=mask, other=0).to(tl.int32)
        first = tl.load(feature + FIRST_SLOT, mask=mask, other=0)
        first += bucket * tl.load(feature + SIZE, mask=mask, other=0)
        slot = tl.load(slot_of + k, mask=mask, other=-1)
        looking = wanted & (slot >= 0)
        slot = tl.maximum(slot, 0)
        distance = _distance(slot, hash, open)
        turn = _turn_of(id)
        own = tl.full((BLOCK,), -1, tl.int32)
        carries = looking & False  # another id
        more = tl.max(looking.to(tl.int32), 0)
        # Store the earliest turn to each slot. A lane stops at a slot that was empty or has its own turn; it carries on
        # a later turn that it has replaced.
        while more > 0:
            slot, free, passed = _next_empty(digests, first, slot, open, looking)
            distance += passed
            free = free & (distance < probes)
            there = tl.atomic_min(turns + first + slot, turn, mask=free, sem="relaxed")
            own = tl.where(free & (carries == 0) & (there >= turn), slot, own)
            looking = looking & (distance < probes) & ((free == 0) | ((there != turn) & (there != last)))
            swaps = looking & free & (there > turn)
            carries = carries | swaps
            turn = tl.where(swaps, there, turn)
            if tl.max(swaps.to(tl.int32), 0) > 0:
                its = unmix(turn ^ ALL_BITS) - 1
                distance = tl.where(swaps, _distance(slot, murmur(its), open), distance)
            slot, distance = _after(slot, distance, open, free)
            looking = looking & (distance < probes)
            more = tl.max(looking.to(tl.int32), 0)
        tl.store(slot_of + k, own, mask=mask)


@triton.jit(do_not_specialize=["set_bits", "most_segments"], do_not_specialize_on_alignment=["low", "high"])
def _claim(
    low,
    high,
    infos,
    ids,
    digests,  # as int32
    used_at,
    waiting,
    heads,
    clock,
    totals,
    counters,
    missing,
    missing_feature,
    following,  # [count] int32: the next chained id of the segment, plus 1
    homes,  # [count] int32: the slot that a chained id probes first
    twin,  # [count] int32: the place in the list of the id whose slot this one has; -1 if it is not admitted
    slot_of,  # [count] int32: the slot in the bucket, or -1
    claimed,  # these five as in `Claims`
    claimed_tables,
    new_ids,
    origins,
    evicted,
    members,  # [2 ** set_bits] int32, 0 between steps: places of the list, plus 1
    member_of,  # [count] int32: where a place is in `members`; -1 if nowhere
    active,  # [3 * most_segments] int32
    set_bits,
    most_segments,
    STRIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Claim the slots that `_insert` has given; as program p of P the blocks p, p + P, .. of BLOCK.

    The other ids that are admitted are chained by segment, once each, for `_evict`. Parameters without a comment are as
    in `_find` or `MapState`.

    Memory: a slot is claimed by the lane that first stores the step to `used_at`. `members` is a hash set with open
    addressing. Of equal ids one claims or is chained; which one makes no difference.

    Order: atomics are relaxed, since all that is read after them was written by earlier kernels.
    """
    total = tl.load(counters + MISSING)
    step = tl.load(clock).to(tl.int32)
    top = ((1 << set_bits) - 1).to(tl.int64)
    for begin in range(tl.program_id(0) * BLOCK, total, tl.num_programs(0) * BLOCK):
        k, mask, i, feature = listed(missing, missing_feature, infos, begin, total, BLOCK)
        id = id_at(low, high, i, mask, STRIDE)
        hash = murmur(id)
        _, bucket = bucket_of(id, feature, mask)
        wanted = mask & (tl.load(twin + k, mask=mask, other=-1) >= 0)
        # Find each id's slot: from where it was stored first, it may have been carried on.
        open = tl.load(feature + OPEN, mask=mask, other=1).to(tl.int32)
        probes = tl.load(feature + PROBES, mask=mask, other=0).to(tl.int32)
        size = tl.load(feature + SIZE, mask=mask, other=0)
        table = tl.load(feature + FIRST_SLOT, mask=mask, other=0)
        first = table + bucket * size
        slot = tl.load(slot_of + k, mask=mask, other=-1)
        looking = wanted & (slot >= 0)
        slot = tl.maximum(slot, 0)
        distance = _distance(slot, hash, open)
        turn = _turn_of(id).to(tl.int64, bitcast=True)
        found = looking & False
        more = tl.max(looking.to(tl.int32), 0)
        while more > 0:
            next_slot, free, passed = _next_empty(digests, first, slot, open, looking)
            distance += passed
            free = free & (distance < probes)
            found = found | (free & (tl.load(ids + first + next_slot, mask=free, other=0) == turn))
            slot = tl.where(looking, next_slot, slot)
            looking = looking & (found == 0) & (distance < probes)
            slot, distance = _after(slot, distance, open, looking & free)
            more = tl.max(looking.to(tl.int32), 0)
        # Claim the slot, once for equal ids.
        at = first + slot
        fresh = found & (tl.load(used_at + at, mask=found, other=0) != step)
        fresh = fresh & (tl.atomic_xchg(used_at + at, tl.zeros_like(k) + step, mask=fresh, sem="relaxed") != step)
        add_total(totals, INSERTED, tl.sum(fresh.to(tl.int32), 0))
        tl.store(claimed + k, tl.where(fresh, at, -1), mask=mask)
        tl.store(evicted + k, tl.full((BLOCK,), EMPTY, tl.int64), mask=fresh)
        # Choose one of equal ids without a slot: the lane that adds the id to `members`.
        looking = wanted & (found == 0)
        place = ((hash >> 8).to(tl.int64) + table) & top
        of = tl.where(found, k, -1)
        more = tl.max(looking.to(tl.int32), 0)
        for _ in range(0, 64):
            if more > 0:
                # A lane that has finished compares with -1, which no word holds.
                word = tl.where(looking, 0, -1)
                word = tl.atomic_cas(members + place, word, tl.where(looking, k + 1, 0), sem="relaxed")
                of = tl.where(looking & (word == 0), k, of)
                other = tl.maximum(word - 1, 0)
                there = looking & (word > 0)
                its = infos + tl.load(missing_feature + other, mask=there, other=0).to(tl.int64) * COLUMNS
                at_other = tl.load(missing + other, mask=there, other=0).to(tl.int64)
                equal = there & (id_at(low, high, at_other, there, STRIDE) == id)
                equal = equal & (tl.load(its + FIRST_SLOT, mask=there, other=-1) == table)
                of = tl.where(equal, other, of)
                looking = there & (equal == 0)
                place = tl.where(looking, (place + 1) & top, place)
                more = tl.max(looking.to(tl.int32), 0)
        chosen = wanted & (found == 0) & (of == k)
        tl.store(twin + k, of, mask=mask)
        tl.store(slot_of + k, tl.where(found, slot, -1), mask=mask)
        tl.store(member_of + k, tl.where(chosen, place, -1).to(tl.int32), mask=mask)
        # Note the new ids, their tables and where their initial rows are.
        new = fresh | chosen
        tl.store(new_ids + k, id, mask=new)
        tl.store(claimed_tables + k, tl.load(feature + TABLE, mask=new, other=0).to(tl.int32), mask=new)
        initials = tl.load(feature + INITIALS, mask=new, other=0)
        reserved = bucket * size + open + remainder(hash, size - open)
        tl.store(origins + k, tl.where(initials > 0, remainder(mix(id), initials), reserved), mask=new)
        # Add it to its segment's chain; the first one lists the segment for its phase of `_evict`.
        segments, within, segment = segment_of(hash, feature, bucket, mask)
        waits = tl.atomic_add(waiting + segment, 1, mask=chosen, sem="relaxed")
        head = tl.atomic_xchg(heads + segment, k + 1, mask=chosen, sem="relaxed")
        tl.store(following + k, head, mask=chosen)
        tl.store(homes + k, remainder(hash, open).to(tl.int32), mask=chosen)
        phase = tl.where((segments > 1) & (within == segments - 2 + segments % 2), 2, within % 2)
        opens = chosen & (waits == 0)
        number = tl.atomic_add(counters + ACTIVE + phase, 1, mask=opens, sem="relaxed")
        tl.store(active + phase * most_segments + number, segment.to(tl.int32), mask=opens)


@triton.jit(do_not_specialize=["phase", "most_segments"])
def _evict(
    infos,
    ids,
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
    homes,
    new_ids,
    slot_of,
    active,
    claimed,
    evicted,
    phase,
    most_segments,
    TIMES: tl.constexpr,
    COUNTS: tl.constexpr,
    LANES: tl.constexpr,
):
    """Give slots of other ids to the chained ids of segments, as program p of P the active segments p, p + P, ...

    In the order of `_turn_of`, each takes the slot that the policy chooses, among the slots that it probes and that
    neither this step nor the last one has used; none of them is empty. Only the first `SEGMENT` ids are considered, or
    `WHOLE` in a bucket with more than `SEGMENT` open slots. Parameters are as in `_claim` or `MapState`.

    Memory: a lane has a new id, and the state of one slot. Segments of other phases, whose slots overlap, do not run at
    the same time. `_replace` stores the ids.
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
        home = tl.zeros((LANES,), tl.int32)
        place_of = tl.zeros((LANES,), tl.int32)
        for turn in range(0, count):
            key = (_turn_of(tl.load(new_ids + k)) ^ TOP_BIT).to(tl.int64, bitcast=True)
            home_k = tl.load(homes + k) - begin
            following_k = tl.load(following + k) - 1
            place = lane == turn
            if turn >= limit:
                worst = tl.max(tl.where(lane < limit, keys, -GREATEST), 0)
                place = (keys == worst) & (key < worst)
            keys = tl.where(place, key, keys)
            home = tl.where(place, home_k, home)
            place_of = tl.where(place, k, place_of)
            k = following_k
        # Load the state of the slots. No slot that these ids probe is empty.
        slot = begin + lane
        slot = tl.where(slot >= open, slot - open, slot)
        inside = lane < tl.minimum(open, LANES)
        slot = tl.where(inside, slot, 0)
        at = first + slot  # [LANES]
        used = tl.load(used_at + at, mask=inside, other=0)
        score = used.to(tl.int64)
        if TIMES:
            score = tl.load(times + at, mask=inside, other=0).to(tl.int64)
        may_go = inside & (used < step - 1) & (policy != NO_POLICY) & ((policy != TTL) | (score < now))
        if COUNTS:
            sightings = tl.load(counts + at, mask=inside, other=0).to(tl.int64)
            score = tl.where(policy == LFU, (sightings << 32) + score, score)
            age = (step - used + 1).to(tl.int64)
            score = tl.where(policy == DISTANCE_LFU, (sightings << 24) // tl.maximum(age, 1), score)
        # Assign them, to the id with the least key first: the least score, then the nearest slot.
        got = tl.full((LANES,), -1, tl.int32)
        claims = 0
        for _ in range(0, tl.minimum(count, limit)):
            its = keys == tl.min(keys, 0)
            keys = tl.where(its, GREATEST, keys)
            distance = lane - tl.sum(tl.where(its, home, 0), 0)
            distance = tl.where((segments == 1) & (distance < 0), distance + open, distance)
            victims = may_go & (distance >= 0) & (distance < probes)
            least = tl.min(tl.where(victims, score, GREATEST), 0)
            nearest = tl.min(tl.where(victims & (score == least), distance, FAR), 0)
            if nearest < FAR:
                taken = victims & (distance == nearest)
                got = tl.where(its, tl.sum(tl.where(taken, slot, 0), 0), got)
                may_go = may_go & (taken == 0)
                claims += 1
        # Record the claims, reset what the slots counted, and empty the chain.
        placed = got >= 0
        at = first + got
        tl.store(evicted + place_of, tl.load(ids + at, mask=placed, other=EMPTY), mask=placed)
        tl.store(claimed + place_of, at, mask=placed)
        tl.store(slot_of + place_of, got, mask=placed)
        tl.store(used_at + at, tl.zeros_like(lane) + step, mask=placed)
        if TIMES:
            tl.store(times + at, tl.zeros_like(lane) - 1, mask=placed)
        if COUNTS:
            tl.store(counts + at, tl.zeros_like(lane), mask=placed)
        tl.store(waiting + segment, 0)
        tl.store(heads + segment, 0)
        add_total(totals, INSERTED, claims)
        add_total(totals, EVICTED, claims)
