"""A batch at fixed addresses on the device, into which the batches of all steps are copied."""

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dlrm_overlap.config import InputError
from dlrm_overlap.embedding.protocol.ids import BatchBound


class StaticIds:
    """A KeyedJaggedTensor with room for the most ids that a batch may have."""

    def __init__(self, example: KeyedJaggedTensor, device: torch.device, bound: BatchBound) -> None:
        if example.weights_or_none() is not None:
            raise InputError("GraphTrainPipeline: ids with weights are not captured; use TorchRec's pipeline for them")
        self._known, self.keys = bound.known_lengths, example.keys()
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

    def fill(self, ids: KeyedJaggedTensor) -> None:
        """Copy a batch's ids. One that has too many is found out, on every rank, where its ids are published."""
        values, room = ids.values(), self.tensor.values()
        here = min(values.numel(), room.numel())
        room[:here].copy_(values[:here], non_blocking=True)
        if not self._known:
            self._lengths.copy_(ids.lengths(), non_blocking=True)
        elif values.numel() != self._count:
            self._count = values.numel()
            self.count.fill_(self._count)

    def copy_from(self, other: "StaticIds") -> None:
        """Copy from another one on the device."""
        self.tensor.values().copy_(other.tensor.values())
        if self._known:
            self.count.copy_(other.count)
        else:
            self._lengths.copy_(other._lengths)


class StaticBatch:
    """A batch like `example`, whose tensors keep their addresses.

    A batch is made of tensors and KeyedJaggedTensors: an object's attributes, or in tuples, lists and dictionaries.
    """

    def __init__(self, example: Any, device: torch.device, bound: BatchBound) -> None:
        self._leaves = [
            StaticIds(leaf, device, bound)
            if isinstance(leaf, KeyedJaggedTensor)
            else torch.zeros(leaf.shape, dtype=leaf.dtype, device=device)
            for leaf in leaves_of(example)
        ]
        tensors = iter([leaf.tensor if isinstance(leaf, StaticIds) else leaf for leaf in self._leaves])
        self.batch = _replace(example, lambda _: next(tensors))
        """a batch of the same class, of the static tensors"""
        if getattr(self.batch, "lease", None) is not None:
            self.batch.lease = None  # which is the example's, and keeps its memory

    def fill(self, batch: Any) -> None:
        """Copy a batch from the host, or from the device, on the current stream.

        Raises:
            InputError: if a tensor has another shape than that of the first batch.
        """
        for static, leaf in zip(self._leaves, leaves_of(batch), strict=True):
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
        """Copy from another one on the device."""
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


def leaves_of(batch: Any) -> Sequence[Any]:
    """Return the tensors and KeyedJaggedTensors of a batch, in an order that is always the same."""
    return list(_walk(batch))


def _walk(value: Any) -> Iterator[Any]:
    if isinstance(value, torch.Tensor | KeyedJaggedTensor):
        yield value
    elif isinstance(value, dict):
        for each in value.values():
            yield from _walk(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _walk(each)
    elif hasattr(value, "__dict__"):
        for each in vars(value).values():
            yield from _walk(each)


def _replace(value: Any, replace: Callable[[Any], Any]) -> Any:
    """Return a copy of `value` with `replace(leaf)` in place of each leaf, in the order of `leaves_of`."""
    if isinstance(value, torch.Tensor | KeyedJaggedTensor):
        return replace(value)
    if isinstance(value, dict):
        return {key: _replace(each, replace) for key, each in value.items()}
    if isinstance(value, list | tuple):
        each = [_replace(each, replace) for each in value]
        return type(value)(*each) if hasattr(value, "_fields") else type(value)(each)
    if any(True for _ in _walk(value)):
        copied = copy.copy(value)
        for name, each in vars(value).items():
            setattr(copied, name, _replace(each, replace))
        return copied
    return value
