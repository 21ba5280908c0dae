from collections.abc import Sequence

import pytest
import torch

from dlrm_overlap.comm.device_errors import DeviceErrorRecord
from dlrm_overlap.kernels import reference
from dlrm_overlap.kernels.pull_ids import (
    ANY_ID,
    Arrivals,
    Published,
    arguments_of,
    prepare_locate,
    prepare_pull,
    pull_tasks,
)
from tests.agreement import assert_same
from tests.kernels.emulation import CPU, interpreted
from tests.kernels.test_divide_ids import wide_ids

pytestmark = interpreted

GUARD = -7
_BLOCK = 4


class Ranks:
    """The windows of several ranks, and a rank that pulls some features from them."""

    def __init__(
        self, bag_sizes: Sequence[tuple[int, int]], world_size: int = 3, samples: int = 5, wide: bool = False
    ) -> None:
        generator = torch.Generator().manual_seed(0)
        self.world_size, self.samples = world_size, samples
        self.capacities = [samples * most for _, most in bag_sizes]
        self.weights_at = sum(self.capacities) + 3
        self.high_at = 2 * self.weights_at * wide
        self.offsets_at = (2 + wide) * self.weights_at
        self.record = DeviceErrorRecord(CPU)
        self.published: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.windows: list[torch.Tensor] = []
        for _ in range(world_size):
            sizes = [torch.randint(low, high + 1, (samples,), generator=generator) for low, high in bag_sizes]
            offsets = torch.cat([torch.zeros(1, dtype=torch.int64), torch.cat(sizes).cumsum(0)]).int()
            ids = torch.randint(0, 100, (int(offsets[-1]),), generator=generator).int()
            window = torch.full((self.offsets_at + offsets.numel(),), GUARD, dtype=torch.int32)
            if wide:
                ids = wide_ids(ids.numel(), generator)
                window[self.high_at : self.high_at + ids.numel()] = reference.split_words(ids)[1]
            window[: ids.numel()] = ids.int()
            weights = torch.randint(-4, 5, ids.shape, generator=generator) / 4
            window[self.weights_at : self.weights_at + ids.numel()] = weights.view(torch.int32)
            window[self.offsets_at :] = offsets
            self.published.append((ids, offsets))
            self.windows.append(window)

    def ask(self, requested: Sequence[int], rows: int = 100) -> Published:
        return Published(
            windows=torch.tensor([window.data_ptr() for window in self.windows]),
            offsets_at=self.offsets_at,
            weights_at=self.weights_at,
            requested=torch.tensor(requested).int(),
            rows=torch.full((len(requested),), rows).int(),
            capacities=torch.tensor(self.capacities).int(),
            high_at=self.high_at,
        )

    def pull(
        self,
        requested: Sequence[int],
        rows: int = 100,
        known: Arrivals | None = None,
        check: bool = True,
        weights: torch.Tensor | None = None,
        high: torch.Tensor | None = None,
        any_id: Sequence[int] = (),
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the values and offsets that arrive, with their padding."""
        pairs, batch = len(requested) * self.world_size, self.world_size * self.samples
        capacity = self.world_size * sum(self.capacities[feature] for feature in requested)
        values = torch.full((capacity + 1,), GUARD, dtype=torch.int32)
        offsets = torch.full(((len(requested) + 1) * batch + 2,), GUARD, dtype=torch.int32)
        arrivals = known or Arrivals(*(torch.full((pairs + (i == 2),), GUARD, dtype=torch.int32) for i in range(3)))
        published, lengths = self.ask(requested, rows), known is None
        for shard in any_id:
            published.rows[shard] = ANY_ID.value
        total = self.published[0][0].numel()
        prepare_locate(published, arrivals, self.record.status, self.samples, lengths, total)()
        here = [self.capacities[feature] for feature in requested]
        tasks = pull_tasks(here, self.world_size, self.samples, capacity * lengths, _BLOCK)
        arrived = values[:-1], offsets, weights, high
        prepare_pull(
            published, arrivals, torch.tensor(tasks).int().view(-1, 3), arrived, self.record.status, self.samples,
            lengths=lengths, check=check, block=_BLOCK,
        )(*arguments_of(arrived))  # fmt: skip
        assert values[-1] == GUARD
        assert offsets[-1] == GUARD
        return values[:-1], offsets[:-1]


@pytest.mark.parametrize("requested", [[0], [1, 0], [2, 1], [2, 2, 0]])
@pytest.mark.parametrize("world_size", [1, 3])
def test_ids_arrive_with_their_offsets_and_are_padded(requested: list[int], world_size: int) -> None:
    ranks = Ranks([(0, 3), (1, 1), (0, 7)], world_size)
    weights = torch.full((200,), float(GUARD))
    values, offsets = ranks.pull(requested, weights=weights)
    expected_values, expected_offsets = reference.pull_ids(ranks.published, requested, ranks.samples)
    published = zip(ranks.windows, ranks.published, strict=True)
    weighted = [(window[ranks.weights_at :], bags) for window, (_, bags) in published]
    expected_weights, _ = reference.pull_ids(weighted, requested, ranks.samples)
    arrived, bags = expected_values.numel(), expected_offsets.numel()
    assert_same(weights[:arrived], expected_weights.view(torch.float32), "weights")
    assert (weights[arrived:] == GUARD).all()
    assert_same(values[:arrived], expected_values, "values")
    assert_same(offsets[:bags], expected_offsets, "offsets")
    assert_same(values[arrived:], torch.zeros_like(values[arrived:]), "padding")
    padding = offsets[bags - 1 :]
    assert padding[0] == arrived
    assert padding[-1] == values.numel()
    assert padding.numel() == world_size * ranks.samples + 1
    assert 0 <= int(padding.diff().min()) <= int(padding.diff().max()) <= int(padding.diff().min()) + 1
    assert ranks.record.empty


@pytest.mark.parametrize("check", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
def test_ids_of_64_bits_arrive_for_tables_of_any_id(weighted: bool, check: bool) -> None:
    """Shards 0 and 2 are of such tables; shard 1 has 8 rows, and none but those ids are checked."""
    ranks, requested = Ranks([(0, 3), (1, 4)], wide=True), [1, 1, 0]
    weights = torch.full((200,), float(GUARD)) if weighted else None
    capacity = ranks.world_size * sum(ranks.capacities[feature] for feature in requested)
    high = torch.full((capacity + 1,), GUARD, dtype=torch.int32)
    values, offsets = ranks.pull(requested, 8, None, check, weights, high[:-1], any_id=[0, 2])
    assert high[-1] == GUARD
    expected, bags = reference.pull_ids(ranks.published, requested, ranks.samples)
    arrived, batch = expected.numel(), ranks.world_size * ranks.samples
    begin, end = int(bags[batch]), int(bags[2 * batch])
    rows = reference.rows_of(expected[begin:end])
    outside = (rows < 0) | (rows >= 8)
    assert outside.any()
    expected[begin:end] = rows.masked_fill(outside, 0) if check else rows
    low, expected_high = reference.split_words(expected)
    expected_high[begin:end] = 0
    assert_same(values[:arrived], low, "low words")
    assert_same(high[:arrived], expected_high, "high words")
    assert_same(offsets[: bags.numel()], bags, "offsets")
    assert not values[arrived:].any()
    assert not high[arrived:-1].any()
    if weights is not None:
        published = zip(ranks.windows, ranks.published, strict=True)
        of = [(window[ranks.weights_at :], bags) for window, (_, bags) in published]
        expected_weights = reference.pull_ids(of, requested, ranks.samples)[0].view(torch.float32)
        assert_same(weights[:arrived], expected_weights, "weights")
    record = ranks.record.bad_arrival()
    assert (record is None) == (not check)
    if record is not None:
        shard, source, index, value, limit = record
        bag = batch + source * ranks.samples
        assert (shard, value, limit) == (1, int(rows[int(bags[bag]) - begin + index]), 8)


def _known(ranks: Ranks, hots: Sequence[int], requested: Sequence[int]) -> Arrivals:
    starts = torch.tensor([0, *hots]).cumsum(0) * ranks.samples
    counts = torch.tensor([hots[f] * ranks.samples for f in requested for _ in range(ranks.world_size)])
    sources = torch.tensor([int(starts[f]) for f in requested for _ in range(ranks.world_size)])
    arrivals = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
    return Arrivals(sources.int(), counts.int(), arrivals.int())


def test_known_lengths_need_no_offsets() -> None:
    hots, requested = [3, 1, 2], [2, 0]
    ranks = Ranks([(hot, hot) for hot in hots])
    expected, _ = reference.pull_ids(ranks.published, requested, ranks.samples)
    known = _known(ranks, hots, requested)
    for window, (ids, _) in zip(ranks.windows, ranks.published, strict=True):
        window[ranks.offsets_at :] = GUARD
        window[ranks.offsets_at] = ids.numel()
    values, offsets = ranks.pull(requested, known=known)
    assert_same(values, expected, "values")
    assert_same(offsets, torch.full_like(offsets, GUARD), "offsets, which are known already")
    assert ranks.record.empty


def test_a_number_of_ids_other_than_the_known_one_is_recorded() -> None:
    ranks = Ranks([(2, 2), (1, 1)])
    known = _known(ranks, [2, 1], [1])
    for rank, window in enumerate(ranks.windows):
        window[ranks.offsets_at] = 15 - (rank == 1)
    ranks.pull([1], known=known)
    record = ranks.record.overflow()
    assert record is not None
    assert (record[0], record[2], record[3]) == (1, 14, 15)


@pytest.mark.parametrize("requested", [[0], [1], []])  # every rank finds it, whichever features it pulls
def test_a_batch_beyond_its_capacity_is_recorded(requested: list[int]) -> None:
    ranks = Ranks([(1, 2), (3, 3)])
    ranks.capacities[1] = 14
    for rank in (0, 1):
        window, (_, offsets) = ranks.windows[rank], ranks.published[rank]
        window[ranks.offsets_at + 10 : ranks.offsets_at + offsets.numel()] -= 1  # 14 ids of feature 1, the last 9 bags
    arrivals = Arrivals(*(torch.zeros(20, dtype=torch.int32) for _ in range(3)))
    prepare_locate(ranks.ask(requested), arrivals, ranks.record.status, ranks.samples, lengths=True, total=0)()
    assert ranks.record.overflow() == [2, 1, 15, 14]


def test_negative_lengths_are_recorded() -> None:
    ranks = Ranks([(1, 2), (3, 3)])
    offsets = ranks.windows[1][ranks.offsets_at :]
    offsets[ranks.samples + 1 :] -= int(offsets[-1] - offsets[ranks.samples]) + 4
    values, _ = ranks.pull([1])
    assert_same(values, torch.zeros_like(values), "values")
    record = ranks.record.overflow()
    assert record is not None
    assert record[:3] == [1, 1, -4]


@pytest.mark.parametrize("wrong", [-1, 100, 2**31 - 1, -(2**31)])
@pytest.mark.parametrize(("check", "rows"), [(True, 100), (True, -100), (False, 100)])
def test_an_id_outside_its_table_is_recorded_and_row_0_taken(wrong: int, check: bool, rows: int) -> None:
    """None is recorded if the number of rows is negative."""
    ranks = Ranks([(2, 2), (1, 3)])
    expected, _ = reference.pull_ids(ranks.published, [1, 0], ranks.samples)
    ranks.windows[1][3] = wrong  # of feature 0, the 4th id of rank 1
    values, _ = ranks.pull([1, 0], rows=rows, check=check)
    expected[expected.numel() - 2 * 10 + 3] = 0 if check else wrong
    assert_same(values[: expected.numel()], expected, "values")
    assert ranks.record.bad_arrival() == ([1, 1, 3, wrong, 100] if check and rows > 0 else None)


def test_no_id_arrives_in_a_step_with_a_batch_beyond_its_capacity() -> None:
    ranks = Ranks([(1, 2), (3, 3)])
    ranks.capacities[1] = 14
    values, offsets = ranks.pull([1, 0])
    assert_same(values, torch.zeros_like(values), "values")
    bags = 2 * ranks.world_size * ranks.samples + 1
    assert_same(offsets[:bags], torch.zeros_like(offsets[:bags]), "offsets")
    assert ranks.record.overflow() is not None
