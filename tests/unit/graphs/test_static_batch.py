"""Batches of any make at fixed addresses: what is copied, what is refused, and whose memory is let go of."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, NamedTuple

import pytest
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dlrm_overlap.config import InputError
from dlrm_overlap.data.batch import Batch, Lease
from dlrm_overlap.embedding.id_layout import BatchBound
from dlrm_overlap.train.graphs.static_batch import Leaves, StaticBatch, on_device
from tests.agreement import assert_same

CPU = torch.device("cpu")
RANGES = BatchBound(2, {"f": (1, 1), "g": (0, 3)})
KNOWN = BatchBound(2, {"f": (1, 1), "g": (2, 2)})


def _ids(lengths: list[int], values: list[int], dtype: torch.dtype = torch.int32) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(["f", "g"], torch.tensor(values, dtype=dtype), lengths=torch.tensor(lengths).int())


FIRST, SECOND = _ids([1, 1, 0, 3], [7, 8, 1, 2, 3]), _ids([1, 1, 2, 2], [5, 6, 4, 3, 2, 1])


def _batch(ids: KeyedJaggedTensor, number: float = 0.0) -> Batch:
    return Batch(torch.full((2, 3), number), ids, torch.tensor([number, 1.0]))


class Pair(NamedTuple):
    ids: KeyedJaggedTensor
    dense: torch.Tensor


@dataclass
class Nested:
    """Whatever a batch may be made of."""

    pair: Pair
    by_name: dict[str, Any]
    several: list[Any] = field(default_factory=list)
    text: str = "of no tensor"


def _nested(number: float) -> Nested:
    inner = _batch(FIRST if number else SECOND, number)
    weights = {"weight": torch.tensor([number]), "inner": inner, "count": 3}
    return Nested(Pair(SECOND if number else FIRST, torch.full((4,), number)), weights, [torch.tensor(number), "x"])


def test_a_batch_is_copied_to_fixed_addresses() -> None:
    static = StaticBatch(_batch(FIRST), CPU, RANGES)
    addresses = [tensor.data_ptr() for tensor in _tensors(static.batch)]
    for ids, number in ((FIRST, 1.0), (SECOND, 2.0), (FIRST, 3.0)):
        static.fill(Leaves(_batch(ids, number)))
        assert_same(static.batch.dense, torch.full((2, 3), number), "dense")
        assert_same(static.batch.labels, torch.tensor([number, 1.0]), "labels")
        assert_same(static.batch.sparse.lengths(), ids.lengths(), "lengths")
        here = static.batch.sparse.values()[: ids.values().numel()]
        assert_same(here, ids.values(), "values")
    assert [tensor.data_ptr() for tensor in _tensors(static.batch)] == addresses
    assert all(address % 16 == 0 for address in addresses), "where kernels read several words at once"
    assert static.batch.sparse.values().numel() == 2 * (1 + 3), "room for the most ids"
    assert static.batch.sparse.stride() == 2


def _tensors(batch: Batch) -> list[torch.Tensor]:
    return [batch.dense, batch.labels, batch.sparse.values(), batch.sparse.lengths()]


def test_objects_dictionaries_lists_and_tuples() -> None:
    static = StaticBatch(_nested(0.0), CPU, RANGES)
    made = static.batch
    assert isinstance(made, Nested)
    assert isinstance(made.pair, Pair)
    assert isinstance(made.by_name["inner"], Batch)
    assert (made.text, made.by_name["count"], made.several[1]) == ("of no tensor", 3, "x")
    static.fill(Leaves(_nested(1.0)))
    assert_same(made.pair.dense, torch.ones(4), "a tuple's")
    assert_same(made.by_name["weight"], torch.ones(1), "a dictionary's")
    assert_same(made.several[0], torch.tensor(1.0), "a list's")
    assert_same(made.by_name["inner"].sparse.lengths(), FIRST.lengths(), "of an object in a dictionary")
    assert_same(made.pair.ids.lengths(), SECOND.lengths(), "a tuple's ids")
    assert len(Leaves(made)) == len(Leaves(_nested(0.0))) == 7
    assert static.find(made.pair.ids) == "pair.0"
    assert static.find(made.by_name["inner"].sparse) == "by_name.inner.sparse"
    assert static.find(FIRST) is None
    assert static.ids["by_name.inner.sparse"].tensor is made.by_name["inner"].sparse


class Attributes(dict[str, Any]):
    """A dictionary whose entries are its attributes as well."""

    def __init__(self, **entries: Any) -> None:
        super().__init__(entries)
        self.__dict__ = self


class Mode(Enum):
    TRAINING = 1


@dataclass(frozen=True)
class FrozenBatch:
    dense: torch.Tensor
    ids: KeyedJaggedTensor
    mode: Mode = Mode.TRAINING


@dataclass(slots=True)
class SlottedBatch:
    dense: torch.Tensor
    ids: KeyedJaggedTensor
    mode: Mode = Mode.TRAINING


@pytest.mark.parametrize("kind", [FrozenBatch, SlottedBatch, Attributes])
def test_a_batch_may_be_of_any_class(kind: Callable[..., Any]) -> None:
    static = StaticBatch(kind(dense=torch.zeros(3), ids=FIRST, mode=Mode.TRAINING), CPU, RANGES)
    static.fill(Leaves(kind(dense=torch.ones(3), ids=SECOND, mode=Mode.TRAINING)))
    for _ in range(2):
        batch: Any = static.batch
        assert isinstance(batch, type(kind(dense=None, ids=None)))
        assert_same(batch.dense, torch.ones(3), "dense")
        assert_same(batch.ids["g"].values()[:4], SECOND["g"].values(), "ids")
        assert batch.mode is Mode.TRAINING
        static.renew()
        assert static.batch is not batch


def test_a_batch_without_a_tensor_is_refused() -> None:
    with pytest.raises(InputError, match="no tensor was found in a batch of type set, so each step would train on the"):
        StaticBatch({1, 2}, CPU, RANGES)


def test_the_example_stays_as_it_was() -> None:
    example = _nested(1.0)
    static = StaticBatch(example, CPU, RANGES)
    static.fill(Leaves(_nested(0.0)))
    assert_same(example.pair.dense, torch.ones(4), "dense")
    assert_same(example.by_name["inner"].sparse.values(), FIRST.values(), "ids")


def test_known_lengths_are_there_from_the_first_and_ids_are_counted() -> None:
    static = StaticBatch(_batch(SECOND), CPU, KNOWN)
    ids = static.ids["sparse"]
    assert_same(ids.tensor.lengths(), SECOND.lengths(), "lengths")
    assert ids.count.tolist() == [6]
    static.fill(Leaves(_batch(FIRST)))  # of fewer ids than it must have: the count informs the exchange, and all ranks
    assert ids.count.tolist() == [5]
    assert ids.count.dtype == torch.int32
    static.fill(Leaves(_batch(SECOND)))
    assert ids.count.tolist() == [6]
    assert_same(ids.tensor.lengths(), SECOND.lengths(), "lengths")


def test_ids_beyond_the_room_are_left_out_and_told_of() -> None:
    values = list(range(10))
    known, ranges = StaticBatch(_batch(SECOND), CPU, KNOWN), StaticBatch(_batch(FIRST), CPU, RANGES)
    known.fill(Leaves(_batch(_ids([1, 1, 4, 4], values))))
    assert known.ids["sparse"].count.tolist() == [10]
    assert known.batch.sparse.values().tolist() == values[:6]
    ranges.fill(Leaves(_batch(_ids([1, 1, 4, 4], values))))
    assert ranges.batch.sparse.lengths().tolist() == [1, 1, 4, 4]
    assert ranges.batch.sparse.values().tolist() == values[:8]


@pytest.mark.parametrize("bound", [RANGES, KNOWN], ids=["ranges", "known"])
def test_one_static_batch_is_copied_from_another(bound: BatchBound) -> None:
    source, to = StaticBatch(_nested(0.0), CPU, bound), StaticBatch(_nested(0.0), CPU, bound)
    source.fill(Leaves(_nested(1.0)))
    to.take_over(source)
    assert_same(to.batch.pair.dense, torch.ones(4), "dense")
    for place in ("pair.0", "by_name.inner.sparse"):
        ids, expected = to.ids[place], source.ids[place]
        assert ids.tensor is not expected.tensor
        assert_same(ids.tensor.values(), expected.tensor.values(), f"values {place}")
        assert_same(ids.tensor.lengths(), expected.tensor.lengths(), f"lengths {place}")
        assert_same(ids.count, expected.count, f"count {place}")


@pytest.mark.parametrize(
    "other",
    [
        replace(_batch(FIRST), labels=torch.zeros(1)),
        _batch(KeyedJaggedTensor(["f", "g"], torch.tensor([7, 1]), lengths=torch.tensor([1, 1]))),
        _batch(_ids([1, 1, 0, 0], [7, 8], torch.int64)),
    ],
    ids=["shape", "samples", "type"],
)
def test_batches_unlike_the_first_one_are_not_taken(other: Any) -> None:
    static = StaticBatch(_batch(FIRST), CPU, RANGES)
    assert static.takes(Leaves(_batch(FIRST)))
    assert not static.takes(Leaves(other))


def _weighted(ids: KeyedJaggedTensor, weights: torch.Tensor | None = None) -> KeyedJaggedTensor:
    weights = torch.rand(ids.values().numel()) if weights is None else weights
    return KeyedJaggedTensor(ids.keys(), ids.values(), weights, lengths=ids.lengths())


def test_weights_are_copied_and_cut_with_their_ids() -> None:
    static = StaticBatch(_batch(_weighted(FIRST)), CPU, RANGES)
    for weights in (torch.arange(5.0), torch.arange(5.0, dtype=torch.float64) + 7):
        batch = _weighted(FIRST, weights)
        static.fill(Leaves(_batch(batch)))
        static.renew()
        ours = static.batch.sparse
        assert_same(ours.weights()[:5], weights.float(), "weights")
        assert_same(ours["g"].weights()[:3], batch["g"].weights().float(), "weights of g")
    static = StaticBatch(_batch(_weighted(FIRST, torch.ones(5, dtype=torch.int32))), CPU, RANGES)
    assert static.batch.sparse.weights_or_none() is None, "integers are no weights"


@pytest.mark.parametrize(
    ("first", "ids", "refused"),
    [
        (_weighted(FIRST), FIRST, "f, g without weights, but those of the first batch are f, g with"),
        (FIRST, KeyedJaggedTensor(["f"], torch.tensor([7, 8]), lengths=torch.tensor([1, 1])), "ids of features f with"),
    ],
    ids=["none", "fewer"],
)
def test_ids_that_no_step_could_take_are_refused(
    first: KeyedJaggedTensor, ids: KeyedJaggedTensor, refused: str
) -> None:
    static = StaticBatch(_batch(first), CPU, RANGES)
    for batch in _batch(ids), replace(_batch(ids), dense=torch.zeros(1, 3)):
        with pytest.raises(InputError, match=f"GraphTrainPipeline: .*{refused}"):
            static.takes(Leaves(batch))


def test_ids_with_other_inverse_indices_are_none_like_the_first() -> None:
    def ids(inverse: torch.Tensor | None) -> Any:
        tensors = {"lengths": FIRST.lengths(), "inverse_indices": None if inverse is None else (["f", "g"], inverse)}
        return _batch(KeyedJaggedTensor(["f", "g"], FIRST.values(), **tensors))

    static = StaticBatch(ids(torch.zeros(2, 2).long()), CPU, RANGES)
    inverses = [torch.ones(2, 2).long(), torch.zeros(2, 3).long(), None]
    assert [static.takes(Leaves(ids(each))) for each in inverses] == [True, False, False]
    static.fill(Leaves(ids(inverses[0])))
    assert_same(Leaves(static.batch)["sparse"].inverse_indices()[1], inverses[0], "inverse indices")


def test_tensors_are_told_apart_by_their_names() -> None:
    static = StaticBatch({"a": torch.zeros(2), "b": torch.ones(2)}, CPU, RANGES)
    static.fill(Leaves({"b": torch.full((2,), 4.0), "a": torch.full((2,), 3.0)}))
    assert (static.batch["a"].tolist(), static.batch["b"].tolist()) == ([3.0, 3.0], [4.0, 4.0])
    assert not static.takes(Leaves({"a": torch.zeros(2), "c": torch.zeros(2)}))


def test_what_has_no_method_of_its_own_is_brought_to_the_device() -> None:
    brought = on_device({"a": (torch.zeros(2), FIRST), "count": 3}, torch.device("meta"))
    assert (brought["a"][0].is_meta, brought["a"][1].values().is_meta, brought["count"]) == (True, True, 3)


def test_a_feature_without_a_bound_is_refused() -> None:
    with pytest.raises(InputError, match="no bound for the ids of feature g"):
        StaticBatch(_batch(FIRST), CPU, BatchBound(2, {"f": (1, 1)}))


def test_lent_memory_is_let_go_of(monkeypatch: pytest.MonkeyPatch) -> None:
    returned: deque[Lease] = deque()
    copying: list[int] = []
    monkeypatch.setattr(Lease, "copying", lambda lease: copying.append(lease.slot))
    example = replace(_batch(FIRST), lease=Lease(0, returned))
    static = StaticBatch(example, CPU, RANGES)
    assert static.batch.lease is None
    assert example.lease is not None
    del example
    assert [lease.slot for lease in returned] == [0], "the example's memory is free"
    for slot in (1, 2):
        static.fill(Leaves(replace(_batch(SECOND), lease=Lease(slot, returned))))
        assert copying == list(range(1, slot + 1)), "the slot waits for the copies"
        assert [lease.slot for lease in returned] == list(range(slot + 1))
