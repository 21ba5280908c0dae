from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from dlrm_overlap.kernels.backward.rounding import rounded
from dlrm_overlap.kernels.compiled import TYPES
from tests.agreement import assert_same
from tests.kernels.emulation import interpreted

pytestmark = [interpreted, pytest.mark.filterwarnings("ignore::RuntimeWarning")]  # numpy warns of NaN and overflow

CHANCES = 4096
STEP = 2.0**-24  # of float16 below 2^-13
EDGE = 2.0**-14  # below which float16 is subnormal


@triton.jit
def _round(x, out, seed, TYPE: tl.constexpr, STOCHASTIC: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + tl.program_id(0) + tl.zeros((BLOCK,), tl.int32))
    tl.store(out + at, rounded(value, at, seed, TYPE, STOCHASTIC))


def _rounded(x: torch.Tensor, dtype: torch.dtype, stochastic: bool = True) -> torch.Tensor:
    """Return [n, CHANCES]: each element of `x` [n] float32, rounded CHANCES times."""
    out = torch.empty(x.numel(), CHANCES, dtype=dtype)
    constants: dict[str, Any] = {"TYPE": TYPES[dtype], "STOCHASTIC": stochastic, "BLOCK": CHANCES}
    _round[(x.numel(),)](x, out, 3, **constants)
    return out


def _of_bits(*bits: int) -> torch.Tensor:
    """Return the float32 numbers of these bits, and their negatives."""
    positive = torch.tensor(bits, dtype=torch.int32).view(torch.float32)
    return torch.cat((positive, -positive))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_nan_stays_nan_and_infinity_infinity(dtype: torch.dtype) -> None:
    # CUDA's own NaN, of all ones, and the interpreter's.
    assert _rounded(_of_bits(0x7FFFFFFF, 0x7FC00000, 0x7F811FFF), dtype).isnan().all()
    infinities = _of_bits(0x7F800000)
    assert_same(_rounded(infinities, dtype), infinities[:, None].expand(-1, CHANCES).to(dtype), "infinities")


def test_a_nan_that_truncation_would_make_infinity_stays_nan() -> None:
    # Not tested for bfloat16, to which the interpreter truncates, and hardware does not.
    assert _rounded(_of_bits(0x7F800001), torch.float16).isnan().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_numbers_beyond_the_greatest_are_rounded_to_the_nearest(dtype: torch.dtype) -> None:
    """In float16 that is 65504 below 65520, and infinity from there on."""
    greatest = torch.tensor(torch.finfo(dtype).max)
    between = {torch.float16: (65519.99, 65520.0, 65535.99, 65536.0), torch.bfloat16: (3.3960e38,)}[dtype]
    x = torch.tensor([greatest, greatest.nextafter(torch.tensor(torch.inf)), *between, torch.finfo(torch.float32).max])
    x = torch.cat((x, -x))
    assert_same(_rounded(x, dtype), _rounded(x, dtype, stochastic=False), "rounded")
    assert (_rounded(x[:2], dtype) == greatest).all()


def _assert_fair(x: float, below: float, above: float, dtype: torch.dtype) -> None:
    found = _rounded(torch.tensor([x]), dtype)[0].double()
    assert ((found == below) | (found == above)).all(), found.unique()
    chance = (x - below) / (above - below)
    up = (found == above).double().mean()
    assert (up - chance).abs() < 4 * (chance * (1 - chance) / CHANCES) ** 0.5, (up, chance)


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize(("below", "part"), [(EDGE - STEP, 0.75), (EDGE, 0.25), (EDGE - 2 * STEP, 0.5), (0.0, 0.25)])
def test_float16_is_rounded_fairly_around_its_least_normal_number(sign: int, below: float, part: float) -> None:
    x, ends = sign * (below + part * STEP), sorted((sign * below, sign * (below + STEP)))
    _assert_fair(x, ends[0], ends[1], torch.float16)


@pytest.mark.parametrize(("dtype", "step"), [(torch.float16, 32.0), (torch.bfloat16, 2.0**120)])
@pytest.mark.parametrize("sign", [1, -1])
def test_numbers_below_the_greatest_are_rounded_fairly(dtype: torch.dtype, step: float, sign: int) -> None:
    greatest = torch.finfo(dtype).max
    ends = sorted((sign * (greatest - step), sign * greatest))
    _assert_fair(sign * (greatest - step / 4), ends[0], ends[1], dtype)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_exact_numbers_are_not_changed(dtype: torch.dtype) -> None:
    x = torch.tensor([0.0, 1.0, EDGE, 3 * EDGE, EDGE - STEP, EDGE / 2, STEP, torch.finfo(dtype).max]).to(dtype)
    x = torch.cat((x, -x))
    assert_same(_rounded(x.float(), dtype), x[:, None].expand(-1, CHANCES), "rounded")
