from collections.abc import Iterator, Sequence
from typing import NamedTuple

import pytest
import torch

from dlrm_overlap.kernels.ids import reference
from dlrm_overlap.kernels.ids.fill_rows import FilledTable, fill_rows, row_tables
from dlrm_overlap.kernels.ids.id_map import (
    CELLS,
    EMPTY,
    Claims,
    MapFeature,
    MapState,
    Policy,
    Totals,
    mix,
    murmur,
    segments_of,
    unmix,
    unsigned_remainder,
)
from dlrm_overlap.kernels.ids.map_ids import Features, IdSet, map_ids
from dlrm_overlap.kernels.reference import split_words

_SAMPLES = 4
CPU = torch.device("cpu")


class Table(NamedTuple):
    buckets: int = 4
    size: int = 16
    reserved: int = 1
    probes: int = 128
    policy: Policy = Policy.LRU
    lifetime: int = 0
    admit_after: int = 1
    halve_at: int = 0
    admit_below: int = 1 << 32
    writes: int = 1
    initials: int = 0


def state_of(*tables: Table, clocked: bool = True) -> tuple[MapState, Features]:
    rows, slots, segments = list[MapFeature](), 0, 0
    for number, table in enumerate(tables):
        open_slots = table.size - table.reserved
        each, probes = segments_of(open_slots), min(table.probes, open_slots)
        where = slots, 0, table.buckets, table.buckets, table.size, open_slots, probes, segments, each
        admission = table.writes, table.lifetime, table.admit_after, table.halve_at, table.admit_below
        rows.append(MapFeature(*where, *admission, int(table.policy), table.initials, number))
        slots, segments = slots + table.buckets * table.size, segments + table.buckets * each
    features = Features.of(rows, clocked, CPU)
    switches = features.times, features.counts, features.sketch
    return MapState.empty(slots, segments, CPU, *switches), features


def words_of(ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    low, high = split_words(ids)
    return low.clone(), high.clone()


def random_ids(count: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(2**63), 2**63 - 1, (count,), generator=generator)


def batches(pool: torch.Tensor, ids: int, features: int, steps: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield the ids of each step, drawn from `pool`, and their offsets; the last 3 ids are padding."""
    generator = torch.Generator().manual_seed(7)
    for _ in range(steps):
        drawn = pool[torch.randint(len(pool), (features * ids + 3,), generator=generator)]
        cuts = torch.randint(ids + 1, (features, _SAMPLES - 1), generator=generator).sort(dim=1).values
        ends = [ids * f + each for f, row in enumerate(cuts.tolist()) for each in (*row, ids)]
        yield drawn, torch.tensor([0, *ends, *[len(drawn)] * _SAMPLES], dtype=torch.int32)


def on_cpu(state: MapState, features: Features, ids: torch.Tensor, offsets: torch.Tensor, train: bool) -> torch.Tensor:
    low, high = words_of(ids)
    reference.map_ids(state, features, low.clone(), high, low, offsets, _SAMPLES, train)
    return low


def one_bag(state: MapState, features: Features, *ids: int, train: bool = True) -> list[int]:
    """Return the rows of ids of the first feature."""
    offsets = torch.tensor([0, *[len(ids)] * _SAMPLES], dtype=torch.int32)
    return on_cpu(state, features, torch.tensor(ids), offsets, train).tolist()


CASES = {
    "lru": ((Table(), Table(buckets=2)), 300, 24),
    "lfu of few probes": ((Table(policy=Policy.LFU, probes=5),), 200, 40),
    "distance lfu": ((Table(policy=Policy.DISTANCE_LFU, reserved=2),), 200, 40),
    "ttl, nothing reserved": ((Table(policy=Policy.TTL, reserved=0, lifetime=1),), 200, 40),
    "no eviction, admission": ((Table(policy=Policy.NONE, admit_after=2, halve_at=16, admit_below=3 << 30),), 60, 40),
    "a feature that only reads": ((Table(), Table(writes=0)), 60, 24),
}


@pytest.mark.parametrize("case", CASES)
def test_kernels_agree_with_the_reference(case: str) -> None:
    tables, pool, ids = CASES[case]
    state, features = state_of(*tables)
    other, members = MapState(*(each.clone() for each in state)), IdSet()
    known = random_ids(pool, 1)
    known[:2] = torch.tensor([EMPTY, 2**63 - 1])
    for step, (drawn, offsets) in enumerate(batches(known, ids, len(tables), 4)):
        train = step != 2
        state.clock[1] = other.clock[1] = step
        low, high = words_of(drawn)
        claims = map_ids(state, features, members, low, high, low, offsets, _SAMPLES, train)
        expected, upper = words_of(drawn)
        claimed = reference.map_ids(other, features, expected.clone(), upper, expected, offsets, _SAMPLES, train)
        assert low.tolist() == expected.tolist()
        for name, mine, its in zip(MapState._fields, state, other, strict=True):
            if name == "totals":
                mine, its = mine.sum(1), its.sum(1)
            assert torch.equal(mine, its), f"step {step}: {name}"
        assert_sums_hold(state, tables)
        if train:
            assert claims is not None
            assert claimed is not None
            assert claims_of(claims) == claims_of(claimed)
    assert state.total(Totals.INSERTED) > 0
    assert low[-3:].tolist() == words_of(drawn)[0][-3:].tolist(), "padding stays"


def assert_sums_hold(state: MapState, tables: Sequence[Table]) -> None:
    """Assert that the sums of the sketch are those of its counters, and below the limits."""
    limits = [each.halve_at for each in tables for _ in range(each.buckets)]
    if state.sketch.numel() and all(limits):
        sums = state.sketch.view(-1, CELLS).sum(1)
        assert torch.equal(state.sketch_sums, sums.int())
        assert (sums < torch.tensor(limits)).all()


def claims_of(claims: Claims) -> list[tuple[int, ...]]:
    """Return (slot, table, id, evicted id) of the claims that are not void."""
    *columns, count = claims
    entries = zip(*(each[: int(count)].tolist() for each in columns), strict=True)
    return sorted(entry for entry in entries if entry[0] >= 0)


def test_the_hash_of_an_id_gives_the_id() -> None:
    ids = torch.tensor([0, -1, 1, 2**63 - 1, -(2**63), *random_ids(1000, 3).tolist()])
    assert torch.equal(unmix(mix(ids)), ids)
    assert torch.equal(mix(unmix(ids)), ids)


def test_segments_of_a_large_bucket_agree() -> None:
    """Windows of neighbouring segments overlap, and the last segment is short: nothing depends on their order."""
    state, features = state_of(Table(buckets=1, size=310, reserved=0))
    full = random_ids(600, 3)
    for part in full.split(200):
        one_bag(state, features, *part.tolist())
    state.clock[0] += 3
    other = MapState(*(each.clone() for each in state))
    drawn = torch.cat([full[:8], random_ids(60, 4)])
    offsets = torch.tensor([0, *[len(drawn)] * _SAMPLES], dtype=torch.int32)
    low, high = words_of(drawn)
    map_ids(state, features, IdSet(), low, high, low, offsets, _SAMPLES, True)
    assert low.tolist() == on_cpu(other, features, drawn, offsets, True).tolist()
    assert torch.equal(state.ids, other.ids)
    assert state.total(Totals.EVICTED) > 40


def test_one_id_has_one_row_in_its_bucket() -> None:
    state, features = state_of(Table(buckets=4, size=128))
    ids = random_ids(300, 5)
    rows = torch.tensor(one_bag(state, features, *ids.tolist(), *ids.tolist()))
    assert torch.equal(rows[:300], rows[300:]), "duplicates share a row"
    assert rows.unique().numel() == 300
    assert torch.equal(rows[:300] // 128, unsigned_remainder(ids, 4))
    assert torch.equal(state.ids[rows[:300]], ids)


def test_the_order_of_ids_does_not_change_who_gets_a_slot() -> None:
    ids = random_ids(60, 6)
    kept = []
    for order in (torch.arange(60), torch.randperm(60, generator=torch.Generator().manual_seed(0))):
        state, features = state_of(Table(buckets=2))
        one_bag(state, features, *ids[order].tolist())
        kept.append(state.ids)
    assert torch.equal(*kept)
    assert state.total(Totals.NO_ROOM) == 60 - 30


def test_stock_fbgemm_finds_every_id() -> None:
    """FBGEMM's operator, which TorchRec's module evaluates with, finds the ids of a map where the map has them."""
    pytest.importorskip("fbgemm_gpu")
    buckets, size = 2, 300
    state, features = state_of(Table(buckets, size, reserved=0, policy=Policy.LRU))
    for seed in range(3):
        one_bag(state, features, *random_ids(250, seed).abs().tolist())
    ids = state.ids[state.ids != EMPTY]
    bucket = unsigned_remainder(ids, torch.tensor(buckets))
    found, _ = torch.ops.fbgemm.zero_collision_hash(
        ids, state.ids.view(-1, 1), 128, True, -1, True, torch.full_like(ids, size), bucket * size
    )
    assert torch.equal(found, (state.ids != EMPTY).nonzero().flatten())


def test_the_number_of_ranks_does_not_change_the_slots() -> None:
    """Each rank has whole buckets, and sees their ids alone."""
    ids = random_ids(60, 16)
    ids = torch.cat([ids, ids[::2]])
    table = Table(buckets=4, admit_after=2, halve_at=24)
    whole, features = state_of(table)
    one_bag(whole, features, *ids.tolist())
    parts = []
    for rank in range(2):
        part, features = state_of(table._replace(buckets=2))
        features.infos[:1, MapFeature._fields.index("first_bucket")] = 2 * rank
        features.infos[:1, MapFeature._fields.index("buckets")] = 4
        one_bag(part, features, *ids[unsigned_remainder(ids, 4) // 2 == rank].tolist())
        parts.append(part)
    for name in ("ids", "sketch", "sketch_sums"):
        assert torch.equal(torch.cat([getattr(part, name) for part in parts]), getattr(whole, name))
    assert whole.total(Totals.INSERTED) > 0
    assert (whole.sketch.view(-1, CELLS).sum(1) < 24).all(), "halved"


def test_no_id_of_this_step_or_the_last_one_is_evicted() -> None:
    state, features = state_of(Table(buckets=1, size=16))
    first, second, third = (each.tolist() for each in random_ids(30, 8).split((8, 7, 15)))
    one_bag(state, features, *first)
    one_bag(state, features, *second)
    rows = one_bag(state, features, *third)
    present = set(state.ids.tolist())
    assert set(second) <= present, "of the last step"
    assert not set(first) & present, "the others went"
    assert rows.count(15) == 7, "ids without a slot share the reserved row"
    assert state.total(Totals.NO_ROOM) == 7


def test_a_row_that_the_last_step_read_stays_though_its_id_was_not_seen() -> None:
    """The last step's update may still use it: a row that an id without a slot shares, or that a feature only reads."""
    for reads in (False, True):
        state, features = state_of(Table(buckets=1, size=16, reserved=0))
        known, new = random_ids(16, 8), random_ids(1, 9)
        one_bag(state, features, *known.tolist())
        one_bag(state, features, *known.tolist())
        stays = known[3] if reads else state.ids[unsigned_remainder(murmur(new), 16)]
        others = [id_ for id_ in known.tolist() if id_ != int(stays)][:8]
        if reads:
            writes = MapFeature._fields.index("writes")
            one_bag(state, features, *others)
            features.infos[0, writes] = 0
            rows = one_bag(state, features, int(stays))
            features.infos[0, writes] = 1
        else:
            rows = one_bag(state, features, *others, int(new))[-1:]
        assert int(state.ids[rows[0]]) == int(stays)
        one_bag(state, features, *random_ids(16, 10).tolist())
        assert int(stays) in state.ids.tolist()
        assert set(known.tolist()) - set(state.ids.tolist()), "other ids were evicted"


def test_evaluation_changes_nothing() -> None:
    state, features = state_of(Table(policy=Policy.LFU, admit_after=2, halve_at=24))
    known = random_ids(20, 9).tolist()
    one_bag(state, features, *known)
    rows = one_bag(state, features, *known)
    before = [each.clone() for each in state]
    assert one_bag(state, features, *known, train=False) == rows
    unknown = one_bag(state, features, *random_ids(20, 10).tolist(), train=False)
    assert all(row % 16 == 15 for row in unknown)
    assert all(torch.equal(*pair) for pair in zip(before, state, strict=True))


def test_ids_that_no_step_looks_up_change_nothing() -> None:
    state, features = state_of(Table(policy=Policy.LFU, admit_after=2))
    known = random_ids(20, 9).tolist()
    one_bag(state, features, *known, *known)
    rows = one_bag(state, features, *known, train=False)
    state.taken.zero_()
    before = [each.clone() for each in state]
    for change in (False, True):
        low, high = words_of(torch.tensor([*known, *random_ids(20, 10).tolist()]))
        offsets = torch.tensor([0, *[40] * _SAMPLES], dtype=torch.int32)
        if change:
            map_ids(state, features, IdSet(), low, high, low, offsets, _SAMPLES, True)
        else:
            reference.map_ids(state, features, low.clone(), high, low, offsets, _SAMPLES, True)
        assert low[:20].tolist() == rows
        assert all(row % 16 == 15 for row in low[20:].tolist())
        assert all(torch.equal(*pair) for pair in zip(before, state, strict=True))


@pytest.mark.parametrize("policy", [Policy.LRU, Policy.LFU, Policy.DISTANCE_LFU, Policy.TTL])
def test_a_policy_evicts_the_least(policy: Policy) -> None:
    """One bucket of three ids: `often` was seen most, `lately` last, `once` first and once."""
    state, features = state_of(Table(1, 4, policy=policy, lifetime=4))
    often, lately, once, new = random_ids(4, 11).tolist()
    for now, seen in enumerate(([once], [often] * 9, [lately] * 2, [], [])):
        state.clock[1] = now
        one_bag(state, features, *seen)
    state.clock[1] = 5
    one_bag(state, features, new)
    gone = {once, often, lately} - set(state.ids.tolist())
    assert gone == {once}
    for now in (6, 7, 8):
        state.clock[1] = now
        one_bag(state, features)
    one_bag(state, features, *random_ids(1, 12).tolist())
    gone = {often, lately, new} - set(state.ids.tolist())
    # `lately` has 2 sightings in 7 steps, `new` 1 in 5, `often` 9 in 8; all but `new`'s time 9 have passed at 8.
    expected = {Policy.LRU: often, Policy.LFU: new, Policy.DISTANCE_LFU: new, Policy.TTL: often}
    assert gone == {expected[policy]}


def test_an_id_keeps_its_slot_until_its_time_has_passed() -> None:
    """A bucket of one slot, and a lifetime of 4 after the time 10."""
    state, features = state_of(Table(1, 2, policy=Policy.TTL, lifetime=4))
    first, other = random_ids(2, 19).tolist()
    state.clock[1] = 10
    one_bag(state, features, first)
    for now in range(11, 16):
        state.clock[1] = now
        one_bag(state, features, other)
        assert (first in state.ids.tolist()) == (now <= 14), now


def test_ids_are_admitted_after_sightings() -> None:
    state, features = state_of(Table(admit_after=3))
    rare, common = random_ids(2, 13).tolist()
    assert all(row % 16 == 15 for row in one_bag(state, features, rare, common))
    rows = one_bag(state, features, rare, common, common)
    assert rows[0] % 16 == 15 != rows[1] % 16
    assert rows[1] == rows[2]
    assert [state.total(which) for which in Totals] == [1, 0, 3, 0, 5]


def test_old_sightings_are_forgotten() -> None:
    """The counters of a bucket are halved once their mean is 1; if they never are, new ids seem to have been seen."""
    rare, common, *others = random_ids(402, 17).tolist()
    admitted = list[int]()
    for halve_at in (CELLS, 0):
        state, features = state_of(Table(1, 512, 257, admit_after=2, halve_at=halve_at))
        one_bag(state, features, rare)
        one_bag(state, features, common)
        one_bag(state, features, common)
        assert common in state.ids.tolist()
        for first in range(0, len(others), 10):
            one_bag(state, features, *others[first : first + 10])
            assert_sums_hold(state, [Table(1, halve_at=halve_at)])
        before = state.total(Totals.INSERTED)
        assert (0.15 < before / len(others) < 0.35) == (halve_at > 0), "share of the ids seen once that are admitted"
        one_bag(state, features, rare, *random_ids(9, 18).tolist())
        admitted.append(state.total(Totals.INSERTED) - before)
        assert (rare in state.ids.tolist()) == (halve_at == 0)
    assert admitted[0] < 4, "few look as if they had been seen"
    assert admitted[1] == 10


def test_ids_that_are_never_admitted_do_not_fill_the_sketch() -> None:
    state, features = state_of(Table(admit_after=2, halve_at=CELLS, admit_below=0))
    one_bag(state, features, *random_ids(100, 19).tolist())
    assert state.total(Totals.NOT_ADMITTED) == 100
    assert not state.sketch.any()


def test_a_share_of_ids_is_admitted() -> None:
    state, features = state_of(Table(64, 128, admit_below=1 << 30))
    ids = random_ids(2000, 14)
    rows = torch.tensor(one_bag(state, features, *ids.tolist()))
    admitted = rows % 128 != 127
    assert admitted.float().mean() == pytest.approx(0.25, abs=0.04)
    upper = mix(ids) >> 32 & 0xFFFFFFFF
    assert torch.equal(admitted, upper < 1 << 30), "the id alone decides"


def test_rows_of_new_ids_begin_alike_wherever_they_are() -> None:
    """An initial row comes from the bucket's reserved slot, or from given rows; states become zeros."""
    for initials in (0, 5):
        state, features = state_of(Table(4, 16, 2, initials=initials), Table(2, 16, 2, initials=initials))
        low, high = words_of(random_ids(40, 15))
        offsets = torch.tensor([0, 20, 20, 20, 20, 40, 40, 40, 40], dtype=torch.int32)
        claims = map_ids(state, features, IdSet(), low, high, low, offsets, _SAMPLES, True)
        assert claims is not None
        before = [
            torch.randn(64, 8),
            torch.randn(32, 4),
            torch.ones(64, 20),
            torch.ones(32, 1),
        ]  # states of more words than a row, and fewer
        given = torch.randn(5, 8), torch.randn(5, 4)
        for fill in (fill_rows, lambda tables, claims: reference.fill_rows(tables.entries, claims)):
            after = [each.clone() for each in before]
            tables = [
                FilledTable(
                    first, w.data_ptr(), w.shape[1], (g if initials else w).data_ptr(), 0, 0, (s.data_ptr(), s.shape[1])
                )
                for first, w, g, s in zip((0, 64), after[:2], given, after[2:], strict=True)
            ]
            fill(row_tables(tables, CPU), claims)
            for number, first in enumerate((0, 64)):
                slots = [s for s, t, *_ in claims_of(claims) if t == number]
                assert len(slots) == 20
                ids, here, old = state.ids[slots], torch.tensor(slots) - first, before[number]
                if initials:
                    expected = given[number][unsigned_remainder(mix(ids), 5)]
                else:
                    expected = old[here // 16 * 16 + 14 + unsigned_remainder(murmur(ids), 2)]
                assert torch.equal(after[number][here], expected)
                others = torch.ones(len(old), dtype=torch.bool).index_fill(0, here, False)
                assert torch.equal(after[number][others], old[others])
                assert torch.equal(after[2 + number], others[:, None].float().expand_as(after[2 + number]))


def test_rows_of_new_ids_begin_in_the_slots_of_a_cache() -> None:
    """Of two tables the first is cached: where its rows have slots, they are filled as rows of a table are."""
    for initials in (0, 5):
        state, features = state_of(Table(4, 16, 2, initials=initials), Table(2, 16, 2, initials=initials))
        low, high = words_of(random_ids(40, 15))
        offsets = torch.tensor([0, 20, 20, 20, 20, 40, 40, 40, 40], dtype=torch.int32)
        claims = map_ids(state, features, IdSet(), low, high, low, offsets, _SAMPLES, True)
        assert claims is not None
        generator, given = torch.Generator().manual_seed(initials), torch.randn(5, 8)
        slot_of = torch.randperm(90, generator=generator)[:64].int()
        rows, others = torch.randn(64, 8), torch.randn(32, 8)
        expected = [rows.clone(), torch.ones(64), others.clone(), torch.ones(32)]
        tables = [
            FilledTable(first, w.data_ptr(), 8, (given if initials else w).data_ptr(), 0, 0, (s.data_ptr(), 1))
            for first, w, s in ((0, *expected[:2]), (64, *expected[2:]))
        ]
        reference.fill_rows(row_tables(tables, CPU).entries, claims)
        for fill in (fill_rows, lambda tables, claims: reference.fill_rows(tables.entries, claims)):
            cache = torch.full((90, 8), torch.nan).index_copy(0, slot_of.long(), rows)
            found = [cache, torch.ones(90), others.clone(), torch.ones(32)]
            source = given if initials else cache
            slots = slot_of.data_ptr(), 0 if initials else slot_of.data_ptr()
            plain = (given if initials else found[2]).data_ptr()
            tables = [
                FilledTable(0, cache.data_ptr(), 8, source.data_ptr(), *slots, (found[1].data_ptr(), 1)),
                FilledTable(64, found[2].data_ptr(), 8, plain, 0, 0, (found[3].data_ptr(), 1)),
            ]
            fill(row_tables(tables, CPU), claims)
            found[:2] = [each[slot_of.long()] for each in found[:2]]
            assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
            unused = torch.ones(90, dtype=torch.bool).index_fill(0, slot_of.long(), False)
            assert bool(cache[unused].isnan().all()), "slots of no row"
