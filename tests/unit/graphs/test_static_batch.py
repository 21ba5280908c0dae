"""Batches of any make at fixed addresses: what is copied, what is refused, and whose memory is let go of."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import date
from enum import Enum
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dlrm_overlap.data.batch import Batch, Lease
from dlrm_overlap.embedding.id_layout import BatchCapacity
from dlrm_overlap.train.graphs.static_batch import BatchTensors, StaticBatch, on_device
from tests.agreement import assert_same
from tests.conftest import refuses

CPU = torch.device("cpu")
RANGES = BatchCapacity(2, {"f": (1, 1), "g": (0, 3)})
KNOWN = BatchCapacity(2, {"f": (1, 1), "g": (2, 2)})


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
        static.fill(BatchTensors(_batch(ids, number)))
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
    static.fill(BatchTensors(_nested(1.0)))
    assert_same(made.pair.dense, torch.ones(4), "a tuple's")
    assert_same(made.by_name["weight"], torch.ones(1), "a dictionary's")
    assert_same(made.several[0], torch.tensor(1.0), "a list's")
    assert_same(made.by_name["inner"].sparse.lengths(), FIRST.lengths(), "of an object in a dictionary")
    assert_same(made.pair.ids.lengths(), SECOND.lengths(), "a tuple's ids")
    assert len(BatchTensors(made)) == len(BatchTensors(_nested(0.0))) == 7
    assert static.path_of(made.pair.ids) == "pair.0"
    assert static.path_of(made.by_name["inner"].sparse) == "by_name.inner.sparse"
    assert static.path_of(FIRST) is None
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
    static.fill(BatchTensors(kind(dense=torch.ones(3), ids=SECOND, mode=Mode.TRAINING)))
    for _ in range(2):
        batch: Any = static.batch
        assert isinstance(batch, type(kind(dense=None, ids=None)))
        assert_same(batch.dense, torch.ones(3), "dense")
        assert_same(batch.ids["g"].values()[:4], SECOND["g"].values(), "ids")
        assert batch.mode is Mode.TRAINING
        static.renew()
        assert static.batch is not batch


def test_a_batch_without_a_tensor_is_refused() -> None:
    with refuses("no tensor was found in a batch of type set, so each step would train on the"):
        StaticBatch({1, 2}, CPU, RANGES)


def test_the_example_stays_as_it_was() -> None:
    example = _nested(1.0)
    static = StaticBatch(example, CPU, RANGES)
    static.fill(BatchTensors(_nested(0.0)))
    assert_same(example.pair.dense, torch.ones(4), "dense")
    assert_same(example.by_name["inner"].sparse.values(), FIRST.values(), "ids")


def test_known_lengths_are_there_from_the_first_and_ids_are_counted() -> None:
    static = StaticBatch(_batch(SECOND), CPU, KNOWN)
    ids = static.ids["sparse"]
    assert_same(ids.tensor.lengths(), SECOND.lengths(), "lengths")
    assert ids.count.tolist() == [6]
    static.fill(
        BatchTensors(_batch(FIRST))
    )  # of fewer ids than it must have: the count informs the exchange, and all ranks
    assert ids.count.tolist() == [5]
    assert ids.count.dtype == torch.int32
    static.fill(BatchTensors(_batch(SECOND)))
    assert ids.count.tolist() == [6]
    assert_same(ids.tensor.lengths(), SECOND.lengths(), "lengths")


def test_ids_beyond_the_room_are_left_out_and_told_of() -> None:
    values = list(range(10))
    known, ranges = StaticBatch(_batch(SECOND), CPU, KNOWN), StaticBatch(_batch(FIRST), CPU, RANGES)
    known.fill(BatchTensors(_batch(_ids([1, 1, 4, 4], values))))
    assert known.ids["sparse"].count.tolist() == [10]
    assert known.batch.sparse.values().tolist() == values[:6]
    ranges.fill(BatchTensors(_batch(_ids([1, 1, 4, 4], values))))
    assert ranges.batch.sparse.lengths().tolist() == [1, 1, 4, 4]
    assert ranges.batch.sparse.values().tolist() == values[:8]


@pytest.mark.parametrize("bound", [RANGES, KNOWN], ids=["ranges", "known"])
def test_one_static_batch_is_copied_from_another(bound: BatchCapacity) -> None:
    source, to = StaticBatch(_nested(0.0), CPU, bound), StaticBatch(_nested(0.0), CPU, bound)
    source.fill(BatchTensors(_nested(1.0)))
    to.copy_from(source)
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
    assert static.mismatch(BatchTensors(_batch(FIRST))) is None
    assert static.mismatch(BatchTensors(other)) is not None


def test_tensors_of_another_type_are_not_cast() -> None:
    first = {"y": torch.tensor([0, 1]), "ids": _weighted(FIRST)}
    static = StaticBatch(first, CPU, RANGES)
    assert static.mismatch(BatchTensors(first)) is None
    float64 = _weighted(FIRST, torch.ones(5).double())
    for changed, reason in (
        ({"y": torch.tensor([0.5, 0.25])}, "tensor y is [2] torch.float32, and was [2] torch.int64 in the first batch"),
        ({"y": torch.tensor([0, 1], dtype=torch.int32)}, "tensor y is [2] torch.int32, and was [2] torch.int64 in"),
        ({"y": torch.tensor([0, 1]).to_sparse()}, "tensor y is [2] torch.int64 torch.sparse_coo, and was"),
        ({"ids": float64}, "ids ids: weights are torch.float64, and were torch.float32 in the first batch"),
    ):
        unlike = static.mismatch(BatchTensors(first | changed))
        assert unlike is not None
        assert unlike.should_warn
        assert unlike.reason.startswith(reason)
    trained = {"y": torch.zeros(2, requires_grad=True)}
    assert StaticBatch(trained, CPU, RANGES).mismatch(BatchTensors(trained)) is not None, "its gradient would be lost"


def test_ids_of_a_smaller_type_keep_their_values() -> None:
    static = StaticBatch(_batch(_ids([1, 1, 0, 0], [7, 8], torch.int64)), CPU, RANGES)
    for dtype, is_taken in ((torch.int32, True), (torch.int64, True), (torch.float32, False)):
        ids = _ids([1, 1, 0, 0], [7, 8], dtype)
        assert (static.mismatch(BatchTensors(_batch(ids))) is None) == is_taken


class Kind(Enum):
    A = 1
    B = 2


class Slotted:
    __slots__ = ("k",)

    def __init__(self, k: Any) -> None:
        self.k = k


class Tagged(list[Any]):
    """A list that has attributes, too."""

    tag: Any = None


def _tagged(tag: str) -> Tagged:
    tagged = Tagged([1])
    tagged.tag = tag
    return tagged


@pytest.mark.parametrize(
    ("make", "other"),
    [
        (lambda: 1.0, lambda: 3.0),
        (lambda: float("nan"), lambda: 1.0),
        (lambda: 1, lambda: True),
        (lambda: 0.0, lambda: -0.0),
        (lambda: None, lambda: 0),
        (lambda: np.float32(1), lambda: np.float32(2)),
        (lambda: np.float64("nan"), lambda: np.float64(2)),
        (lambda: np.arange(3), lambda: np.arange(3) + 1),
        (lambda: np.array([1.0, np.nan]), lambda: np.array([1.0, 2.0])),
        (lambda: np.arange(3), lambda: np.arange(3).astype(np.int32)),
        (lambda: "train", lambda: "test"),
        (lambda: b"a", lambda: b"b"),
        (lambda: Kind.A, lambda: Kind.B),
        (lambda: [1, 2, 3], lambda: [1, 2, 4]),
        (lambda: [1, 2, 3], lambda: [1, 2]),
        (lambda: [], lambda: ()),
        (lambda: (1, "a"), lambda: (1, "b")),
        (lambda: {"a": {"k": 1.0}}, lambda: {"a": {"k": 3.0}}),
        (lambda: {"a": 1}, lambda: {"b": 1}),
        (lambda: {1, 2}, lambda: {1, 3}),
        (lambda: deque([1, 2]), lambda: deque([1, 3])),
        (lambda: Slotted(1), lambda: Slotted(2)),
        (lambda: Slotted([1]), lambda: Slotted([2])),
        (lambda: _tagged("a"), lambda: _tagged("b")),
        (lambda: date(2026, 1, 1), lambda: date(2026, 1, 2)),
        (lambda: torch.float32, lambda: torch.float64),
    ],
)
def test_a_batch_with_other_constants_is_not_taken(make: Callable[[], Any], other: Callable[[], Any]) -> None:
    """Each value is made anew, as by whoever reads a batch."""
    static = StaticBatch({"x": torch.zeros(1), "part": make()}, CPU, RANGES)
    assert static.mismatch(BatchTensors({"x": torch.ones(1), "part": make()})) is None
    unlike = static.mismatch(BatchTensors({"x": torch.ones(1), "part": other()}))
    assert unlike is not None
    assert unlike.should_warn
    assert "part" in unlike.reason
    assert static.mismatch(BatchTensors({"x": torch.ones(1), "part": make()})) is None


def test_a_value_that_nobody_can_compare_is_taken_for_a_changed_one() -> None:
    static = StaticBatch({"x": torch.zeros(1), "part": (one := object())}, CPU, RANGES)
    assert static.mismatch(BatchTensors({"x": torch.zeros(1), "part": one})) is None
    assert static.mismatch(BatchTensors({"x": torch.zeros(1), "part": object()})) is not None


class Stubborn(set[int]):
    """A set that cannot be copied."""

    def __deepcopy__(self, _: Any) -> Any:
        raise TypeError


def test_a_value_that_can_change_without_a_copy_is_taken_for_a_changed_one() -> None:
    batch = {"x": torch.zeros(1), "part": Stubborn()}
    assert StaticBatch(batch, CPU, RANGES).mismatch(BatchTensors(batch)) is not None


def test_events_and_leases_of_a_batch_do_not_count() -> None:
    first, second = ({"x": torch.zeros(1), "event": torch.Event("cpu")} for _ in range(2))
    assert StaticBatch(first, CPU, RANGES).mismatch(BatchTensors(second)) is None
    returned: deque[Lease] = deque()
    first, second, third = (
        replace(_batch(FIRST), lease=lease) for lease in (Lease(0, returned), Lease(1, returned), None)
    )
    for batch in (second, third):
        assert StaticBatch(first, CPU, RANGES).mismatch(BatchTensors(batch)) is None


@pytest.mark.parametrize("change", ["array", "list", "set", "dict"])
def test_values_that_are_changed_in_place_are_seen(change: str) -> None:
    parts: dict[str, Any] = {"array": np.zeros(2), "list": [1], "set": {1}, "dict": {"a": [1]}}
    batch = {"x": torch.zeros(1), "parts": parts}
    static = StaticBatch(batch, CPU, RANGES)
    held = BatchTensors(batch).snapshot()
    assert static.mismatch(BatchTensors(batch)) is None
    changes: dict[str, Callable[[Any], Any]] = {
        "array": lambda array: array.fill(1.0),
        "list": lambda numbers: numbers.append(2),
        "set": lambda numbers: numbers.add(2),
        "dict": lambda lists: lists["a"].append(2),
    }
    changes[change](parts[change])
    assert static.mismatch(BatchTensors(batch)) is not None
    assert static.mismatch(held) is None, "a batch that waits for its step"
    assert static.mismatch(BatchTensors(static.batch)) is None, "what eager steps read"


def _weighted(ids: KeyedJaggedTensor, weights: torch.Tensor | None = None) -> KeyedJaggedTensor:
    weights = torch.rand(ids.values().numel()) if weights is None else weights
    return KeyedJaggedTensor(ids.keys(), ids.values(), weights, lengths=ids.lengths())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.int32])
def test_weights_are_copied_and_cut_with_their_ids(dtype: torch.dtype) -> None:
    static = StaticBatch(_batch(_weighted(FIRST, torch.ones(5).to(dtype))), CPU, RANGES)
    for weights in (torch.arange(5).to(dtype), torch.arange(5).to(dtype) + 7):
        batch = _weighted(FIRST, weights)
        assert static.mismatch(BatchTensors(_batch(batch))) is None
        static.fill(BatchTensors(_batch(batch)))
        static.renew()
        ours = static.batch.sparse
        assert_same(ours.weights()[:5], weights, "weights")
        kept = [torch.full((ours["g"].weights().numel(),), 3).to(dtype) for _ in range(9)]
        del kept  # the weights of g take such memory
        of_g = ours["g"].weights()
        assert_same(of_g[:3], batch["g"].weights(), "weights of g")
        assert_same(of_g[3:], torch.zeros(of_g.numel() - 3, dtype=dtype), "room behind those of g")
        assert of_g.numel() > 3
        assert_same(ours["f"].weights()[2:], torch.zeros(0, dtype=dtype), "room behind those of f")


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
        with refuses(f"GraphTrainPipeline: .*{refused}"):
            static.mismatch(BatchTensors(batch))


def test_ids_with_other_inverse_indices_are_none_like_the_first() -> None:
    def ids(inverse: torch.Tensor | None) -> Any:
        tensors = {"lengths": FIRST.lengths(), "inverse_indices": None if inverse is None else (["f", "g"], inverse)}
        return _batch(KeyedJaggedTensor(["f", "g"], FIRST.values(), **tensors))

    static = StaticBatch(ids(torch.zeros(2, 2).long()), CPU, RANGES)
    inverses = [torch.ones(2, 2).long(), torch.zeros(2, 3).long(), None]
    assert [static.mismatch(BatchTensors(ids(each))) is None for each in inverses] == [True, False, False]
    static.fill(BatchTensors(ids(inverses[0])))
    assert_same(BatchTensors(static.batch)["sparse"].inverse_indices()[1], inverses[0], "inverse indices")


def test_tensors_are_told_apart_by_their_names() -> None:
    static = StaticBatch({"a": torch.zeros(2), "b": torch.ones(2)}, CPU, RANGES)
    static.fill(BatchTensors({"b": torch.full((2,), 4.0), "a": torch.full((2,), 3.0)}))
    assert (static.batch["a"].tolist(), static.batch["b"].tolist()) == ([3.0, 3.0], [4.0, 4.0])
    unlike = static.mismatch(BatchTensors({"a": torch.zeros(2), "c": torch.zeros(2)}))
    assert unlike is not None
    assert unlike.reason == "tensors at b and c are in one batch and not in another"


def test_what_has_no_method_of_its_own_is_brought_to_the_device() -> None:
    brought = on_device({"a": (torch.zeros(2), FIRST), "count": 3}, torch.device("meta"))
    assert (brought["a"][0].is_meta, brought["a"][1].values().is_meta, brought["count"]) == (True, True, 3)


def test_a_feature_without_a_bound_is_refused() -> None:
    with refuses("feature g has no bag size"):
        StaticBatch(_batch(FIRST), CPU, BatchCapacity(2, {"f": (1, 1)}))


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
        static.fill(BatchTensors(replace(_batch(SECOND), lease=Lease(slot, returned))))
        assert copying == list(range(1, slot + 1)), "the slot waits for the copies"
        assert [lease.slot for lease in returned] == list(range(slot + 1))
