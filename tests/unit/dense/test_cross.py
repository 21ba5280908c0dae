"""The cross network as one autograd function, against TorchRec's module in float64 and the error of autocast."""

import sys
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torchrec.modules.crossnet import LowRankCrossNet

from dlrm_overlap.dense.cross import (
    QUACK,
    CrossLayer,
    _by_one_kernel,
    _by_two_kernels,
    compute_layer,
    cross,
)
from dlrm_overlap.dense.flat import FlatParameters
from dlrm_overlap.dense.functions import Write, product_into
from tests.agreement import assert_near, assert_same
from tests.conftest import refuses

SAMPLES, WIDTH, RANK = 67, 20, 7  # neither a block of samples nor a power of two
every_depth = pytest.mark.parametrize("depth", [1, 2, 3, 5])


def _network(depth: int, samples: int = SAMPLES) -> tuple[LowRankCrossNet, torch.Tensor, torch.Tensor]:
    """Return a network, its input and the gradient of its output, in float32 of values that bfloat16 holds exactly."""
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
    named = {f"{name} {index}": getattr(layer, name) for index, layer in enumerate(layers) for name in layer._fields}
    gradients = {"x0": x.grad} | {name: tensor.grad for name, tensor in named.items()}
    return {name: gradient for name, gradient in gradients.items() if gradient is not None}


def _buffers(layers: list[CrossLayer], apart: int | None) -> list[CrossLayer]:
    """Return tensors of NaN for gradients: separate ones, or slices of one with `apart` elements between layers."""
    if apart is None:
        return [CrossLayer(*(torch.full(t.shape, torch.nan) for t in layer)) for layer in layers]
    sizes = [tensor.numel() for tensor in layers[0]]
    rows = torch.full((len(layers), sum(sizes) + apart), torch.nan)[:, : sum(sizes)]
    parts = [row.split(sizes) for row in reversed(rows)]
    return [CrossLayer(*(part.view_as(t) for part, t in zip(row, layers[0], strict=True))) for row in parts]


def _ours(
    network: LowRankCrossNet, x: torch.Tensor, gradient: torch.Tensor, dtype: torch.dtype, into: str = "together"
) -> dict[str, torch.Tensor]:
    """Return output and gradients of `cross`, the latter from where they were written."""
    layers, x0 = _layers(network, dtype), x.to(dtype, copy=True).requires_grad_()
    buffers = _buffers(layers, None if into == "single" else 5)
    output = cross(x0, layers, lambda name, write: write([getattr(each, name) for each in buffers]))
    output.backward(gradient.to(dtype))
    for layer, found in zip(layers, buffers, strict=True):
        for parameter, tensor in zip(layer, found, strict=True):
            assert parameter.grad is None, "autograd sees nothing of the parameters"
            parameter.grad = tensor.to(parameter.dtype)
    return {"output": output.detach()} | _named(layers, x0)


def _theirs(network: LowRankCrossNet, x: torch.Tensor, gradient: torch.Tensor, autocast: bool = False):
    """Return the same of TorchRec's module: in float64, or in bfloat16 under autocast."""
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
def test_bfloat16_is_as_near_as_autocast(depth: int) -> None:
    inputs = _network(depth)
    found, expected = _ours(*inputs, torch.bfloat16), _theirs(*inputs)
    autocast = _theirs(*inputs, autocast=True)
    for name, tensor in expected.items():
        ours, theirs = (float((each[name].double() - tensor).norm() / tensor.norm()) for each in (found, autocast))
        assert ours < 1.5 * theirs + 1e-3, f"{name}: error {ours:.1e}, autocast's is {theirs:.1e}"
        assert ours > 0, f"{name} cannot be exact in bfloat16"


def test_weights_gradients_are_two_products_where_the_flat_gradient_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    network, x, gradient = _network(3)
    flat = FlatParameters(dict(network.named_parameters()))
    weights = {"w": network.W_kernels, "v": network.V_kernels, "bias": network.bias}
    products = list[int]()

    def counted(out: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
        products.append(len(out))
        product_into(out, left, right)

    monkeypatch.setattr("dlrm_overlap.dense.cross.product_into", counted)
    views = {id(parameter): flat.gradients.views[name] for name, parameter in flat.parameters.items()}
    layers = _layers(network, torch.float32)
    output = cross(x.requires_grad_(), layers, lambda name, write: write([views[id(each)] for each in weights[name]]))
    output.backward(gradient)
    assert products == [2, 1, 3], "of v, the first layer's apart from the others, and of w"


def test_gradients_may_be_written_to_separate_tensors() -> None:
    inputs = _network(3)
    single, together = _ours(*inputs, torch.float32, "single"), _ours(*inputs, torch.float32)
    for name, tensor in together.items():
        assert_near(single[name], tensor, 1e-6, name)


def test_the_writes_of_gradients_are_given_out_and_take_place_when_called() -> None:
    network, x, gradient = _network(2)
    layers, x0 = _layers(network, torch.float32), x.clone().requires_grad_()
    handed = dict[str, Write]()
    cross(x0, layers, handed.__setitem__).backward(gradient)
    assert x0.grad is not None
    assert list(handed) == ["bias", "v", "w"], "the product of w would keep back the kernel that sends x0's gradient"
    buffers = _buffers(layers, 0)
    for name, write in handed.items():
        written = [getattr(layer, name) for layer in buffers]
        assert all(tensor.isnan().all() for tensor in written)
        write(written)
        assert not any(tensor.isnan().any() for tensor in written)


def test_layers_are_computed_by_the_function_that_is_given() -> None:
    network, x, gradient = _network(3)
    layers, is_first = _layers(network, torch.float32), list[bool]()

    def compute(narrow: Any, layer: CrossLayer, x0: Any, x: Any, w: Any, out: Any) -> None:
        is_first.append(x is x0)
        w.copy_(narrow @ layer.w.t())
        out.copy_(x0 * (w + layer.bias) + x)

    x0 = x.clone().requires_grad_()
    output = cross(x0, layers, lambda name, write: write([torch.empty_like(getattr(e, name)) for e in layers]), compute)
    output.backward(gradient)
    expected = _ours(network, x, gradient, torch.float32)
    assert is_first == [True, False, False]
    assert x0.grad is not None
    assert_near(output.detach(), expected["output"], 1e-6, "output")
    assert_near(x0.grad, expected["x0"], 1e-6, "gradient of x0")


@pytest.mark.parametrize(("width", "rank", "by_one"), [(40, 8, True), (36, 8, False), (40, 7, False), (24, 8, False)])
def test_one_kernel_computes_a_layer_whose_rows_it_can_read(
    width: int, rank: int, by_one: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = list[Any]()
    kernels = SimpleNamespace(ALIGNED=8, NARROWEST=32, add_layer=lambda *tensors: given.extend(tensors))
    monkeypatch.setitem(sys.modules, "dlrm_overlap.kernels.dense.cross_product", kernels)
    layer = CrossLayer(torch.randn(width, rank).bfloat16(), torch.randn(rank, width).bfloat16(), torch.randn(width))
    narrow, x0, x = (torch.randn(SAMPLES, columns).bfloat16() for columns in (rank, width, width))
    found, expected = (torch.full((2, SAMPLES, width), torch.nan).bfloat16() for _ in range(2))
    _by_one_kernel(narrow, layer, x0, x, *found)
    if by_one:
        assert all(a is b for a, b in zip(given[:5], (narrow, layer.w, x0, x, layer.bias), strict=True))
        assert [each.data_ptr() for each in given[5:]] == [each.data_ptr() for each in found]
    else:
        _by_two_kernels(narrow, layer, x0, x, *expected)
        assert_same(found, expected, "product and output")
        assert not given


@pytest.mark.parametrize(
    ("device", "capability", "version", "reason"),
    [
        ("cpu", (9, 0), f"{QUACK}5", "cpu is no GPU of compute capability 9.0"),
        ("cuda", (8, 0), f"{QUACK}5", "cuda is no GPU of compute capability 9.0"),
        ("cuda", (9, 0), None, "quack-kernels is not installed; run pip install"),
        ("cuda", (9, 0), "0.4.1", f"quack-kernels is 0.4.1, and must be {QUACK}"),
        ("cuda", (9, 0), f"{QUACK}5", None),
    ],
)
def test_one_kernel_needs_hopper_and_a_package(
    device: str, capability: Any, version: str | None, reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def installed(name: str) -> str:
        assert name == "quack-kernels"
        if version is None:
            raise metadata.PackageNotFoundError
        return version

    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(metadata, "version", installed)
    on = torch.device(device)
    assert compute_layer("triton", on) is _by_two_kernels
    assert compute_layer("auto", on) is (_by_two_kernels if reason else _by_one_kernel)
    if reason is None:
        assert compute_layer("cutlass", on) is _by_one_kernel
    else:
        with refuses(f"train.cross_kernel: cutlass, but {reason}"):
            compute_layer("cutlass", on)


def test_the_version_of_quack_is_that_of_the_extra() -> None:
    extra = next(line for line in Path("pyproject.toml").read_text().splitlines() if line.startswith("cutlass ="))
    assert f"=={QUACK}*" in extra
