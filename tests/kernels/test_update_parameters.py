"""The kernel that updates the dense parameters against its twin, and the twin against torch.optim."""

from collections.abc import Callable
from types import ModuleType

import pytest
import torch

from dlrm_overlap.kernels.dense import reference, update
from dlrm_overlap.kernels.dense.arguments import BLOCK, STATES, FlatUpdate
from tests.agreement import assert_near, assert_same
from tests.kernels.compiling import run_without_interpreter
from tests.kernels.emulation import interpreted, to_wire

LR, EPS, BETAS = 0.3, 1e-3, (0.8, 0.95)
_ROUNDING = 1e-6  # of one that fuses products and sums against one that does not
OPTIMIZERS: dict[str, Callable[[list[torch.Tensor]], torch.optim.Optimizer]] = {
    "sgd": lambda weights: torch.optim.SGD(weights, lr=LR),
    "adagrad": lambda weights: torch.optim.Adagrad(weights, lr=LR, eps=EPS),
    "adam": lambda weights: torch.optim.Adam(weights, lr=LR, eps=EPS, betas=BETAS),
}
every_kind = pytest.mark.parametrize("kind", STATES)


def _random(seed: int, elements: int) -> torch.Tensor:
    """Return numbers of many magnitudes, with zeros among them."""
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randn(elements, generator=generator)
    return numbers.pow(3) * (torch.rand(elements, generator=generator) > 0.1)


def _make(kind: str, shadow: torch.dtype | None = None, elements: int = 3 * BLOCK) -> FlatUpdate:
    return FlatUpdate(
        kind=kind,
        weights=_random(0, elements),
        gradients=torch.empty(elements),
        states=tuple(torch.zeros(elements) for _ in STATES[kind]),
        shadow=torch.full((elements,), torch.nan, dtype=shadow) if shadow else None,
        step=torch.zeros(1),
        numbers=torch.tensor([LR, EPS, *BETAS], dtype=torch.float64),
        factors=torch.full((6,), torch.nan),
    )


def _update_all(kernels: ModuleType, tensors: FlatUpdate) -> None:
    kernels.begin_update(tensors)
    kernels.update_range(tensors, 0, tensors.weights.numel())


@every_kind
def test_the_twin_has_the_bits_of_torch_optim(kind: str) -> None:
    ours = _make(kind)
    theirs = torch.nn.Parameter(ours.weights.clone())
    optimizer = OPTIMIZERS[kind]([theirs])
    for seed in range(1, 51):
        theirs.grad = _random(seed, theirs.numel())
        ours.gradients.copy_(theirs.grad)
        optimizer.step()
        _update_all(reference, ours)
    assert_same(ours.weights, theirs.data, "weights")
    for name, state in zip(STATES[kind], ours.states, strict=True):
        assert_same(state, optimizer.state[theirs][name], name)


@interpreted
@every_kind
@pytest.mark.parametrize("shadow", [None, torch.bfloat16, torch.float16])
def test_the_kernel_agrees_with_its_twin(kind: str, shadow: torch.dtype | None) -> None:
    ours, theirs = _make(kind, shadow), _make(kind, shadow)
    for seed in range(1, 6):
        for each in (ours, theirs):
            each.gradients.copy_(_random(seed, each.gradients.numel()))
            each.numbers[0] = LR / seed
        _update_all(update, ours)
        _update_all(reference, theirs)
        assert ours.step.item() == theirs.step.item() == seed
        assert_near(ours.weights, theirs.weights, _ROUNDING, f"weights after {seed} updates")
        for name, state, expected in zip(STATES[kind], ours.states, theirs.states, strict=True):
            assert_near(state, expected, _ROUNDING, f"{name} after {seed} updates")
        if ours.shadow is not None:
            assert_same(ours.shadow, to_wire(ours.weights, ours.shadow.dtype), "shadow")


@interpreted
@every_kind
def test_ranges_are_updated_as_the_whole(kind: str) -> None:
    ours, theirs = (_make(kind, torch.bfloat16, 5 * BLOCK) for _ in range(2))
    for seed in (1, 2):
        for each in (ours, theirs):
            each.gradients.copy_(_random(seed, each.gradients.numel()))
        _update_all(update, theirs)
        update.begin_update(ours)
        for first, end in ((0, BLOCK), (BLOCK, BLOCK), (BLOCK, 5 * BLOCK)):
            update.update_range(ours, first, end)
    assert ours.shadow is not None
    assert theirs.shadow is not None
    assert ours.step.item() == 2
    for found, expected in zip(
        (ours.weights, ours.shadow, *ours.states), (theirs.weights, theirs.shadow, *theirs.states), strict=True
    ):
        assert_same(found, expected, kind)


@interpreted
@pytest.mark.parametrize("steps", [1, 2, 1000, 10**6])
def test_bias_corrections_have_all_their_digits(steps: int) -> None:
    adam = _make("adam")
    adam.numbers[2:].copy_(torch.tensor([0.9, 0.999]))
    adam.step.fill_(steps - 1)
    adam.gradients.zero_()
    _update_all(update, adam)
    beta1, beta2 = adam.numbers[2:].tolist()
    assert adam.factors[update.RATE].item() == pytest.approx(LR / (1 - beta1**steps), rel=1e-7)
    assert adam.factors[update.ROOT].item() == pytest.approx((1 - beta2**steps) ** 0.5, rel=1e-7)


def test_a_flat_tensor_that_is_not_padded_is_refused() -> None:
    with pytest.raises(AssertionError, match=rf"elements 0 .. 1000; pad to multiples of {BLOCK}"):
        _update_all(update, _make("sgd", elements=1000))


@pytest.mark.slow
def test_the_compiled_kernel_moves_16_bytes_a_lane() -> None:
    run_without_interpreter("tests.kernels.update_vectors")
