import pytest
import torch

from dlrm_overlap.kernels import reference
from dlrm_overlap.kernels.dense import cross
from dlrm_overlap.kernels.dense.arguments import GROUP, CrossGradient, stack
from tests.agreement import assert_near, assert_same
from tests.kernels.emulation import interpreted, to_wire

ROWS, LAYERS = GROUP + 7, 3
_SUMS = 1e-5  # another order of float32 sums
every_width = pytest.mark.parametrize("width", [13, 40, 200])  # the last takes two programs a row


def _random(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


@interpreted
@every_width
@pytest.mark.parametrize("first", [True, False])
def test_a_cross_layer_agrees_with_its_twin(width: int, first: bool) -> None:
    x0, w = _random(0, ROWS, width), _random(1, ROWS, width)
    x, bias = x0 if first else _random(2, ROWS, width), torch.randn(width)
    found, expected = torch.full_like(x0, torch.nan), torch.empty(ROWS, width)
    cross.add_layer(x0, x, w, bias, found)
    reference.add_layer(x0, x, w, bias, expected)
    assert_same(found, to_wire(expected, torch.bfloat16), "output")


def _gradient(width: int, written: torch.dtype) -> CrossGradient:
    """Return the tensors of a gradient; those that are written have type `written`, and are NaN before."""
    x0 = _random(0, ROWS, width)
    later, w = stack(LAYERS - 1, x0), stack(LAYERS, x0)
    for seed, each in enumerate((*later, *w)):
        each.copy_(_random(seed + 1, ROWS, width))
    bias = torch.randn(LAYERS, width, generator=torch.Generator().manual_seed(0))
    du, dx = (torch.full_like(x0, torch.nan, dtype=written) for _ in range(2))
    return CrossGradient(_random(9, ROWS, width), later, x0, w, bias, du, dx, torch.full((2, width), torch.nan))


@interpreted
@every_width
@pytest.mark.parametrize("layer", range(LAYERS))
def test_the_gradient_of_a_cross_layer_agrees_with_its_twin(width: int, layer: int) -> None:
    found, expected = _gradient(width, torch.bfloat16), _gradient(width, torch.float32)
    cross.gradient_of_layer(found, layer, LAYERS)
    reference.gradient_of_layer(expected, layer, LAYERS)
    assert_same(found.du, to_wire(expected.du, torch.bfloat16), "du")
    assert_near(found.sums, expected.sums, _SUMS, "sums")
    if layer == 0:
        assert_same(found.dx, to_wire(expected.dx, torch.bfloat16), "dx")
    else:
        assert found.dx.isnan().all(), "dx is written with the first layer alone"
