"""The kernels of products with communication inside, under Triton's interpreter, several ranks in one process."""

from dataclasses import replace

import pytest
import torch

from dlrm_overlap.comm.record import Record
from dlrm_overlap.kernels.dense.arguments import LINE
from dlrm_overlap.kernels.flags import Flags
from dlrm_overlap.kernels.gemm import reference
from dlrm_overlap.kernels.gemm.calls import CallFlags, Parts, begin_call, publish_rows, sum_parts
from tests.agreement import assert_same
from tests.kernels.emulation import CPU, GUARD, interpreted, to_wire

pytestmark = interpreted
SLOTS = 3


class Ranks:
    """Flags of all ranks, and the clock of one, which stands at call 6."""

    def __init__(self, world_size: int, rank: int) -> None:
        self.rank, self.world_size, self.records = rank, world_size, Record(CPU)
        self.done = [torch.full((world_size, 1), 6) for _ in range(world_size)]
        self.ready = [torch.full((world_size, SLOTS), 6) for _ in range(world_size)]
        self.clock, self.counted = torch.tensor([6, 0])[:1], torch.zeros(1, dtype=torch.int32)
        self.done[rank][rank] = 0  # its own are not awaited
        slots = tuple(self._flags(self.ready, slot + 1) for slot in range(SLOTS))
        self.flags = CallFlags(self._flags(self.done, 1), slots, self.counted)

    def _flags(self, at_ranks: list[torch.Tensor], slots: int) -> Flags:
        addresses = torch.tensor([flags.data_ptr() for flags in at_ranks])
        counts = torch.tensor([slots * (rank != self.rank) for rank in range(self.world_size)]).int()
        return Flags(addresses, self.clock, at_ranks[self.rank], counts, timeout=3, status=self.records.status)


def test_a_call_begins_when_all_peers_are_through_with_the_one_before() -> None:
    ranks = Ranks(3, 1)
    begin_call(ranks.flags, 1)
    assert (ranks.clock.item(), ranks.records.empty) == (7, True)
    begin_call(ranks.flags, 1)
    assert ranks.records.expired() == [1, 0, 0, 7, 6]


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("elements", [1, 4096, 9001])  # of int16: words of 2 bytes; of 16, one block; of 2, three
def test_rows_are_published(elements: int, keep: bool) -> None:
    ranks = Ranks(2, 0)
    ranks.ready[0][1] = torch.tensor([7, 7, 6])
    rows = torch.arange(2 * elements).short()
    window, kept = torch.full((2 * elements + 8,), int(GUARD)).short(), torch.full((2 * elements,), int(GUARD)).short()
    for slot, some in enumerate((slice(0, elements), slice(elements, 2 * elements))):
        publish_rows(rows[some], window[some], kept[some] if keep else None, ranks.flags, 0, slot)
        for rank in range(2):
            assert ranks.ready[rank][0].tolist() == [7, 7 if slot else 6, 6], f"flags of rank 0 at rank {rank}"
        assert (ranks.clock.item(), ranks.counted.item(), ranks.records.empty) == (7, 0, True)
    assert_same(window[:-8], rows, "window")
    assert window[-8:].eq(int(GUARD)).all()
    assert_same(kept, rows if keep else torch.full_like(kept, int(GUARD)), "kept")
    publish_rows(rows, window[:-8], None, ranks.flags, 0, 2)
    assert ranks.records.expired() == [0, 1, 2, 7, 6], "slot 2 of rank 1"


def test_rows_are_not_published_over_what_a_peer_still_reads() -> None:
    ranks = Ranks(2, 1)
    ranks.done[1][0] = 5
    publish_rows(torch.ones(8), torch.zeros(8), None, ranks.flags, 1, 0)
    assert ranks.records.expired() == [1, 0, 0, 6, 5]


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
    done = replace(ranks.flags.done, clock=torch.tensor([9]))
    middle = min(8, rows)
    for begin, end in ((0, middle), (middle, rows)) if middle < rows else ((0, rows),):
        sum_parts(summed, done, ranks.counted, ranks.rank, (begin, end), last=end == rows)
        raised = [flags[ranks.rank, 0].item() for flags in ranks.done]
        assert raised == [9] * world_size if end == rows else 9 not in raised
    expected = reference.sum_parts(parts.float(), added, relu)
    assert_same(out[: rows * columns].view(rows, columns), to_wire(expected, dtype), "sums")
    assert not ranks.counted.any()
