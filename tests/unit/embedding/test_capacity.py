"""The bound that is learnt from batches, worked by hand; and when a batch is captured or beyond it."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dlrm_overlap.embedding.capacity import CapacityTracker, RankConsensus, ended
from dlrm_overlap.embedding.id_layout import BatchCapacity
from dlrm_overlap.train.graphs.static_batch import BatchTensors


def _batch(*bags: list[int]) -> BatchTensors:
    """Return a batch of features f, g .. by the numbers of ids of their bags."""
    lengths = torch.tensor([length for feature in bags for length in feature])
    ids = KeyedJaggedTensor(list("fgh"[: len(bags)]), torch.zeros(int(lengths.sum())).int(), lengths=lengths)
    return BatchTensors({"ids": ids})


def _learnt(group: dist.ProcessGroup, *batches: Any, bound: BatchCapacity | None = None) -> CapacityTracker:
    """Return what has been learnt of batches, each of which but the first is beyond the bound."""
    learnt = CapacityTracker(bound, RankConsensus(group, lambda: None))
    for index, batch in enumerate(batches):
        if index == 0:
            assert learnt.learn(batch)
        else:
            numbers = learnt.ask(learnt.describe(batch)).wait()
            assert learnt.are_beyond(numbers)
            learnt.grow(numbers)
        numbers = learnt.ask(learnt.describe(batch)).wait()
        assert learnt.are_captured(numbers)
    return learnt


def test_the_worked_example(world_of_one: dist.ProcessGroup) -> None:
    first = _batch([1, 0], [2, 1])
    learnt = _learnt(world_of_one, first)
    assert learnt.describe(first).numbers.tolist() == [0, 0, 2, *(1, 3), *(1, 2), *(0, -1)]
    assert learnt.capacity.capacity(["f", "g"]) == [2, 4]
    assert _learnt(world_of_one, first, _batch([1, 0], [5, 0])).capacity.capacity(["f", "g"]) == [2, 8]


def test_the_sizes_of_several_tensors_of_ids_are_those_of_their_features(world_of_one: dist.ProcessGroup) -> None:
    bags = {"f": [1, 0], "g": [2, 1], "h": [0, 5]}
    ids = [
        KeyedJaggedTensor(
            keys,
            torch.zeros(sum(sum(bags[key]) for key in keys)).int(),
            lengths=torch.tensor([length for key in keys for length in bags[key]]),
        )
        for keys in (["f"], ["g", "h"])
    ]
    learnt = _learnt(world_of_one, batch := BatchTensors(ids))
    assert learnt.describe(batch).numbers.tolist() == [0, 0, 2, *(1, 3, 5), *(1, 2, 5), *(0, -1, 0)]
    assert learnt.capacity.capacity(["f", "g", "h"]) == [2, 4, 7]


def test_long_tails_take_the_room_of_their_ids_not_of_their_largest_bag(world_of_one: dist.ProcessGroup) -> None:
    bound = _learnt(world_of_one, _batch([100, *[1] * 99], [1] * 100)).capacity
    assert bound.capacity(["f", "g"]) == [249, 100]
    assert (bound.samples, bound.known_lengths) == (100, False)


def test_equal_lengths_are_known_until_a_batch_differs(world_of_one: dist.ProcessGroup) -> None:
    fixed = _learnt(world_of_one, _batch([1, 1, 1, 1], [2, 2, 2, 2]))
    assert fixed.capacity == BatchCapacity(4, {"f": (1, 1), "g": (2, 2)})
    batches = _batch([1], [2]), _batch([1] * 4, [2, 2, 2, 1])
    fewer, shorter = (fixed.ask(fixed.describe(batch)).wait() for batch in batches)
    assert fixed.are_captured(fewer)
    assert fixed.are_beyond(shorter)
    fixed.grow(shorter)
    assert (fixed.capacity.known_lengths, fixed.capacity.capacity(["f", "g"])) == (False, [4, 8])


@pytest.mark.parametrize(
    ("batch", "grown"),
    [
        (_batch([1, 0], [60, 0]), None),  # a bag is larger, but the batch is not
        (_batch([2, 2], [0, 0]), BatchCapacity(2, {"f": (0, 2), "g": (0, 50)}, {"f": 5})),
        (_batch([1, 1, 1], [0, 9, 0]), BatchCapacity(3, {"f": (0, 1), "g": (0, 50)}, {"f": 4})),
    ],
)
def test_a_bound_that_is_given_grows(world_of_one: dist.ProcessGroup, batch: Any, grown: BatchCapacity | None) -> None:
    given = BatchCapacity(2, {"f": (0, 1), "g": (0, 50)})
    first = _batch([1, 0], [1, 0])
    learnt = _learnt(world_of_one, first, *([batch] if grown else []), bound=given)
    assert learnt.capacity == (grown or given)
    assert learnt.are_captured(learnt.ask(learnt.describe(batch)).wait())


def test_a_batch_unlike_the_first_and_the_end_are_not_captured(world_of_one: dist.ProcessGroup) -> None:
    learnt = _learnt(world_of_one, first := _batch([1, 0], [2, 1]))
    unlike, end = learnt.ask(learnt.describe(first), is_mismatch=True).wait(), learnt.ask(None).wait()
    assert not learnt.are_captured(unlike)
    assert not learnt.are_beyond(unlike)
    assert (ended(end), ended(unlike)) == (True, False)
    assert not learnt.learn(None)


def test_after_a_batch_of_no_sample_lengths_are_not_known(world_of_one: dist.ProcessGroup) -> None:
    """It is padded by empty bags, since it has no ids to repeat; its largest bag says nothing."""
    empty, fixed = _batch([], []), _learnt(world_of_one, _batch([1, 1], [2, 2]))
    assert fixed.describe(empty).numbers.tolist() == [0, 0, 0, *(0, 0), *[-(2**31)] * 2, *(0, 0)]
    numbers = fixed.ask(fixed.describe(empty)).wait()
    assert fixed.are_beyond(numbers)
    fixed.grow(numbers)
    assert fixed.capacity.bag_sizes == {"f": (0, 1), "g": (0, 2)}
    assert fixed.are_captured(fixed.ask(fixed.describe(empty)).wait())
    assert _learnt(world_of_one, empty).capacity == BatchCapacity(1, {"f": (0, 0), "g": (0, 0)})


def test_an_answer_waits_for_no_later_question(world_of_one: dist.ProcessGroup) -> None:
    class Written:
        waits = 0

        def synchronize(self) -> None:
            self.waits += 1

        def record_event(self, _: Any) -> "Written":
            return self

    agreement, first, second = RankConsensus(world_of_one, lambda: None), Written(), Written()
    streams = iter([first, second])
    agreement._current = lambda: next(streams)  # type: ignore[assignment, return-value]
    numbers = [torch.tensor([number], dtype=torch.int64) for number in (1, 2)]
    earlier, later = (agreement.ask(each, are_pending=True) for each in numbers)
    assert (earlier.wait().tolist(), first.waits, second.waits) == ([1], 1, 0)
    assert (later.wait().tolist(), second.waits) == ([2], 1)
