"""Several ranks in one process: tables, ids and windows are CPU tensors, and kernels run one rank after another.

Triton's interpreter takes 0.1 to 0.6 ms an operation, and runs the programs of a launch one after another.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import gcd

import pytest
import torch

from dlrm_overlap.comm.device_errors import DeviceErrorRecord
from dlrm_overlap.kernels import reference
from dlrm_overlap.kernels.bags import Bags, FeatureTable, Windows
from dlrm_overlap.kernels.compiled import INTERPRETED
from dlrm_overlap.kernels.flags import Flags, signal_flags
from dlrm_overlap.kernels.forward.put_slices import SlicedPut, Slices, SliceState
from dlrm_overlap.kernels.forward.store_pooled import prepare_store_pooled
from dlrm_overlap.kernels.tuning import PoolingOptions, Tuning, tuning_for
from tests.agreement import assert_same
from tests.kernels.tasks import TaskGrid

interpreted = pytest.mark.skipif(not INTERPRETED, reason="CPU tensors need TRITON_INTERPRET=1")

GUARD = -7.0  # around the elements that a kernel may write, which are NaN before
_GUARDS = 8  # at each end of a tensor that must begin at a multiple of 16 bytes
CPU = torch.device("cpu")
CLOCK = torch.zeros(1, dtype=torch.int64)  # of eager steps: nothing is counted on the device


@dataclass(frozen=True)
class Case:
    """What ranks pool, and how."""

    batch_sizes: tuple[int, ...] = (5, 3)  # samples of each rank
    features: tuple[int, ...] = (3, 2)  # that each rank pools; the first two share a table; odd ones are means
    dim: int = 12
    weights: torch.dtype = torch.float32
    wire: torch.dtype = torch.float32
    ids: torch.dtype = torch.int32
    offsets: torch.dtype = torch.int32
    schedule: str = "balanced"
    gap: int = 4  # guard columns around each feature: columns are multiples of 4, but not of 8
    longest: int = 4  # ids of the longest bag
    tuning: Tuning | None = None  # None is the default for dim
    check: bool = True
    leaves_out: bool = False  # whether empty bags of even features are not stored
    weighted: bool = False  # whether ids have weights

    @property
    def world_size(self) -> int:
        return len(self.batch_sizes)


def to_wire(pooled: torch.Tensor, wire: torch.dtype) -> torch.Tensor:
    """Return `pooled` as the interpreter stores it: it truncates to bfloat16 where hardware rounds to the nearest."""
    if wire == torch.bfloat16:
        pooled = (pooled.contiguous().view(torch.int32) & -0x10000).view(torch.float32)
    return pooled.to(wire)


class Ids:
    """The ids of one rank's features for all samples: every fifth bag is empty, the second is the longest."""

    def __init__(self, case: Case, features: int, rows: int, generator: torch.Generator) -> None:
        self.samples = sum(case.batch_sizes)
        self.lengths = torch.randint(0, case.longest + 1, (features * self.samples,), generator=generator)
        self.lengths[::5] = 0
        self.lengths[1:2] = case.longest
        self.offsets = torch.cat((torch.zeros(1, dtype=torch.int64), self.lengths.cumsum(0))).to(case.offsets)
        count = int(self.lengths.sum())
        # The values begin one element into their storage: batches are views that may begin anywhere.
        self.storage = torch.full((count + 2,), -1, dtype=case.ids)
        self.values = self.storage[1:-1]
        self.values.copy_(torch.randint(0, rows, (count,), generator=generator))
        drawn = torch.randint(-4, 5, (count + 1,), generator=generator)[1:] / 4  # some are 0 or negative
        self.weights = drawn if case.weighted else None

    def bags(self, feature: int, first: int, end: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Return lengths, ids and their weights of the bags of samples first .. end - 1 of the input's `feature`."""
        bag = feature * self.samples
        here = slice(int(self.offsets[bag + first]), int(self.offsets[bag + end]))
        weights = None if self.weights is None else self.weights[here]
        return self.lengths[bag + first : bag + end], self.values[here], weights


class World:
    """All ranks of a case: their inputs, and the expected content of their windows."""

    ROWS = 11

    def __init__(self, case: Case, seed: int = 0) -> None:
        self.case = case
        generator = torch.Generator().manual_seed(seed)
        self.first_sample = torch.tensor([0, *case.batch_sizes]).cumsum(0).int()
        self.tuning = case.tuning or tuning_for(case.dim, case.weights.itemsize)
        self.samples = max(case.batch_sizes)
        self.ids = [Ids(case, count, self.ROWS, generator) for count in case.features]
        # Each rank's tables are in one allocation, one after another; the last rows belong to no table.
        self.storage = [
            torch.randn(max(1, count) + 1, self.ROWS, case.dim, generator=generator).to(case.weights)
            for count in case.features
        ]
        self.columns = self._columns()
        self.stride = sum(case.features) * (case.dim + case.gap) + case.gap
        # With a guard row above and below the rows of the rank with the most samples.
        self.windows = [torch.full((self.samples + 2, self.stride), GUARD, dtype=case.wire) for _ in case.batch_sizes]
        self.records = [DeviceErrorRecord(CPU) for _ in case.batch_sizes]
        self.rows_to_check = [self.ROWS] * max(case.features)  # by feature; if negative, bad ids are not recorded
        self._poison()

    def _columns(self) -> list[list[int]]:
        starts = iter(range(self.case.gap, 1 << 30, self.case.dim + self.case.gap))
        return [[next(starts) for _ in range(count)] for count in self.case.features]

    @cached_property
    def _shards(self) -> list[tuple[int, int, slice]]:
        """Rank, feature of this rank and its columns, for all features."""
        return [
            (rank, feature, slice(column, column + self.case.dim))
            for rank, columns in enumerate(self.columns)
            for feature, column in enumerate(columns)
        ]

    def _poison(self) -> None:
        for window, samples in zip(self.windows, self.case.batch_sizes, strict=True):
            for _, _, columns in self._shards:
                window[1 : samples + 1, columns] = torch.nan

    def table(self, rank: int, feature: int) -> torch.Tensor:
        """Return the rows of a feature's table; the first two features share one."""
        return self.storage[rank][max(0, feature - 1)]

    def input_feature(self, rank: int, feature: int) -> int:
        """Return the index of the feature in its input, whose order is reversed."""
        return self.case.features[rank] - 1 - feature

    def pooled(self, rank: int, feature: int, destination: int) -> torch.Tensor:
        """Return [b, D] float32 of the destination's samples."""
        first, end = self.first_sample[destination : destination + 2].tolist()
        lengths, values, weights = self.ids[rank].bags(self.input_feature(rank, feature), first, end)
        return reference.pool(self.table(rank, feature), lengths, values, feature % 2 == 1, weights)

    def expected(self) -> list[torch.Tensor]:
        """Return the windows, guards included. Sums are in the order of the ids, so they are equal to the last bit."""
        windows = [torch.full_like(window, GUARD) for window in self.windows]
        for destination, (window, samples) in enumerate(zip(windows, self.case.batch_sizes, strict=True)):
            for rank, feature, columns in self._shards:
                pooled = to_wire(self.pooled(rank, feature, destination), self.case.wire)
                if self.case.leaves_out and feature % 2 == 0:
                    first, end = self.first_sample[destination : destination + 2].tolist()
                    lengths, *_ = self.ids[rank].bags(self.input_feature(rank, feature), first, end)
                    pooled[lengths == 0] = torch.nan  # not written
                window[1 : samples + 1, columns] = pooled
        return windows

    def assert_windows(self) -> None:
        """Check every element of every window."""
        for rank, (window, expected) in enumerate(zip(self.windows, self.expected(), strict=True)):
            assert_same(window, expected, f"window of rank {rank}")

    def bags(self, rank: int) -> Bags:
        ids = self.ids[rank]
        return Bags(ids.values, ids.offsets, self.first_sample, ids.samples, self.samples, ids.weights)

    def feature_table(self, rank: int) -> FeatureTable:
        case, features = self.case, range(self.case.features[rank])
        tables = [self.table(rank, feature) for feature in features]
        entries = []
        for feature, table, column in zip(features, tables, self.columns[rank], strict=True):
            is_mean, read_from = feature % 2, self.input_feature(rank, feature)
            entries.append([table.data_ptr(), self.rows_to_check[feature], column, read_from, is_mean, 1 - is_mean])
        return FeatureTable(
            entries=torch.tensor(entries, dtype=torch.int64).view(-1, 6),
            dim=case.dim,
            weight_dtype=case.weights,
            alignment=gcd(16, case.dim * case.weights.itemsize, *(table.data_ptr() for table in tables)),
            column_alignment=gcd(16, *self.columns[rank]),
            leaves_out=case.leaves_out,
        )

    def destinations(self) -> Windows:
        addresses = [window[1].data_ptr() for window in self.windows]
        return Windows(torch.tensor(addresses), self.stride, self.case.wire, alignment=gcd(16, *addresses))

    def options(self, rank: int) -> PoolingOptions:
        return PoolingOptions(rank, self.case.schedule, self.tuning, self.case.check)

    def store_pooled(self, rank: int) -> None:
        """Run the zero-copy kernel of one rank."""
        bags, features, status = self.bags(rank), self.feature_table(rank), self.records[rank].status
        prepare_store_pooled(bags, features, self.destinations(), status, self.options(rank))(*bags.tensors)

    def assert_no_record(self) -> None:
        for rank, record in enumerate(self.records):
            assert record.bad_id() is None, f"rank {rank}"
            assert record.expired() is None, f"rank {rank}"


class SlicedWorld(World):
    """A world whose ranks put slices: with flags, and the state that a persistent kernel's programs share."""

    def __init__(self, case: Case, slice_tasks: int = 2, first_slot: int = 0, spare: int = 0, seed: int = 0) -> None:
        """Make slices of `slice_tasks` tasks, and `spare` more slots than the ranks need."""
        super().__init__(case, seed)
        self.first_slot, self.slice_bags = first_slot, slice_tasks * self.tuning.task_bags
        self.grids = [
            TaskGrid(rank, case.world_size, count, self.samples, self.tuning.task_bags)
            for rank, count in enumerate(case.features)
        ]
        self.slices = -(-self.samples // self.slice_bags)  # of a feature and a destination
        self.used = [grid.features * self.slices for grid in self.grids]
        slots = first_slot + max(self.used) + spare
        self.in_place = False
        self.ready = [torch.zeros(case.world_size, slots, dtype=torch.int64) for _ in case.batch_sizes]
        self.shared = [self._make_shared(grid) for grid in self.grids]

    def _make_shared(self, grid: TaskGrid) -> tuple[SliceState, torch.Tensor, torch.Tensor]:
        """Return the state of a rank's programs, and its staging buffer and counters with their guards."""
        pairs = grid.world_size * grid.features
        staged = pairs * grid.blocks * grid.task_bags * self.case.dim
        staging = torch.full((staged + 2 * _GUARDS,), GUARD, dtype=self.case.wire)
        staging[_GUARDS:-_GUARDS] = torch.nan
        done = torch.full((pairs * self.slices + 2 * _GUARDS,), int(GUARD), dtype=torch.int32)
        done[_GUARDS:-_GUARDS] = 0
        ticket = torch.zeros(3, dtype=torch.int32)
        return SliceState(staging[_GUARDS:-_GUARDS], done[_GUARDS:-_GUARDS], ticket), staging, done

    def flags(self, rank: int, counts: Sequence[int] | None = None, timeout: int = 3) -> Flags:
        """Return a rank's flags; it waits for the first counts[w] of rank w, for up to `timeout` turns."""
        return Flags(
            addresses=torch.tensor([ready.data_ptr() for ready in self.ready]),
            clock=CLOCK,
            local=self.ready[rank],
            counts=torch.tensor(counts or [0] * self.case.world_size).int(),
            timeout=timeout,
            status=self.records[rank].status,
        )

    def put_slices(
        self,
        rank: int,
        epoch: int = 1,
        programs: int = 2,
        counts: Sequence[int] | None = None,
        in_place: bool = False,
        raises: bool = True,
    ) -> None:
        """Run the persistent kernel of one rank; at its end it waits for `counts` flags, if given.

        In place, a rank without features only signals, as in the exchange.
        """
        self.in_place = in_place
        if self.in_place and not self.case.features[rank]:
            signal_flags(self.flags(rank), rank, 0, epoch)
            return
        slices = Slices(self.slice_bags, self.first_slot, in_place, raises, end_wait=counts is not None)
        bags = self.bags(rank)
        put = SlicedPut(
            bags, self.feature_table(rank), self.destinations(), self.flags(rank, counts), self.shared[rank][0],
            self.options(rank), slices,
        )  # fmt: skip
        put.launch(programs)(*bags.tensors, epoch)

    def assert_flags(self, epoch: int) -> None:
        """Check that all used slots, except a rank's own, are at `epoch`, and that no other was changed.

        In place, these are the first slots of all ranks, their own included.
        """
        for rank, ready in enumerate(self.ready):
            expected = torch.zeros_like(ready)
            for source, used in enumerate(self.used):
                if self.in_place:
                    expected[source, 0] = epoch
                elif source != rank:
                    expected[source, self.first_slot : self.first_slot + used] = epoch
            assert_same(ready, expected, f"flags at rank {rank} (source, slot)")

    def assert_ready_for_another_launch(self) -> None:
        for rank, (state, staging, done) in enumerate(self.shared):
            expected = torch.full_like(done, int(GUARD))
            expected[_GUARDS:-_GUARDS] = 0
            assert_same(done, expected, f"done of rank {rank}")
            assert_same(state.ticket, torch.zeros_like(state.ticket), f"ticket of rank {rank}")
            guards = torch.cat((staging[:_GUARDS], staging[-_GUARDS:]))
            assert_same(guards, torch.full_like(guards, GUARD), f"guards of the staging of rank {rank}")


fp16, bf16, fp32 = torch.float16, torch.bfloat16, torch.float32
CASES = {
    "one_rank": Case((5,), (3,), dim=4, schedule="linear"),
    "two_ranks_linear": Case(schedule="linear"),
    "two_ranks_remote_first": Case(schedule="remote_first"),
    "three_ranks_balanced": Case((4, 4, 4), (1, 2, 1), dim=4),
    "three_ranks_linear": Case((1, 6, 4), (1, 2, 1), dim=4, schedule="linear"),
    "four_ranks_balanced": Case((2, 5, 1, 3), (1, 1, 2, 1), dim=4),
    "four_ranks_remote_first": Case((6, 1, 3, 2), (1, 2, 1, 1), dim=4, schedule="remote_first"),
    "a_rank_without_samples": Case((3, 0, 2), (1, 1, 2), dim=4),
    "a_rank_without_tables": Case((3, 5), (0, 2), dim=4, schedule="linear"),
    "empty_bags_only": Case((3, 2), (2, 1), longest=0),
    "empty_bags_left_out": Case((5, 4), (3, 1), longest=1, leaves_out=True),
    "long_bags": Case((2, 3), (1, 1), longest=11),
    "weighted": Case(weighted=True),
    "weighted_fp16_rows_int64": Case((3, 4), (2, 1), 64, fp16, bf16, torch.int64, leaves_out=True, weighted=True),
    "int64": Case(ids=torch.int64, offsets=torch.int64),
    "int64_ids_int32_offsets": Case((3, 4), (2, 1), dim=64, ids=torch.int64),
    "int32_ids_int64_offsets": Case((3, 4), (2, 1), dim=64, offsets=torch.int64),
    "columns_side_by_side": Case((4, 2), (2, 2), dim=64, gap=0),
    "one_bag_a_task": Case((3, 2), (1, 2), dim=4, tuning=Tuning(task_bags=1, unroll=3, num_warps=1)),
    "eight_bags_a_task": Case((7, 9), (1, 1), dim=4, tuning=Tuning(task_bags=8, unroll=1, num_warps=1)),
}
# Every dim with every type of rows, and every type of rows with every type of the wire.
CASES |= {
    f"dim_{dim}_{str(weights)[6:]}_rows_{str(wire)[6:]}_wire": Case((2, 3), (2, 1), dim, weights, wire, longest=2)
    for turn, dim in enumerate((4, 12, 64, 92, 128, 1020, 1024))
    for row, weights in enumerate((fp32, fp16, bf16))
    for wire in [(fp32, bf16, fp16)[(turn + row) % 3]]
}
every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)
