"""Which pipeline trains a model: known by the model alone, not by its copies."""

import copy
import pickle
from typing import Any

import torch
from torch import nn

from dlrm_overlap.train.graphs.model_owner import owner_of, set_owner
from dlrm_overlap.train.graphs.static_batch import BatchTensors


class Pipeline:
    def release_model(self) -> None:
        raise NotImplementedError

    def gather_dense(self) -> None:
        raise NotImplementedError

    def prepare_evaluation(self, batch: BatchTensors) -> None:
        raise NotImplementedError

    def __reduce__(self) -> Any:
        raise AssertionError("a pipeline is not copied with its model")


def test_a_model_has_one_owner_and_its_copies_have_none() -> None:
    model = nn.Linear(2, 2)
    assert owner_of(model) is None
    set_owner(model, owner := Pipeline())
    assert owner_of(model) is owner
    for copied in (copy.copy(model), copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert owner_of(copied) is None
        set_owner(copied, other := Pipeline())
        assert (owner_of(copied), owner_of(model)) == (other, owner)
    assert list(model.state_dict()) == ["weight", "bias"]
    set_owner(model, None)
    assert owner_of(model) is None


def test_a_compiled_model_has_the_owner_of_the_model() -> None:
    model = nn.Linear(2, 2)
    compiled: Any = torch.compile(model, backend="eager")
    set_owner(compiled, owner := Pipeline())
    assert owner_of(model) is owner
    assert owner_of(compiled) is owner
