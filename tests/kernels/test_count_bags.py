import pytest
import torch

from dlrm_overlap.kernels import reference
from dlrm_overlap.kernels.count_bags import BLOCK, count_bags
from tests.agreement import assert_same
from tests.kernels.emulation import interpreted

pytestmark = interpreted


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("samples", [0, 1, BLOCK - 1, 2 * BLOCK + 3])
def test_bags_are_counted_as_by_the_twin_and_no_other_column_is_written(samples: int, dtype: torch.dtype) -> None:
    lengths = torch.randint(3, 60, (4, samples), generator=torch.Generator().manual_seed(0)).to(dtype)
    lengths[2] = 0  # a feature of empty bags
    numbers = torch.full((3, 9), -7)
    count_bags(lengths, numbers[:, 3:7])
    assert_same(numbers[:, 3:7], reference.count_bags(lengths).long(), "numbers")
    assert (numbers[:, :3] == -7).all()
    assert (numbers[:, 7:] == -7).all()


def test_the_twin_counts_bags_as_in_its_example() -> None:
    assert reference.count_bags(torch.tensor([[1, 0], [2, 1]])).tolist() == [[1, 3], [1, 2], [0, -1]]
