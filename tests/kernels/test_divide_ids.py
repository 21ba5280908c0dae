import pytest
import torch

from dlrm_overlap.kernels import reference
from dlrm_overlap.kernels.divide_ids import Shares, divide_ids
from dlrm_overlap.kernels.ids.id_map import unsigned_remainder
from tests.agreement import assert_same
from tests.kernels.emulation import interpreted

pytestmark = interpreted

EVERY_ID = 1 << 32
GUARD = -7


@pytest.mark.parametrize("samples", [1, 5, 130])
def test_ids_are_divided_into_shares_of_rows(samples: int) -> None:
    """Two of three features are cut, one in two ways; ids outside a table are in the share of its last rows."""
    shares = [(0, 0, 4), (0, 4, EVERY_ID), (2, 0, 3), (2, 0, 5)]
    shares += [(2, first, EVERY_ID) for first in (3, 5, EVERY_ID)]
    generator = torch.Generator().manual_seed(samples)
    lengths = torch.randint(0, 4, (3 * samples,), generator=generator)
    values = torch.randint(-1, 9, (int(lengths.sum()),), dtype=torch.int32, generator=generator)
    room, shared = 9 * samples, 9 * samples
    values_at, weights_at = room + 3, room + 3 + shared + 1
    offsets_at = 2 * weights_at
    window = torch.full((offsets_at + (3 + 1 + len(shares)) * samples + 1 + 4,), GUARD, dtype=torch.int32)
    window[: values.numel()] = values
    window[weights_at : weights_at + values.numel()] = torch.arange(values.numel())  # of any bits
    window[offsets_at : offsets_at + lengths.numel() + 1] = torch.cat([torch.zeros(1), lengths.cumsum(0)])
    before = window.clone()
    counts = torch.full((1 + len(shares) * samples,), values_at, dtype=torch.int32)
    table = Shares(torch.tensor(shares), room, values_at, shared, offsets_at, 3, weights_at)
    divide_ids(window, table, samples, counts)
    ids, positions, share_lengths = reference.divide_ids(before, before[offsets_at:], shares, samples)
    assert torch.equal(window[values_at : values_at + ids.numel()], ids)
    first = offsets_at + 4 * samples
    expected = torch.cat([torch.zeros(1), share_lengths.cumsum(0)]).int() + values_at
    assert torch.equal(window[first : first + expected.numel()], expected)
    untouched = torch.ones_like(window, dtype=torch.bool)
    weights = slice(weights_at + values_at, weights_at + values_at + ids.numel())
    assert torch.equal(window[weights], positions.int())
    untouched[weights] = untouched[values_at : values_at + ids.numel()] = False
    untouched[first : first + expected.numel()] = False
    assert torch.equal(window[untouched], before[untouched])


EXTREME = [0, -1, 1, 2**63 - 1, -(2**63), 2**32, -(2**32), 2**31 - 1, 2**31, -(2**31), -(2**31) - 1, 2**32 + 3, 5, 5]


def wide_ids(count: int, generator: torch.Generator) -> torch.Tensor:
    """Return [count] int64: extreme ids, then a mixture of any ids and of small ones."""
    any_id = torch.randint(-(2**63), 2**63 - 1, (count,), generator=generator)
    ids = any_id.where(any_id % 2 == 0, any_id % 9)
    extreme = torch.tensor(EXTREME)[:count]
    ids[: extreme.numel()] = extreme
    return ids


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("samples", [1, 130])
def test_ids_of_64_bits_are_divided_into_shares_of_buckets_and_of_rows(samples: int, weighted: bool) -> None:
    """Features 0 and 2 have several tables of any id; feature 0 also has a table of rows."""
    shares = [(0, 0, 4, 0), (0, 4, EVERY_ID, 0), (0, 0, 4, 12), (0, 4, 12, 12), (0, 0, 1, 1)]
    greatest = 2**31 - 1
    shares += [(2, 0, 2**30, greatest), (2, 2**30, greatest, greatest), (2, 0, 3, 7), (2, 3, 7, 7)]
    generator = torch.Generator().manual_seed(samples)
    lengths = torch.randint(0, 4, (3 * samples,), generator=generator)
    lengths[0] = len(EXTREME)
    values = wide_ids(int(lengths.sum()), generator)
    room = values.numel() + 5
    shared = 5 * room  # each cut of a feature's ids
    values_at = room + 3
    plane = values_at + shared + 1
    high_at = plane * (1 + weighted)
    offsets_at = high_at + plane
    window = torch.full((offsets_at + (3 + 1 + len(shares)) * samples + 1 + 4,), GUARD, dtype=torch.int32)
    window[: values.numel()], window[high_at : high_at + values.numel()] = reference.split_words(values)
    window[offsets_at : offsets_at + lengths.numel() + 1] = torch.cat([torch.zeros(1), lengths.cumsum(0)])
    if weighted:
        window[plane : plane + values.numel()] = torch.arange(values.numel())
    ids, positions, share_lengths = reference.divide_ids(values, window[offsets_at:], shares, samples)
    expected = window.clone()
    expected[values_at : values_at + ids.numel()], high = reference.split_words(ids)
    expected[high_at + values_at : high_at + values_at + ids.numel()] = high
    if weighted:
        expected[plane + values_at : plane + values_at + ids.numel()] = positions
    first = offsets_at + 4 * samples
    ends = torch.cat([torch.zeros(1), share_lengths.cumsum(0)]).int() + values_at
    expected[first : first + ends.numel()] = ends

    counts = torch.full((1 + len(shares) * samples,), values_at, dtype=torch.int32)
    table = Shares(torch.tensor(shares), room, values_at, shared, offsets_at, 3, plane * weighted, high_at)
    divide_ids(window, table, samples, counts)
    assert_same(window, expected, "window")


def test_the_twin_divides_ids_as_in_its_examples() -> None:
    values, shares = torch.tensor([5, 1, 7, 4], dtype=torch.int32), [(0, 0, 4), (0, 4, EVERY_ID)]
    ids, positions, lengths = reference.divide_ids(values, torch.tensor([0, 2, 4]), shares, 2)
    assert ids.tolist() == [1, 1, 3, 0]
    assert positions.tolist() == [1, 0, 2, 3]
    assert lengths.tolist() == [1, 0, 1, 2]
    buckets = [(0, 0, 2, 4), (0, 2, 4, 4)]
    ids, positions, lengths = reference.divide_ids(values.long(), torch.tensor([0, 2, 4]), buckets, 2)
    assert ids.tolist() == [5, 1, 4, 7]
    assert positions.tolist() == [0, 1, 3, 2]
    assert lengths.tolist() == [2, 1, 0, 1]


def test_the_twins_of_device_functions_for_ids_of_64_bits() -> None:
    ids = wide_ids(200, torch.Generator().manual_seed(0))
    for buckets in (1, 7, 4096, 2**31 - 1):
        assert unsigned_remainder(ids, buckets).tolist() == [each % 2**64 % buckets for each in ids.tolist()]
    rows = [each if -(2**31) <= each < 2**31 else 2**31 - 1 if each > 0 else -1 for each in ids.tolist()]
    assert reference.rows_of(ids).tolist() == rows
    assert torch.equal(reference.joined_words(*reference.split_words(ids)), ids)


def test_offsets_beyond_the_capacity_write_nothing_beyond_the_window() -> None:
    samples, room, shared = 2, 4, 4
    window = torch.full((8 + 6 * samples + 1,), GUARD, dtype=torch.int32)
    window[:4] = torch.tensor([0, 1, 2, 3])
    window[8:11] = torch.tensor([0, 100, 200])
    counts = torch.full((1 + 2 * samples,), 4, dtype=torch.int32)
    shares = Shares(torch.tensor([[0, 0, EVERY_ID], [0, 0, EVERY_ID]]), room, 4, shared, 8, 1)
    divide_ids(window, shares, samples, counts)
    assert window[:8].tolist() == [0, 1, 2, 3, 0, 1, 2, 3]
