"""Gradients stored into their owners' windows, under Triton's interpreter: every element of every window."""

from dataclasses import dataclass
from math import gcd

import pytest
import torch

from dlrm_overlap.kernels.arguments import Windows
from dlrm_overlap.kernels.gradient_exchange import PieceTable, push_gradients
from dlrm_overlap.kernels.schedule import SCHEDULES
from tests.agreement import assert_same
from tests.kernels.emulation import GUARD, interpreted, to_wire

pytestmark = interpreted

ABSENT = [1 << 40, 1 << 40, 0]  # where a rank has no such piece: elements that nothing may touch


@dataclass(frozen=True)
class Case:
    """Whose gradients go where, and how."""

    batch_sizes: tuple[int, ...] = (5, 3)
    """samples of each rank"""
    dims: tuple[tuple[int, ...], ...] = ((12, 12, 12), (12,))
    """of each rank's pieces"""
    wire: torch.dtype = torch.float32
    schedule: str = "balanced"
    gap: int = 4
    """guard columns around each piece, in the gradient and in the windows"""
    spare: int = 0
    """columns behind the last of the gradient"""
    programs: int = 3


class World:
    """All ranks of a case: their gradients, and their windows with guards at both ends."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.first_sample = [sum(case.batch_sizes[:rank]) for rank in range(len(case.batch_sizes))]
        self.batch = sum(case.batch_sizes)
        starts = [case.gap] * len(case.dims)
        column = case.gap
        # Owner, column of the gradient, column of the owner's D_local, dim: the last rank's come first in the gradient.
        self.pieces: list[tuple[int, int, int, int]] = []
        for owner, dims in reversed([*enumerate(case.dims)]):
            for dim in dims:
                self.pieces.append((owner, column, starts[owner], dim))
                starts[owner] += dim + case.gap
                column += dim + case.gap
        generator = torch.Generator().manual_seed(0)
        self.gradients = [torch.full((samples, column + case.spare), torch.nan) for samples in case.batch_sizes]
        self.storage = [torch.full((start * self.batch + 2 * 4,), GUARD, dtype=case.wire) for start in starts]
        for owner, column, start, dim in self.pieces:
            self.storage[owner][4:-4][start * self.batch : (start + dim) * self.batch] = torch.nan
            for gradient in self.gradients:
                gradient[:, column : column + dim] = torch.randn(gradient.shape[0], dim, generator=generator)

    def piece_table(self, dim: int) -> PieceTable:
        """Return the pieces of one dim."""
        owned = [
            [[column, start, 1] for owner, column, start, piece_dim in self.pieces if (owner, piece_dim) == (rank, dim)]
            for rank in range(len(self.case.dims))
        ]
        most = max(map(len, owned))
        entries = torch.tensor([[*pieces, *[ABSENT] * (most - len(pieces))] for pieces in owned])
        present = entries[entries[:, :, 2] == 1].tolist()
        return PieceTable(
            entries, dim, gcd(16, *(column for column, _, _ in present)), gcd(16, *(start for _, start, _ in present))
        )

    def push(self, rank: int, dim: int, scale: float) -> None:
        """Run the kernel of one rank for the pieces of one dim."""
        case = self.case
        addresses = [storage[4:].data_ptr() for storage in self.storage]
        push_gradients(
            self.gradients[rank],
            self.piece_table(dim),
            Windows(torch.tensor(addresses), stride=0, dtype=case.wire, alignment=gcd(16, *addresses)),
            rank,
            case.schedule,
            first_sample=self.first_sample[rank],
            batch=self.batch,
            most_samples=max(case.batch_sizes),
            scale=scale,
            programs=case.programs,
        )

    def assert_windows(self, scale: float) -> None:
        """Check every element of every window, guards included."""
        expected = [torch.full_like(storage, GUARD) for storage in self.storage]
        for owner, column, start, dim in self.pieces:
            piece = torch.cat([gradient[:, column : column + dim] for gradient in self.gradients]) * scale
            into = expected[owner][4:-4][start * self.batch : (start + dim) * self.batch]
            into.copy_(to_wire(piece, self.case.wire).flatten())
        for rank, (storage, wanted) in enumerate(zip(self.storage, expected, strict=True)):
            assert_same(storage, wanted, f"window of rank {rank}")


def _check(case: Case) -> None:
    """Push as an average over the ranks."""
    world, scale = World(case), 1 / len(case.batch_sizes)
    for rank in range(len(case.batch_sizes)):
        for dim in sorted({dim for _, _, _, dim in world.pieces}):
            world.push(rank, dim, scale)
    world.assert_windows(scale)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    ("batch_sizes", "pieces"),
    [
        ((5,), (3,)),
        ((5, 3), (3, 1)),
        ((1, 6), (0, 2)),
        ((1, 6, 4), (1, 3, 2)),
        ((4, 0, 3), (2, 1, 0)),
        ((0, 0, 2), (0, 0, 1)),
    ],
)
def test_ranks_of_unlike_batches_and_pieces(
    schedule: str, batch_sizes: tuple[int, ...], pieces: tuple[int, ...]
) -> None:
    _check(Case(batch_sizes, tuple((12,) * count for count in pieces), schedule=schedule))


@pytest.mark.parametrize("wire", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("dim", "samples"), [(4, 1027), (12, 259), (128, 35), (1024, 5)])  # all but 3 in full tasks
def test_dims_and_types(wire: torch.dtype, dim: int, samples: int) -> None:
    _check(Case((samples, 3), ((dim,), (dim, dim)), wire))


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("programs", [1, 4, 1000])
def test_any_number_of_programs(schedule: str, programs: int) -> None:
    _check(Case((40, 9, 17), ((128,), (128, 128), ()), schedule=schedule, programs=programs))  # 18 tasks


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_dims_go_one_after_the_other(schedule: str) -> None:
    _check(Case((5, 2, 3), ((4, 12), (128,), (12, 4, 4)), schedule=schedule))


def test_a_dim_leaves_the_others_alone() -> None:
    world = World(Case(dims=((4, 12), (12, 4))))
    before = [storage.clone() for storage in world.storage]
    for rank in range(2):
        world.push(rank, 4, scale=1.0)
    for owner, _, start, dim in world.pieces:
        if dim == 12:
            of_piece = slice(4 + start * world.batch, 4 + (start + dim) * world.batch)
            assert_same(world.storage[owner][of_piece], before[owner][of_piece], f"window of rank {owner}")


def test_a_rank_writes_its_own_samples_only() -> None:
    world = World(Case((3, 2)))
    world.push(1, 12, scale=1.0)
    world.gradients[0][:] = torch.nan  # as the windows still are
    world.assert_windows(scale=1.0)


@pytest.mark.parametrize(("gap", "spare"), [(0, 0), (0, 4), (4, 3), (8, 100)])
def test_columns_and_rows_lie_anywhere(gap: int, spare: int) -> None:
    _check(Case((5, 3), ((12, 12), (12,)), gap=gap, spare=spare))


@pytest.mark.parametrize("scale", [1.0, 1 / 3, 0.0, -4.0])
def test_scale(scale: float) -> None:
    world = World(Case())
    for rank in range(2):
        world.push(rank, 12, scale)
    world.assert_windows(scale)
