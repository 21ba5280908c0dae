"""The mean of a row over the ranks, under Triton's interpreter."""

import pytest
import torch

from dlrm_overlap.comm.flows import mean_in_order
from dlrm_overlap.kernels.average_rows import average_rows
from dlrm_overlap.kernels.flags import Flags
from tests.agreement import assert_same
from tests.kernels.emulation import interpreted

EPOCH = 5


@interpreted
@pytest.mark.parametrize(
    ("world_size", "elements", "shift", "dtype"),
    [
        (1, 5, 0, torch.float32),
        (2, 20_001, 0, torch.float32),
        (2, 77, 1, torch.bfloat16),
        (3, 78, 2, torch.float32),
        (4, 64, 0, torch.float16),
        (8, 33, 0, torch.float32),
    ],
)
def test_the_rows_of_all_ranks_are_averaged(world_size: int, elements: int, shift: int, dtype: torch.dtype) -> None:
    rank, generator = world_size - 1, torch.Generator().manual_seed(elements)
    rows = torch.randint(-64, 64, (world_size, elements), generator=generator).to(dtype)  # exact sums
    own = torch.randint(-64, 64, (shift + elements,), generator=generator).to(dtype)[shift:]
    if dtype == torch.float32:  # whose bits tell in which order they are added up
        rows.div_(7)
        own.div_(7)
    rows[rank] = torch.nan  # its place is not read
    ready = torch.full((world_size, 1), EPOCH, dtype=torch.int64)
    ready[rank] = 0  # nor is its flag awaited
    counts = torch.tensor([int(each != rank) for each in range(world_size)], dtype=torch.int32)
    flags = Flags(ready, torch.tensor([EPOCH]), ready, counts, 1000, torch.zeros(3, dtype=torch.int64))
    guarded = torch.full((elements + 2,), 7.0, dtype=dtype)
    average_rows(rows, own, guarded[1:-1], flags, rank)
    rows[rank] = own
    assert_same(guarded[1:-1], mean_in_order(rows).to(dtype), "mean")
    assert guarded[0] == guarded[-1] == 7.0, "nothing beside it is stored"
