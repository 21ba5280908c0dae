"""The steps that are planned for batches: captured, eager or the end, each from the buffer whose turn it is."""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dlrm_overlap.comm.order import CommunicationOrder, Streams
from dlrm_overlap.embedding.capacity import CapacityTracker, RankConsensus
from dlrm_overlap.train.graphs.input_prefetcher import InputPrefetcher, StepKind
from dlrm_overlap.train.graphs.model_ids import ModelIds
from tests.agreement import assert_same

CPU = torch.device("cpu")
CAPTURED, EAGER, END = StepKind.CAPTURED, StepKind.EAGER, StepKind.END


@pytest.fixture
def prefetcher(world_of_one: dist.ProcessGroup) -> InputPrefetcher:
    consensus = RankConsensus(world_of_one, lambda: None)
    ids = ModelIds([], CommunicationOrder())
    return InputPrefetcher(CPU, CapacityTracker(None, consensus), Streams(CPU), ids)


def _batches(*sizes: int) -> Iterator[dict[str, torch.Tensor]]:
    yield from ({"x": torch.full((size,), float(number))} for number, size in enumerate(sizes))


def _take(prefetcher: InputPrefetcher, batches: Iterator[Any]) -> tuple[StepKind, int, bool, float]:
    """Take a step as the pipeline does, and return its kind, buffer, whether it is the first, and what it has read."""
    step = prefetcher.plan(batches)
    if step.kind is END:
        return END, step.buffer_index, step.is_first, -1.0
    if step.kind is CAPTURED:
        prefetcher.activate(step)
    values = step.batch(CPU)["x"]
    assert_same(values, values[:1].expand_as(values), "a batch")
    found = step.kind, step.buffer_index, step.is_first, float(values[0])
    del step, values
    prefetcher.finish(batches)
    return found


def test_steps_are_planned_in_turn_until_the_end(prefetcher: InputPrefetcher) -> None:
    batches = _batches(2, 2, 3, 2)
    assert [_take(prefetcher, batches) for _ in range(5)] == [
        (CAPTURED, 0, True, 0.0),
        (CAPTURED, 1, False, 1.0),
        (EAGER, 0, False, 2.0),
        (CAPTURED, 1, False, 3.0),
        (END, 0, True, -1.0),
    ]
    assert _take(prefetcher, _batches(2)) == (CAPTURED, 0, True, 0.0), "of another iterator"


def test_eager_steps_have_all_ids_of_batches_beyond_the_capacity(prefetcher: InputPrefetcher) -> None:
    lengths = [[1, 2], [2, 1], [40, 2], [0, 1]]
    given = [
        KeyedJaggedTensor(["f"], torch.arange(sum(each)) + number, lengths=torch.tensor(each))
        for number, each in enumerate(lengths)
    ]
    batches, kinds = iter([{"ids": ids} for ids in given]), []
    for expected in given:
        step = prefetcher.plan(batches)
        kinds.append(step.kind)
        if step.kind is CAPTURED:
            prefetcher.activate(step)
        ids = step.batch(CPU)["ids"]
        assert_same(ids.values(), expected.values(), "ids")
        assert_same(ids.lengths(), expected.lengths(), "lengths")
        del step, ids
        prefetcher.finish(batches)
    assert kinds == [CAPTURED, CAPTURED, EAGER, CAPTURED]


def test_steps_of_batches_that_were_read_before_are_eager_without_buffers(prefetcher: InputPrefetcher) -> None:
    batches = _batches(2, 2, 2, 3, 3)
    assert _take(prefetcher, batches)[0] is CAPTURED
    prefetcher.drop_buffers()
    found = [(kind, value) for kind, _, _, value in (_take(prefetcher, batches) for _ in range(4))]
    assert found == [(EAGER, 1.0), (EAGER, 2.0), (CAPTURED, 3.0), (CAPTURED, 4.0)]


def test_a_batch_is_freed_before_another_is_read(prefetcher: InputPrefetcher) -> None:
    """A loader may need its memory for the next one."""
    alive = list[weakref.ref[torch.Tensor]]()

    def read() -> Iterator[dict[str, torch.Tensor]]:
        for size in (2, 2, 3, 3, 3, 3):
            assert sum(each() is not None for each in alive) <= 2
            batch = {"x": torch.zeros(size)}
            alive.append(weakref.ref(batch["x"]))
            yield batch
            del batch

    batches = read()
    assert [_take(prefetcher, batches)[0] for _ in range(6)] == [CAPTURED] * 2 + [EAGER] * 4


def test_a_batch_is_kept_until_copies_follow_its_step(
    prefetcher: InputPrefetcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its memory may be a loader's, who has recorded it for the stream of copies, not for that of the step."""
    alive, follow = list[weakref.ref[torch.Tensor]](), Streams.copies

    def read() -> Iterator[dict[str, torch.Tensor]]:
        for size in (2, 2, 3):
            batch = {"x": torch.zeros(size)}
            alive.append(weakref.ref(batch["x"]))
            yield batch
            del batch

    @contextmanager
    def copies(streams: Streams, buffer_index: int, later: bool = False) -> Iterator[None]:
        kept.append(bool(alive) and alive[-1]() is not None)
        with follow(streams, buffer_index, later):
            yield

    batches, kept = read(), list[bool]()
    monkeypatch.setattr(Streams, "copies", copies)
    assert [_take(prefetcher, batches)[0] for _ in range(3)] == [CAPTURED, CAPTURED, EAGER]
    assert kept[-1], "the batch of the eager step was freed before copies waited for the step"
    assert alive[-1]() is None
