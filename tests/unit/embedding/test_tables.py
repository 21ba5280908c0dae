"""The oracle of the rows' update against torch's own optimizers, and by hand where torch has none."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn

from dlrm_overlap.embedding.tables import max_gradients
from dlrm_overlap.kernels.reference import update_rows
from tests.agreement import WEIGHT_TOLERANCE, assert_near, assert_same

ROWS, DIM, STEPS = 50, 12, 3
LR, EPS = 0.5, 0.25
OPTIMIZERS = {
    "sgd": partial(torch.optim.SGD, lr=LR),
    "adagrad": partial(torch.optim.Adagrad, lr=LR, eps=EPS, initial_accumulator_value=0.0),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_against_torchs_optimizer_on_dense_gradients(name: str) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(ROWS, DIM, generator=generator)
    before, expected = weight.clone(), nn.Parameter(weight.clone())
    state = torch.zeros(ROWS, DIM) if name == "adagrad" else None
    make: Callable[..., torch.optim.Optimizer] = OPTIMIZERS[name]
    optimizer = make([expected])
    named = []
    for _ in range(STEPS):
        ids = torch.randint(0, 30, (40,), generator=generator)  # some twice, those from 30 on never
        gradient = torch.randn(40, DIM, generator=generator)
        update_rows(weight, state, ids, gradient, name, LR, EPS)
        optimizer.zero_grad()
        (expected[ids] * gradient).sum().backward()
        optimizer.step()
        named.append(ids)
    assert_near(weight, expected.detach(), WEIGHT_TOLERANCE["fp32"], "weight")
    if state is not None:
        assert_near(state, optimizer.state[expected]["sum"], WEIGHT_TOLERANCE["fp32"], "state")
    others = torch.cat(named).bincount(minlength=ROWS) == 0
    assert_same(weight[others], before[others], "rows that no id names")


def test_rowwise_adagrad_by_hand() -> None:
    weight = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    state = torch.tensor([8.0, 7.0, 0.0])
    gradient = torch.tensor([[1.0, 1.0], [0.0, -4.0], [2.0, 4.0]])
    update_rows(weight, state, torch.tensor([0, 2, 0]), gradient, "rowwise_adagrad", lr=0.5, eps=5.0)
    # Row 0: [3, 5] in sum, 17 in mean square, 25 with what was there: 0.5 / (5 + 5) of it. Row 2: 8, from nothing.
    assert_same(state, torch.tensor([25.0, 7.0, 8.0]), "state")
    row_2 = 6 + 0.5 * 4 / (8**0.5 + 5)
    assert_near(weight, torch.tensor([[0.85, 1.75], [3.0, 4.0], [5.0, row_2]]), WEIGHT_TOLERANCE["fp32"], "weight")


def test_half_precision_rows_are_rounded_once() -> None:
    weight = torch.ones(1, 4).half()  # below 1, float16 lie 2**-11 apart
    update_rows(weight, None, torch.tensor([0, 0]), torch.full((2, 4), 0.3 * 2**-11), "sgd", lr=1.0)
    assert_same(weight, torch.full((1, 4), 1 - 2**-11).half(), "weight")


@pytest.mark.parametrize("name", [*OPTIMIZERS, "rowwise_adagrad"])
def test_without_ids_nothing_changes(name: str) -> None:
    weight, state = torch.ones(3, 4), torch.ones(3) if name == "rowwise_adagrad" else torch.ones(3, 4)
    update_rows(weight, state, torch.empty(0, dtype=torch.int64), torch.empty(0, 4), name, LR, EPS)
    assert_same(weight, torch.ones(3, 4), "weight")
    assert_same(state, torch.ones_like(state), "state")


def test_only_lookups_that_clip_have_a_bound() -> None:
    assert max_gradients([{"gradient_clipping": True, "max_gradient": 0.5}, {"gradient_clipping": True}]) == {0.5, 1.0}
    assert max_gradients([{"max_gradient": 0.5}, {}]) == {None}
