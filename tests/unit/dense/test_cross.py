"""The cross network as one autograd function, against TorchRec's module in float64, and beside autocast's error."""

import pytest
import torch
from torchrec.modules.crossnet import LowRankCrossNet

from dlrm_overlap.dense.cross import CrossLayer, cross
from tests.agreement import assert_near

SAMPLES, WIDTH, RANK = 67, 20, 7  # neither a block of samples nor a power of two
every_depth = pytest.mark.parametrize("depth", [1, 2, 3, 5])


def _network(depth: int, samples: int = SAMPLES) -> tuple[LowRankCrossNet, torch.Tensor, torch.Tensor]:
    """Return a network with biases that are not zero, its input and the gradient of its output; all float32.

    Input, weights and gradient are bfloat16 numbers, so that nothing differs but the arithmetic.
    """
    torch.manual_seed(depth)
    network = LowRankCrossNet(WIDTH, depth, RANK)
    with torch.no_grad():
        for weight in (*network.W_kernels, *network.V_kernels):
            weight.copy_(weight.bfloat16())
        for bias in network.bias:
            bias.normal_()
    x, gradient = (torch.randn(samples, WIDTH).bfloat16().float() for _ in range(2))
    return network, x, gradient


def _layers(network: LowRankCrossNet, dtype: torch.dtype) -> list[CrossLayer]:
    each = zip(network.W_kernels, network.V_kernels, network.bias, strict=True)
    copied = [(w.to(dtype, copy=True), v.to(dtype, copy=True), bias.clone()) for w, v, bias in each]
    return [CrossLayer(*(tensor.detach().requires_grad_() for tensor in layer)) for layer in copied]


def _named(layers: list[CrossLayer], x: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the gradients by name."""
    named = {f"{name} {index}": getattr(layer, name) for index, layer in enumerate(layers) for name in layer._fields}
    gradients = {"x0": x.grad} | {name: tensor.grad for name, tensor in named.items()}
    return {name: gradient for name, gradient in gradients.items() if gradient is not None}


def _ours(network: LowRankCrossNet, x: torch.Tensor, gradient: torch.Tensor, dtype: torch.dtype, sink: bool = False):
    layers, x0 = _layers(network, dtype), x.to(dtype, copy=True).requires_grad_()
    into = [CrossLayer(*(torch.full(t.shape, torch.nan) for t in layer)) for layer in layers]
    output = cross(x0, layers, (lambda: into) if sink else None)
    output.backward(gradient.to(dtype))
    if sink:
        for layer, found in zip(layers, into, strict=True):
            for parameter, tensor in zip(layer, found, strict=True):
                assert parameter.grad is None, "autograd sees nothing of the parameters"
                parameter.grad = tensor.to(parameter.dtype)
    return {"output": output.detach()} | _named(layers, x0)


def _theirs(network: LowRankCrossNet, x: torch.Tensor, gradient: torch.Tensor, autocast: bool = False):
    """Return what autograd makes of TorchRec's module: in float64, or in float32 under autocast."""
    module = LowRankCrossNet(WIDTH, len(network.bias), RANK)
    module.load_state_dict(network.state_dict())
    x0 = x.bfloat16() if autocast else x.double()
    x0.requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        output = (module if autocast else module.double())(x0)
    output.backward(gradient.to(output.dtype))
    layers = [CrossLayer(*each) for each in zip(module.W_kernels, module.V_kernels, module.bias, strict=True)]
    return {"output": output.detach()} | _named(layers, x0)


@every_depth
def test_float32_has_the_gradients_of_autograd(depth: int) -> None:
    inputs = _network(depth)
    found, expected = _ours(*inputs, torch.float32), _theirs(*inputs)
    assert found.keys() == expected.keys()
    assert len(found) == 2 + 3 * depth
    for name, tensor in expected.items():
        assert_near(found[name].double(), tensor, 1e-5, name)


@every_depth
@pytest.mark.parametrize("sink", [False, True])
def test_bfloat16_is_as_near_as_autocast(depth: int, sink: bool) -> None:
    inputs = _network(depth)
    found, expected = _ours(*inputs, torch.bfloat16, sink), _theirs(*inputs)
    autocast = _theirs(*inputs, autocast=True)
    for name, tensor in expected.items():
        ours, theirs = (float((each[name].double() - tensor).norm() / tensor.norm()) for each in (found, autocast))
        assert ours < 1.5 * theirs + 1e-3, f"{name}: error {ours:.1e}, autocast's is {theirs:.1e}"
        assert ours > 0, f"{name} cannot be exact in bfloat16"


def test_gradients_are_written_where_they_are_asked_for() -> None:
    inputs = _network(2)
    into, plain = _ours(*inputs, torch.float32, sink=True), _ours(*inputs, torch.float32)
    for name, tensor in plain.items():
        assert_near(into[name], tensor, 1e-6, name)


def test_two_backwards_give_the_same() -> None:
    network, x, gradient = _network(3)
    layers, x0 = _layers(network, torch.bfloat16), x.bfloat16().requires_grad_()
    output = cross(x0, layers)
    wanted = [x0, *(tensor for layer in layers for tensor in layer)]
    first = torch.autograd.grad(output, wanted, gradient.bfloat16(), retain_graph=True)
    second = torch.autograd.grad(output, wanted, gradient.bfloat16())
    for left, right in zip(first, second, strict=True):
        assert torch.equal(left, right), "a backward changes nothing that it was given"
