"""Device functions on ids: hashes, buckets, and the search for an id in a map; see `id_map` for the layout."""

import triton
import triton.language as tl

from dlrm_overlap.kernels.ids import id_map
from dlrm_overlap.kernels.ids.id_map import MapFeature
from dlrm_overlap.kernels.wide_ids import joined, remainder

EMPTY = tl.constexpr(id_map.EMPTY)
SEGMENT = tl.constexpr(id_map.SEGMENT)
CELLS = tl.constexpr(id_map.CELLS)
TURNS = tl.constexpr(id_map.SEGMENT // 16 + 1)  # of `probe`, each of 16 slots
GREATEST = tl.constexpr(2**63 - 1)
FAR = tl.constexpr(2**31 - 1)
ALL_BITS = tl.constexpr(2**64 - 1)
TOP_BIT = tl.constexpr(2**63)

# Columns of the table of features [features + 2, 17] int64.
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
HALVE_AT = tl.constexpr(_column("halve_at"))
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
FULL = tl.constexpr(4)

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
def unmix(mixed):
    """Return `id_map.unmix` of uint64, as int64."""
    value = (mixed ^ (mixed >> 31) ^ (mixed >> 62)) * 0x319642B2D24D8EC3
    value = (value ^ (value >> 27) ^ (value >> 54)) * 0x96DE1B173F119089
    return (value ^ (value >> 30) ^ (value >> 60)).to(tl.int64, bitcast=True)


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
def segment_of(hash, feature, bucket, mask):
    """Return [N], three: the number of segments of a bucket, the segment within the bucket, and the segment."""
    segments = tl.load(feature + SEGMENTS, mask=mask, other=1)
    home = remainder(hash, tl.load(feature + OPEN, mask=mask, other=1))
    within = tl.where(segments > 1, home // SEGMENT, 0)
    return segments, within, tl.load(feature + FIRST_SEGMENT, mask=mask, other=0) + bucket * segments + within


@triton.jit
def probe(ids, digests, id, hash, first, feature, live, IDS: tl.constexpr, ALIGNED: tl.constexpr):
    """Return [IDS] int32, two: slots in the bucket of each live id, which begins at slot `first`.

    The first is the id's, or -1. The second, of an id without a slot, is the first empty one that it probes, or -1.

    `digests` is int32: a turn compares four words of four digests each, circularly from the id's home on. ALIGNED says
    that buckets have a multiple of 16 slots and begin at one; then the words are loaded at once.
    """
    # Where the bucket and the id's home are, in words of four digests.
    open = tl.load(feature + OPEN, mask=live, other=1).to(tl.int32)
    probes = tl.load(feature + PROBES, mask=live, other=0).to(tl.int32)
    pattern = (digest(hash).to(tl.int32) * 0x01010101)[:, None]
    lane = tl.arange(0, 4)[None, :]
    home = remainder(hash, open).to(tl.int32)
    before = tl.zeros((IDS,), tl.int32)  # slots before the bucket in its first word
    if not ALIGNED:
        before = (first % 4).to(tl.int32)
    words = (before + open + 3) // 4
    home_word = (before + home) // 4
    end = words + 1  # the first word is looked at again at the end, for its slots before the home
    if ALIGNED:
        words = (words + 3) // 4 * 4
        home_word = home_word // 4 * 4
        end = words + 4
    start_bit = before + home - home_word * 4
    found = tl.full((IDS,), -1, tl.int32)
    vacant = found
    looking = live
    more = tl.max(looking.to(tl.int32), 0)
    for turn in range(0, TURNS):
        if more > 0:
            # Load the digests of 16 slots, and find which are the id's and which are empty.
            if ALIGNED:
                word = home_word + turn * 4
                word = tl.where(word >= words, word - words, word)
                start = tl.multiple_of(first // 16 * 4 + word, [4])
                word = word[:, None] + lane
                inside = looking[:, None] & (lane >= 0)
                four = tl.load((digests + start)[:, None] + lane, mask=inside, other=-1)  # [IDS, 4]
            else:
                ahead = lane + turn * 4
                word = home_word[:, None] + ahead
                word = tl.where(word >= words[:, None], word - words[:, None], word)
                inside = looking[:, None] & (ahead < end[:, None])
                four = tl.load((digests + first // 4)[:, None] + word, mask=inside, other=-1)
            shift = word * 4 - before[:, None]  # the word's first slot
            here = (15 << tl.minimum(tl.maximum(-shift, 0), 4)) & (15 >> tl.maximum(shift + 4 - open[:, None], 0))
            here = tl.where(inside, here, 0)
            alike = tl.sum((zero_bytes(four ^ pattern) & here) << (lane * 4), 1)
            empty = tl.sum((zero_bytes(four) & here) << (lane * 4), 1)
            # A digest of 8 bits is rarely another id's: this loop seldom has a second turn.
            trying = tl.max(alike, 0)
            while trying > 0:
                slot = _slot_at(alike, home_word, turn, words, before)
                same = (alike != 0) & (tl.load(ids + first + slot, mask=alike != 0, other=EMPTY) == id)
                found = tl.where(same, slot, found)
                alike = tl.where(same, 0, alike & (alike - 1))
                trying = tl.max(alike, 0)
            # The first empty slot from the home on ends the search.
            if turn == 0:
                empty = empty & (-1 << start_bit)
            slot = _slot_at(empty, home_word, turn, words, before)
            distance = distance_of(slot, home, open)
            stops = (found < 0) & (empty != 0)  # an id is never after an empty slot
            vacant = tl.where(stops & (distance < probes), slot, vacant)
            looking = looking & (found < 0) & (empty == 0) & (turn * 4 + 4 < end)
            more = tl.max(looking.to(tl.int32), 0)
    return found, vacant


@triton.jit
def distance_of(slot, home, open):
    """Return how many slots after its home an id probes a slot."""
    return tl.where(slot < home, slot - home + open, slot - home)


@triton.jit
def zero_bytes(word):
    """Return 4 bits: which bytes of a word are 0."""
    # The highest bit of such a byte is set, then the four are put together.
    zero = ~(((word & 0x7F7F7F7F) + 0x7F7F7F7F) | word | 0x7F7F7F7F)
    return ((zero.to(tl.uint32, bitcast=True) >> 7) * 0x01020408 >> 24).to(tl.int32) & 0xF


@triton.jit
def lowest_bit(bits):
    """Return the number of the lowest bit that is set, of 16."""
    lowest = bits & -bits
    number = ((lowest & 0xAAAA) != 0).to(tl.int32) + ((lowest & 0xCCCC) != 0).to(tl.int32) * 2
    return number + ((lowest & 0xF0F0) != 0).to(tl.int32) * 4 + ((lowest & 0xFF00) != 0).to(tl.int32) * 8


@triton.jit
def _slot_at(bits, home_word, turn, words, before):
    """Return the slot of the lowest of 16 bits, one for each slot that a turn of `probe` looks at."""
    bit = lowest_bit(bits)
    word = home_word + turn * 4 + bit // 4
    word = tl.where(word >= words, word - words, word)
    return word * 4 + bit % 4 - before
