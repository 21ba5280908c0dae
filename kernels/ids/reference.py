"""What the kernels of `map_ids` compute, in numpy; it runs on CPUs."""

import ctypes
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from dlrm_overlap.kernels.ids.id_map import (
    CELLS,
    EMPTY,
    SEGMENT,
    WHOLE,
    Claims,
    MapFeature,
    MapState,
    Policy,
    Totals,
    digests_of,
    mix,
    murmur,
    turns_of,
    unsigned_remainder,
)
from dlrm_overlap.kernels.reference import joined_words

if TYPE_CHECKING:
    from dlrm_overlap.kernels.ids.map_ids import Features

_FAR = 2**31 - 1


def map_ids(
    state: MapState,
    features: "Features",
    low: torch.Tensor,
    high: torch.Tensor,
    out: torch.Tensor,
    offsets: torch.Tensor,
    samples: int,
    train: bool,
) -> Claims | None:
    """Do what `map_ids.map_ids` does."""
    train = train and bool(state.taken)
    if train:
        (state.clock[:1] if features.clocked else state.clock).add_(1)
        state.totals[Totals.SEEN, 0] += offsets[features.mapped * samples]
    number = (offsets.numel() - 1) // samples
    bounds = offsets[::samples].long()
    feature = torch.bucketize(torch.arange(out.numel()), bounds[1:], right=True).clamp(max=number)
    info = features.infos[feature]
    ids = joined_words(low, high)
    live = info[:, _column("size")] > 0
    bucket = unsigned_remainder(ids, info[:, _column("buckets")].clamp(min=1)) - info[:, _column("first_bucket")]
    here = live & (bucket >= 0) & (bucket < info[:, _column("local_buckets")])
    out[live & ~here] = 0
    places = here.nonzero().flatten()
    step = _Step(state, ids[places], info[places], bucket[places])
    slots = step.probe(np.arange(len(places)))
    found = slots >= 0
    if train:
        step.use(found, slots)
        step.mark(np.flatnonzero(found & (step.of["writes"] > 0)), slots, features)
    claims, lost = None, np.flatnonzero(~found)
    if train:
        admitted = step.admit(lost, features.sketch)
        claims = step.assign(lost[admitted], features)
        slots[lost[admitted]] = step.probe(lost[admitted])
        got = lost[admitted]
        step.mark(got[slots[got] >= 0], slots, features)
        step.total(Totals.NO_ROOM, (slots[got] < 0).sum())
        step.total(Totals.NOT_ADMITTED, (step.of["writes"][lost[~admitted]] > 0).sum())
    without = slots < 0
    slots[without] = step.spare()[without]
    if train:
        step.use(without & (step.of["size"] == step.of["open_slots"]), slots)
    rows = step.bucket * step.of["size"] + slots
    out[places] = torch.from_numpy(rows).to(out.dtype)
    return claims


_column = MapFeature._fields.index


class _Step:
    """Sightings of ids whose buckets are here, [n] each."""

    def __init__(self, state: MapState, ids: torch.Tensor, info: torch.Tensor, bucket: torch.Tensor) -> None:
        self._state: Any = MapState(*(each.numpy() for each in state))  # type: ignore[arg-type]
        hashes, mixed = murmur(ids), mix(ids)
        self.of = {name: info[:, column].numpy() for column, name in enumerate(MapFeature._fields)}
        self._home = unsigned_remainder(hashes, info[:, _column("open_slots")]).numpy()
        beyond = (info[:, _column("size")] - info[:, _column("open_slots")]).clamp(min=1)
        self._reserved = unsigned_remainder(hashes, beyond).numpy()
        self._digests = digests_of(hashes).numpy()
        self._upper = ((mixed >> 32) & 0xFFFFFFFF).numpy()
        self._cells = self._upper % CELLS, (mixed & 0xFFFFFFFF).numpy() % CELLS
        self._keys = turns_of(ids).numpy()
        self._ids, self.bucket = ids.numpy(), bucket.numpy()
        self._first = self.of["first_slot"] + self.bucket * self.of["size"]
        within = np.where(self.of["segments"] > 1, self._home // SEGMENT, 0)
        self._within = within
        self._segment = self.of["first_segment"] + self.bucket * self.of["segments"] + within

    def total(self, which: Totals, count: int) -> None:
        self._state.totals[which, 0] += count

    def probe(self, of: np.ndarray) -> np.ndarray:
        """Return the slot in its bucket of each id, [len(of)] int64; -1 without one."""
        found = np.full(len(of), -1, np.int64)
        open_slots, left = self.of["open_slots"][of], np.arange(len(of))
        for distance in range(SEGMENT):
            left = left[distance < self.of["probes"][of[left]]]
            if not len(left):
                break
            slot = (self._home[of[left]] + distance) % open_slots[left]
            there = self._state.ids[self._first[of[left]] + slot]
            same = (there == self._ids[of[left]]) & (there != EMPTY)
            found[left[same]] = slot[same]
            left = left[~same & (there != EMPTY)]  # an id is never after an empty slot
        return found

    def use(self, which: np.ndarray, slots: np.ndarray) -> None:
        """Keep slots from eviction in the next step, whose ids are mapped while this step's update uses the rows."""
        self._state.used_at[self._first[which] + slots[which]] = self._state.clock[0]

    def mark(self, of: np.ndarray, slots: np.ndarray, features: "Features") -> None:
        """Count a sighting of ids, whose slots are in use."""
        at, clock = self._first[of] + slots[of], self._state.clock
        if features.times:
            np.maximum.at(self._state.times, at, (clock[1] + self.of["lifetime"][of]).astype(np.int32))
        if features.counts:
            np.add.at(self._state.counts, at, 1)

    def admit(self, of: np.ndarray, sketch: bool) -> np.ndarray:
        """Count the sightings `of` ids without a slot, and return which of them are admitted, [len(of)] bool."""
        writes = self.of["writes"][of] > 0
        admitted = writes & (self._ids[of] != EMPTY) & (self._upper[of] < self.of["admit_below"][of])
        if sketch:
            after, counters = self.of["admit_after"][of], self._state.sketch
            first, second = (self._segment[of] * CELLS + cell[of] for cell in self._cells)
            sights = admitted & (after > 1)
            np.add.at(counters, first[sights], 1)
            np.add.at(counters, second[sights & (first != second)], 1)
            admitted &= (after <= 1) | (np.minimum(counters[first], counters[second]) >= after)
            self._halve(of[sights])
        return admitted

    def _halve(self, of: np.ndarray) -> None:
        """Halve the counters of segments where ids were counted, until their sum is below the limit."""
        of = of[self.of["halve_at"][of] > 0]
        segments, one = np.unique(self._segment[of], return_index=True)
        counters, halve_at = self._state.sketch.reshape(-1, CELLS), self.of["halve_at"][of[one]]
        while (full := counters[segments].sum(1) >= halve_at).any():
            counters[segments[full]] >>= 1
        self._state.sketch_sums[segments] = counters[segments].sum(1)

    def assign(self, of: np.ndarray, features: "Features") -> Claims:
        """Give ids empty slots, then the others slots of other ids, segment by segment, in the order of phases."""
        new = _once(np.stack([self.of["first_slot"][of], self._ids[of]], axis=1), of)
        slots = self._empty_slots(new)
        claimed = self._claim(new[slots >= 0], self._first[new[slots >= 0]] + slots[slots >= 0], features)
        new = new[slots < 0]
        segments = self.of["segments"][new]
        alone = (segments > 1) & (self._within[new] == segments - 2 + segments % 2)
        phase = np.where(alone, 2, self._within[new] % 2)
        new = new[np.lexsort((self._keys[new], self._segment[new], phase))]
        starts = np.flatnonzero(np.diff(self._segment[new], prepend=-1))
        ends = np.append(starts, len(new))[1:]
        for begin, end in zip(starts, ends, strict=True):
            claimed += self._evict(new[begin:end], features)
        slots, tables, origins, evicted = torch.tensor(claimed, dtype=torch.int64).view(-1, 4).unbind(1)
        self.total(Totals.INSERTED, len(slots))
        self.total(Totals.EVICTED, int((evicted != EMPTY).sum()))
        count = torch.tensor([len(slots)], dtype=torch.int32)
        ids = torch.from_numpy(self._state.ids)[slots]
        return Claims(slots, tables.int(), ids, origins, evicted, count)

    def _empty_slots(self, new: np.ndarray) -> np.ndarray:
        """Return the slot in its bucket that each of different new ids gets, -1 without an empty one in reach.

        All start at their homes. An id moves on while its slot has an id, or a new id with an earlier turn is there.
        """
        slots, distances = self._home[new].copy(), np.zeros(len(new), np.int64)
        first, open_slots, keys = self._first[new], self.of["open_slots"][new], self._keys[new]
        while True:
            left = np.flatnonzero(distances < self.of["probes"][new])
            at = first[left] + slots[left]
            order = np.lexsort((keys[left], at))
            earlier = np.zeros(len(left), bool)
            earlier[order[1:]] = np.diff(at[order]) == 0
            moves = left[earlier | (self._state.ids[at] != EMPTY)]
            if not len(moves):
                return np.where(distances < self.of["probes"][new], slots, -1)
            slots[moves] = (slots[moves] + 1) % open_slots[moves]
            distances[moves] += 1

    def _evict(self, new: np.ndarray, features: "Features") -> list[tuple[int, ...]]:
        """Give the new ids of a segment, the least key first, slots of other ids."""
        state, one = self._state, new[0]
        of = {name: int(column[one]) for name, column in self.of.items()}
        limit = WHOLE if of["open_slots"] > SEGMENT else SEGMENT
        lanes = min(limit, of["open_slots"])
        begin = int(self._within[one]) * SEGMENT
        slots = (begin + np.arange(lanes)) % of["open_slots"]
        at = int(self._first[one]) + slots
        step, now = int(state.clock[0]), int(state.clock[1])
        used = state.used_at[at]
        times = (state.times if features.times else state.used_at)[at].astype(np.int64)
        score = scores(of["policy"], times, state.counts[at] if features.counts else None, used, step)
        may_go = (used < step - 1) & (of["policy"] != Policy.NONE) & ((of["policy"] != Policy.TTL) | (times < now))
        got, where = list[int](), list[int]()
        for sighting in new[:limit]:
            distance = np.arange(lanes) - (self._home[sighting] - begin)
            if of["segments"] == 1:
                distance = distance % of["open_slots"]
            victims = may_go & (distance >= 0) & (distance < of["probes"])
            if victims.any():
                least = victims & (score == score[victims].min())
                taken = np.where(least, distance, _FAR).argmin()
                may_go[taken] = False
                got.append(sighting)
                where.append(at[taken])
        return self._claim(np.array(got, np.int64), np.array(where, np.int64), features)

    def _claim(self, new: np.ndarray, at: np.ndarray, features: "Features") -> list[tuple[int, ...]]:
        """Store new ids to slots `at`; return (slot, table, origin, id before) of each."""
        state = self._state
        before = state.ids[at].tolist()
        state.ids[at] = self._ids[new]
        state.digests[at] = self._digests[new]
        state.used_at[at] = state.clock[0]
        if features.times:
            state.times[at] = -1
        if features.counts:
            state.counts[at] = 0
        reserved = self.bucket[new] * self.of["size"][new] + self.of["open_slots"][new] + self._reserved[new]
        initials = self.of["initials"][new]
        drawn = unsigned_remainder(mix(torch.from_numpy(self._ids[new])), torch.from_numpy(initials).clamp(min=1))
        origins = np.where(initials > 0, drawn.numpy(), reserved)
        return [*zip(at.tolist(), self.of["table"][new].tolist(), origins.tolist(), before, strict=True)]

    def spare(self) -> np.ndarray:
        """Return the slot in the bucket for an id without one, [n]."""
        reserved = self.of["size"] > self.of["open_slots"]
        return np.where(reserved, self.of["open_slots"] + self._reserved, self._home)


def scores(policy: int, times: np.ndarray, counts: np.ndarray | None, used: np.ndarray, step: int) -> np.ndarray:
    """Return [n] int64: of the ids that may lose their slots, the one with the least number does.

    Args:
        times: [n] int64, the times of a policy that needs them, else `used`.
        counts: [n] int32; None if no policy needs them.
        used: [n] int32, last training step that used each id.
        step: number of training steps.
    """
    if counts is not None and policy == Policy.LFU:
        return (counts.astype(np.int64) << 32) + times
    if counts is not None and policy == Policy.DISTANCE_LFU:
        return (counts.astype(np.int64) << 24) // np.maximum(step - used + 1, 1)
    return times


def _once(keys: np.ndarray, of: np.ndarray) -> np.ndarray:
    """Return one element of `of` [n] for each distinct row of `keys` [n, k]."""
    return of[np.unique(keys, axis=0, return_index=True)[1]]


def fill_rows(tables: torch.Tensor, claims: Claims) -> None:
    """Do what `fill_rows.fill_rows` does; `tables` has the addresses of memory of this process."""
    valid = (claims.slots[: int(claims.count)] >= 0).nonzero().flatten()
    slots, numbers, origins = claims.slots[valid], claims.tables[valid], claims.origins[valid]
    for number, (first_slot, weights, words, source, cached, source_cached, *states) in enumerate(tables.tolist()):
        rows = (slots[numbers == number] - first_slot).numpy()
        if not len(rows):
            continue
        read = _in_cache(origins[numbers == number].numpy(), source_cached)
        rows = _in_cache(rows, cached)
        end = int(rows.max()) + 1
        _rows_at(weights, end, words)[rows] = _rows_at(source, int(read.max()) + 1, words)[read]
        for address, row_words in zip(states[::2], states[1::2], strict=True):
            if address:
                _rows_at(address, end, row_words)[rows] = 0


def _in_cache(rows: np.ndarray, slots: int) -> np.ndarray:
    """Return the slots of rows in a cache, whose slots are at an address; the rows themselves if that is 0."""
    return _rows_at(slots, int(rows.max()) + 1, 1)[rows, 0] if slots else rows


def _rows_at(address: int, rows: int, words: int) -> np.ndarray:
    """Return the memory at an address as [rows, words] int32."""
    memory = (ctypes.c_int32 * (rows * words)).from_address(address)
    return np.ctypeslib.as_array(memory).reshape(rows, words)
