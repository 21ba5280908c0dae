"""The state of a map from ids to slots, for tables of ids that are not known beforehand.

An id is a 64-bit integer. A table has B buckets of M slots; slot s of the table is its row s. Unsigned id modulo B is
the id's bucket, and a rank holds consecutive buckets. Within the bucket, an id may be in the `probes` slots from
`murmur(id) % open_slots` on, circularly; the last M - `open_slots` slots are reserved for ids without a slot. A slot
never becomes empty again, so no id is in a slot that it probes after an empty one. FBGEMM's `zero_collision_hash`,
which TorchRec's `HashZchManagedCollisionModule` uses, has the same layout.

A map holds the slots of all its tables, one table after the other.
"""

from enum import IntEnum
from typing import NamedTuple, TypeVar

import numpy as np
import torch

EMPTY = -1
"""content of an empty slot; this id never gets one"""
SEGMENT = 128
"""slots in which one program evicts, and the most probes"""
WHOLE = 256
"""a bucket with at most as many open slots is one segment"""
CELLS = 128
"""counters of a segment's sketch"""
BLANK = {"ids": EMPTY, "used_at": -2, "times": -1, "counts": 0, "sketch": 0}
"""column of `MapState` -> its value where there is no id"""


class Policy(IntEnum):
    """Which id leaves its slot if no slot is empty; never one that this step or the last one has used."""

    NONE = 0
    LRU = 1
    """the one with the least time"""
    LFU = 2
    """the one with the least count, then the least time"""
    DISTANCE_LFU = 3
    """the one with the least count divided by the steps since its last use, plus 1"""
    TTL = 4
    """of the ids whose time has passed, the one with the least time"""


class MapFeature(NamedTuple):
    """A feature that looks up ids, and its table on this rank; a row of the table of features, int64."""

    first_slot: int
    """first slot of the table in the map"""
    first_bucket: int
    """first bucket of this rank"""
    local_buckets: int
    """buckets on this rank; 0: ids of this feature stay as they are"""
    buckets: int
    """B"""
    size: int
    """M"""
    open_slots: int
    probes: int
    """at most `open_slots` and `SEGMENT`"""
    first_segment: int
    """number of the table's first segment in the map"""
    segments: int
    """segments of a bucket: 1 up to `WHOLE` open slots, else one for each `SEGMENT` open slots"""
    writes: int
    """0: this feature inserts no ids and its ids do not count as seen"""
    lifetime: int
    """added to the time at which an id is seen"""
    admit_after: int
    """sightings after which an id gets a slot; 1 is at once"""
    halve_at: int
    """sum of a segment's counters of sightings at which all of them are halved; 0: never"""
    admit_below: int
    """an id gets a slot if the upper 32 bits of `mix(id)` are less than this"""
    policy: int
    initials: int
    """number of initial rows; 0: the bucket's reserved slots have them"""
    table: int
    """index of the table in the map"""


NO_FEATURE = MapFeature(*[0] * len(MapFeature._fields))
"""of padding"""


class Totals(IntEnum):
    """What a map counts."""

    INSERTED = 0
    """ids that got a slot"""
    EVICTED = 1
    """ids that lost it"""
    NOT_ADMITTED = 2
    """sightings in training of ids that are not admitted yet"""
    NO_ROOM = 3
    """sightings in training of admitted ids that found no slot to take"""
    SEEN = 4
    """sightings in training"""


SPREAD, SPREAD_STEP = 32, 4
"""a total is the sum of SPREAD numbers, SPREAD_STEP apart: programs that add to one address wait for each other"""


class MapState(NamedTuple):
    """The S slots of a map, in G segments."""

    ids: torch.Tensor
    """[S] int64: `EMPTY` without an id"""
    digests: torch.Tensor
    """[at least S + SEGMENT] uint8: bits of the id's hash, 0 for an empty slot"""
    used_at: torch.Tensor
    """[S] int32: last training step that used the slot"""
    times: torch.Tensor
    """[S] int32: greatest time, with the feature's lifetime, at which the id was seen; [0] if no policy needs it"""
    counts: torch.Tensor
    """[S] int32: sightings since the id has the slot; [0] unless a policy needs them"""
    sketch: torch.Tensor
    """[G * CELLS] int32: sightings of ids without a slot; [0] unless ids are admitted after several"""
    sketch_sums: torch.Tensor
    """[G] int32: sum of each segment's counters, which is below `halve_at` between steps; 0 if counters are not halved.
    [0] without a sketch"""
    waiting: torch.Tensor
    """[G] int32: new ids of each segment that found no empty slot, 0 between steps"""
    heads: torch.Tensor
    """[G] int32: the last of these, plus 1; 0 between steps"""
    clock: torch.Tensor
    """[2] int64: number of training steps, and the time"""
    taken: torch.Tensor
    """[1] int64: 1; 0 while ids are mapped that no step will look up, which then change nothing"""
    totals: torch.Tensor
    """[5, SPREAD * SPREAD_STEP] int64: by `Totals`, numbers that add up to the total"""

    @classmethod
    def empty(
        cls, slots: int, segments: int, device: torch.device, times: bool, counts: bool, sketch: bool
    ) -> "MapState":
        def full(count: int, value: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.full((count,), value, dtype=dtype, device=device)

        return cls(
            full(slots, BLANK["ids"], torch.int64),
            full((slots // 4 + 1) * 4 + SEGMENT, 0, torch.uint8),
            full(slots, BLANK["used_at"]),
            full(slots * times, BLANK["times"]),
            full(slots * counts, BLANK["counts"]),
            full(segments * CELLS * sketch, BLANK["sketch"]),
            full(segments * sketch, 0),
            full(segments, 0),
            full(segments, 0),
            full(2, 0, torch.int64),
            full(1, 1, torch.int64),
            full(len(Totals) * SPREAD * SPREAD_STEP, 0, torch.int64).view(len(Totals), -1),
        )

    def total(self, which: Totals) -> int:
        """Return a total; waits for the device."""
        return int(self.totals[which].sum())


def halve(sketch: torch.Tensor, halve_at: int) -> torch.Tensor:
    """Halve the counters [g * CELLS] of segments until the sum of each segment is below `halve_at`.

    Returns the sums, [g] int32. Waits for the device.
    """
    counters = sketch.view(-1, CELLS)
    while (full := counters.sum(1) >= halve_at).any():
        counters[full] >>= 1
    return counters.sum(1).int()


class Claims(NamedTuple):
    """Slots that a step has assigned to new ids, in no order; some entries are void."""

    slots: torch.Tensor
    """[n] int64, negative in void entries"""
    tables: torch.Tensor
    """[n] int32"""
    ids: torch.Tensor
    """[n] int64"""
    origins: torch.Tensor
    """[n] int64: number of the id's initial row, or the reserved slot that has it"""
    evicted: torch.Tensor
    """[n] int64: the ids that were in the slots, or `EMPTY`"""
    count: torch.Tensor
    """[1] int32: number of entries"""


def segments_of(open_slots: int) -> int:
    """Return the number of segments of a bucket."""
    return 1 if open_slots <= WHOLE else -(-open_slots // SEGMENT)


_FIRST, _SECOND = -4658895280553007687, -7723592293110705685
Values = TypeVar("Values", torch.Tensor, np.ndarray)


def mix(values: Values) -> Values:
    """Return SplitMix64's finaliser of int64 values, a bijection (Steele et al., 2014)."""
    values = (values ^ _shifted(values, 30)) * _FIRST
    values = (values ^ _shifted(values, 27)) * _SECOND
    return values ^ _shifted(values, 31)


_FIRST_INVERSE, _SECOND_INVERSE = -7575587736534282103, 3573116690164977347


def unmix(values: torch.Tensor) -> torch.Tensor:
    """Return the int64 values from which `mix` makes these."""
    for bits, inverse in ((31, _SECOND_INVERSE), (27, _FIRST_INVERSE), (30, 1)):
        values = (values ^ _shifted(values, bits) ^ _shifted(values, 2 * bits)) * inverse
    return values


def murmur(values: torch.Tensor) -> torch.Tensor:
    """Return `murmur_hash3_2x64(value, 0, 0)` of FBGEMM as int64, whose bits are those of the unsigned hash."""
    first = _rotated(values * -8663945395140668459, 31) * 5545529020109919103
    first = _rotated(first, 27) * 5 + 0x52DCE729
    second = first * 5 + 0x38495AB5
    first, second = first ^ 16, second ^ 16
    first = first + second
    second = second + first
    first, second = _finished(first), _finished(second)
    first = first + second
    return first ^ (second + first)


def _finished(values: torch.Tensor) -> torch.Tensor:
    values = (values ^ _shifted(values, 33)) * -49064778989728563
    values = (values ^ _shifted(values, 33)) * -4265267296055464877
    return values ^ _shifted(values, 33)


def _shifted(values: Values, bits: int) -> Values:
    return (values >> bits) & ((1 << (64 - bits)) - 1)


def _rotated(values: torch.Tensor, bits: int) -> torch.Tensor:
    return (values << bits) | _shifted(values, 64 - bits)


def unsigned_remainder(values: Values, divisors: Values | int) -> Values:
    """Return int64 values, taken as unsigned, modulo positive `divisors` below 2^31."""
    high = _shifted(values, 32) % divisors
    return ((high << 32) + (values & 0xFFFFFFFF)) % divisors


def turns_of(ids: torch.Tensor) -> torch.Tensor:
    """Return [n] int64: new ids take slots in the ascending order of these numbers."""
    return mix(ids + 1) ^ (2**63 - 1)


def digests_of(hashes: torch.Tensor) -> torch.Tensor:
    """Return [n] uint8: the digests of hashes, never 0."""
    return _shifted(hashes, 56).clamp(min=1).to(torch.uint8)
