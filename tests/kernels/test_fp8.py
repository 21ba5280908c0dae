import pytest
import torch

from dlrm_overlap.kernels import reference
from dlrm_overlap.kernels.dense import cross, fp8, layers
from dlrm_overlap.kernels.dense.arguments import GROUP, CrossGradient, fp8_tiles, stack
from tests.kernels.emulation import interpreted

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
ROWS, WIDTH = GROUP + 7, 200  # two programs a row


def _assert_same_bits(found: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    different = found.view(torch.uint8) != expected.view(torch.uint8)
    different &= ~(found.float().isnan() & expected.float().isnan())
    assert not different.any(), f"{what}: {found[different][:5].float()} for {expected[different][:5].float()}"


def _in(dtype: torch.dtype, *shape: int) -> list[torch.Tensor]:
    """Return a tensor for the kernel and one for its reference, which are NaN."""
    return [torch.full(shape, torch.nan).to(dtype) for _ in range(2)]


@interpreted
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_numbers_are_rounded_to_the_nearest_and_saturate(dtype: torch.dtype) -> None:
    every = torch.arange(256).to(torch.uint8).view(dtype).float()
    every = every[every.isfinite()].sort()[0]
    between = (every[1:] + every[:-1]) / 2  # ties
    others = torch.tensor([torch.nan, torch.inf, -torch.inf, 1e9, -1e9, 1e-30, 449, 465, 61440])
    x = torch.cat([every, between, torch.nextafter(between, every[1:]), others, torch.randn(5000)])
    found, expected = _in(dtype, len(x))
    fp8.cast(x, found, 4.0)
    reference.cast(x, expected, 4.0)
    _assert_same_bits(found, expected, "numbers")
    saturated = found[[len(x) - 5000 - len(others) + place for place in range(5)]].float()
    most = torch.finfo(dtype).max
    assert saturated[0].isnan()
    assert saturated[1:].tolist() == [most, -most, most, -most]


@interpreted
def test_weights_are_rounded_in_both_layouts() -> None:
    matrices = [(0, 16, 80), (1280, 65, 48)]
    weights, tiles = torch.randn(5000).bfloat16(), torch.tensor(fp8_tiles(matrices), dtype=torch.int32)
    (found, expected), (found_t, expected_t) = _in(E4M3, 5000), _in(E4M3, 5000)
    fp8.cast_weights(weights, tiles, found, found_t, 256.0)
    reference.cast_weights(weights, tiles, expected, expected_t, 256.0)
    _assert_same_bits(found, expected, "weights")
    _assert_same_bits(found_t, expected_t, "transposed weights")
    assert found_t[:1280].float().isfinite().all()
    assert found_t[1280 + 65 * 48 :].float().isnan().all()


@interpreted
@pytest.mark.parametrize("first", [True, False])
def test_a_cross_layer_also_writes_8_bits(first: bool) -> None:
    x0, w, bias = torch.randn(ROWS, WIDTH).bfloat16(), torch.randn(ROWS, WIDTH).bfloat16(), torch.randn(WIDTH)
    x = x0 if first else torch.randn(ROWS, WIDTH).bfloat16()
    found, expected = _in(E4M3, ROWS, WIDTH)
    for kernels, out8 in ((cross, found), (reference, expected)):
        kernels.add_layer(x0, x, w, bias, torch.empty_like(x0), out8, 16.0)
    _assert_same_bits(found, expected, "output")


@interpreted
@pytest.mark.parametrize("layer", range(2))
def test_the_gradient_of_a_cross_layer_also_writes_8_bits(layer: int) -> None:
    x0, gradient = torch.randn(ROWS, WIDTH).bfloat16(), torch.randn(ROWS, WIDTH).bfloat16()
    later, w, bias = stack(1, x0), stack(2, x0), torch.randn(2, WIDTH)
    for each in (*later, *w):
        each.copy_(torch.randn(ROWS, WIDTH))
    found, expected = _in(E5M2, ROWS, WIDTH)
    for kernels, du8 in ((cross, found), (reference, expected)):
        outputs = torch.empty_like(x0), torch.empty_like(x0), torch.empty(2, WIDTH)
        kernels.gradient_of_layer(CrossGradient(gradient, later, x0, w, bias, *outputs, du8, 2.0**15), layer, 2)
    _assert_same_bits(found, expected, "du")


@interpreted
def test_the_gradient_of_relu_also_writes_8_bits() -> None:
    gradient, output = torch.randn(ROWS, WIDTH).bfloat16(), torch.randn(ROWS, WIDTH).bfloat16().relu()
    found, expected = _in(E5M2, ROWS, WIDTH)
    for kernels, out8 in ((layers, found), (reference, expected)):
        kernels.mask_and_sum(gradient, output, torch.empty_like(output), torch.empty(2, WIDTH), out8, 2.0**10)
    _assert_same_bits(found, expected, "gradient")
