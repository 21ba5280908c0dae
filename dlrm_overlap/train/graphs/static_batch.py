"""A batch at fixed addresses on the device, into which the batches of all steps are copied.

Its ids have room for the most that a batch may have, and a model cuts them there without reading their numbers back.
"""

import copy
import copyreg
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
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
from dlrm_overlap.embedding.steps import weights_of, with_room
from dlrm_overlap.embedding.variable_batch import InverseIndices, with_bags_of_samples, with_even_batches
from dlrm_overlap.train.graphs.constants import Constant, copy_of, difference, frozen


class BatchTensors(dict[str, Any]):
    """The tensors and KeyedJaggedTensors of a batch by their places in it, found once for all that a step asks.

    Example: of ({"a": t, "b": u, "k": 3}, v) they are "0.a": t, "0.b": u, "1": v.
    """

    def __init__(self, batch: Any) -> None:
        super().__init__()
        self.batch = batch
        self.constants: list[Constant] = []
        """all other parts: numbers, text, arrays and the like, and the types of lists, dictionaries and objects"""
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
        """The forms of the tensors by their places."""
        return {place: Form.of(leaf) for place, leaf in self.items() if isinstance(leaf, torch.Tensor)}

    def kept(self) -> "BatchTensors":
        """Return the same batch with lists and dictionaries of its own, which a caller may fill for its next batch."""
        return BatchTensors(replace_leaves(self.batch, lambda leaf: leaf))


_LEAVES = torch.Tensor, KeyedJaggedTensor
# Types, modules and enumerations are shared by all batches.
_WITHOUT_LEAVES = type(None), int, float, complex, str, bytes, type, ModuleType, Enum
# No model computes with these, and each batch has its own.
_UNREAD = Lease, torch.Event, torch.cuda.Event, torch.Stream


def _parts(value: Any) -> Collection[tuple[Any, Any]]:
    """Return the members of a batch, or of a part of it, by index, key or attribute."""
    if isinstance(value, list | tuple):
        return list(enumerate(value))
    if isinstance(value, dict):
        return value.items()
    slots = copyreg._slotnames(type(value))  # pyright: ignore[reportAttributeAccessIssue]  as copy.copy does
    names = [*getattr(value, "__dict__", {}), *slots]
    return [(name, getattr(value, name)) for name in names if hasattr(value, name)]


class Unlike(NamedTuple):
    """Why a batch is not copied into a static one."""

    path: str
    """of the part that differs"""
    reason: str
    needs_word: bool
    """whether the user should know: a captured step would otherwise take such batches"""


def why_not_static(batch: Any) -> str | None:
    """Return why memory at fixed addresses cannot hold such a batch, or None if it can."""
    for place, leaf in BatchTensors(batch).items():
        if isinstance(leaf, torch.Tensor) and (leaf.is_nested or leaf.layout is not torch.strided):
            kind = "a nested tensor" if leaf.is_nested else f"a tensor of layout {leaf.layout}"
            return f"a batch has {kind} at {place}"
    return None


class StaticBatch:
    """A batch like `example`, whose tensors keep their addresses.

    They are an object's attributes, or in tuples, lists and dictionaries. Its other parts are those of `example`: a
    batch with other ones is not taken.
    """

    def __init__(self, example: Any, device: torch.device, bound: BatchCapacity) -> None:
        leaves = BatchTensors(example)
        if not leaves:
            raise InputError(
                f"GraphTrainPipeline: no tensor was found in a batch of type {type(example).__name__}, so each step "
                f"would train on the first one; give batches that hold tensors as attributes, or in tuples, lists and "
                f"dictionaries"
            )
        self._constants, self._forms = frozen(leaves.constants), leaves.forms
        self._leaves = {
            place: StaticKeyedJaggedTensor(leaf, device, bound)
            if isinstance(leaf, KeyedJaggedTensor)
            else torch.zeros(leaf.shape, dtype=leaf.dtype, device=device)
            for place, leaf in leaves.items()
        }
        self.ids = {place: leaf for place, leaf in self._leaves.items() if isinstance(leaf, StaticKeyedJaggedTensor)}
        """the leaves that are ids, by place"""
        each = [
            leaf.changing if isinstance(leaf, StaticKeyedJaggedTensor) else [leaf] for leaf in self._leaves.values()
        ]
        self._memory = _moved_together([tensor for tensors in each for tensor in tensors])
        self._example = example
        self.renew()
        if isinstance(getattr(self.batch, "lease", None), Lease):
            object.__setattr__(self.batch, "lease", None)  # which is the example's, and keeps its memory
        self._example = self.batch  # whose tensors stay, while the example's are somebody else's
        self.renew()

    def renew(self) -> None:
        """Make the batch anew for its next step: of the same tensors, and of ids that remember nothing of the last."""
        for leaf in self.ids.values():
            leaf.renew()
        tensors = iter(
            [leaf.tensor if isinstance(leaf, StaticKeyedJaggedTensor) else leaf for leaf in self._leaves.values()]
        )
        self.batch = replace_leaves(self._example, lambda _: next(tensors))
        """a batch of the same class, of the static tensors"""

    def why_not(self, leaves: BatchTensors) -> Unlike | None:
        """Return why a batch is not taken: it differs from the first one in samples, shapes, types or other parts.

        Raises:
            InputError: if ids have another place than in the first batch; or see `StaticKeyedJaggedTensor.why_not`.
        """
        if leaves.keys() != self._leaves.keys():
            if [place for place, leaf in leaves.items() if isinstance(leaf, KeyedJaggedTensor)] == list(self.ids):
                # Such as offsets that a JaggedTensor remembers or does not.
                places = " and ".join(sorted(set(leaves) ^ set(self._leaves)))
                return Unlike(places, f"tensors at {places} are in one batch and not in another", True)
            raise InputError(
                f"GraphTrainPipeline: a batch of tensors {', '.join(leaves)}, but the first batch has "
                f"{', '.join(self._leaves)}; give each batch its ids in the same places"
            )
        found = [self._why_not(place, leaf) for place, leaf in leaves.items()]
        if changed := difference(leaves.constants, self._constants):
            path, reason = changed
            found.append(Unlike(path, f"{reason}; give it as a tensor to have such steps captured", True))
        return next((each for each in found if each is not None), None)

    def _why_not(self, place: str, leaf: Any) -> Unlike | None:
        static = self._leaves[place]
        if isinstance(static, StaticKeyedJaggedTensor):
            reason = static.why_not(leaf)
            return Unlike(place, f"ids {place}: {reason}", reason != _SAMPLES) if reason else None
        ours, first = Form.of(leaf), self._forms[place]
        if ours == first and not ours.requires_grad and ours.layout == torch.strided:
            return None
        return Unlike(place, f"tensor {place} is {ours}, and was {first} in the first batch", ours.shape == first.shape)

    def fill(self, leaves: BatchTensors) -> None:
        """Copy a batch that `takes` accepts, from the host or from the device, on the current stream."""
        for place, leaf in leaves.items():
            static = self._leaves[place]
            if isinstance(static, StaticKeyedJaggedTensor):
                static.fill(leaf)
            else:
                static.copy_(leaf, non_blocking=True)
        lease = getattr(leaves.batch, "lease", None)
        if isinstance(lease, Lease):  # of lent memory, which is free once copied
            lease.copying()

    def take_over(self, other: "StaticBatch") -> None:
        """Copy the content of `other`, which is like this one and on the same device, and make the batch anew."""
        # By a kernel, which has its stream's priority in a CUDA graph: a copy has the lowest, and would wait until all
        # programs of the lookup have begun.
        torch.bitwise_or(other._memory, 0, out=self._memory)
        self.renew()

    def exact(self) -> Any:
        """Return the batch with ids that have no room behind them; reads their numbers from the device."""
        tensors = iter(
            [leaf.exact() if isinstance(leaf, StaticKeyedJaggedTensor) else leaf for leaf in self._leaves.values()]
        )
        return replace_leaves(self._example, lambda _: next(tensors))

    def find(self, features: KeyedJaggedTensor) -> str | None:
        """Return the place of `features` in the batch or in its `exact` form, or None if it is none of the leaves."""
        given = with_room(features)
        return next((place for place, leaf in self.ids.items() if leaf.tensor is given), None)


class Form(NamedTuple):
    """What a model may ask of a tensor besides its elements."""

    shape: torch.Size
    dtype: torch.dtype
    layout: torch.layout
    requires_grad: bool

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "Form":
        """Return the form of a tensor."""
        return cls(tensor.shape, tensor.dtype, tensor.layout, tensor.requires_grad)

    def __str__(self) -> str:
        """Return a text such as "[4, 3] torch.float32"."""
        layout = "" if self.layout == torch.strided else f" {self.layout}"
        return f"{list(self.shape)} {self.dtype}{layout}{' that requires a gradient' * self.requires_grad}"


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
    return replace_leaves(batch, lambda leaf: leaf.to(device, non_blocking=True))


def with_even_batches_of(batch: Any, unpooled: Collection[str] = ()) -> BatchTensors:
    """Return a batch whose ids have a bag a sample for each feature, see `own_batches`; mostly the same one.

    Args:
        unpooled: features of tables that are not pooled: ids that have one of them get each sample's own bags.
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
    """Return a copy of `value` with `replace(leaf)` in place of each leaf, in the order of `BatchTensors`.

    Of objects without leaves, those that no one can hash are copied, such as arrays; the others are shared.
    """
    if isinstance(value, _LEAVES):
        return replace(value)
    if isinstance(value, _WITHOUT_LEAVES):
        return value
    if type(value) not in (list, tuple, dict) and not BatchTensors(value):
        return copy_of(value)
    replaced = {key: replace_leaves(each, replace) for key, each in _parts(value)}
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


class StaticKeyedJaggedTensor:
    """Memory for the most ids that a batch may have, and the KeyedJaggedTensor of it that the next step reads."""

    def __init__(self, example: KeyedJaggedTensor, device: torch.device, bound: BatchCapacity) -> None:
        self._known, self._samples, self.keys = bound.known_lengths, example.stride(), example.keys()
        self._weighted = weights_of(example) is not None
        # Known lengths leave no room behind the ids of a batch, which may have fewer samples than the bound.
        self._capacities = (replace(bound, samples=max(1, self._samples)) if self._known else bound).capacity(self.keys)
        self._room = sum(self._capacities)
        self._values = torch.zeros(self._room, dtype=example.values().dtype, device=device)
        weights = example.weights_or_none()
        self._weights = None if weights is None else torch.zeros(self._room, dtype=weights.dtype, device=device)
        self._lengths = torch.zeros(example.lengths().numel(), dtype=example.lengths().dtype, device=device)
        if self._known:
            sizes = torch.tensor([bound.bag_sizes[key][1] for key in self.keys], device=device)
            self._lengths.copy_(sizes.repeat_interleave(self._samples))
        self.count = torch.full((1,), self._room, dtype=torch.int32, device=device)
        """[1] int32: ids of the batch, where lengths are known beforehand"""
        self._count = self._room if self._known else 0  # of ids that are in the memory
        self._inverse: InverseIndices | None = None
        if (inverse := example.inverse_indices_or_none()) is not None:
            self._inverse = inverse[0], torch.zeros(inverse[1].shape, dtype=inverse[1].dtype, device=device)
        inverses = self._inverse and self._inverse[1]
        changing = self._values, self._weights, inverses, self.count if self._known else self._lengths
        self.changing = [tensor for tensor in changing if tensor is not None]
        """all that differs from batch to batch"""
        self.renew()

    def renew(self) -> None:
        """Make the KeyedJaggedTensor anew: it remembers offsets and lengths, which are those of one batch."""
        about = self._samples, self._capacities, self._known, self._inverse
        self.tensor = PaddedKeyedJaggedTensor(self.keys, self._values, self._weights, self._lengths, *about)

    def exact(self) -> KeyedJaggedTensor:
        """Return these ids without room behind them, as TorchRec has them; reads their number from the device."""
        if self._known:
            return self.tensor
        counts = self._lengths.view(len(self.keys), self._samples).sum(1).tolist()
        if (total := sum(counts)) > self._room:
            return self.tensor  # of a batch that has changed since it was counted: whoever sends it finds that
        weights = None if self._weights is None else self._weights[:total]
        tensors = self._values[:total], weights, self._lengths
        found = PaddedKeyedJaggedTensor(self.keys, *tensors, self._samples, counts, True, self._inverse)
        found.with_room, found.is_exact = self.tensor, True
        return found

    def why_not(self, ids: KeyedJaggedTensor) -> str:
        """Return why ids are not taken, empty if they are: in samples or types they differ from the first batch's.

        Raises:
            InputError: if they have other features, or weights where those have none or the other way round.
        """
        weighted = weights_of(ids) is not None
        if ids.keys() != self.keys or weighted != self._weighted:
            raise InputError(
                f"GraphTrainPipeline: ids of features {_described(ids.keys(), weighted)}, but those of the first batch "
                f"are {_described(self.keys, self._weighted)}, and captured steps are all alike; give each batch the "
                f"same, in the same order"
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


_SAMPLES = "another number of samples"


def _form(inverse: InverseIndices | None) -> object:
    return inverse and (list(inverse[0]), inverse[1].shape, inverse[1].dtype)


def _type_of(weights: torch.Tensor | None) -> torch.dtype | None:
    return None if weights is None else weights.dtype


def _holds(memory: torch.dtype, ids: torch.dtype) -> bool:
    """Return whether memory of one type holds all ids of another: a wider integer type does."""
    integers = torch.int8, torch.int16, torch.int32, torch.int64
    return memory == ids or (memory in integers and ids in integers[: integers.index(memory)])


def _described(keys: Sequence[str], weighted: bool) -> str:
    return f"{', '.join(keys)} {'with' if weighted else 'without'} weights"


@uncompiled  # for a compiled model makes the tensor in every step
@cache
def _on_device(indices: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Return indices of features, [n] int32, which a capture cannot copy to the device: the steps before it have."""
    return torch.tensor(indices, dtype=torch.int32, device=device)


class PaddedKeyedJaggedTensor(KeyedJaggedTensor):
    """Ids of one step in memory that has room for the most that a batch may have.

    After a batch's ids, `values` is 0. TorchRec's class reads numbers of ids from the device; here `split`, `permute`,
    `[]` and `to_dict` return features with room for the most ids of each. A method that must return the numbers
    themselves is refused, unless all lengths are known beforehand.

    Example: 2 samples, f of at most 1 and g of at most 2 ids a bag. f: [5] [], g: [7, 7] [1] has values 5 7 7 1 0 0 and
    lengths 1 0 2 1; `["g"]` has values 7 7 1 0 and lengths 2 1.
    """

    with_room: KeyedJaggedTensor | None = None
    """of ids without room, which eager steps read: those with room, which are sent to the owners of the rows"""
    is_exact = False
    """whether there is no room behind the ids, nor in what is cut from them"""

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
            cut, given = partial(torch.ops.fbgemm.permute_2D_sparse_data, index, safe), self.weights_or_none()
            has_id = torch.arange(room, device=index.device) < safe.index_select(0, index).sum()
            # FBGEMM takes weights of these types alone, and others where it takes ids.
            is_weight = given is not None and given.dtype in (torch.float32, torch.float64)
            _, values, weights = cut(self.values(), given if is_weight else None, room)
            if given is not None and not is_weight:
                _, weights, _ = cut(given, None, room)
            values, weights = values.where(has_id, 0), weights if weights is None else weights.where(has_id, 0)
        taken = [keys[i] for i in indices]
        inverse = self.inverse_indices_or_none()
        cut = PaddedKeyedJaggedTensor(taken, values, weights, lengths, samples, capacities, self._known, inverse)
        cut.is_exact = self.is_exact
        return cut

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
