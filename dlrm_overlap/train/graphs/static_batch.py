"""A batch at fixed addresses on the device, into which the batches of all steps are copied."""

import copy
import copyreg
from collections.abc import Callable, Iterable, Iterator
from enum import Enum
from typing import Any

import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dlrm_overlap.config import InputError
from dlrm_overlap.embedding.id_layout import BatchBound
from dlrm_overlap.train.graphs.static_ids import IdCuts, StaticIds


class StaticBatch:
    """A batch like `example`, whose tensors keep their addresses.

    A batch is made of tensors and KeyedJaggedTensors: an object's attributes, or in tuples, lists and dictionaries.
    What else it holds stays as `example` has it.
    """

    def __init__(self, example: Any, device: torch.device, bound: BatchBound, cuts: IdCuts | None = None) -> None:
        """Take a batch to be like; `cuts` are those of the ids, shared by the static batches that one model reads.

        Raises:
            InputError: if no tensor is found in it.
        """
        leaves = leaves_of(example)
        if not leaves:
            raise InputError(
                f"GraphTrainPipeline: no tensor was found in a batch of type {type(example).__name__}, so each step "
                f"would train on the first one; give batches that hold tensors as attributes, or in tuples, lists and "
                f"dictionaries"
            )
        self._example, self._places = example, {place: index for index, place in enumerate(leaves)}
        self._leaves = [
            StaticIds(leaf, device, bound, cuts if cuts is not None else IdCuts())
            if isinstance(leaf, KeyedJaggedTensor)
            else torch.zeros(leaf.shape, dtype=leaf.dtype, device=device)
            for leaf in leaves.values()
        ]
        self.renew()
        if getattr(self.batch, "lease", None) is not None:
            object.__setattr__(self.batch, "lease", None)  # which is the example's, and keeps its memory
        self._example = self.batch  # whose tensors stay, while the example's are somebody else's
        self.renew()

    def renew(self) -> None:
        """Make the batch anew for its next step: of the same tensors, and of ids that remember nothing of the last."""
        for leaf in self._leaves:
            if isinstance(leaf, StaticIds):
                leaf.renew()
        tensors = iter([leaf.tensor if isinstance(leaf, StaticIds) else leaf for leaf in self._leaves])
        self.batch = _replace(self._example, lambda _: next(tensors))
        """a batch of the same class, of the static tensors"""

    def fill(self, batch: Any) -> None:
        """Copy a batch from the host, or from the device, on the current stream.

        Raises:
            InputError: if a tensor has another place or shape than that of the first batch, or ids are not like its.
        """
        leaves = leaves_of(batch)
        if leaves.keys() != self._places.keys():
            raise InputError(
                f"GraphTrainPipeline: a batch of tensors {', '.join(leaves)}, but the first batch has "
                f"{', '.join(self._places)}, and captured steps are all alike; give each batch the same tensors"
            )
        for place, leaf in leaves.items():
            static = self._leaves[self._places[place]]
            if isinstance(static, StaticIds):
                static.fill(leaf)
                continue
            if leaf.shape != static.shape:
                raise InputError(
                    f"GraphTrainPipeline: a tensor of shape {tuple(leaf.shape)}, but that of the first batch is "
                    f"{tuple(static.shape)}, and captured steps are all alike; drop the last, smaller batch"
                )
            static.copy_(leaf, non_blocking=True)
        if (lease := getattr(batch, "lease", None)) is not None:  # of lent memory, which is free once copied from
            lease.copying()

    def copy_from(self, other: "StaticBatch") -> None:
        """Copy the content of `other`, which is on the same device, into these fixed addresses."""
        for to, source in zip(self._leaves, other._leaves, strict=True):
            if isinstance(to, StaticIds):
                assert isinstance(source, StaticIds)
                to.copy_from(source)
            else:
                assert isinstance(source, torch.Tensor)
                to.copy_(source)

    def find(self, features: KeyedJaggedTensor) -> int | None:
        """Return which of the leaves `features` is, or None if it is none of them."""
        for index, leaf in enumerate(self._leaves):
            if isinstance(leaf, StaticIds) and leaf.tensor is features:
                return index
        return None

    def ids(self, index: int) -> StaticIds:
        """Return the leaf `index`, which holds ids."""
        leaf = self._leaves[index]
        assert isinstance(leaf, StaticIds)
        return leaf


def leaves_of(batch: Any) -> dict[str, Any]:
    """Return the tensors and KeyedJaggedTensors of a batch by their places in it.

    Example: of ({"a": t, "b": u}, v) they are "0.a": t, "0.b": u, "1": v.
    """
    return dict(_walk(batch, ""))


def _walk(value: Any, place: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, torch.Tensor | KeyedJaggedTensor):
        yield place, value
        return
    for key, each in _parts(value):
        yield from _walk(each, f"{place}.{key}" if place else str(key))


def _parts(value: Any) -> Iterable[tuple[Any, Any]]:
    """Return what a batch, or a part of it, is made of, by index, key or attribute."""
    if isinstance(value, list | tuple):
        return enumerate(value)
    if isinstance(value, dict):
        return value.items()
    if isinstance(value, type | Enum):  # which all batches share
        return ()
    slots = copyreg._slotnames(type(value))  # pyright: ignore[reportAttributeAccessIssue]  as copy.copy does
    names = [*getattr(value, "__dict__", {}), *slots]
    return [(name, getattr(value, name)) for name in names if hasattr(value, name)]


def on_device(batch: Any, device: torch.device) -> Any:
    """Return a batch on `device`, by its own `to` if it has one."""
    if hasattr(batch, "to"):
        return batch.to(device, non_blocking=True)
    return _replace(batch, lambda leaf: leaf.to(device, non_blocking=True))


def _replace(value: Any, replace: Callable[[Any], Any]) -> Any:
    """Return a copy of `value` with `replace(leaf)` in place of each leaf, in the order of `leaves_of`."""
    if isinstance(value, torch.Tensor | KeyedJaggedTensor):
        return replace(value)
    if not leaves_of(value):
        return value
    replaced = {key: _replace(each, replace) for key, each in _parts(value)}
    if isinstance(value, dict):
        copied = copy.copy(value)  # of its own class
        copied.update(replaced)
        attributes = getattr(copied, "__dict__", {})
        attributes.update({key: each for key, each in replaced.items() if key in attributes})
        return copied
    if isinstance(value, list | tuple):
        each = list(replaced.values())
        return type(value)(*each) if hasattr(value, "_fields") else type(value)(each)
    copied = copy.copy(value)
    for name, each in replaced.items():
        object.__setattr__(copied, name, each)  # a frozen class has no other way
    return copied
