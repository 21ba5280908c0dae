"""A batch at fixed addresses on the device, into which the batches of all steps are copied.

Its ids have room for the most that a batch may have, and a model cuts them there without reading their numbers back.
"""

import copy
import copyreg
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from enum import Enum
from functools import cache
from itertools import accumulate, pairwise
from typing import Any

import torch
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from dlrm_overlap.comm.order import uncompiled
from dlrm_overlap.config import InputError
from dlrm_overlap.embedding.id_layout import BatchBound
from dlrm_overlap.embedding.own_batches import InverseIndices, with_bags_of_samples, with_even_batches
from dlrm_overlap.embedding.steps import weights_of


class Leaves(dict[str, Any]):
    """The tensors and KeyedJaggedTensors of a batch by their places in it, found once for all that a step asks.

    Example: of ({"a": t, "b": u}, v) they are "0.a": t, "0.b": u, "1": v.
    """

    def __init__(self, batch: Any) -> None:
        super().__init__(_walk(batch, ""))
        self.batch = batch
        self.ids = [leaf for leaf in self.values() if isinstance(leaf, KeyedJaggedTensor)]


_LEAVES = torch.Tensor, KeyedJaggedTensor
_WITHOUT_LEAVES = type(None), int, float, str, type, Enum  # types and enumerations are shared by all batches


def _walk(value: Any, place: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, _LEAVES):
        yield place, value
        return
    for key, each in _parts(value):
        if not isinstance(each, _WITHOUT_LEAVES):
            yield from _walk(each, f"{place}.{key}" if place else str(key))


def _parts(value: Any) -> Iterable[tuple[Any, Any]]:
    """Return the members of a batch, or of a part of it, by index, key or attribute."""
    if isinstance(value, list | tuple):
        return enumerate(value)
    if isinstance(value, dict):
        return value.items()
    slots = copyreg._slotnames(type(value))  # pyright: ignore[reportAttributeAccessIssue]  as copy.copy does
    names = [*getattr(value, "__dict__", {}), *slots]
    return [(name, getattr(value, name)) for name in names if hasattr(value, name)]


def why_not_static(batch: Any) -> str | None:
    """Return why memory at fixed addresses cannot hold such a batch, or None if it can."""
    for place, leaf in Leaves(batch).items():
        if isinstance(leaf, torch.Tensor) and (leaf.is_nested or leaf.layout is not torch.strided):
            kind = "a nested tensor" if leaf.is_nested else f"a tensor of layout {leaf.layout}"
            return f"a batch has {kind} at {place}"
    return None


class StaticBatch:
    """A batch like `example`, whose tensors keep their addresses.

    They are an object's attributes, or in tuples, lists and dictionaries. Other attributes stay as `example` has them.
    """

    def __init__(self, example: Any, device: torch.device, bound: BatchBound) -> None:
        leaves = Leaves(example)
        if not leaves:
            raise InputError(
                f"GraphTrainPipeline: no tensor was found in a batch of type {type(example).__name__}, so each step "
                f"would train on the first one; give batches that hold tensors as attributes, or in tuples, lists and "
                f"dictionaries"
            )
        self._leaves = {
            place: StaticIds(leaf, device, bound)
            if isinstance(leaf, KeyedJaggedTensor)
            else torch.zeros(leaf.shape, dtype=leaf.dtype, device=device)
            for place, leaf in leaves.items()
        }
        self.ids = {place: leaf for place, leaf in self._leaves.items() if isinstance(leaf, StaticIds)}
        """the leaves that are ids, by place"""
        each = [leaf.changing if isinstance(leaf, StaticIds) else [leaf] for leaf in self._leaves.values()]
        self._memory = _moved_together([tensor for tensors in each for tensor in tensors])
        self._example = example
        self.renew()
        if getattr(self.batch, "lease", None) is not None:
            object.__setattr__(self.batch, "lease", None)  # which is the example's, and keeps its memory
        self._example = self.batch  # whose tensors stay, while the example's are somebody else's
        self.renew()

    def renew(self) -> None:
        """Make the batch anew for its next step: of the same tensors, and of ids that remember nothing of the last."""
        for leaf in self.ids.values():
            leaf.renew()
        tensors = iter([leaf.tensor if isinstance(leaf, StaticIds) else leaf for leaf in self._leaves.values()])
        self.batch = _replace(self._example, lambda _: next(tensors))
        """a batch of the same class, of the static tensors"""

    def takes(self, leaves: Leaves) -> bool:
        """Return whether a batch has tensors, samples, shapes and types of ids like the first one.

        Raises:
            InputError: if ids have another place than in the first batch; or see `StaticIds.takes`.
        """
        if leaves.keys() != self._leaves.keys():
            if [place for place, leaf in leaves.items() if isinstance(leaf, KeyedJaggedTensor)] == list(self.ids):
                return False  # such as offsets that a JaggedTensor remembers or does not
            raise InputError(
                f"GraphTrainPipeline: a batch of tensors {', '.join(leaves)}, but the first batch has "
                f"{', '.join(self._leaves)}; give each batch its ids in the same places"
            )
        is_like = True
        for place, leaf in leaves.items():
            static = self._leaves[place]
            is_like &= static.takes(leaf) if isinstance(static, StaticIds) else leaf.shape == static.shape
        return is_like

    def fill(self, leaves: Leaves) -> None:
        """Copy a batch that `takes` accepts, from the host or from the device, on the current stream."""
        for place, leaf in leaves.items():
            static = self._leaves[place]
            if isinstance(static, StaticIds):
                static.fill(leaf)
            else:
                static.copy_(leaf, non_blocking=True)
        if (lease := getattr(leaves.batch, "lease", None)) is not None:  # of lent memory, which is free once copied
            lease.copying()

    def take_over(self, other: "StaticBatch") -> None:
        """Copy the content of `other`, which is like this one and on the same device, and make the batch anew."""
        # By a kernel, which has its stream's priority in a CUDA graph: a copy has the lowest, and would wait until all
        # programs of the lookup have begun.
        torch.bitwise_or(other._memory, 0, out=self._memory)
        self.renew()

    def find(self, features: KeyedJaggedTensor) -> str | None:
        """Return the place of `features` in the batch, or None if it is none of the leaves."""
        return next((place for place, leaf in self.ids.items() if leaf.tensor is features), None)


def _moved_together(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Move tensors into one memory, in which each begins at a multiple of 16 bytes; return it, int64."""
    begins = list(accumulate((2 * -(-tensor.nbytes // 16) for tensor in tensors), initial=0))
    memory = torch.zeros(begins[-1], dtype=torch.int64, device=tensors[0].device)
    for tensor, begin, end in zip(tensors, begins, begins[1:], strict=False):
        place = memory[begin:end].view(tensor.dtype)[: tensor.numel()].view(tensor.shape)
        tensor.data = place.copy_(tensor)
    return memory


def on_device(batch: Any, device: torch.device) -> Any:
    """Return a batch on `device`, by its own `to` if it has one."""
    if hasattr(batch, "to"):
        return batch.to(device, non_blocking=True)
    return _replace(batch, lambda leaf: leaf.to(device, non_blocking=True))


def with_even_batches_of(batch: Any, unpooled: Collection[str] = ()) -> Leaves:
    """Return a batch whose ids have a bag a sample for each feature, see `own_batches`; mostly the same one.

    Args:
        unpooled: features of tables that are not pooled: ids that have one of them get each sample's own bags.
    """
    leaves = Leaves(batch)
    if not any(ids.variable_stride_per_key() for ids in leaves.ids):
        return leaves

    def even(leaf: Any) -> Any:
        if not isinstance(leaf, KeyedJaggedTensor):
            return leaf
        return with_even_batches(with_bags_of_samples(leaf) if {*unpooled} & {*leaf.keys()} else leaf)

    return Leaves(_replace(batch, even))


def _replace(value: Any, replace: Callable[[Any], Any]) -> Any:
    """Return a copy of `value` with `replace(leaf)` in place of each leaf, in the order of `Leaves`."""
    if isinstance(value, _LEAVES):
        return replace(value)
    if isinstance(value, _WITHOUT_LEAVES) or not Leaves(value):
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


class StaticIds:
    """Memory for the most ids that a batch may have, and the KeyedJaggedTensor of it that the next step reads."""

    def __init__(self, example: KeyedJaggedTensor, device: torch.device, bound: BatchBound) -> None:
        self._known, self._samples, self.keys = bound.known_lengths, example.stride(), example.keys()
        self._weighted = weights_of(example) is not None
        # Known lengths leave no room behind the ids of a batch, which may have fewer samples than the bound.
        self._capacities = (replace(bound, samples=max(1, self._samples)) if self._known else bound).capacity(self.keys)
        self._room = sum(self._capacities)
        self._values = torch.zeros(self._room, dtype=example.values().dtype, device=device)
        self._weights = torch.zeros(self._room, device=device) if self._weighted else None
        self._lengths = torch.zeros(example.lengths().numel(), dtype=example.lengths().dtype, device=device)
        if self._known:
            sizes = torch.tensor([bound.bag_sizes[key][1] for key in self.keys], device=device)
            self._lengths.copy_(sizes.repeat_interleave(self._samples))
        self.count = torch.full((1,), self._room, dtype=torch.int32, device=device)
        """[1] int32: ids of the batch, where lengths are known beforehand"""
        self._count = self._room if self._known else 0  # of ids that are in the memory
        self._inverse: InverseIndices | None = None
        if (inverse := example.inverse_indices_or_none()) is not None:
            self._inverse = inverse[0], torch.zeros(inverse[1].shape, dtype=torch.int64, device=device)
        inverses = self._inverse and self._inverse[1]
        changing = self._values, self._weights, inverses, self.count if self._known else self._lengths
        self.changing = [tensor for tensor in changing if tensor is not None]
        """all that differs from batch to batch"""
        self.renew()

    def renew(self) -> None:
        """Make the KeyedJaggedTensor anew: it remembers offsets and lengths, which are those of one batch."""
        about = self._samples, self._capacities, self._known, self._inverse
        self.tensor = BoundedIds(self.keys, self._values, self._weights, self._lengths, *about)

    def takes(self, ids: KeyedJaggedTensor) -> bool:
        """Return whether ids are of as many samples as the first batch's, and of a type that has room here.

        Raises:
            InputError: if they have other features, or weights where those have none or the other way round.
        """
        alike = _form(ids.inverse_indices_or_none()) == _form(self._inverse) and ids.stride() == self._samples
        weighted = weights_of(ids) is not None
        if ids.keys() != self.keys or weighted != self._weighted:
            raise InputError(
                f"GraphTrainPipeline: ids of features {_described(ids.keys(), weighted)}, but those of the first batch "
                f"are {_described(self.keys, self._weighted)}, and captured steps are all alike; give each batch the "
                f"same, in the same order"
            )
        return alike and ids.values().dtype.itemsize <= self._values.dtype.itemsize

    def fill(self, ids: KeyedJaggedTensor) -> None:
        """Copy ids that `takes` accepts; too many are found, on every rank, where they are published."""
        values = ids.values()
        count, here = values.numel(), min(values.numel(), self._room)
        self._values[:here].copy_(values[:here], non_blocking=True)
        if self._weights is not None:
            self._weights[:here].copy_(ids.weights()[:here], non_blocking=True)
        if self._inverse is not None:
            self._inverse[1].copy_(ids.inverse_indices()[1], non_blocking=True)
        if not self._known:
            self._lengths.copy_(ids.lengths(), non_blocking=True)
            if here < self._count:  # where ids of the batch before are
                self._values[here : self._count].zero_()
            self._count = here
        elif count != self._count:
            self.count.fill_(count)
            self._count = count


def _form(inverse: InverseIndices | None) -> object:
    return inverse and (list(inverse[0]), inverse[1].shape)


def _described(keys: Sequence[str], weighted: bool) -> str:
    return f"{', '.join(keys)} {'with' if weighted else 'without'} weights"


@uncompiled  # for a compiled model makes the tensor in every step
@cache
def _on_device(indices: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Return indices of features, [n] int32, which a capture cannot copy to the device: the steps before it have."""
    return torch.tensor(indices, dtype=torch.int32, device=device)


class BoundedIds(KeyedJaggedTensor):
    """Ids of one step in memory that has room for the most that a batch may have.

    After a batch's ids, `values` is 0. TorchRec's class reads numbers of ids from the device; here `split`, `permute`,
    `[]` and `to_dict` return features with room for the most ids of each. A method that must return the numbers
    themselves is refused, unless all lengths are known beforehand.

    Example: 2 samples, f of at most 1 and g of at most 2 ids a bag. f: [5] [], g: [7, 7] [1] has values 5 7 7 1 0 0 and
    lengths 1 0 2 1; `["g"]` has values 7 7 1 0 and lengths 2 1.
    """

    def __init__(
        self,
        keys: Sequence[str],
        values: torch.Tensor,
        weights: torch.Tensor | None,
        lengths: torch.Tensor,
        samples: int,
        capacities: Sequence[int],
        known: bool,
        inverse: InverseIndices | None = None,
    ) -> None:
        """Take T features of `samples` bags.

        Args:
            values: [sum of capacities], as `weights`.
            lengths: [T * samples].
            capacities: the most ids of each feature.
            known: whether each feature has as many.
            inverse: which of a feature's bags is each sample's, where features have batches of their own.
        """
        self.capacities, self._known = list(capacities), known
        super().__init__(list(keys), values, weights, lengths=lengths, stride=samples, inverse_indices=inverse)

    @property
    def _length_per_key(self) -> list[int] | None:
        if self._known:
            return self.capacities
        raise InputError(
            "GraphTrainPipeline: the model asks for the number of ids of each feature, which a captured step cannot "
            "read back from the device; leave out length_per_key, offset_per_key and concat (split, permute, to_dict "
            "and [] are done on the device), or give every bag of a feature the same number in the bound"
        )

    @_length_per_key.setter
    def _length_per_key(self, lengths: list[int] | None) -> None:
        """Forget the lengths that TorchRec's class has found: they are of one batch."""

    def split(self, segments: list[int]) -> list[KeyedJaggedTensor]:
        """Return the features in groups of `segments`, see `KeyedJaggedTensor.split`."""
        ends = list(accumulate(segments, initial=0))
        return [self.permute(list(range(begin, end))) for begin, end in pairwise(ends)]

    def permute(self, indices: list[int], indices_tensor: torch.Tensor | None = None) -> KeyedJaggedTensor:
        """Return the features `indices` in this order, see `KeyedJaggedTensor.permute`."""
        keys, samples = self.keys(), self.stride()
        if indices == list(range(len(keys))):
            return self
        capacities = [self.capacities[i] for i in indices]
        if not indices:
            values, weights, lengths = self.values()[:0], self.weights_or_none(), self.lengths()[:0]
            weights = weights if weights is None else weights[:0]
        else:
            index, counts = _on_device(tuple(indices), self.device()), self.lengths().view(len(keys), samples)
            # The lengths stay as they are, so that a batch beyond its bound is found where its ids are published.
            lengths, room = counts.index_select(0, index).flatten(), sum(capacities)
            # Of such a batch no id is read: there may be none where its lengths say, nor room for it.
            safe = counts * ((counts.sum() <= sum(self.capacities)) & (lengths.sum() <= room))
            arguments = index, safe, self.values(), self.weights_or_none(), room
            _, values, weights = torch.ops.fbgemm.permute_2D_sparse_data(*arguments)
            positions = torch.arange(room, device=values.device)
            values = values.where(positions < safe.index_select(0, index).sum(), 0)
        taken = [keys[i] for i in indices]
        inverse = self.inverse_indices_or_none()
        return BoundedIds(taken, values, weights, lengths, samples, capacities, self._known, inverse)

    def to(self, device: torch.device, *args: Any, **kwargs: Any) -> KeyedJaggedTensor:
        """Return these ids where they are on `device`, else see `KeyedJaggedTensor.to`."""
        return self if torch.device(device) == self.device() else super().to(device, *args, **kwargs)

    def __getitem__(self, key: str) -> JaggedTensor:
        """Return one feature."""
        one = self.permute([self._key_indices()[key]])
        return JaggedTensor(one.values(), one.weights_or_none(), lengths=one.lengths())

    def to_dict(self, compute_offsets: bool = True) -> dict[str, JaggedTensor]:
        """Return each feature by its key."""
        return {key: self[key] for key in self.keys()}
