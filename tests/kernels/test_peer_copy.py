import pytest
import torch

from dlrm_overlap.kernels.peer_copy import RowFlags, Rows, store_rows
from tests.agreement import assert_same
from tests.kernels.emulation import interpreted

EPOCH, GUARD = 5, 0x55
BLOCK_BYTES = 16 * 32 * 64  # of the widest words
# Ranks, bytes of a row, bytes before the memory's rows, bytes before the source.
CASES = [(1, 48, 0, 0), (2, 16, 32, 0), (3, 7, 0, 0), (2, 6, 4, 2), (3, 20, 8, 4), (4, 24, 0, 8), (2, 0, 0, 0)]
CASES += [(2, BLOCK_BYTES + 16, 16, 0), (3, 2 * BLOCK_BYTES, 0, 0), (2, 4099, 3, 1)]


@interpreted
@pytest.mark.parametrize("gather", [False, True])
@pytest.mark.parametrize(("world_size", "row_bytes", "begin", "shift"), CASES)
def test_rows_arrive_and_then_the_flag(world_size: int, row_bytes: int, begin: int, shift: int, gather: bool) -> None:
    generator = torch.Generator().manual_seed(row_bytes)
    memory = [torch.full((begin + world_size * row_bytes + 16,), GUARD, dtype=torch.uint8) for _ in range(world_size)]
    expected = [each.clone() for each in memory]
    flags = [torch.zeros(world_size, 1, dtype=torch.int64) for _ in range(world_size)]
    counted = torch.zeros(1, dtype=torch.int32)
    row_flags = RowFlags(torch.tensor([each.data_ptr() for each in flags]), counted, torch.tensor([EPOCH]))
    own = row_bytes != 20  # whether a rank stores its own row, too
    for rank in range(world_size):
        sent = torch.randint(0, 256, (shift + row_bytes * (1 if gather else world_size),), generator=generator)
        source, stride = sent.to(torch.uint8)[shift:], 0 if gather else row_bytes
        targets, offset = torch.tensor([each.data_ptr() for each in memory]), begin + rank * row_bytes
        store_rows(Rows(source, stride, row_bytes, targets, offset, own), row_flags, rank, programs=3)
        assert not counted.any(), "the count is ready for the next kernel"
        for peer in range(world_size):
            if peer != rank or own:
                expected[peer][offset : offset + row_bytes] = source[peer * stride : peer * stride + row_bytes]
            assert_same(memory[peer], expected[peer], f"memory of rank {peer}, after rank {rank}")
            assert flags[peer][rank] == EPOCH, f"flag of rank {rank} at rank {peer}"
            assert flags[peer].count_nonzero() == rank + 1, "no other flag is set"
