"""Partial sums added up, under Triton's interpreter: every element of a window."""

import pytest
import torch

from dlrm_overlap.kernels import reference
from dlrm_overlap.kernels.forward.add_partials import add_partials, partial_table
from tests.agreement import assert_same
from tests.kernels.emulation import interpreted

pytestmark = interpreted


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("samples", [0, 1, 19])
def test_every_element(samples: int, dtype: torch.dtype) -> None:
    """Sums of other numbers of shards and other dims, one of them longer than a program takes at once."""
    sums = [(4, 8, [300, 316]), (20, 132, [400]), (160, 4, [308, 324, 328])]
    # Whose sums are exact in every type: the interpreter cuts bits off where a GPU rounds.
    window = (torch.randint(-32, 32, (samples, 536), generator=torch.Generator().manual_seed(1)) / 8).to(dtype)
    expected = window.clone()
    reference.add_partials(expected, sums)
    add_partials(window, partial_table(sums, 4, window.device))
    assert_same(window, expected, "window")
