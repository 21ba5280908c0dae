"""A batch at fixed addresses on the device, with padded ids, to which the batches of all steps are copied."""

import copy
import copyreg
from collections.abc import Callable, Collection, Sequence
from enum import Enum
from functools import cache, partial
from itertools import accumulate, pairwise
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from dlrm_overlap.comm.order import uncompiled
from dlrm_overlap.config import InputError
from dlrm_overlap.data.batch import Lease
from dlrm_overlap.embedding.id_layout import BatchCapacity
from dlrm_overlap.embedding.steps import padded, weights_of
from dlrm_overlap.embedding.variable_batch import InverseIndices, with_bags_of_samples, with_even_batches
from dlrm_overlap.train.graphs.constants import Constant, copy_of, difference, frozen


class BatchTensors(dict[str, Any]):
    """The tensors and KeyedJaggedTensors of a batch, by path.

    The walk also enters dataclasses, `Streamable` batches and other objects, which torch's pytree takes for leaves.

    Example: the batch ({"a": t, "b": u, "k": 3}, v) with tensors t, u, v gives "0.a": t, "0.b": u, "1": v.
    """

    def __init__(self, batch: Any) -> None:
        super().__init__()
        self.batch = batch
        self.constants: list[Constant] = []
        """all other parts, such as numbers, text and arrays, and the type of each list, dictionary and object"""
        self._find(batch, "", "", "")
        self.ids = [leaf for leaf in self.values() if isinstance(leaf, KeyedJaggedTensor)]

    def _find(self, value: Any, path: str, parent: str, key: Any) -> None:
        if isinstance(value, _LEAVES):
            self[path] = value
        elif isinstance(value, _WITHOUT_LEAVES):
            self.constants.append(Constant(parent, key, value))
        elif (parts := _parts(value)) or isinstance(value, list | tuple | dict):
            self.constants.append(Constant(parent, key, type(value)))
            for name, each in parts:
                if not isinstance(each, _UNREAD) and not (name == "lease" and each is None):
                    self._find(each, f"{path}.{name}" if path else str(name), path, name)
            own: Any = getattr(value, "__dict__", {})
            if isinstance(value, list | tuple | dict) and own is not value:
                self.constants += [Constant(path, f"attribute {name}", each) for name, each in own.items()]
        else:
            self.constants.append(Constant(parent, key, value))

    @property
    def forms(self) -> "dict[str, Form]":
        return {path: Form.of(leaf) for path, leaf in self.items() if isinstance(leaf, torch.Tensor)}

    def snapshot(self) -> "BatchTensors":
        """Return the same tensors, not copied, in copies of the batch's lists and dictionaries."""
        return BatchTensors(replace_leaves(self.batch, lambda leaf: leaf))


_LEAVES = torch.Tensor, KeyedJaggedTensor
# Types, modules and enumerations are the same objects in all batches.
_WITHOUT_LEAVES = type(None), int, float, complex, str, bytes, type, ModuleType, Enum
# Differ in each batch, but no model computes with them.
_UNREAD = Lease, torch.Event, torch.cuda.Event, torch.Stream


def _parts(value: Any) -> Collection[tuple[Any, Any]]:
    if isinstance(value, list | tuple):
        return list(enumerate(value))
    if isinstance(value, dict):
        return value.items()
    slots = copyreg._slotnames(type(value))  # pyright: ignore[reportAttributeAccessIssue]  as copy.copy does
    names = [*getattr(value, "__dict__", {}), *slots]
    return [(name, getattr(value, name)) for name in names if hasattr(value, name)]


class Mismatch(NamedTuple):
    path: str
    reason: str
    should_warn: bool
    """True if the user can change the batch so that its step is captured"""


def why_not_static(batch: Any) -> str | None:
    """Return why a `StaticBatch` cannot be made like this batch; None if it can."""
    for path, leaf in BatchTensors(batch).items():
        if isinstance(leaf, torch.Tensor) and (leaf.is_nested or leaf.layout is not torch.strided):
            kind = "a nested tensor" if leaf.is_nested else f"a tensor of layout {leaf.layout}"
            return f"a batch has {kind} at {path}"
    return None


class StaticBatch:
    """A batch like `example`: its tensors keep their addresses, and its other parts equal the example's."""

    def __init__(self, example: Any, device: torch.device, capacity: BatchCapacity) -> None:
        leaves = BatchTensors(example)
        if not leaves:
            raise InputError(
                f"GraphTrainPipeline: no tensor was found in a batch of type {type(example).__name__}, so each step "
                f"would train on the first one; give batches that hold tensors as attributes, or in tuples, lists and "
                f"dictionaries"
            )
        self._constants, self._forms = frozen(leaves.constants), leaves.forms
        self._leaves = {
            path: StaticKeyedJaggedTensor(leaf, device, capacity)
            if isinstance(leaf, KeyedJaggedTensor)
            else torch.zeros(leaf.shape, dtype=leaf.dtype, device=device)
            for path, leaf in leaves.items()
        }
        self.ids = {path: leaf for path, leaf in self._leaves.items() if isinstance(leaf, StaticKeyedJaggedTensor)}
        each = [
            leaf.changing if isinstance(leaf, StaticKeyedJaggedTensor) else [leaf] for leaf in self._leaves.values()
        ]
        self._memory = _moved_together([tensor for tensors in each for tensor in tensors])
        self._example = example
        self.renew()
        if isinstance(getattr(self.batch, "lease", None), Lease):
            object.__setattr__(self.batch, "lease", None)  # would keep the example's memory from the loader
        self._example = self.batch  # drops the given example and its tensors
        self.renew()

    def renew(self) -> None:
        """Make `batch` again from the same tensors, because KeyedJaggedTensors cache the lengths of one step."""
        for leaf in self.ids.values():
            leaf.renew()
        tensors = iter(
            [leaf.tensor if isinstance(leaf, StaticKeyedJaggedTensor) else leaf for leaf in self._leaves.values()]
        )
        self.batch = replace_leaves(self._example, lambda _: next(tensors))

    def mismatch(self, leaves: BatchTensors) -> Mismatch | None:
        """Return how a batch differs from the example; None if it can be copied to this batch.

        Raises:
            InputError: if ids have another path than in the example, or `StaticKeyedJaggedTensor.mismatch` raises it.
        """
        if leaves.keys() != self._leaves.keys():
            if [path for path, leaf in leaves.items() if isinstance(leaf, KeyedJaggedTensor)] == list(self.ids):
                # Such as offsets, which a JaggedTensor may have cached or not.
                paths = " and ".join(sorted(set(leaves) ^ set(self._leaves)))
                return Mismatch(paths, f"tensors at {paths} are in one batch and not in another", True)
            raise InputError(
                f"GraphTrainPipeline: a batch of tensors {', '.join(leaves)}, but the first batch has "
                f"{', '.join(self._leaves)}; give each batch its ids in the same places"
            )
        found = [self._mismatch_at(path, leaf) for path, leaf in leaves.items()]
        if changed := difference(leaves.constants, self._constants):
            path, reason = changed
            found.append(Mismatch(path, f"{reason}; give it as a tensor to have such steps captured", True))
        return next((each for each in found if each is not None), None)

    def _mismatch_at(self, path: str, leaf: Any) -> Mismatch | None:
        static = self._leaves[path]
        if isinstance(static, StaticKeyedJaggedTensor):
            reason = static.mismatch(leaf)
            return Mismatch(path, f"ids {path}: {reason}", reason != _SAMPLES) if reason else None
        ours, first = Form.of(leaf), self._forms[path]
        if ours == first and not ours.requires_grad and ours.layout == torch.strided:
            return None
        return Mismatch(path, f"tensor {path} is {ours}, and was {first} in the first batch", ours.shape == first.shape)

    def fill(self, leaves: BatchTensors) -> None:
        """Copy a batch from the host or the device to this batch, on the current stream."""
        for path, leaf in leaves.items():
            static = self._leaves[path]
            if isinstance(static, StaticKeyedJaggedTensor):
                static.fill(leaf)
            else:
                static.copy_(leaf, non_blocking=True)
        lease = getattr(leaves.batch, "lease", None)
        if isinstance(lease, Lease):  # the loader reuses the batch's memory once it is copied
            lease.copying()

    def copy_from(self, other: "StaticBatch") -> None:
        """Copy the tensors of `other`, a static batch of the same example and device, and call `renew`."""
        # By a kernel: in a CUDA graph it has its stream's priority, while a copy has the lowest, and would wait until
        # all programs of the lookup have begun.
        torch.bitwise_or(other._memory, 0, out=self._memory)
        self.renew()

    def exact(self) -> Any:
        """Return the batch with unpadded ids; may wait for the device to read their number."""
        tensors = iter(
            [leaf.exact() if isinstance(leaf, StaticKeyedJaggedTensor) else leaf for leaf in self._leaves.values()]
        )
        return replace_leaves(self._example, lambda _: next(tensors))

    def path_of(self, features: KeyedJaggedTensor) -> str | None:
        """Return the path of `features` in this batch or in the result of `exact`; None if they are in neither."""
        given = padded(features)
        return next((path for path, leaf in self.ids.items() if leaf.tensor is given), None)


class Form(NamedTuple):
    """All that a model may ask of a tensor except its elements."""

    shape: torch.Size
    dtype: torch.dtype
    layout: torch.layout
    requires_grad: bool

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "Form":
        return cls(tensor.shape, tensor.dtype, tensor.layout, tensor.requires_grad)

    def __str__(self) -> str:
        layout = "" if self.layout == torch.strided else f" {self.layout}"
        return f"{list(self.shape)} {self.dtype}{layout}{' that requires a gradient' * self.requires_grad}"


def _moved_together(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Move tensors into one allocation, each at a multiple of 16 bytes, and return it as int64."""
    begins = list(accumulate((2 * -(-tensor.nbytes // 16) for tensor in tensors), initial=0))
    memory = torch.zeros(begins[-1], dtype=torch.int64, device=tensors[0].device)
    for tensor, begin, end in zip(tensors, begins, begins[1:], strict=False):
        part = memory[begin:end].view(tensor.dtype)[: tensor.numel()].view(tensor.shape)
        tensor.data = part.copy_(tensor)
    return memory


def on_device(batch: Any, device: torch.device) -> Any:
    if hasattr(batch, "to"):
        return batch.to(device, non_blocking=True)
    return replace_leaves(batch, lambda leaf: leaf.to(device, non_blocking=True))


def with_even_batches_of(batch: Any, unpooled: Collection[str] = ()) -> BatchTensors:
    """Return a batch whose ids have one bag per sample and feature, see `variable_batch`.

    `unpooled` names the features of unpooled tables. In a KeyedJaggedTensor with such a feature, a bag that several
    samples share is repeated for each of them.
    """
    leaves = BatchTensors(batch)
    if not any(ids.variable_stride_per_key() for ids in leaves.ids):
        return leaves

    def even(leaf: Any) -> Any:
        if not isinstance(leaf, KeyedJaggedTensor):
            return leaf
        return with_even_batches(with_bags_of_samples(leaf) if {*unpooled} & {*leaf.keys()} else leaf)

    return BatchTensors(replace_leaves(batch, even))


def replace_leaves(value: Any, replace: Callable[[Any], Any]) -> Any:
    """Return a copy of `value` with each leaf replaced by `replace(leaf)`, in the order of `BatchTensors`.

    Objects without leaves are copied if they are not hashable, such as arrays; hashable ones are shared.
    """
    if isinstance(value, _LEAVES):
        return replace(value)
    if isinstance(value, _WITHOUT_LEAVES):
        return value
    if type(value) not in (list, tuple, dict) and not BatchTensors(value):
        return copy_of(value)
    replaced = {key: replace_leaves(each, replace) for key, each in _parts(value)}
    if isinstance(value, dict):
        copied = copy.copy(value)  # keeps its class
        copied.update(replaced)
        attributes = getattr(copied, "__dict__", {})
        attributes.update({key: each for key, each in replaced.items() if key in attributes})
        return copied
    if isinstance(value, list | tuple):
        each = list(replaced.values())
        return type(value)(*each) if hasattr(value, "_fields") else type(value)(each)
    copied = copy.copy(value)
    for name, each in replaced.items():
        object.__setattr__(copied, name, each)  # also works for a frozen dataclass
    return copied


class StaticKeyedJaggedTensor:
    """Memory for ids within the capacity."""

    def __init__(self, example: KeyedJaggedTensor, device: torch.device, capacity: BatchCapacity) -> None:
        self._known, self._samples, self.keys = capacity.known_lengths, example.stride(), example.keys()
        self._weighted = weights_of(example) is not None
        self._capacities = capacity.capacity(self.keys)
        if self._known:  # no padding, also if the batch has fewer samples than the capacity, or none
            self._capacities = [self._samples * capacity.bag_sizes[key][1] for key in self.keys]
        self._size = sum(self._capacities)
        self._values = torch.zeros(self._size, dtype=example.values().dtype, device=device)
        weights = example.weights_or_none()
        self._weights = None if weights is None else torch.zeros(self._size, dtype=weights.dtype, device=device)
        self._lengths = torch.zeros(example.lengths().numel(), dtype=example.lengths().dtype, device=device)
        if self._known:
            sizes = torch.tensor([capacity.bag_sizes[key][1] for key in self.keys], device=device)
            self._lengths.copy_(sizes.repeat_interleave(self._samples))
        self.count = torch.full((1,), self._size, dtype=torch.int32, device=device)
        """[1] int32: ids of the batch, if all lengths are known beforehand"""
        self._count = self._size if self._known else 0
        self._inverse: InverseIndices | None = None
        if (inverse := example.inverse_indices_or_none()) is not None:
            self._inverse = inverse[0], torch.zeros(inverse[1].shape, dtype=inverse[1].dtype, device=device)
        inverses = self._inverse and self._inverse[1]
        changing = self._values, self._weights, inverses, self.count if self._known else self._lengths
        self.changing = [tensor for tensor in changing if tensor is not None]
        """tensors that differ from batch to batch"""
        self.renew()

    def renew(self) -> None:
        """Make `tensor` again from the same memory, without the cached lengths of an earlier step."""
        about = self._samples, self._capacities, self._known, self._inverse
        self.tensor = PaddedKeyedJaggedTensor(self.keys, self._values, self._weights, self._lengths, *about)

    def exact(self) -> KeyedJaggedTensor:
        """Return the unpadded ids; waits for the device to read their number, unless all lengths are known."""
        if self._known:
            return self.tensor
        counts = self._lengths.view(len(self.keys), self._samples).sum(1).tolist()
        if (total := sum(counts)) > self._size:
            return self.tensor  # the batch has changed since it was counted, which is found when its ids are sent
        weights = None if self._weights is None else self._weights[:total]
        tensors = self._values[:total], weights, self._lengths
        found = PaddedKeyedJaggedTensor(self.keys, *tensors, self._samples, counts, True, self._inverse)
        found.padded, found.is_exact = self.tensor, True
        return found

    def mismatch(self, ids: KeyedJaggedTensor) -> str:
        """Return how `ids` differ from the ids of the first batch; empty if they can be copied to this memory.

        Raises:
            InputError: if their features differ, or only one of the two batches has weights.
        """
        weighted = weights_of(ids) is not None
        if ids.keys() != self.keys or weighted != self._weighted:
            raise InputError(
                f"GraphTrainPipeline: ids of features {_described(ids.keys(), weighted)}, but those of the first batch "
                f"are {_described(self.keys, self._weighted)}, and all captured steps have the same; give each batch "
                f"the same features, in the same order"
            )
        if ids.stride() != self._samples or _form(ids.inverse_indices_or_none()) != _form(self._inverse):
            return _SAMPLES
        if not _holds(self._values.dtype, ids.values().dtype):
            return f"{ids.values().dtype}, and were {self._values.dtype} in the first batch"
        theirs, ours = ids.weights_or_none(), self._weights
        if _type_of(theirs) != _type_of(ours):
            return f"weights are {_type_of(theirs)}, and were {_type_of(ours)} in the first batch"
        return ""

    def fill(self, ids: KeyedJaggedTensor) -> None:
        """Copy ids, up to the capacity. If there are more, sending the ids raises an error on every rank."""
        values = ids.values()
        count, copied = values.numel(), min(values.numel(), self._size)
        self._values[:copied].copy_(values[:copied], non_blocking=True)
        if self._weights is not None:
            self._weights[:copied].copy_(ids.weights()[:copied], non_blocking=True)
        if self._inverse is not None:
            self._inverse[1].copy_(ids.inverse_indices()[1], non_blocking=True)
        if not self._known:
            self._lengths.copy_(ids.lengths(), non_blocking=True)
            if copied < self._count:  # the last batch had more ids
                self._values[copied : self._count].zero_()
            self._count = copied
        elif count != self._count:
            self.count.fill_(count)
            self._count = count


_SAMPLES = "another number of samples"


def _form(inverse: InverseIndices | None) -> object:
    return inverse and (type(inverse[0]), list(inverse[0]), inverse[1].shape, inverse[1].dtype)


def _type_of(weights: torch.Tensor | None) -> torch.dtype | None:
    return None if weights is None else weights.dtype


def _holds(memory: torch.dtype, ids: torch.dtype) -> bool:
    integers = torch.int8, torch.int16, torch.int32, torch.int64
    return memory == ids or (memory in integers and ids in integers[: integers.index(memory)])


def _described(keys: Sequence[str], weighted: bool) -> str:
    return f"{', '.join(keys)} {'with' if weighted else 'without'} weights"


@uncompiled  # a compiled model would make the tensor in every step
@cache
def _on_device(indices: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Return indices [n] int32 on the device. The result is cached, since a capture cannot copy from the host."""
    return torch.tensor(indices, dtype=torch.int32, device=device)


class PaddedKeyedJaggedTensor(KeyedJaggedTensor):
    """Ids of one step, padded with 0 to the capacity.

    `split`, `permute`, `[]` and `to_dict` return features padded to their capacities, without reading the number of ids
    from the device. Methods that return numbers of ids raise an error, unless all lengths are known beforehand.

    Example: 2 samples, f has up to 1 and g up to 2 ids a bag. f: [5] [], g: [7, 7] [1] has values 5 7 7 1 0 0 and
    lengths 1 0 2 1; `["g"]` has values 7 7 1 0 and lengths 2 1.
    """

    padded: KeyedJaggedTensor | None = None
    """set on the unpadded ids of an eager step: the padded ids of the same batch, which are sent to the row owners"""
    is_exact = False
    """True if neither these ids nor features split from them are padded"""

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
            values: [sum of capacities] ids.
            weights: [sum of capacities] weight of each id, or None.
            lengths: [T * samples] ids of each bag.
            capacities: [T] largest number of ids of each feature; if `known`, the exact number.
            inverse: for a variable batch, the index of each sample's bag, for each feature.
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
            "and [] are done on the device), or give every bag of a feature the same number in the capacity"
        )

    @_length_per_key.setter
    def _length_per_key(self, lengths: list[int] | None) -> None:
        """Ignore the lengths that TorchRec's class caches: they belong to one batch."""

    def split(self, segments: list[int]) -> list[KeyedJaggedTensor]:
        ends = list(accumulate(segments, initial=0))
        return [self.permute(list(range(begin, end))) for begin, end in pairwise(ends)]

    def permute(self, indices: list[int], indices_tensor: torch.Tensor | None = None) -> KeyedJaggedTensor:
        keys, samples = self.keys(), self.stride()
        if indices == list(range(len(keys))):
            return self
        capacities = [self.capacities[i] for i in indices]
        if not indices:
            values, weights, lengths = self.values()[:0], self.weights_or_none(), self.lengths()[:0]
            weights = weights if weights is None else weights[:0]
        else:
            index, counts = _on_device(tuple(indices), self.device()), self.lengths().view(len(keys), samples)
            # The lengths are kept, so that a batch beyond the capacity raises an error when its ids are sent.
            lengths, size = counts.index_select(0, index).flatten(), sum(capacities)
            # No id of such a batch is read, since its lengths may lead beyond the memory.
            safe = counts * ((counts.sum() <= sum(self.capacities)) & (lengths.sum() <= size))
            cut, given = partial(torch.ops.fbgemm.permute_2D_sparse_data, index, safe), self.weights_or_none()
            has_id = torch.arange(size, device=index.device) < safe.index_select(0, index).sum()
            # FBGEMM takes weights of these types only; others are permuted as ids are.
            is_weight = given is not None and given.dtype in (torch.float32, torch.float64)
            _, values, weights = cut(self.values(), given if is_weight else None, size)
            if given is not None and not is_weight:
                _, weights, _ = cut(given, None, size)
            values, weights = values.where(has_id, 0), weights if weights is None else weights.where(has_id, 0)
        taken = [keys[i] for i in indices]
        inverse = self.inverse_indices_or_none()
        cut = PaddedKeyedJaggedTensor(taken, values, weights, lengths, samples, capacities, self._known, inverse)
        cut.is_exact = self.is_exact
        return cut

    def to(self, device: torch.device, *args: Any, **kwargs: Any) -> KeyedJaggedTensor:
        return self if torch.device(device) == self.device() else super().to(device, *args, **kwargs)

    def __getitem__(self, key: str) -> JaggedTensor:
        one = self.permute([self._key_indices()[key]])
        return JaggedTensor(one.values(), one.weights_or_none(), lengths=one.lengths())

    def to_dict(self, compute_offsets: bool = True) -> dict[str, JaggedTensor]:
        return {key: self[key] for key in self.keys()}
