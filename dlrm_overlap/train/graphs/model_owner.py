"""The pipeline that trains a model, which several pipelines may share."""

import weakref
from typing import Any, Protocol

from dlrm_overlap.train.graphs.static_batch import BatchTensors


class ModelOwner(Protocol):
    """A pipeline that holds the CUDA graphs of a model and averages its dense gradients."""

    def release_model(self) -> None:
        """Release the model's graphs and gradient hooks for another pipeline; no rank may be in a step."""
        ...

    def gather_dense(self) -> None:
        """Make the float32 dense weights the same on all ranks; a collective."""
        ...

    def prepare_evaluation(self, batch: BatchTensors) -> None:
        """Prepare the model for a forward on this batch, by this or another pipeline; a collective."""
        ...


class _Owned:
    """Refers to the owner from the model; a copy of the model refers to none."""

    def __init__(self, model: Any, owner: ModelOwner | None) -> None:
        self.model, self.owner = weakref.ref(model), owner

    def __reduce__(self) -> tuple[type[None], tuple[()]]:  # for copy.deepcopy and pickle
        return type(None), ()


_ATTRIBUTE = "_dlrm_overlap_owner"


def owner_of(model: Any) -> ModelOwner | None:
    """Return the pipeline that trains a model, or None; the model may be wrapped by torch.compile."""
    owned = getattr(model, _ATTRIBUTE, None)
    if owned is None or (owned.model() is not model and owned.model() is not getattr(model, "_orig_mod", None)):
        return None
    return owned.owner


def set_owner(model: Any, owner: ModelOwner | None) -> None:
    model = getattr(model, "_orig_mod", model)
    setattr(model, _ATTRIBUTE, _Owned(model, owner))
