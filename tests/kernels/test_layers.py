import pytest
import torch
from torch import nn

from dlrm_overlap.dense.functions import Write
from dlrm_overlap.dense.layers import Layer, relu_layers
from dlrm_overlap.kernels import reference
from dlrm_overlap.kernels.dense import layers as kernels
from dlrm_overlap.kernels.dense.arguments import GROUP
from tests.agreement import assert_near, assert_same
from tests.kernels.emulation import interpreted


@interpreted
@pytest.mark.parametrize("width", [130, 7])
@pytest.mark.parametrize("rows", [GROUP, GROUP + 3])
def test_the_gradient_of_relu_and_bias_agrees_with_its_twin(rows: int, width: int) -> None:
    gradient, output = (torch.randn(rows, width).bfloat16() for _ in range(2))
    output.relu_()
    masked = [torch.full_like(gradient, torch.nan) for _ in range(2)]
    sums = [torch.full((-(-rows // GROUP), 3 + width), torch.nan)[:, 3:] for _ in range(2)]
    kernels.mask_and_sum(gradient, output, masked[0], sums[0])
    reference.mask_and_sum(gradient, output, masked[1], sums[1])
    assert_same(masked[0], masked[1], "gradient")
    assert_near(sums[0], sums[1], 1e-5, "sums")


@interpreted
@pytest.mark.parametrize("width", [130, 7])
def test_a_layer_of_one_output_agrees_with_its_twin(width: int) -> None:
    rows = GROUP + 3
    x, weight, bias, gradient = (torch.randn(n) for n in (rows * width, width, 1, rows))
    x, weight = x.view(rows, width).relu(), weight[None]
    found, expected = (torch.full((rows,), torch.nan) for _ in range(2))
    kernels.logits(x, weight, bias, found)
    reference.logits(x, weight, bias, expected)
    assert_near(found, expected, 1e-5, "logits")
    masked = [torch.full_like(x, torch.nan) for _ in range(2)]
    sums = [torch.full((2, 5 + 2 * width + 1), torch.nan)[:, 5:] for _ in range(2)]
    kernels.gradient_of_logits(gradient, x, weight, masked[0], sums[0])
    reference.gradient_of_logits(gradient, x, weight, masked[1], sums[1])
    assert_near(masked[0], masked[1], 1e-6, "gradient")
    assert_near(sums[0], sums[1], 1e-5, "sums")


@pytest.mark.parametrize("outputs", [4, 1])
@pytest.mark.parametrize("needed", [True, False])
def test_layers_with_relu_have_the_gradients_of_autograd(needed: bool, outputs: int) -> None:
    torch.manual_seed(0)
    modules = [nn.Linear(5, 6), nn.Linear(6, outputs)]
    layers = [Layer(module.weight, module.bias) for module in modules]
    buffers = [Layer(*(torch.full_like(each, torch.nan) for each in layer)) for layer in layers]
    x, gradient = torch.randn(GROUP + 2, 5), torch.randn(GROUP + 2, outputs)
    wide, plain = torch.nn.functional.pad(x, (0, 3)).requires_grad_(needed), x.clone().requires_grad_(needed)
    padded = [layers[0]._replace(weight=torch.nn.functional.pad(modules[0].weight, (0, 3))), layers[1]]
    deferred = list[tuple[list[tuple[int, str]], Write]]()
    anchor = torch.empty(0, requires_grad=True)
    found = relu_layers(wide, padded, lambda which, write: deferred.append((list(which), write)), anchor)
    expected = modules[1](modules[0](plain).relu())
    expected = expected.relu() if outputs > 1 else expected
    assert_near(found.view_as(expected), expected, 1e-6, "output")
    found.backward(gradient.view_as(found))
    expected.backward(gradient)
    if needed:
        assert wide.grad is not None
        assert plain.grad is not None
        assert_near(wide.grad[:, :5], plain.grad, 1e-5, "gradient of the input")
    order = [name for which, _ in deferred for name in which]
    assert order[0] == ((0, "weight") if outputs == 1 else (1, "weight")), "the last layer with ReLU comes first"
    assert sorted(order) == [(0, "bias"), (0, "weight"), (1, "bias"), (1, "weight")], "each once"
    assert all(tensor.isnan().all() for buffer in buffers for tensor in buffer), "none is written at once"
    for which, write in reversed(deferred):
        write([getattr(buffers[index], name) for index, name in which])
    for layer, buffer in zip(layers, buffers, strict=True):
        for parameter, written in zip(layer, buffer, strict=True):
            assert parameter.grad is not None
            assert_near(written, parameter.grad, 1e-5, "gradient of a parameter")
