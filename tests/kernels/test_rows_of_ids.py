"""Rows expanded to their ids, and gradients summed by row, under Triton's interpreter, against their twins."""

import pytest
import torch

from dlrm_overlap.kernels import reference
from dlrm_overlap.kernels.backward.sum_rows import RowSums, Runs
from dlrm_overlap.kernels.forward.expand_rows import expand_rows
from tests.agreement import assert_same
from tests.kernels.emulation import interpreted

pytestmark = interpreted


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("dim", "ids"), [(4, 0), (8, 1), (20, 150), (1024, 5)])
def test_expanded(dim: int, ids: int, dtype: torch.dtype) -> None:
    """Some places are of no row: zeros, also where rows that nobody has stored hold anything."""
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(7, dim, generator=generator).to(dtype)
    rows[3] = torch.nan
    places = torch.tensor([-1, 0, 1, 2, 4, 5, 6], dtype=torch.int32)[torch.randint(0, 7, (ids,), generator=generator)]
    expanded = expand_rows(rows, places)
    assert_same(expanded, reference.expand_rows(rows, places), "expanded")
    assert not expanded.isnan().any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("counts", [[], [1], [3, 0, 1, 40, 2, 0, 17]])
def test_summed(counts: list[int], dtype: torch.dtype) -> None:
    """Runs of one gradient, side by side and in chunks; some gradients are of no row, and hold anything."""
    generator = torch.Generator().manual_seed(2)
    rows = 2 * len(counts) + 3
    named = 2 * torch.arange(len(counts)).flip(0)  # rows in another order than the runs
    places = torch.cat([named.repeat_interleave(torch.tensor(counts, dtype=torch.int64)), torch.full((3,), -1)])
    places = places[torch.randperm(len(places), generator=generator)].int()
    # Whose sums are exact in every order.
    gradient = (torch.randint(-32, 32, (len(places), 12), generator=generator) / 8).to(dtype)
    gradient[places < 0] = torch.nan
    order = torch.cat([(places == row).nonzero().flatten() for row in [*named.tolist(), -1]]).int()
    here = [(int(row), count) for row, count in zip(named, counts, strict=True) if count]
    starts = torch.tensor([0, *(count for _, count in here)]).cumsum(0)
    runs = Runs(
        torch.tensor([row for row, _ in here] + [0], dtype=torch.int32),
        starts.int(),
        torch.tensor([len(here)], dtype=torch.int32),
        order,
    )
    sums = RowSums(12, gradient.device)(gradient, runs, rows, chunk_ids=16)
    assert_same(sums, reference.sum_rows(gradient, places, rows), "sums")
    assert not sums.isnan().any()
