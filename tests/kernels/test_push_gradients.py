from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd

import pytest
import torch

from dlrm_overlap.kernels.backward.push_gradients import PartFlags, ShardTable, prepare_push_gradients
from dlrm_overlap.kernels.bags import Windows
from dlrm_overlap.kernels.schedule import SCHEDULES
from tests.agreement import assert_same
from tests.kernels.emulation import CLOCK, GUARD, interpreted, to_wire

pytestmark = interpreted

ABSENT = [1 << 40, 1 << 40, 0]  # columns of a shard that a rank does not have: nothing may access them


@dataclass(frozen=True)
class Case:
    """Batches and shards, and how their gradients are sent."""

    batch_sizes: tuple[int, ...] = (5, 3)  # samples of each rank
    dims: tuple[tuple[int, ...], ...] = ((12, 12, 12), (12,))  # of each rank's shards
    wire: torch.dtype = torch.float32
    gradient: torch.dtype = torch.float32
    leading: int = 0  # columns of a wider tensor before the gradient
    schedule: str = "balanced"
    gap: int = 4  # guard columns around each shard, in the gradient and in the windows
    spare: int = 0  # columns after the last of the gradient
    programs: int = 3
    parts: int = 2
    shares: bool = False  # whether all shards except each owner's first are shares of tables cut by rows


class World:
    """All ranks of a case: their gradients, and their windows with guards."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.first_sample = [sum(case.batch_sizes[:rank]) for rank in range(len(case.batch_sizes))]
        self.batch, self.owners = sum(case.batch_sizes), range(len(case.dims))
        starts = [case.gap] * len(case.dims)
        column = case.gap
        # Part, owner, column in the gradient and in the owner's window, dim; the last rank's are first in the gradient.
        self.shards: list[tuple[int, int, int, int, int]] = []
        for owner, dims in reversed([*enumerate(case.dims)]):
            for index, dim in enumerate(dims):
                self.shards.append((index * case.parts // len(dims), owner, column, starts[owner], dim))
                starts[owner] += dim + case.gap
                column += dim + case.gap
        generator = torch.Generator().manual_seed(0)
        width = case.leading + column + case.spare
        self.gradients = [
            torch.full((samples, width), torch.nan, dtype=case.gradient)[:, case.leading :]
            for samples in case.batch_sizes
        ]
        self.storage = [torch.full((start * self.batch + 2 * 4,), GUARD, dtype=case.wire) for start in starts]
        for _, owner, column, start, dim in self.shards:
            self.storage[owner][4:-4][start * self.batch : (start + dim) * self.batch] = torch.nan
            for gradient in self.gradients:
                gradient[:, column : column + dim] = torch.randn(gradient.shape[0], dim, generator=generator)
        self.ready = [torch.zeros(len(case.dims), case.parts, dtype=torch.int64) for _ in case.dims]
        self.done = torch.zeros(case.parts, dtype=torch.int32)
        # [shards, samples] for each rank: ids of each bag.
        self.lengths = [torch.randint(0, 2, (len(self.shards), n), generator=generator) for n in case.batch_sizes]

    def share_of(self, shard: tuple[int, int, int, int, int]) -> int | None:
        return self.shards.index(shard) if self.case.shares and shard[3] > self.case.gap else None

    def shard_table(self, dim: int) -> ShardTable:
        present = {key: 1 if (share := self.share_of(key)) is None else 2 + share for key in self.shards}
        shards = [(key[:2], [*key[2:4], present[key]]) for key in self.shards if key[4] == dim]
        columns = [
            [[each for of, each in shards if of == (part, owner)] for owner in self.owners]
            for part in range(self.case.parts)
        ]
        counts = [max(map(len, owned)) for owned in columns]
        padded = [[[*each, *[ABSENT] * (max(counts) - len(each))] for each in owned] for owned in columns]
        return ShardTable(
            torch.tensor(padded),
            torch.tensor(counts, dtype=torch.int32),
            dim,
            gcd(16, *(column for _, (column, _, _) in shards)),
            gcd(16, *(start for _, (_, start, _) in shards)),
        )

    def push(
        self, rank: int, scale: float, epoch: int = 1, dims: Sequence[int] = (), parts: range | None = None
    ) -> None:
        """Run the kernel of one rank, for all shards and parts, or those of `dims` and `parts`."""
        case = self.case
        addresses = [storage[4:].data_ptr() for storage in self.storage]
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), self.lengths[rank].flatten().cumsum(0)]).int()
        changing = [offsets] if case.shares else []
        tables = [self.shard_table(dim) for dim in dims or sorted({dim for *_, dim in self.shards})]
        windows = Windows(torch.tensor(addresses), stride=0, dtype=case.wire, alignment=gcd(16, *addresses))
        flags = PartFlags(torch.tensor([ready.data_ptr() for ready in self.ready]), self.done, CLOCK)
        for push in prepare_push_gradients(
            self.gradients[rank], tables, windows, flags, rank, case.schedule,
            first_sample=self.first_sample[rank], batch=self.batch, most_samples=max(case.batch_sizes), scale=scale,
            programs=case.programs, first_part=parts.start if parts else 0,
            end_part=parts.stop if parts else case.parts, offsets=offsets if case.shares else None,
        ):  # fmt: skip
            push(self.gradients[rank], *changing, epoch)

    def assert_windows(self, scale: float) -> None:
        """Check every element of every window, guards included."""
        expected = [torch.full_like(storage, GUARD) for storage in self.storage]
        for key in self.shards:
            _, owner, column, start, dim = key
            shard = torch.cat([gradient[:, column : column + dim] for gradient in self.gradients]).float() * scale
            if (share := self.share_of(key)) is not None:
                shard[torch.cat([lengths[share] for lengths in self.lengths]) == 0] = torch.nan  # not written
            into = expected[owner][4:-4][start * self.batch : (start + dim) * self.batch]
            into.copy_(to_wire(shard, self.case.wire).flatten())
        for rank, (storage, wanted) in enumerate(zip(self.storage, expected, strict=True)):
            assert_same(storage, wanted, f"window of rank {rank}")

    def assert_flags(self, epoch: int) -> None:
        """Check that every rank has every rank's flag of every part, and that the counters are reset."""
        for rank, ready in enumerate(self.ready):
            assert_same(ready, torch.full_like(ready, epoch), f"flags at rank {rank} (source, part)")
        assert_same(self.done, torch.zeros_like(self.done), "programs that are done with a part")


def _check(case: Case) -> None:
    world, scale = World(case), 1 / len(case.batch_sizes)
    for rank in world.owners:
        world.push(rank, scale)
    world.assert_windows(scale)
    world.assert_flags(epoch=1)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    ("batch_sizes", "shards"),
    [
        *[((5,), (3,)), ((5, 3), (3, 1)), ((1, 6), (0, 2))],
        *[((1, 6, 4), (1, 3, 2)), ((4, 0, 3), (2, 1, 0)), ((0, 0, 2), (0, 0, 1))],
    ],
)
def test_gradients_arrive_from_ranks_of_any_batches_and_shards(
    schedule: str, batch_sizes: tuple[int, ...], shards: tuple[int, ...]
) -> None:
    _check(Case(batch_sizes, tuple((12,) * count for count in shards), schedule=schedule))


@pytest.mark.parametrize("wire", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("dim", "samples"), [(4, 8195), (12, 2051), (128, 259), (1020, 35), (1024, 35)]
)  # all but 3 in full tasks
def test_gradients_arrive_in_any_dim_and_wire_dtype(wire: torch.dtype, dim: int, samples: int) -> None:
    _check(Case((samples, 3), ((dim,), (dim, dim)), wire))


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("programs", [1, 4, pytest.param(1000, marks=pytest.mark.slow)])
def test_gradients_arrive_from_any_number_of_programs(schedule: str, programs: int) -> None:
    _check(Case((300, 9, 17), ((128,), (128, 128), ()), schedule=schedule, programs=programs))  # 6 tasks a part


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_gradients_of_several_dims_arrive(schedule: str) -> None:
    _check(Case((5, 2, 3), ((4, 12), (128,), (12, 4, 4)), schedule=schedule, parts=3))


def test_bags_without_ids_of_a_row_shard_get_no_gradient() -> None:
    _check(Case((5, 2, 3), ((4, 12), (128,), (12, 4, 4)), parts=3, shares=True))


def test_a_rank_writes_its_own_samples_only() -> None:
    world = World(Case((3, 2)))
    world.push(1, scale=1.0)
    world.gradients[0][:] = torch.nan  # as the windows still are
    world.assert_windows(scale=1.0)


@pytest.mark.parametrize("parts", [1, 2, 5])
def test_each_part_has_its_flags(parts: int) -> None:
    """Some parts of a rank with few shards are empty."""
    world = World(Case((4, 0, 3), ((12,) * 6, (), (4, 12)), parts=parts))
    for epoch in (1, 2):
        for rank in world.owners:
            for ready in world.ready:
                assert (ready[rank] == epoch - 1).all()
            world.push(rank, 1.0, epoch)
        world.assert_flags(epoch)
    world.assert_windows(1.0)


def test_the_last_program_signals() -> None:
    world = World(Case(parts=3))
    world.done[1] = -1  # as if another program had yet to do its share of the second part
    world.push(0, 1.0, epoch=7)
    for ready in world.ready:
        assert ready[0].tolist() == [7, 0, 7]
    assert world.done.tolist() == [0, world.case.programs - 1, 0]


@pytest.mark.parametrize(("gap", "spare"), [(0, 0), (0, 4), (4, 3), (8, 100)])
def test_columns_and_rows_may_begin_anywhere(gap: int, spare: int) -> None:
    _check(Case((5, 3), ((12, 12), (12,)), gap=gap, spare=spare))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("leading", "scale"), [(0, 1.0), (8, 1.0), (128, 1.0), (16, 0.5)])
def test_gradients_in_the_wire_dtype_are_sent_as_they_are(dtype: torch.dtype, leading: int, scale: float) -> None:
    world = World(Case((5, 3), ((12, 128), (12,)), dtype, dtype, leading))
    for rank in range(2):
        world.push(rank, scale)
    world.assert_windows(scale)


def test_parts_are_sent_one_by_one() -> None:
    world = World(Case((4, 0, 3), ((12,) * 6, (), (4, 12)), parts=3))
    for part in range(3):
        for rank in world.owners:
            world.push(rank, 0.5, epoch=4, parts=range(part, part + 1))
        for ready in world.ready:
            assert ready.tolist() == [[4] * (part + 1) + [0] * (2 - part)] * 3
    world.assert_windows(0.5)
    assert world.done.tolist() == [0, 0, 0]
