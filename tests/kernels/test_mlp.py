"""A small MLP as one kernel each way."""

from itertools import pairwise

import pytest
import torch
from torch import nn

from dlrm_overlap.dense.mlp import small_mlp
from dlrm_overlap.kernels import reference
from dlrm_overlap.kernels.dense import mlp
from dlrm_overlap.kernels.dense.arguments import MLP_SAMPLES, MLPShape
from tests.agreement import assert_near
from tests.kernels.emulation import interpreted

SAMPLES = MLP_SAMPLES + 3
SHAPES = {
    "one_layer": MLPShape((5, 3), gelu=False, ends_linear=False),
    "one_linear": MLPShape((5, 1), gelu=False, ends_linear=True),
    "bottom": MLPShape((13, 40, 16), gelu=True, ends_linear=False),
    "top": MLPShape((52, 33, 20, 1), gelu=True, ends_linear=True),
    "four": MLPShape((7, 18, 5, 17, 2), gelu=False, ends_linear=True),
    "four_activated": MLPShape((7, 18, 5, 17, 2), gelu=True, ends_linear=False),
}
every_shape = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
ACTIVATIONS = {False: torch.relu, True: nn.functional.gelu}


def _random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@interpreted
@every_shape
@pytest.mark.parametrize("of_input", [True, False])
def test_the_kernels_agree_with_their_twins(shape: MLPShape, of_input: bool) -> None:
    weights = [_random(wide, before, seed=1) / before**0.5 for before, wide in pairwise(shape.widths)]
    biases = [_random(wide, seed=2) for wide in shape.widths[1:]]
    x, gradient = _random(SAMPLES, shape.widths[0]), _random(SAMPLES, shape.widths[-1], seed=3)
    found, expected = [], []
    for module, into in ((mlp, found), (reference, expected)):
        z, out = torch.full((SAMPLES, shape.activated), torch.nan), torch.full_like(gradient, torch.nan)
        module.mlp(x, weights, biases, shape, z, out)
        sums, dx = torch.full((2, shape.parameters), torch.nan), torch.full_like(x, torch.nan) if of_input else None
        module.gradient_of_mlp(gradient, x, weights, shape, z, sums, dx)
        into += [z, out, sums.sum(0)] + ([] if dx is None else [dx])
    for name, each, wanted in zip(("sums", "output", "parameters", "x")[: len(found)], found, expected, strict=True):
        assert_near(each, wanted, 1e-5, name)


@interpreted
@pytest.mark.parametrize("gelu", [False, True])
def test_nan_is_not_hidden_by_an_activation(gelu: bool) -> None:
    """Else the loss would not show that training has diverged."""
    shape = MLPShape((5, 8, 3), gelu, ends_linear=False)
    weights, biases = [_random(8, 5), _random(3, 8)], [_random(8), _random(3)]
    x, z, out = _random(SAMPLES, 5), torch.empty(SAMPLES, shape.activated), torch.empty(SAMPLES, 3)
    x[1, 2] = torch.nan
    mlp.mlp(x, weights, biases, shape, z, out)
    assert out.isnan().all(1).nonzero().flatten().tolist() == [1]
    assert out.isnan().any(1).sum() == 1


@every_shape
@pytest.mark.parametrize("of_input", [True, False])
def test_the_function_has_autograds_gradients(shape: MLPShape, of_input: bool) -> None:
    activation = ACTIVATIONS[shape.gelu]
    layers = [nn.Linear(before, wide) for before, wide in pairwise(shape.widths)]
    x = _random(SAMPLES, shape.widths[0]).requires_grad_(of_input)
    inputs = [x] * of_input + [parameter for layer in layers for parameter in layer.parameters()]
    expected = x
    for number, layer in enumerate(layers, 1):
        expected = layer(expected)
        expected = expected if number == len(layers) and shape.ends_linear else activation(expected)
    function = small_mlp(layers, activation, shape.ends_linear)
    assert function is not None
    found, gradient = function(x), _random(SAMPLES, shape.widths[-1], seed=3)
    assert_near(found, expected, 1e-5, "output")
    pairs = zip(
        torch.autograd.grad(found, inputs, gradient), torch.autograd.grad(expected, inputs, gradient), strict=True
    )
    for number, (each, wanted) in enumerate(pairs):
        assert_near(each, wanted, 1e-5, f"gradient of input {number}")


def test_only_small_layers_with_a_known_activation_in_float32_have_it() -> None:
    def function(*widths: int, activation=torch.relu, bias: bool = True, dtype: torch.dtype = torch.float32):
        layers = [nn.Linear(before, wide, bias=bias, dtype=dtype) for before, wide in pairwise(widths)]
        return small_mlp(layers, activation, ends_linear=False)

    assert function(128, 128, 128, 128, 128)
    assert not function(129, 128)
    assert not function(128, 129)
    assert not function(8, 8, 8, 8, 8, 8)
    assert not function(8, 8, activation=torch.sigmoid)
    assert not function(8, 8, bias=False)
    assert not function(8, 8, dtype=torch.bfloat16)
