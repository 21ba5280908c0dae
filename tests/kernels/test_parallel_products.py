from dataclasses import replace

import pytest
import torch

from dlrm_overlap.comm.device_errors import DeviceErrorRecord
from dlrm_overlap.kernels.dense.arguments import LINE
from dlrm_overlap.kernels.flags import Flags
from dlrm_overlap.kernels.gemm import reference
from dlrm_overlap.kernels.gemm.calls import Parts, begin_call, sum_parts
from tests.agreement import assert_same
from tests.kernels.emulation import CPU, GUARD, interpreted, to_wire

pytestmark = interpreted


class Ranks:
    """The DONE flags of all ranks, and the clock of one rank, at call 6."""

    def __init__(self, world_size: int, rank: int) -> None:
        self.rank, self.records = rank, DeviceErrorRecord(CPU)
        self.at = [torch.full((world_size, 1), 6) for _ in range(world_size)]
        self.clock, self.counted = torch.tensor([6, 0])[:1], torch.zeros(1, dtype=torch.int32)
        self.at[rank][rank] = 0  # it does not wait for its own
        addresses = torch.tensor([flags.data_ptr() for flags in self.at])
        counts = torch.tensor([int(each != rank) for each in range(world_size)]).int()
        self.done = Flags(addresses, self.clock, self.at[rank], counts, timeout=3, status=self.records.status)


def test_a_call_begins_when_all_peers_have_finished_the_one_before() -> None:
    ranks = Ranks(3, 1)
    begin_call(ranks.done, 1)
    assert (ranks.clock.item(), ranks.records.empty) == (7, True)
    begin_call(ranks.done, 1)
    assert ranks.records.expired() == [1, 0, 0, 7, 6]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("world_size", "rows", "columns"), [(1, 3, 5), (2, 24, 7), (3, 19, 120), (5, 8, 1)])
def test_parts_are_summed_in_the_order_of_the_ranks(
    world_size: int, rows: int, columns: int, bias: bool, dtype: torch.dtype
) -> None:
    generator, relu = torch.Generator().manual_seed(rows), not bias or world_size == 3
    parts = (torch.randn(world_size, rows, columns, generator=generator) ** 3).to(dtype)
    added = torch.randn(columns, generator=generator).to(dtype) if bias else None
    lines = -(-rows * columns // LINE)
    window = torch.full((world_size, lines * LINE), torch.nan, dtype=dtype)
    window[:, : rows * columns] = parts.flatten(1)
    out = torch.full((lines * LINE,), GUARD, dtype=dtype)
    ranks = Ranks(world_size, world_size - 1)
    summed = Parts(window.flatten(), lines, out, columns, added, relu)
    done = replace(ranks.done, clock=torch.tensor([9]))
    middle = min(8, rows)
    for begin, end in ((0, middle), (middle, rows)) if middle < rows else ((0, rows),):
        sum_parts(summed, done, ranks.counted, ranks.rank, (begin, end), last=end == rows)
        signaled = [flags[ranks.rank, 0].item() for flags in ranks.at]
        assert signaled == [9] * world_size if end == rows else 9 not in signaled
    expected = reference.sum_parts(parts.float(), added, relu)
    assert_same(out[: rows * columns].view(rows, columns), to_wire(expected, dtype), "sums")
    assert not ranks.counted.any()
