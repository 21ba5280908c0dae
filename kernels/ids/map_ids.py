"""Replaces the ids of a step by the slots of a map, and gives slots to new ids; see `id_map` for the layout.

    _find      ids that have a slot become rows of their table; the positions of the others are listed
    _sight     the listed ids are counted, if ids are admitted after several sightings
    _insert    the listed ids that are admitted are stored to empty slots
    _halve     counters are halved in segments where they add up to a limit: old sightings count for less
    _claim     these slots are claimed, once each; admitted ids that found none are chained by segment, once each
    _evict     each segment's chained ids take the slots of other ids, which the policy chooses
    _replace   the listed ids become rows, too: their new slots, or the row for ids without a slot

The result does not depend on the order in which programs run: new ids take slots in the order of a hash. One program
evicts in a segment. A segment of a large bucket shares slots with the next one, and the last segment may be short. So
`_evict` runs in three phases: for segments of even number, for odd ones, and for the last one of even number, whose ids
may also take slots of segment 0.

Evaluation only finds: it changes nothing in the map.
"""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch

from dlrm_overlap.kernels.compiled import INTERPRETED, specialised
from dlrm_overlap.kernels.ids import reference
from dlrm_overlap.kernels.ids.admission import _halve, _sight
from dlrm_overlap.kernels.ids.assign_slots import _claim, _evict, _insert
from dlrm_overlap.kernels.ids.find_ids import _find, _replace
from dlrm_overlap.kernels.ids.id_map import NO_FEATURE, SEGMENT, WHOLE, Claims, MapFeature, MapState, Policy, Totals
from dlrm_overlap.kernels.tuning import power_of_2

_NUM_WARPS = 1
_BLOCK = 32  # ids that a program takes at a time
_PROGRAMS = 2 if INTERPRETED else 4224
_PHASES = 3
_COUNTERS = 5


class Features(NamedTuple):
    """The features that a map looks up together, and which constants their kernels have."""

    infos: torch.Tensor
    """[features + 2, 17] int64, rows of `MapFeature`; ids after all bags belong to the last two"""
    mapped: int
    """number of features; padding follows them"""
    clocked: bool
    """whether the caller sets the time; else it is the number of training steps"""
    times: bool
    """whether a policy needs times other than those of the last use"""
    counts: bool
    """whether a policy needs counts"""
    sketch: bool
    """whether some ids are admitted after several sightings"""
    lanes: int
    """upper limit of a segment's slots"""
    phases: int
    aligned: bool
    """whether all buckets have a multiple of 16 slots and begin at one"""

    @classmethod
    def of(cls, rows: Sequence[MapFeature], clocked: bool, device: torch.device) -> "Features":
        """Return the features with the rows of a table."""
        policies = {Policy(row.policy) for row in rows}
        aligned = all(row.size % 16 == 0 and row.first_slot % 16 == 0 for row in rows)
        small = all(row.open_slots <= SEGMENT for row in rows)
        return cls(
            torch.tensor([*rows, NO_FEATURE, NO_FEATURE], device=device),
            len(rows),
            clocked,
            clocked or any(row.lifetime for row in rows) or Policy.TTL in policies,
            bool(policies & {Policy.LFU, Policy.DISTANCE_LFU}),
            any(row.admit_after > 1 for row in rows),
            SEGMENT if small else WHOLE,
            1 if all(row.segments == 1 for row in rows) else _PHASES,
            aligned,
        )


class IdSet:
    """A hash set of the ids of one step, as large as the largest step so far."""

    def __init__(self) -> None:
        self._members: torch.Tensor | None = None

    def for_ids(self, count: int, device: torch.device) -> torch.Tensor:
        """Return [a power of two, at least 2 * count] int32, all 0."""
        if self._members is None or self._members.numel() < 2 * count:
            self._members = torch.zeros(power_of_2(2 * max(count, 2)), dtype=torch.int32, device=device)
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

    With `train`, and if `state.taken` is 1, `state` counts a step, its slots are marked, and ids that are admitted get
    slots. Else ids without a slot only get the row for them.

    Args:
        low: [n] int32, lower words of the ids, feature after feature; maybe every other word of a tensor.
        high: [n] int32, upper words, with the same stride.
        out: [n] int32 or int64, receives the rows; may be `low`. Ids of features without a map stay as they are.
        offsets: [F * samples + 1] int32 or int64, of the bags of F features.
    """
    if not (low.is_cuda or INTERPRETED):
        return reference.map_ids(state, features, low, high, out, offsets, samples, train)
    ids, digests, used_at, times, counts, sketch, sums, waiting, heads, clock, taken, totals = state
    infos, mapped, clocked, with_times, with_counts, with_sketch, lanes, phases, aligned = features
    count, number, device = out.numel(), (offsets.numel() - 1) // samples, low.device
    segments, stride = waiting.numel(), low.stride(0)
    assert stride == high.stride(0), "the words are of one tensor, or of two with the same stride"
    # Count the step and its ids.
    if train:
        (clock[:1] if clocked else clock).add_(taken)
        totals[Totals.SEEN, :1].add_(offsets[mapped * samples :][:1] * taken)
    # Allocate the counters and lists that the kernels share.
    counters = torch.zeros(_COUNTERS, dtype=torch.int32, device=device)
    room = max(4, -(-count // 4) * 4)  # tensors begin at multiples of 16 bytes
    lists = torch.empty(9 * room, dtype=torch.int32, device=device).split(room)
    missing, missing_feature, following, homes, twin, slot_of, member_of, *full = lists
    none = missing[:0]
    times, counts, sketch = (
        each if used else none for each, used in ((times, with_times), (counts, with_counts), (sketch, with_sketch))
    )
    make = partial(specialised, num_warps=_NUM_WARPS)
    switches = {"TRAIN": train, "TIMES": with_times, "COUNTS": with_counts}
    words, marks, listed = (low, high), (used_at, times, counts, clock, taken), (missing, missing_feature)
    # Replace the ids that have slots, and list the others.
    find = make(_find, STRIDE=stride, **switches, HALVINGS=number.bit_length(), IDS=_BLOCK, ALIGNED=aligned)
    find(
        -(-count // _BLOCK), (out.dtype, offsets.dtype),
        *words, out, offsets, infos, ids, digests.view(torch.int32), *marks, counters, *listed, slot_of,
        count, samples, number,
    )  # fmt: skip
    # Give slots to the listed ids that are admitted.
    claims, members, claimed = None, none, none.view(torch.int64)
    if train:
        members = id_set.for_ids(count, device)
        if with_sketch:
            sight = make(_sight, STRIDE=stride, BLOCK=_BLOCK)
            sight(_PROGRAMS, (), *words, infos, sketch, sums, taken, counters, *listed, *full)
        active = torch.empty(_PHASES * segments, dtype=torch.int32, device=device)
        new_ids, claimed, origins, evicted = torch.empty(4 * room, dtype=torch.int64, device=device).split(room)
        claimed_tables = torch.empty(room, dtype=torch.int32, device=device)
        insert = make(_insert, STRIDE=stride, SKETCH=with_sketch, BLOCK=_BLOCK)
        insert(
            _PROGRAMS, (),
            *words, infos, ids, digests.view(torch.int32), sketch, taken, counters, *listed, slot_of, twin,
        )  # fmt: skip
        if with_sketch:
            make(_halve)(_PROGRAMS, (), sketch, sums, counters, *full)
        slots, set_bits = (claimed, claimed_tables, new_ids, origins, evicted), members.numel().bit_length() - 1
        claim = make(_claim, STRIDE=stride, BLOCK=_BLOCK)
        claim(
            _PROGRAMS, (),
            *words, infos, ids, digests.view(torch.int32), used_at, waiting, heads, clock, totals, counters, *listed,
            following, homes, twin, slot_of, *slots, members, member_of, active, set_bits, segments,
        )  # fmt: skip
        evict = make(_evict, TIMES=with_times, COUNTS=with_counts, LANES=lanes)
        for phase in range(phases):
            evict(
                _PROGRAMS, (),
                infos, ids, used_at, times, counts, waiting, heads, clock, totals, counters, missing_feature, following,
                homes, new_ids, slot_of, active, claimed, evicted, phase, segments,
            )  # fmt: skip
        claims = Claims(claimed, claimed_tables, new_ids, origins, evicted, counters[:1])
    # Replace the listed ids.
    replace = make(_replace, STRIDE=stride, **switches, BLOCK=_BLOCK)
    replace(
        _PROGRAMS, (out.dtype,),
        *words, out, infos, ids, digests, *marks, totals, counters, *listed, twin, slot_of, claimed, members, member_of,
    )  # fmt: skip
    return claims
