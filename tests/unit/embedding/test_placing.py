"""Ids that are loaded take the slots that training gives to new ids."""

import numpy as np
import pytest
import torch

from dlrm_overlap.embedding.id_tables.placing import Known, place
from dlrm_overlap.embedding.id_tables.rules import IdRules
from dlrm_overlap.kernels.ids.id_map import EMPTY, MapFeature, MapState, Policy, unsigned_remainder
from dlrm_overlap.kernels.ids.map_ids import Features
from dlrm_overlap.kernels.ids.reference import map_ids
from dlrm_overlap.kernels.reference import split_words

BUCKETS, SIZE, STEP = 4, 128, 100


def _rules(policy: Policy = Policy.LRU) -> IdRules:
    return IdRules("t", BUCKETS * SIZE, BUCKETS, reserved=1, policy=policy, frozen=True)


def _ids(count: int) -> torch.Tensor:
    return torch.randint(-(2**63), 2**63 - 1, (count,), generator=torch.Generator().manual_seed(5)).unique()


def _trained(ids: torch.Tensor) -> torch.Tensor:
    """Return [rows] int64: the ids in the slots of an empty map after a training step on `ids`."""
    rules, cpu = _rules(), torch.device("cpu")
    state = MapState.empty(rules.rows, BUCKETS, cpu, times=False, counts=False, sketch=False)
    below = 2**32
    of_bucket = (rules.size, rules.open_slots, rules.open_slots, 0, 1, 1, 0, 1, 0, below, int(Policy.LRU), 0, 0)
    features = Features.of([MapFeature(0, 0, BUCKETS, BUCKETS, *of_bucket)], False, cpu)
    out, ends = torch.empty_like(ids), torch.tensor([0, len(ids)])
    map_ids(state, features, *split_words(ids), out, ends, 1, train=True)
    return state.ids


def test_slots_are_those_of_a_training_step_in_any_order() -> None:
    ids = _ids(380)
    expected = _trained(ids)
    for order in (torch.arange(len(ids)), torch.randperm(len(ids), generator=torch.Generator().manual_seed(1))):
        shuffled = ids[order]
        stay, rows = place(Known(shuffled, torch.zeros(len(ids), dtype=torch.int32)), _rules(), STEP)
        found = torch.full((BUCKETS * SIZE,), EMPTY)
        found[rows] = shuffled[stay]
        assert torch.equal(found, expected)
        assert len(stay) == len(ids)


@pytest.mark.parametrize("policy", [Policy.NONE, Policy.LRU, Policy.LFU, Policy.DISTANCE_LFU, Policy.TTL])
def test_of_a_full_bucket_the_policy_chooses(policy: Policy) -> None:
    ids, draw = _ids(900), torch.Generator().manual_seed(2)
    used, counts = (torch.randint(1, STEP, (len(ids),), generator=draw, dtype=torch.int32) for _ in range(2))
    known = Known(
        ids,
        used,
        times=used + 7 if policy == Policy.TTL else None,
        counts=counts if policy in (Policy.LFU, Policy.DISTANCE_LFU) else None,
    )
    stay, rows = place(known, _rules(policy), STEP)
    assert len(stay) == BUCKETS * 127
    assert len(set(rows.tolist())) == len(rows)
    assert int((rows % SIZE).max()) < 127, "reserved slots stay empty"
    value = {
        Policy.LFU: counts.double() * 2**32 + used,
        Policy.DISTANCE_LFU: counts.double() / (STEP - used + 1),
    }.get(policy, used.double())
    buckets, stays = unsigned_remainder(ids, BUCKETS), torch.zeros(len(ids), dtype=torch.bool)
    stays[stay] = True
    for bucket in range(BUCKETS):
        kept, lost = value[(buckets == bucket) & stays], value[(buckets == bucket) & ~stays]
        assert kept.min() >= lost.max() - 1e-6
    again, _ = place(Known(ids[stay], used[stay], *(each[stay] if each is not None else None for each in known[2:])),
                     _rules(policy), STEP)  # fmt: skip
    assert np.array_equal(np.sort(again.numpy()), np.arange(len(stay)))


def test_a_table_without_ids_has_no_rows() -> None:
    none = torch.empty(0, dtype=torch.int64)
    stay, rows = place(Known(none, none.int()), _rules(), STEP)
    assert len(stay) == len(rows) == 0
