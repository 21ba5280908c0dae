from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import NamedTuple

import pytest
import torch

from dlrm_overlap.kernels import reference
from dlrm_overlap.kernels.dense import update
from dlrm_overlap.kernels.dense.arguments import (
    BLOCK,
    DECOUPLED,
    FACTORS,
    FIRST,
    L2,
    LINE,
    LR,
    SECOND,
    STATES,
    FlatUpdate,
)
from tests.agreement import assert_near, assert_same
from tests.kernels.emulation import interpreted, to_wire

RATE, EPS, BETAS, DECAY = 0.3, 1e-3, (0.8, 0.95), 0.1
_ROUNDING = 1e-6  # with and without fused products and sums


class Form(NamedTuple):
    """An optimizer of torch.optim, and its settings as an update has them."""

    kind: str
    make: Callable[..., torch.optim.Optimizer]
    numbers: tuple[float, ...]


_SGD, _ADAGRAD = partial(torch.optim.SGD, lr=RATE), partial(torch.optim.Adagrad, lr=RATE, eps=EPS)
_ADAM, _ADAMW = (partial(each, lr=RATE, eps=EPS, betas=BETAS) for each in (torch.optim.Adam, torch.optim.AdamW))
_NESTEROV = partial(_SGD, momentum=0.9, nesterov=True, weight_decay=DECAY)
FORMS = {
    "sgd": Form("sgd", _SGD, (RATE, 0, 0, 0, 0, 0, 0)),
    "sgd_l2": Form("sgd", partial(_SGD, weight_decay=DECAY), (RATE, 0, 0, 0, 0, DECAY, 0)),
    "momentum": Form("momentum", partial(_SGD, momentum=0.9, dampening=0.4), (RATE, 0, 0.9, 0.4, 0, 0, 0)),
    "nesterov": Form("momentum", _NESTEROV, (RATE, 0, 0.9, 0, 1, DECAY, 0)),
    "adagrad": Form("adagrad", _ADAGRAD, (RATE, EPS, 0, 0, 0, 0, 0)),
    "adagrad_decays": Form(
        "adagrad", partial(_ADAGRAD, lr_decay=0.2, weight_decay=DECAY), (RATE, EPS, 0.2, 0, 0, DECAY, 0)
    ),
    "adam": Form("adam", _ADAM, (RATE, EPS, *BETAS, 0, 0, 0)),
    "adamw": Form("adam", partial(_ADAMW, weight_decay=DECAY), (RATE, EPS, *BETAS, 0, 0, DECAY)),
}
every_form = pytest.mark.parametrize("form", FORMS)


def _random(seed: int, elements: int) -> torch.Tensor:
    """Return numbers of many magnitudes, some of which are zero."""
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randn(elements, generator=generator)
    return numbers.pow(3) * (torch.rand(elements, generator=generator) > 0.1)


def _make(
    form: str, shadow: torch.dtype | None = None, elements: int = 3 * BLOCK, rows: torch.Tensor | None = None
) -> FlatUpdate:
    kind, _, numbers = FORMS[form]
    rows = torch.zeros(elements // LINE, dtype=torch.int32) if rows is None else rows
    count = int(rows.max()) + 1
    return FlatUpdate(
        kind=kind,
        decays=any(numbers[-2:]),
        weights=_random(0, elements),
        gradients=torch.empty(elements),
        states=tuple(torch.zeros(elements) for _ in STATES[kind]),
        shadow=torch.full((elements,), torch.nan, dtype=shadow) if shadow else None,
        rows=rows,
        step=torch.zeros(count),
        numbers=torch.tensor(numbers, dtype=torch.float64).repeat(count, 1),
        factors=torch.full((count, FACTORS), torch.nan),
    )


def _update_all(kernels: ModuleType, tensors: FlatUpdate) -> None:
    kernels.begin_update(tensors)
    kernels.update_range(tensors, 0, tensors.weights.numel())


@every_form
def test_the_twin_has_the_bits_of_torch_optim(form: str) -> None:
    ours, kind = _make(form), FORMS[form].kind
    theirs = torch.nn.Parameter(ours.weights.clone())
    optimizer = FORMS[form].make([theirs])
    for seed in range(1, 51):
        theirs.grad = _random(seed, theirs.numel())
        ours.gradients.copy_(theirs.grad)
        optimizer.step()
        _update_all(reference, ours)
    assert_same(ours.weights, theirs.data, "weights")
    for name, state in zip(STATES[kind], ours.states, strict=True):
        assert_same(state, optimizer.state[theirs][name], name)


@interpreted
@every_form
@pytest.mark.parametrize("kernels", [update, reference], ids=["kernel", "twin"])
def test_each_line_is_updated_by_its_row(form: str, kernels: ModuleType) -> None:
    """Rows differ in all numbers and counts; lines of row -1 and their states are not changed."""
    rows = torch.tensor([1] * 5 + [0] * 20 + [-1] * 3 + [1] * 4 + [0] * 16).int()
    ours, theirs = (_make(form, torch.bfloat16, rows=rows) for _ in range(2))
    before = ours.weights.clone()
    for each in (ours, theirs):
        each.numbers[1, [LR, FIRST, L2, DECOUPLED]] *= 0.7
        each.step[1] = 3
    for seed in (1, 2, 3):
        for each in (ours, theirs):
            each.gradients.copy_(_random(seed, each.gradients.numel()))
            each.numbers[0, LR] = RATE / seed
        kernels.begin_update(ours)
        for first, end in ((0, BLOCK), (BLOCK, BLOCK), (BLOCK, 3 * BLOCK)):
            kernels.update_range(ours, first, end)
        for row in (0, 1):  # as if each were the only one
            step, numbers = theirs.step[row, None], theirs.numbers[row, None]
            alone = theirs._replace(rows=torch.zeros_like(rows), step=step, numbers=numbers)
            reference.begin_update(alone)
            for line in (rows == row).nonzero().flatten().tolist():
                reference.update_range(alone, line * LINE, (line + 1) * LINE)
    assert_same(ours.step, torch.tensor([3.0, 6.0]), "step")
    pairs = zip((ours.weights, *ours.states), (theirs.weights, *theirs.states), strict=True)
    for name, (found, expected) in zip(("weights", *STATES[ours.kind]), pairs, strict=True):
        assert_near(found, expected, _ROUNDING, name)
    left = rows.repeat_interleave(LINE) < 0
    assert_same(ours.weights[left], before[left], "weights without a row")
    assert ours.shadow is not None
    if kernels is update:
        assert_same(ours.shadow[~left], to_wire(ours.weights, torch.bfloat16)[~left], "shadow")


@interpreted
@pytest.mark.parametrize("steps", [1, 2, 1000, 10**6])
def test_bias_corrections_have_all_their_digits(steps: int) -> None:
    adam = _make("adam")
    adam.numbers[0, [FIRST, SECOND]] = torch.tensor([0.9, 0.999]).double()
    adam.step.fill_(steps - 1)
    adam.gradients.zero_()
    _update_all(update, adam)
    beta1, beta2 = adam.numbers[0, [FIRST, SECOND]].tolist()
    assert adam.factors[0, update.RATE.value].item() == pytest.approx(RATE / (1 - beta1**steps), rel=1e-7)
    assert adam.factors[0, update.ROOT.value].item() == pytest.approx((1 - beta2**steps) ** 0.5, rel=1e-7)


def test_a_flat_tensor_that_is_not_padded_is_refused() -> None:
    with pytest.raises(AssertionError, match=rf"elements 0 .. 1000; pad to multiples of {BLOCK}"):
        _update_all(update, _make("sgd", elements=1000))
