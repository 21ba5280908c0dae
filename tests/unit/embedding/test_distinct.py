"""Distinct ids of a batch, their slots, and the way back, against what Python finds one by one."""

from typing import Any

import pytest
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dlrm_overlap.embedding.distinct import Distinct, DistinctIds, NamedSequence, SlotBlocks
from dlrm_overlap.kernels.ids.id_map import mix, unsigned_remainder

SEQUENCES = [
    NamedSequence("f@a", "f", 0),
    NamedSequence("g", "g", 0),
    NamedSequence("f@b", "f", 1),
    NamedSequence("h", "h", 1),
]
ROWS = [10, 2**31 - 1]


def _finder() -> DistinctIds:
    return DistinctIds(SEQUENCES, ROWS, torch.device("cpu"))


def _batch(**bags: list[list[int]]) -> KeyedJaggedTensor:
    values = [id for each in bags.values() for bag in each for id in bag]
    lengths = [len(bag) for each in bags.values() for bag in each]
    return KeyedJaggedTensor(list(bags), torch.tensor(values, dtype=torch.int64), lengths=torch.tensor(lengths))


def _check(batch: KeyedJaggedTensor, distinct: Distinct, capacities: list[int], blocks: SlotBlocks) -> None:
    """Check that each id is expanded from a slot that has it, and that the runs name its gradient once."""
    tables, features = len(ROWS), sum(blocks.counts)
    lengths = distinct.lengths.split([count * blocks.slots for count in blocks.counts])
    counts = [int(of_table.sum()) for of_table in lengths]
    assert all(sorted(row.tolist(), reverse=True) == row.tolist() for row in lengths), "slots without ids come last"
    by_table = dict(zip(range(tables), distinct.values[: sum(counts)].split(counts), strict=True))
    parts = batch.values().split(batch.length_per_key())
    ids_by_key = {key: each.tolist() for key, each in zip(batch.keys(), parts, strict=True)}
    begin, named = 0, dict[int, list[int]]()
    for sequence, capacity in zip(SEQUENCES, capacities, strict=True):
        places = distinct.slots[begin : begin + capacity].tolist()
        ids = ids_by_key[sequence.feature]
        for position, id in enumerate(ids):
            bag, feature = divmod(places[position], features)
            table = int(feature >= blocks.counts[0])
            slot = (feature - table * blocks.counts[0]) * blocks.slots + bag
            assert table == sequence.table
            assert by_table[table][slot] == id
            named.setdefault(places[position], []).append(begin + position)
        assert places[len(ids) :] == [-1] * (capacity - len(ids))
        begin += capacity
    runs, found = distinct.runs, dict[int, list[int]]()
    for run in range(int(runs.count)):
        first, end = runs.starts[run : run + 2].tolist()
        found[int(runs.rows[run])] = runs.order[first:end].tolist()
    assert found == named
    assert all(each.tolist() == sorted(set(each.tolist())) for each in by_table.values())


BATCHES: dict[str, Any] = {
    "ends of the range": {"h": [[0, 2**31 - 2], [0]], "f": [[9, 0, 9], [0]], "g": [[9], [5, 5]], "unread": [[1], []]},
    "empty": {"f": [[], []], "g": [[], []], "h": [[], []]},
    "no sample": {"f": [], "g": [], "h": []},
    "some empty": {"f": [[], [3]], "g": [[], []], "h": [[], []]},
    "one id": {"f": [[4] * 50, [4]], "g": [[4] * 7, []], "h": [[4], [4] * 3]},
}


@pytest.mark.parametrize("name", BATCHES)
def test_each_id_has_its_slot(name: str) -> None:
    batch, finder = _batch(**BATCHES[name]), _finder()
    capacities = finder.capacities_of(batch)
    found = finder.sort(batch, capacities)
    most = max(1, int(found.first_run.diff().max()))
    counts = found.first_run.diff().tolist()
    halves = SlotBlocks(-(-most // 2), (2, 2))
    for blocks in (SlotBlocks(most, (1, 1)), SlotBlocks(most + 3, (1, 1)), halves, SlotBlocks.of(counts)):
        _check(batch, finder.assign_slots(found, blocks), capacities, blocks)
    assert found.counts.tolist() == counts


def test_padded_ids() -> None:
    batch, finder = _batch(**BATCHES["ends of the range"]), _finder()
    exact, capacities = finder.capacities_of(batch), [6, 3, 6, 5]
    found = finder.sort(batch, capacities)
    _check(batch, finder.assign_slots(found, SlotBlocks(20, (1, 1))), capacities, SlotBlocks(20, (1, 1)))
    expected = [9, 0, 9, 0, 0, 0, 9, 5, 5, 9, 0, 9, 0, 0, 0, 0, 2**31 - 2, 0, 0, 0]
    assert finder.padded(batch, capacities).tolist() == expected
    assert exact == [4, 3, 4, 3]


def test_ids_beyond_their_room_or_slots_are_told_by_lengths() -> None:
    """What is published then has more ids than any bound, and no place is outside the window."""
    batch, finder = _batch(**BATCHES["ends of the range"]), _finder()
    few = finder.assign_slots(finder.sort(batch, [4, 3, 4, 3]), SlotBlocks(2, (1, 1)))
    assert few.lengths.view(2, 2).sum(1).tolist() == [3, 3]
    no_room = finder.assign_slots(finder.sort(batch, [3, 3, 4, 3]), SlotBlocks(8, (1, 1)))
    told = no_room.lengths.view(2, 8).sum(1).tolist()
    assert told[0] > 13
    assert told[1] == 3
    for each, slots in ((few, 2), (no_room, 8)):
        assert int(each.slots.max()) < 2 * slots
        assert int(each.runs.rows.min()) >= 0


def test_ranges_of_rows_have_slots_of_their_own() -> None:
    """As between nodes; ids outside the table are in its last range."""
    finder = DistinctIds(SEQUENCES, ROWS, torch.device("cpu"), [[0, 4, 6], [0]])
    batch = _batch(f=[[9, 0, 3], [0, 12]], g=[[4], [5, 5]], h=[[7], []])
    capacities = finder.capacities_of(batch)
    distinct = finder.assign_slots(finder.sort(batch, capacities), SlotBlocks(6, (1, 1, 1, 1)))
    counts = distinct.lengths.view(4, 6).sum(1).tolist()
    values = [each.tolist() for each in distinct.values[: sum(counts)].split(counts)]
    assert values == [[0, 3], [4, 5], [9, 12], [0, 3, 7, 9, 12]]
    assert (distinct.slots % 4).tolist() == [2, 0, 0, 0, 2, 1, 1, 1, 3, 3, 3, 3, 3, 3], "of each id the range"
    assert finder.sort(batch, capacities).counts.tolist() == [2, 2, 2, 5]
    beyond = finder.sort(batch, [4, *capacities[1:]]).counts
    assert int(beyond[0]) > len(batch.values()), "no range has room"


def test_ids_outside_their_table_share_a_slot() -> None:
    """So that their owner finds one of them, and no other table's ids are mixed up with them."""
    batch, finder = _batch(f=[[10, -1], [3]], g=[[], [3]], h=[[-5, 0], [10]]), _finder()
    distinct = finder.assign_slots(finder.sort(batch, finder.capacities_of(batch)), SlotBlocks(6, (1, 1)))
    assert distinct.values[:2].tolist() == [3, 10]
    assert distinct.slots[:4].tolist() == [2, 2, 0, 0]
    assert finder.sort(batch, finder.capacities_of(batch)).counts.tolist() == [2, 4]


@pytest.mark.parametrize("most", [[1000, 90], [5], [0, 0], [100] * 26, [1_000_000] + [100] * 10, [70, 3, 1]])
def test_there_are_few_more_slots_than_distinct_ids(most: list[int]) -> None:
    blocks = SlotBlocks.of(most)
    slots = sum(blocks.counts) * blocks.slots
    assert sum(most) <= slots <= max(9 / 8 * sum(most), 64 * (len(most) + 1))
    tables = {f"t{number}": count for number, count in enumerate(most)}
    shares = blocks.by_feature(tables)
    assert len(shares) == sum(blocks.counts)
    assert {name: sum(n for table, n in shares.values() if table == name) for name in tables} == tables


@pytest.mark.parametrize("mixes", [False, True])
def test_ids_of_64_bits_are_distinct_by_both_words(mixes: bool) -> None:
    """Without ranges a table's ids are in the order of the ids; with ranges each is in the range of its bucket."""
    ids = [(1 << 32) + 5, 5, -5, (1 << 32) + 5, -(2**63), 2**63 - 1, 5]
    batch = _batch(f=[ids[:3], ids[3:]], g=[[5], []], h=[[-5], [7]])
    whole = DistinctIds(SEQUENCES, [4, 6], torch.device("cpu"), any_id=True, mixes=mixes)
    capacities = [each + 2 for each in whole.capacities_of(batch)]
    blocks = SlotBlocks(9, (1, 1))
    _check(batch, whole.assign_slots(whole.sort(batch, capacities), blocks), capacities, blocks)
    cut = DistinctIds(SEQUENCES, [4, 6], torch.device("cpu"), [[0, 2], [0, 3]], any_id=True, mixes=mixes)
    found = cut.sort(batch, capacities)
    distinct = cut.assign_slots(found, SlotBlocks(9, (1, 1, 1, 1)))
    counts = found.counts.tolist()
    parts = [each.tolist() for each in distinct.values[: sum(counts)].split(counts)]
    for table, (buckets, every) in enumerate(((4, set(ids)), (6, {*ids, -5, 7}))):
        bucket = {id: int(unsigned_remainder(_hashed(id, mixes), buckets)) for id in every}
        assert set(parts[2 * table]) == {id for id in every if bucket[id] < buckets // 2}
        assert set(parts[2 * table + 1]) == {id for id in every if bucket[id] >= buckets // 2}


@pytest.mark.parametrize("name", BATCHES)
def test_ids_of_64_bits_are_told_apart_by_their_tables(name: str) -> None:
    """The last id of a table may be the first one of the next."""
    batch = _batch(**BATCHES[name])
    finder = DistinctIds(SEQUENCES, [4, 6], torch.device("cpu"), any_id=True)
    capacities, blocks = finder.capacities_of(batch), SlotBlocks(9, (1, 1))
    _check(batch, finder.assign_slots(finder.sort(batch, capacities), blocks), capacities, blocks)


def _hashed(id: int, mixes: bool) -> torch.Tensor:
    return mix(torch.tensor(id)) if mixes else torch.tensor(id)
