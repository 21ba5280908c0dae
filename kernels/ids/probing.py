"""Device functions on ids: hashes, buckets, and the search for an id in a map; see `id_map` for the layout."""

import triton
import triton.language as tl

from dlrm_overlap.kernels.ids import id_map
from dlrm_overlap.kernels.ids.id_map import MapFeature
from dlrm_overlap.kernels.wide_ids import joined, remainder

EMPTY = tl.constexpr(id_map.EMPTY)
SEGMENT = tl.constexpr(id_map.SEGMENT)
WHOLE = tl.constexpr(id_map.WHOLE)
CELLS = tl.constexpr(id_map.CELLS)
PART = tl.constexpr(id_map.SEGMENT // 4)  # words whose digests have a bit each in two of 64
GREATEST = tl.constexpr(2**63 - 1)
FAR = tl.constexpr(2**31 - 1)

# Columns of the table of features [features + 2, 16] int64.
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
INITIALS = tl.constexpr(_column("initials"))
TABLE = tl.constexpr(_column("table"))
COLUMNS = tl.constexpr(len(MapFeature._fields))

SPREAD = tl.constexpr(id_map.SPREAD)
SPREAD_STEP = tl.constexpr(id_map.SPREAD_STEP)

# Words of the counters of a step, which begin at 0.
MISSING = tl.constexpr(0)
ACTIVE = tl.constexpr(1)  # one for each phase

LFU = tl.constexpr(int(id_map.Policy.LFU))
DISTANCE_LFU = tl.constexpr(int(id_map.Policy.DISTANCE_LFU))
TTL = tl.constexpr(int(id_map.Policy.TTL))
NO_POLICY = tl.constexpr(int(id_map.Policy.NONE))
INSERTED = tl.constexpr(int(id_map.Totals.INSERTED))
EVICTED = tl.constexpr(int(id_map.Totals.EVICTED))
NOT_ADMITTED = tl.constexpr(int(id_map.Totals.NOT_ADMITTED))
NO_ROOM = tl.constexpr(int(id_map.Totals.NO_ROOM))


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
def digest(hash):
    return tl.maximum(hash >> 56, 1).to(tl.uint8)


@triton.jit
def id_at(low, high, position, mask, STRIDE: tl.constexpr):
    low_word = tl.load(low + position * STRIDE, mask=mask, other=0)
    return joined(low_word, tl.load(high + position * STRIDE, mask=mask, other=0))


@triton.jit
def listed(missing, missing_feature, infos, begin, total, BLOCK: tl.constexpr):
    """Return [BLOCK] each, of the places from `begin` on in the list of ids without a slot.

    They are the place, whether the list has it, the id's position, and the row of its feature in `infos`.
    """
    k = begin + tl.arange(0, BLOCK)
    mask = k < total
    i = tl.load(missing + k, mask=mask, other=0).to(tl.int64)
    feature = infos + tl.load(missing_feature + k, mask=mask, other=0).to(tl.int64) * COLUMNS
    return k, mask, i, feature


@triton.jit
def add_total(totals, which, count):
    """Add to a total of a map, if there is something to add."""
    if count > 0:
        spread = which * (SPREAD * SPREAD_STEP) + tl.program_id(0) % SPREAD * SPREAD_STEP
        tl.atomic_add(totals + spread, count.to(tl.int64), sem="relaxed")


@triton.jit
def bucket_of(id, feature, mask):
    """Return [N], of ids and rows of the table of features: whether the bucket is here, and its number here."""
    bucket = remainder(id.to(tl.uint64, bitcast=True), tl.load(feature + BUCKETS, mask=mask, other=1))
    bucket -= tl.load(feature + FIRST_BUCKET, mask=mask, other=0)
    here = mask & (bucket >= 0) & (bucket < tl.load(feature + LOCAL_BUCKETS, mask=mask, other=0))
    return here, tl.where(here, bucket, 0)


@triton.jit
def probe(ids, digests, id, hash, first, feature, live, IDS: tl.constexpr, WORDS: tl.constexpr):
    """Return [IDS] int32: the slot in its bucket, which begins at slot `first`, of each live id; -1 without one.

    `digests` is int32: four slots are compared at a time. With `SEGMENT` / 4 WORDS a bucket has at most `SEGMENT` open
    slots and begins at a multiple of 16, and all its words are read. Else they are read circularly from the first slot
    to probe on, and an id is not farther than `SEGMENT` / 2 words.
    """
    open = tl.load(feature + OPEN, mask=live, other=1).to(tl.int32)
    pattern = (digest(hash).to(tl.int32) * 0x01010101)[:, None]
    lane = tl.arange(0, PART)[None, :]
    found = tl.full((IDS,), -1, tl.int32)
    before = tl.zeros((IDS,), tl.int32)  # slots before the bucket in its first word
    words = before + PART
    home = before
    if WORDS > PART:
        before = (first % 4).to(tl.int32)
        words = (before + open + 3) // 4
        home = (before + remainder(hash, open).to(tl.int32)) // 4
    for part in tl.static_range(WORDS // PART):
        if WORDS == PART:
            start = tl.multiple_of((first // 16) * 4, [4])
            four = tl.load((digests + start)[:, None] + lane, mask=live[:, None], other=0)  # [IDS, PART]
        else:
            ahead = lane + part * PART
            word = home[:, None] + ahead
            word = tl.where(word >= words[:, None], word - words[:, None], word)
            inside = live[:, None] & (ahead < words[:, None])
            four = tl.load((digests + first // 4)[:, None] + word, mask=inside, other=0)
        # A byte is 0 where the digest is alike: its highest bit is set, then the four are put together.
        differs = four ^ pattern
        alike = ~(((differs & 0x7F7F7F7F) + 0x7F7F7F7F) | differs | 0x7F7F7F7F)
        bits = ((alike.to(tl.uint32, bitcast=True) >> 7) * 0x01020408 >> 24) & 0xF
        wide = bits.to(tl.uint64) << (lane % 16 * 4).to(tl.uint64)
        low = tl.sum(tl.where(lane < 16, wide, 0), 1)
        high = tl.sum(tl.where(lane < 16, 0, wide), 1)
        more = tl.max((live & (found < 0) & ((low | high) != 0)).to(tl.int32), 0)
        # A digest of 8 bits is rarely another id's: the second loop seldom has turns.
        for _ in range(0, 4):
            if more > 0:
                found, low, high, more = _try(ids, id, first, before, home, words, open, live, found, low, high, part)
        for _ in range(0, more * SEGMENT):
            if more > 0:
                found, low, high, more = _try(ids, id, first, before, home, words, open, live, found, low, high, part)
    return found


@triton.jit
def _lowest(bits):
    """Return the number of the lowest bit that is set in uint64, as int32; 64 if none is."""
    rest = (bits ^ (bits - 1)) >> 1  # the bits below it
    rest = tl.where(bits == 0, 0, rest)
    rest = rest - ((rest >> 1) & 0x5555555555555555)
    rest = (rest & 0x3333333333333333) + ((rest >> 2) & 0x3333333333333333)
    count = (((rest + (rest >> 4)) & 0x0F0F0F0F0F0F0F0F) * 0x0101010101010101) >> 56
    return tl.where(bits == 0, 64, count.to(tl.int32))


@triton.jit
def _try(ids, id, first, before, home, words, open, live, found, low, high, part):
    """Compare the id of one slot whose digest is alike, for each id; return whether there are more."""
    one = _lowest(low)
    one = tl.where(one < 64, one, 64 + _lowest(high))
    trying = live & (found < 0) & (one < 128)
    word = home + part * PART + one // 4
    word = tl.where(word >= words, word - words, word)
    slot = word * 4 + one % 4 - before
    safe = trying & (slot >= 0) & (slot < open)
    same = safe & (tl.load(ids + first + slot, mask=safe, other=EMPTY) == id)
    found = tl.where(same, slot, found)
    high = tl.where(low == 0, high & (high - 1), high)
    low = low & (low - 1)
    more = live & (found < 0) & ((low | high) != 0)
    return found, low, high, tl.max(more.to(tl.int32), 0)
