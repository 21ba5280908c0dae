"""A batch at fixed addresses on the device, into which the batches of all steps are copied."""

import copy
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dlrm_overlap.config import InputError
from dlrm_overlap.embedding.protocol.ids import BatchBound


class StaticIds:
    """A KeyedJaggedTensor with room for the most ids that a batch may have."""

    def __init__(self, example: KeyedJaggedTensor, device: torch.device, bound: BatchBound) -> None:
        self._known, self._samples, self.keys = bound.known_lengths, bound.samples, example.keys()
        self._check(example)
        room = sum(bound.capacity(self.keys))
        values = torch.zeros(room, dtype=example.values().dtype, device=device)
        self._lengths = torch.zeros(example.lengths().numel(), dtype=example.lengths().dtype, device=device)
        if self._known:
            sizes = torch.tensor([bound.bag_sizes[key][1] for key in self.keys], device=device)
            self._lengths.copy_(sizes.repeat_interleave(bound.samples))
        self.tensor = KeyedJaggedTensor(self.keys, values=values, lengths=self._lengths, stride=bound.samples)
        self.count = torch.full((1,), room, dtype=torch.int32, device=device)
        """[1] int32: ids of the batch, where lengths are known beforehand"""
        self._count = room

    def _check(self, ids: KeyedJaggedTensor) -> None:
        """Check that ids can take the place of the first batch's.

        Raises:
            InputError: if they have weights, batches of their own, or other features or samples.
        """
        if ids.weights_or_none() is not None:
            raise InputError("GraphTrainPipeline: ids with weights are not captured; use TorchRec's pipeline for them")
        if ids.keys() != self.keys:
            raise InputError(
                f"GraphTrainPipeline: ids of features {', '.join(ids.keys())}, but those of the first batch are "
                f"{', '.join(self.keys)}, and captured steps are all alike; give each batch the same, in the same order"
            )
        if ids.variable_stride_per_key():
            raise InputError("GraphTrainPipeline: features with batches of their own are not captured; use TorchRec's")
        if ids.stride() != self._samples:
            raise InputError(
                f"GraphTrainPipeline: ids of {ids.stride()} samples, but the bound names {self._samples}, and captured "
                f"steps are all alike; correct the bound's samples, or drop the last, smaller batch"
            )

    def fill(self, ids: KeyedJaggedTensor) -> None:
        """Copy a batch's ids. One that has too many is found out, on every rank, where its ids are published.

        Raises:
            InputError: if they are not like the first batch's.
        """
        self._check(ids)
        values, room = ids.values(), self.tensor.values()
        if values.dtype.itemsize > room.dtype.itemsize:  # some would be other ids there
            raise InputError(
                f"GraphTrainPipeline: ids of type {values.dtype}, but those of the first batch are {room.dtype}, in "
                f"which they have no room; give each batch ids of one type"
            )
        here = min(values.numel(), room.numel())
        room[:here].copy_(values[:here], non_blocking=True)
        if not self._known:
            self._lengths.copy_(ids.lengths(), non_blocking=True)
        elif values.numel() != self._count:
            self._count = values.numel()
            self.count.fill_(self._count)

    def copy_from(self, other: "StaticIds") -> None:
        """Copy the content of `other`, which is on the same device, into these fixed addresses."""
        self.tensor.values().copy_(other.tensor.values())
        if self._known:
            self.count.copy_(other.count)
        else:
            self._lengths.copy_(other._lengths)


class StaticBatch:
    """A batch like `example`, whose tensors keep their addresses.

    A batch is made of tensors and KeyedJaggedTensors: an object's attributes, or in tuples, lists and dictionaries.
    What else it holds stays as `example` has it.
    """

    def __init__(self, example: Any, device: torch.device, bound: BatchBound) -> None:
        leaves = leaves_of(example)
        self._places = {place: index for index, place in enumerate(leaves)}
        self._leaves = [
            StaticIds(leaf, device, bound)
            if isinstance(leaf, KeyedJaggedTensor)
            else torch.zeros(leaf.shape, dtype=leaf.dtype, device=device)
            for leaf in leaves.values()
        ]
        tensors = iter([leaf.tensor if isinstance(leaf, StaticIds) else leaf for leaf in self._leaves])
        self.batch = _replace(example, lambda _: next(tensors))
        """a batch of the same class, of the static tensors"""
        if getattr(self.batch, "lease", None) is not None:
            self.batch.lease = None  # which is the example's, and keeps its memory

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
    return (value if isinstance(value, dict) else getattr(value, "__dict__", {})).items()


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
        return replaced
    if isinstance(value, list | tuple):
        each = list(replaced.values())
        return type(value)(*each) if hasattr(value, "_fields") else type(value)(each)
    copied = copy.copy(value)
    for name, each in replaced.items():
        setattr(copied, name, each)
    return copied
