import pytest
import torch

from dlrm_overlap.kernels import reference
from dlrm_overlap.kernels.bags import EVERY_BAG, Partials
from dlrm_overlap.kernels.forward.add_partials import add_partials, partial_table
from tests.agreement import assert_same
from tests.kernels.emulation import interpreted

pytestmark = interpreted


@pytest.mark.parametrize("some", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("samples", [0, 1, 19])
def test_partial_sums_are_added_and_no_other_element_changes(samples: int, dtype: torch.dtype, some: bool) -> None:
    """Of other numbers of shards and other dims, one of them longer than a program takes at once."""
    sums = [
        Partials([4, 300, 316], 8, [0, 1, 2]),
        Partials([20, 400, 536], 132, [4, 3, EVERY_BAG]),
        Partials([160, 308, 324, 328], 4, [0, 1, 2, 3]),
    ]
    generator = torch.Generator().manual_seed(1)
    # Values whose sums are exact in every type: the interpreter truncates where a GPU rounds.
    window = (torch.randint(-32, 32, (samples, 668), generator=generator) / 8).to(dtype)
    offsets = None
    if some:
        lengths = torch.randint(0, 2, (5 * samples,), generator=generator)
        offsets = torch.cat([torch.full((1,), 7), 7 + lengths.cumsum(0)]).int()
        for columns, dim, shares in sums:
            for column, share in ((c, s) for c, s in zip(columns, shares, strict=True) if s != EVERY_BAG):
                window[lengths[share * samples : (share + 1) * samples] == 0, column : column + dim] = torch.nan
    expected = window.clone()
    reference.add_partials(expected, sums, offsets)
    add_partials(window, partial_table(sums, 4, window.device), offsets)
    assert_same(window, expected, "window")
    for columns, dim, _ in sums:
        assert not window[:, columns[0] : columns[0] + dim].isnan().any()
