import pytest
import torch

from dlrm_overlap.dense.stores import cut
from dlrm_overlap.kernels.dense.all_reduce import average_share
from dlrm_overlap.kernels.dense.arguments import LINE
from dlrm_overlap.kernels.flags import Flags
from tests.agreement import assert_near, assert_same
from tests.kernels.emulation import CLOCK, interpreted, to_wire

SLOTS, SLOT, EPOCH = 3, 1, 5
# Ranks, and lines of a range that begins after one line: fewer than ranks, of unequal shares, of two blocks.
CASES = [(1, 3), (2, 1), (2, 301), (3, 4), (4, 143), (5, 7), (17, 20)]


class Ranks:
    """Ranks with flags and random gradients: of a line, a range, and a line."""

    def __init__(self, world_size: int, lines: int) -> None:
        generator = torch.Generator().manual_seed(lines)
        self.world_size, self.elements = world_size, (lines + 2) * LINE
        self.gradients = [torch.randn(self.elements, generator=generator).pow(3) for _ in range(world_size)]
        self.flags = [torch.zeros(world_size, SLOTS, dtype=torch.int64) for _ in range(world_size)]
        self.counted = torch.zeros(1, dtype=torch.int32)
        ((_, (self.piece,)),) = cut([(LINE, (lines + 1) * LINE)], 1 << 30, world_size)

    def share_flags(self) -> Flags:
        addresses = torch.tensor([flags.data_ptr() for flags in self.flags])
        unused = torch.zeros(self.world_size)
        return Flags(addresses, CLOCK, self.flags[0], unused, timeout=3, status=unused)

    def check_flags(self, rank: int) -> None:
        """Check that `rank` has set its flag at every rank, and no other flag, and reset it."""
        assert not self.counted.any(), "the count is ready for the next kernel"
        for peer, flags in enumerate(self.flags):
            assert flags[rank, SLOT] == EPOCH, f"flag of rank {rank} at rank {peer}"
            flags[rank, SLOT] = 0
            assert not flags.any(), "no other flag is set"

    def share(self, rank: int) -> slice:
        first = self.piece.first(rank)
        return slice(first * LINE, (first + self.piece.lines(rank)) * LINE)


@interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("programs", [1, 3])
@pytest.mark.parametrize(("world_size", "lines"), CASES)
def test_owners_store_the_mean_of_their_share(world_size: int, lines: int, programs: int, dtype: torch.dtype) -> None:
    ranks = Ranks(world_size, lines)
    ranks.gradients = [to_wire(gradient, dtype) for gradient in ranks.gradients]
    before = [gradient.clone() for gradient in ranks.gradients]
    for rank in range(world_size):
        shares = torch.tensor([gradient[ranks.share(rank)].data_ptr() for gradient in ranks.gradients])
        flags = ranks.share_flags()
        average_share(shares, dtype, ranks.piece.lines(rank), flags, ranks.counted, rank, SLOT, EPOCH, programs)
        ranks.check_flags(rank)
    total = before[0].float()
    for gradient in before[1:]:
        total = total + gradient.float()
    mean = to_wire(total * (1 / world_size), dtype)
    exact = torch.stack(before).double().mean(0).float()
    assert_near(mean.float(), exact, 1e-6 if dtype == torch.float32 else 1e-2, "the expected mean")
    for rank, gradient in enumerate(ranks.gradients):
        expected = before[rank].clone()
        expected[LINE:-LINE] = mean[LINE:-LINE]
        assert_same(gradient, expected, f"gradient of rank {rank}")
