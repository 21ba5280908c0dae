from collections.abc import Sequence
from typing import NamedTuple

import pytest
import torch

from dlrm_overlap.dense.stores import GradientPiece, cut
from dlrm_overlap.kernels import reference
from dlrm_overlap.kernels.dense.all_reduce import average_share
from dlrm_overlap.kernels.dense.arguments import (
    BLOCK,
    DECOUPLED,
    FIRST,
    L2,
    LINE,
    LR,
    STATES,
    FlatUpdate,
    SharedWeights,
)
from dlrm_overlap.kernels.dense.update import begin_update, update_range
from dlrm_overlap.kernels.dense.update_share import update_share
from dlrm_overlap.kernels.flags import Flags
from tests.agreement import assert_near, assert_same
from tests.kernels.emulation import CLOCK, interpreted, to_wire
from tests.kernels.test_update_parameters import FORMS, _make, _random

pytestmark = interpreted

SLOTS, SLOT, EPOCH, PROGRAMS = 3, 1, 5, 3
_ROUNDING = {torch.float32: 1e-6, torch.bfloat16: 2e-2}  # the interpreter cuts bfloat16 off
# Ranks, and lines of a range that begins after one line: fewer than ranks, of unequal shares, of two blocks.
CASES = [(2, 1), (2, 301), (3, 40), (4, 143), (17, 20)]


class Ranks(NamedTuple):
    """Ranks with the same weights and other gradients; some lines have no optimizer, others are read in float32."""

    gradients: list[torch.Tensor]
    updates: list[FlatUpdate]
    in_float32: torch.Tensor
    piece: GradientPiece
    flags: list[torch.Tensor]

    def arguments(self, rank: int) -> tuple[Flags, torch.Tensor, int, int, int, int]:
        """Return the last arguments of both kernels."""
        addresses = torch.tensor([flags.data_ptr() for flags in self.flags])
        unused = torch.zeros(len(self.flags))
        flags = Flags(addresses, CLOCK, self.flags[0], unused, timeout=3, status=unused)
        return flags, torch.zeros(1, dtype=torch.int32), rank, SLOT, EPOCH, PROGRAMS

    def share(self, rank: int) -> slice:
        first = self.piece.first(rank)
        return slice(first * LINE, (first + self.piece.lines(rank)) * LINE)

    @property
    def range(self) -> slice:
        return slice(self.piece.begin * LINE, self.piece.end * LINE)


def _ranks(form: str, world_size: int, lines: int, dtype: torch.dtype) -> Ranks:
    elements = -(-(lines + 2) * LINE // BLOCK) * BLOCK
    rows = torch.tensor([1, 0, 0, -1, 1, 0, 0]).repeat(elements // LINE)[: elements // LINE].int()
    updates = [_make(form, torch.bfloat16, elements, rows) for _ in range(world_size)]
    for update in updates:
        update.numbers[1, [LR, FIRST, L2, DECOUPLED]] *= 0.7
        update.step[1] = 3
        assert update.shadow is not None
        update.shadow.copy_(to_wire(update.weights, torch.bfloat16))
        begin_update(update)
    gradients = [to_wire(_random(1 + rank, elements), dtype).clone() for rank in range(world_size)]
    in_float32 = (torch.arange(elements // LINE) % 5 == 1).int()
    ((_, (piece,)),) = cut([(LINE, (lines + 1) * LINE)], 1 << 30, world_size)
    return Ranks(gradients, updates, in_float32, piece, [torch.zeros(world_size, SLOTS).long() for _ in updates])


def _addresses(tensors: Sequence[torch.Tensor | None]) -> torch.Tensor:
    return torch.tensor([tensor.data_ptr() for tensor in tensors if tensor is not None])


def _update(ranks: Ranks, dtype: torch.dtype) -> None:
    """Let each rank update its share."""
    weights, shadows = [each.weights for each in ranks.updates], [each.shadow for each in ranks.updates]
    tables = _addresses(ranks.gradients), _addresses(weights), _addresses(shadows)
    shared = SharedWeights(*tables, ranks.in_float32)
    for rank, update in enumerate(ranks.updates):
        flags, counted, *others = ranks.arguments(rank)
        first, lines = ranks.piece.first(rank), ranks.piece.lines(rank)
        update_share(update, shared, dtype, first, lines, flags, counted, *others)
        assert not counted.any(), "the count is ready for the next kernel"
        for peer, each in enumerate(ranks.flags):
            assert each[rank, SLOT] == EPOCH, f"flag of rank {rank} at rank {peer}"
            each[rank, SLOT] = 0
            assert not each.any(), "no other flag is set"


def _check(ranks: Ranks, expected: Ranks, tolerance: float) -> None:
    """Compare with `expected`, where every rank has updated all weights."""
    line_is_whole = ranks.in_float32.repeat_interleave(LINE) == 1
    before = _make("sgd", elements=ranks.in_float32.numel() * LINE).weights
    for rank, (ours, theirs) in enumerate(zip(ranks.updates, expected.updates, strict=True)):
        assert ours.shadow is not None
        assert theirs.shadow is not None
        assert_near(ours.shadow.float(), theirs.shadow.float(), tolerance, f"shadow of rank {rank}")
        here = torch.zeros_like(line_is_whole)
        here[ranks.share(rank)] = True
        inside = torch.zeros_like(here)
        inside[ranks.range] = True
        known = here | (line_is_whole & inside)
        assert_near(ours.weights[known], theirs.weights[known], tolerance, f"weights of rank {rank}")
        assert_same(ours.weights[~known], before[~known], f"weights of the other ranks at rank {rank}")
        for name, state, other in zip(STATES[ours.kind], ours.states, theirs.states, strict=True):
            assert_near(state[here], other[here], tolerance, f"{name} of rank {rank}")
            assert not state[~here].any(), f"{name} of the other ranks' shares at rank {rank}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", FORMS)
def test_a_share_gets_the_bits_of_a_mean_and_an_update_on_every_rank(form: str, dtype: torch.dtype) -> None:
    _check_bits(form, 4, 143, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("world_size", "lines"), CASES)
def test_shares_of_any_size_are_updated(world_size: int, lines: int, dtype: torch.dtype) -> None:
    _check_bits("adam", world_size, lines, dtype)


def _check_bits(form: str, world_size: int, lines: int, dtype: torch.dtype) -> None:
    ours, theirs = (_ranks(form, world_size, lines, dtype) for _ in range(2))
    before = [gradient.clone() for gradient in ours.gradients]
    _update(ours, dtype)
    for gradient, expected in zip(ours.gradients, before, strict=True):
        assert_same(gradient, expected, "gradients stay")
    for rank in range(world_size):
        shares = _addresses([gradient[theirs.share(rank)] for gradient in theirs.gradients])
        average_share(shares, dtype, theirs.piece.lines(rank), *theirs.arguments(rank))
    for gradient, update in zip(theirs.gradients, theirs.updates, strict=True):
        outside = torch.ones(len(gradient) // LINE, dtype=torch.bool)
        outside[theirs.piece.begin : theirs.piece.end] = False
        update.rows[outside] = -1
        update.gradients.copy_(gradient)
        update_range(update, 0, len(gradient))
    _check(ours, theirs, 0.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", FORMS)
def test_a_share_is_updated_as_by_the_reference(form: str, dtype: torch.dtype) -> None:
    ours, theirs = (_ranks(form, 3, 40, dtype) for _ in range(2))
    _update(ours, dtype)
    weights, shadows = [each.weights for each in theirs.updates], [each.shadow for each in theirs.updates]
    present = [shadow for shadow in shadows if shadow is not None]
    for rank, update in enumerate(theirs.updates):
        share = theirs.share(rank)
        reference.update_share(update, theirs.gradients, weights, present, theirs.in_float32, share.start, share.stop)
    for rank, (found, expected) in enumerate(zip(ours.updates, theirs.updates, strict=True)):
        assert found.shadow is not None
        assert expected.shadow is not None
        assert_near(found.weights, expected.weights, _ROUNDING[dtype], f"weights at rank {rank}")
        assert_near(found.shadow.float(), expected.shadow.float(), _ROUNDING[torch.bfloat16], f"shadow at rank {rank}")
        for name, state, other in zip(STATES[found.kind], found.states, expected.states, strict=True):
            assert_near(state, other, 2 * _ROUNDING[dtype], f"{name} at rank {rank}")
