import pytest
import torch

from dlrm_overlap.dense.layers import fits, interact
from dlrm_overlap.kernels import reference
from dlrm_overlap.kernels.dense import interaction
from dlrm_overlap.train.interaction import DotInteraction
from tests.agreement import assert_near
from tests.kernels.emulation import interpreted

SAMPLES = 3
# Features, dim, width of the output, whose last columns are zeros.
SHAPES = {"not_powers_of_two": (5, 12, 24), "more_than_a_block": (17, 16, 152), "two": (2, 4, 5)}
every_shape = pytest.mark.parametrize(("features", "dim", "width"), SHAPES.values(), ids=SHAPES)
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


def _random(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(shape[1])).to(dtype)


@interpreted
@every_shape
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_the_kernels_agree_with_their_twins(features: int, dim: int, width: int, dtype: torch.dtype) -> None:
    embeddings, gradient = _random(dtype, SAMPLES, features * dim), _random(dtype, SAMPLES, width)
    found, expected = (torch.full((SAMPLES, width), torch.nan, dtype=dtype) for _ in range(2))
    interaction.interact(embeddings, features, found)
    reference.interact(embeddings, features, expected)
    assert_near(found.float(), expected.float(), TOLERANCES[dtype], "output")
    found, expected = (torch.full_like(embeddings, torch.nan) for _ in range(2))
    interaction.gradient_of_interaction(gradient, embeddings, features, found)
    reference.gradient_of_interaction(gradient, embeddings, features, expected)
    assert_near(found.float(), expected.float(), TOLERANCES[dtype], "gradient")


@every_shape
def test_the_function_is_the_models_interaction(features: int, dim: int, width: int) -> None:
    embeddings, plain = (_random(torch.float32, SAMPLES, features * dim).requires_grad_() for _ in range(2))
    expected = DotInteraction(features, dim)(plain)
    found = interact(embeddings, features, width)
    assert_near(found[:, : expected.shape[1]], expected, TOLERANCES[torch.float32], "output")
    assert not found[:, expected.shape[1] :].any(), "the columns after the pairs are zeros"
    gradient = _random(torch.float32, *expected.shape)
    expected.backward(gradient)
    found.backward(torch.cat((gradient, torch.ones(SAMPLES, width - gradient.shape[1])), dim=1))
    assert embeddings.grad is not None
    assert plain.grad is not None
    assert_near(embeddings.grad, plain.grad, TOLERANCES[torch.float32], "gradient")


def test_more_embeddings_than_registers_hold_are_not_supported() -> None:
    assert fits(27, 128)
    assert fits(128, 256)
    assert not fits(129, 16)
    assert not fits(64, 1024)
    assert not fits(2, 8192)  # a block has 16 features at least
