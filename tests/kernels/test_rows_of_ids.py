from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dlrm_overlap.embedding.unpooled import ExpandRows
from dlrm_overlap.kernels import reference
from dlrm_overlap.kernels.backward.sum_rows import RowSums, Runs
from dlrm_overlap.kernels.forward.expand_rows import expand_rows
from tests.agreement import assert_same
from tests.kernels.emulation import interpreted

pytestmark = interpreted


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("dim", "ids"), [(4, 0), (8, 1), (20, 150), (1024, 5)])
def test_rows_are_expanded_to_their_ids(dim: int, ids: int, dtype: torch.dtype) -> None:
    """An id without a row (-1) gets zeros; rows that no id has are not read."""
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(7, dim, generator=generator).to(dtype)
    rows[3] = torch.nan
    slots = torch.tensor([-1, 0, 1, 2, 4, 5, 6], dtype=torch.int32)[torch.randint(0, 7, (ids,), generator=generator)]
    expanded = expand_rows(rows, slots)
    assert_same(expanded, reference.expand_rows(rows, slots), "expanded")
    assert not expanded.isnan().any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("counts", [[], [1], [3, 0, 1, 40, 2, 0, 17]])
def test_gradients_are_summed_by_row(counts: list[int], dtype: torch.dtype) -> None:
    """Runs of one gradient, several per program, and in chunks; gradients without a row are NaN, and not read."""
    generator = torch.Generator().manual_seed(2)
    rows = 2 * len(counts) + 3
    named = 2 * torch.arange(len(counts)).flip(0)  # rows in another order than the runs
    slots = torch.cat([named.repeat_interleave(torch.tensor(counts, dtype=torch.int64)), torch.full((3,), -1)])
    slots = slots[torch.randperm(len(slots), generator=generator)].int()
    # Values whose sums are exact in every order.
    gradient = (torch.randint(-32, 32, (len(slots), 12), generator=generator) / 8).to(dtype)
    gradient[slots < 0] = torch.nan
    order = torch.cat([(slots == row).nonzero().flatten() for row in [*named.tolist(), -1]])
    here = [(int(row), count) for row, count in zip(named, counts, strict=True) if count]
    starts = torch.tensor([0, *(count for _, count in here)]).cumsum(0)
    keys = torch.tensor([row for row, _ in here] + [0])
    runs = Runs(keys.int(), starts.int(), torch.tensor([len(here)]).int(), order.int())
    sums = RowSums(12, gradient.device)(gradient, runs, rows, chunk_ids=16)
    assert_same(sums, reference.sum_rows(gradient, slots, rows), "sums")
    assert not sums.isnan().any()


def test_a_gradient_may_begin_anywhere_in_its_memory() -> None:
    """As that of rows before which a model puts other numbers: their gradients are views of one tensor."""
    exchange = SimpleNamespace(expanded_dtype=torch.float32, clipped=lambda gradient: gradient)
    sender: Any = SimpleNamespace(dim=4, exchange=exchange, sums=RowSums(4, torch.device("cpu")))
    runs = Runs(*(torch.tensor(each).int() for each in ([0, 1, 0], [0, 1, 3, 0], [2], [1, 0, 2])))
    distinct: Any = SimpleNamespace(slots=torch.tensor([1, 0, 1]).int(), runs=runs)
    slots = torch.arange(8.0).view(1, 8).requires_grad_()
    expanded: Any = ExpandRows.apply(slots, sender, distinct)
    torch.cat([torch.ones(1), expanded.flatten()]).backward(torch.arange(13.0))
    assert slots.grad is not None
    assert_same(slots.grad, torch.tensor([[5.0, 6, 7, 8, 1 + 9, 2 + 10, 3 + 11, 4 + 12]]), "gradient")
