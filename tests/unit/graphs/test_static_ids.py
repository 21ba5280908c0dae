"""Ids at fixed addresses are cut on the device as TorchRec cuts them, batch after batch; no number is read back."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dlrm_overlap.embedding.id_layout import BatchCapacity
from dlrm_overlap.train.graphs.static_batch import StaticKeyedJaggedTensor
from tests.agreement import assert_same
from tests.conftest import refuses

CPU = torch.device("cpu")
BOUND = BatchCapacity(2, {"f": (0, 1), "g": (0, 2), "h": (0, 3)})
KNOWN = BatchCapacity(2, {"f": (1, 1), "g": (2, 2), "h": (0, 0)})


def _ids(lengths: list[int], values: list[int]) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(["f", "g", "h"], torch.tensor(values, dtype=torch.int64), lengths=torch.tensor(lengths))


# Of few ids, of as many as there may be, of none.
BATCHES = [_ids([1, 0, 2, 1, 0, 2], [5, 7, 8, 1, 9, 3]), _ids([1, 1, 2, 2, 3, 3], list(range(12))), _ids([0] * 6, [])]
OF_KNOWN = [_ids([1, 1, 2, 2, 0, 0], [*range(first, first + 6)]) for first in (1, 20)]


def _static(example: KeyedJaggedTensor, bound: BatchCapacity = BOUND) -> StaticKeyedJaggedTensor:
    return StaticKeyedJaggedTensor(example, CPU, bound)


def _assert_alike(ours: Any, theirs: Any, room: int) -> None:
    """Check ids that have room for `room`: what lies behind TorchRec's is 0."""
    assert_same(ours.lengths(), theirs.lengths(), "lengths")
    assert_same(ours.offsets(), theirs.offsets(), "offsets")
    padding = torch.zeros(room - theirs.values().numel(), dtype=torch.int64)
    assert_same(ours.values(), torch.cat([theirs.values(), padding]), "values")


@pytest.mark.parametrize(("bound", "batches"), [(BOUND, BATCHES), (KNOWN, OF_KNOWN)], ids=["ranges", "known"])
def test_each_batch_is_cut_by_its_own_lengths(bound: BatchCapacity, batches: list[KeyedJaggedTensor]) -> None:
    static = _static(batches[0], bound)
    f, g, h = bound.capacity(["f", "g", "h"])
    for batch in batches:
        static.fill(batch)
        static.renew()
        ours = static.tensor
        _assert_alike(ours, batch, f + g + h)
        for part, theirs, room in zip(ours.split([1, 2]), batch.split([1, 2]), (f, g + h), strict=True):
            assert part.keys() == theirs.keys()
            _assert_alike(part, theirs, room)
        _assert_alike(ours.permute([2, 0]), batch.permute([2, 0]), h + f)
        _assert_alike(ours.split([1, 2])[1].permute([1, 0])["g"], batch["g"], g)
        for key, room in (("f", f), ("g", g), ("h", h)):
            _assert_alike(ours[key], batch[key], room)
            _assert_alike(ours.to_dict()[key], batch[key], room)
        assert ours.split([3])[0] is ours.to(CPU) is ours
        assert [part.keys() for part in ours.split([0, 3])] == [[], ["f", "g", "h"]]


@pytest.mark.parametrize("batch", BATCHES)
def test_eager_steps_read_ids_without_room(batch: KeyedJaggedTensor) -> None:
    static = _static(BATCHES[0])
    static.fill(batch)
    static.renew()
    ours: Any = static.exact()
    _assert_alike(ours, batch, batch.values().numel())
    assert ours.length_per_key() == batch.length_per_key()
    assert ours.offset_per_key() == batch.offset_per_key()
    for part, theirs in zip(ours.split([1, 2]), batch.split([1, 2]), strict=True):
        _assert_alike(part, theirs, theirs.values().numel())
    for key in ("f", "g", "h"):
        _assert_alike(ours[key], batch[key], batch[key].values().numel())
    assert ours.padded is static.tensor, "which is sent to the owners of the rows"
    assert ours.to(CPU) is ours.split([3])[0] is ours


def test_ids_of_known_lengths_have_no_room() -> None:
    static = _static(OF_KNOWN[0], KNOWN)
    assert static.exact() is static.tensor


NUMBERS: dict[str, Callable[[KeyedJaggedTensor], Any]] = {
    "lengths": lambda ids: ids.length_per_key(),
    "offsets": lambda ids: ids.offset_per_key(),
    "concat": lambda ids: KeyedJaggedTensor.concat(ids.split([1, 2])),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_of_ids_are_known_or_refused(name: str) -> None:
    ranges, known = _static(BATCHES[0]), _static(OF_KNOWN[0], KNOWN)
    with refuses("cannot read back from the device; leave out length_per_key"):
        NUMBERS[name](ranges.tensor)
    known.fill(OF_KNOWN[1])
    found = NUMBERS[name](known.tensor)
    if name == "concat":
        _assert_alike(found, OF_KNOWN[1], 6)
    else:
        assert found == ([2, 4, 0] if name == "lengths" else [0, 2, 6, 6])


def test_of_a_batch_beyond_its_bound_no_id_is_read() -> None:
    """It has more ids of g than there is room for; its lengths stay, for the exchange to find that."""
    static = _static(BATCHES[0])
    static.fill(_ids([0, 0, 3, 9, 0, 0], list(range(1, 13))))
    cut = static.tensor["g"]
    assert cut.lengths().tolist() == [3, 9]
    assert cut.values().tolist() == [0, 0, 0, 0]


def test_a_compiled_model_cuts_without_numbers_of_the_cpu() -> None:
    """A capture could not copy them to the device."""
    static, made = _static(BATCHES[0]), list[Any]()

    def note(graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        made.extend(node.target for node in graph.graph.nodes)
        return graph.forward

    static.fill(BATCHES[0])
    cut = torch.compile(lambda ids: ids["g"].values() + 1, backend=note)
    assert_same(cut(static.tensor), static.tensor["g"].values() + 1, "values")
    assert torch.ops.fbgemm.permute_2D_sparse_data in made
    assert torch.tensor not in made
