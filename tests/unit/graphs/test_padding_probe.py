"""Models that read the padding of ids are found, and no others, by runs that leave no trace."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from dlrm_overlap.embedding.distinct import NamedSequence
from dlrm_overlap.embedding.exchanging_module import Deferred
from dlrm_overlap.embedding.id_layout import BatchCapacity
from dlrm_overlap.train.graphs.padding_probe import PaddingProbe
from dlrm_overlap.train.graphs.static_batch import BatchTensors, StaticBatch
from tests.agreement import assert_same

CPU = torch.device("cpu")
BOUND = BatchCapacity(3, {"f": (1, 1), "g": (0, 4)})
IDS = KeyedJaggedTensor(
    ["f", "g"], torch.tensor([7, 8, 9, 1, 2, 3]), torch.rand(6), lengths=torch.tensor([1, 1, 1, 0, 3, 0])
)


class Rows(nn.Module):
    """Stands for the embedding modules: rows of both features, unpooled."""

    def __init__(self) -> None:
        super().__init__()
        sequences = [NamedSequence(name, name, 0) for name in ("f", "g")]
        distinct = type("Distinct", (), {"sequences": sequences})
        self.sender, self.calls = type("Sender", (), {"distinct": distinct}), 0

    def forward(self, ids: KeyedJaggedTensor) -> Any:
        self.calls += 1
        rows = {
            key: JaggedTensor(torch.stack([each.values(), each.values() + 1], 1).float(), lengths=each.lengths())
            for key, each in ids.to_dict().items()
        }
        return Deferred(lambda: rows)


class Model(nn.Module):
    """Runs a function of the batch and the rows, between modules that have a state or draw at random."""

    def __init__(self, function: Callable[[Any, Any], torch.Tensor]) -> None:
        super().__init__()
        self.rows, self.function = Rows(), function
        self.norm, self.drop, self.head = nn.BatchNorm1d(2), nn.Dropout(0.5), nn.Linear(2, 1)
        self.register_buffer("steps", torch.zeros(()))
        self.last: torch.Tensor | None = None

    def forward(self, batch: Any) -> tuple[torch.Tensor, Any]:
        found = self.function(batch, self.rows(batch["ids"]))
        self.steps += 1
        self.last = found.detach()
        self.head.weight.data.mul_(1.5)
        hidden = self.head(self.drop(self.norm(batch["x"])))
        batch["x"].zero_()
        return hidden.square().mean() + found, hidden.detach()


def _why(model: Model) -> str:
    static = StaticBatch({"x": torch.rand(3, 2), "ids": IDS}, CPU, BOUND)
    static.fill(BatchTensors({"x": torch.rand(3, 2), "ids": IDS}))
    static.renew()
    modules: Any = [model.rows]
    probe = PaddingProbe(model, modules, BOUND, batch := static.exact())
    with probe.recording():
        model(batch)
    return probe.why_padding_is_read(model, lambda here: here)


def _padded(rows: JaggedTensor) -> torch.Tensor:
    return torch.ops.fbgemm.jagged_to_padded_dense(rows.values(), [rows.offsets()], [4])


IGNORES: dict[str, Callable[[Any, Any], torch.Tensor]] = {
    "nothing": lambda batch, rows: torch.zeros(()),
    "padded": lambda batch, rows: _padded(rows["g"]).square().mean(),
    "fixed": lambda batch, rows: (
        (rows["f"].values() * batch["x"].new_ones(3, 2)).mean() + batch["ids"]["f"].values().sum()
    ),
    "lengths": lambda batch, rows: rows["g"].lengths().float().mean() + batch["ids"].offsets().float().mean(),
    "weights": lambda batch, rows: (_padded(rows["g"]) * _padded(rows["g"])).mean(),
    "dropped": lambda batch, rows: nn.Dropout(0.5)(_padded(rows["g"])).square().mean() * 0 + _padded(rows["g"]).mean(),
}
READS: dict[str, tuple[Callable[[Any, Any], torch.Tensor], str]] = {
    "mean": (lambda batch, rows: rows["g"].values().square().mean(), "the loss differs"),
    "a little": (lambda batch, rows: 1e-9 * rows["g"].values().sum(), "the loss becomes NaN"),
    "size": (lambda batch, rows: torch.tensor(float(len(rows["g"].values()))), "the loss differs"),
    "ids": (lambda batch, rows: batch["ids"]["g"].values().float().mean(), "the loss differs"),
    "all ids": (lambda batch, rows: batch["ids"].values().float().mean(), "the loss differs"),
    "ids and rows": (lambda batch, rows: (rows["g"].values() @ torch.rand(2)).std(), "the loss differs"),
    "weights": (lambda batch, rows: 1e-9 * batch["ids"].weights().sum(), "the loss becomes NaN"),
    "numbers": (lambda batch, rows: torch.tensor(float(batch["ids"].length_per_key()[1])), "it fails (InputError: "),
    "shapes": (lambda batch, rows: (rows["g"].values() + torch.zeros(3, 2)).mean() * 0, "it fails (RuntimeError: "),
}


@pytest.mark.parametrize("name", IGNORES)
def test_a_model_that_cuts_by_lengths_is_captured(name: str) -> None:
    assert _why(Model(IGNORES[name])) == ""


@pytest.mark.parametrize("name", READS)
def test_a_model_that_reads_the_padding_is_found(name: str) -> None:
    function, reason = READS[name]
    assert reason in _why(Model(function))


def test_it_leaves_no_trace() -> None:
    model = Model(IGNORES["padded"])
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        expected = Model(IGNORES["padded"])
        expected.load_state_dict(model.state_dict())
        torch.manual_seed(1)
        expected({"x": torch.rand(3, 2), "ids": IDS})
    torch.manual_seed(1)
    x = torch.rand(3, 2)
    modules: Any = [model.rows]
    probe = PaddingProbe(model, modules, BOUND, batch := {"x": x, "ids": IDS})
    with probe.recording():
        model(batch)
    generator, last = torch.get_rng_state(), model.last
    assert probe.why_padding_is_read(model, lambda here: here) == ""
    for name, tensor in expected.state_dict().items():
        assert_same(model.state_dict()[name], tensor, name)
    assert_same(torch.get_rng_state(), generator, "the generator's state")
    assert model.last is last
    assert (model.training, model.drop.training, model.rows.calls) == (True, True, 1)
    assert model.rows.forward.__func__ is Rows.forward


def test_a_rank_takes_the_word_of_another() -> None:
    static = StaticBatch({"x": torch.rand(3, 2), "ids": IDS}, CPU, BOUND)
    model = Model(IGNORES["nothing"])
    modules: Any = [model.rows]
    probe = PaddingProbe(model, modules, BOUND, batch := static.exact())
    with probe.recording():
        model(batch)
    assert probe.why_padding_is_read(model, lambda here: True) == "another rank has found out"


def test_pooled_embeddings_keep_their_leading_columns() -> None:
    """A model joins its dense features there, see `JoinInPlace`."""
    module: Any = nn.Module()
    module.leading_columns = 2
    values = torch.arange(12.0).view(2, 6)[:, 2:]
    probe = PaddingProbe(nn.Module(), [module], BOUND, {"x": torch.zeros(1)})
    copied = probe._result(module, KeyedTensor(["t"], [4], values), None).values()
    assert_same(copied.detach(), values, "values")
    assert (copied.stride(), copied.storage_offset()) == ((6, 1), 2)
