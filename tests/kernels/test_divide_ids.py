import pytest
import torch

from dlrm_overlap.kernels import reference
from dlrm_overlap.kernels.divide_ids import Shares, divide_ids
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


def test_the_twin_divides_ids_as_in_its_example() -> None:
    values, shares = torch.tensor([5, 1, 7, 4], dtype=torch.int32), [(0, 0, 4), (0, 4, EVERY_ID)]
    ids, positions, lengths = reference.divide_ids(values, torch.tensor([0, 2, 4]), shares, 2)
    assert ids.tolist() == [1, 1, 3, 0]
    assert positions.tolist() == [1, 0, 2, 3]
    assert lengths.tolist() == [1, 0, 1, 2]


def test_offsets_beyond_the_capacity_write_nothing_beyond_the_window() -> None:
    samples, room, shared = 2, 4, 4
    window = torch.full((8 + 6 * samples + 1,), GUARD, dtype=torch.int32)
    window[:4] = torch.tensor([0, 1, 2, 3])
    window[8:11] = torch.tensor([0, 100, 200])
    counts = torch.full((1 + 2 * samples,), 4, dtype=torch.int32)
    shares = Shares(torch.tensor([[0, 0, EVERY_ID], [0, 0, EVERY_ID]]), room, 4, shared, 8, 1)
    divide_ids(window, shares, samples, counts)
    assert window[:8].tolist() == [0, 1, 2, 3, 0, 1, 2, 3]
