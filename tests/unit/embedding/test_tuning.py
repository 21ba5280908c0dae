"""How launches are cut: what a warp has in flight, and tasks that lie in one slice."""

import pytest
import torch

from dlrm_overlap.embedding.backends.fused import persistent_tuning
from dlrm_overlap.kernels.bags import FeatureTable
from dlrm_overlap.kernels.tuning import has_short_bags, power_of_2, tuning_for

_DIMS = (4, 12, 32, 36, 64, 92, 128, 256, 512, 1024)
_TYPES = (torch.float32, torch.bfloat16)


@pytest.mark.parametrize("short", [False, True])
@pytest.mark.parametrize("dtype", _TYPES)
@pytest.mark.parametrize("dim", _DIMS)
def test_a_warp_has_at_most_4_kb_of_rows_in_flight(dim: int, dtype: torch.dtype, short: bool) -> None:
    tuning = tuning_for(dim, dtype.itemsize, short=short)
    row_bytes = power_of_2(dim) * dtype.itemsize
    assert tuning.task_bags * tuning.unroll * row_bytes <= 4096 * tuning.num_warps
    assert tuning.task_bags <= 4, "of the smallest slice, embedding.slice_bags"


@pytest.mark.parametrize("short", [False, True])
@pytest.mark.parametrize("slice_bags", [4, 8, 32])
@pytest.mark.parametrize("dim", _DIMS)
def test_a_task_lies_in_one_slice_however_many_bags_there_are(dim: int, slice_bags: int, short: bool) -> None:
    table = FeatureTable(torch.zeros(16, 6, dtype=torch.int64), dim, torch.float32, 16, 16)
    for samples in (1, 8192, 65536):
        assert slice_bags % persistent_tuning(table, samples, slice_bags, short).task_bags == 0


@pytest.mark.parametrize(
    ("dim", "dtype", "most"),
    [
        (32, torch.float32, 6),
        (64, torch.bfloat16, 6),
        (64, torch.float32, 8),
        (92, torch.bfloat16, 8),
        (128, torch.float32, 1),
        (256, torch.bfloat16, 1),
    ],
)
def test_bags_are_short_by_the_shapes_of_their_input_and_the_rows(dim: int, dtype: torch.dtype, most: int) -> None:
    table = FeatureTable(torch.zeros(16, 6, dtype=torch.int64), dim, dtype, 16, 16)
    offsets = torch.zeros(65, dtype=torch.int32)
    assert has_short_bags(table, torch.empty(64 * most), offsets)
    assert not has_short_bags(table, torch.empty(64 * most + 1), offsets)
