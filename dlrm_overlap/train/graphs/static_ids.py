"""Ids at fixed addresses on the device, and how a model cuts them there without reading their numbers back."""

from collections.abc import Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from dlrm_overlap.config import InputError
from dlrm_overlap.embedding.id_layout import BatchBound


class StaticIds:
    """Memory for the most ids that a batch may have, and the KeyedJaggedTensor of it that the next step reads."""

    def __init__(self, example: KeyedJaggedTensor, device: torch.device, bound: BatchBound, cuts: "IdCuts") -> None:
        self._known, self._samples, self.keys = bound.known_lengths, bound.samples, example.keys()
        self._check(example)
        self._capacities = bound.capacity(self.keys)
        self._room = sum(self._capacities)
        self._values = torch.zeros(self._room, dtype=example.values().dtype, device=device)
        self._lengths = torch.zeros(example.lengths().numel(), dtype=example.lengths().dtype, device=device)
        if self._known:
            sizes = torch.tensor([bound.bag_sizes[key][1] for key in self.keys], device=device)
            self._lengths.copy_(sizes.repeat_interleave(bound.samples))
        self.count = torch.full((1,), self._room, dtype=torch.int32, device=device)
        """[1] int32: ids of the batch, where lengths are known beforehand"""
        self._count = self._room
        self._cuts = cuts
        self.renew()

    def renew(self) -> None:
        """Make the KeyedJaggedTensor anew: it remembers offsets and lengths, which are those of one batch."""
        self.tensor = BoundedIds(
            self.keys, self._values, self._lengths, self._samples, self._capacities, self._known, self._cuts
        )

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
        values = ids.values()
        if values.dtype.itemsize > self._values.dtype.itemsize:  # some would be other ids there
            raise InputError(
                f"GraphTrainPipeline: ids of type {values.dtype}, but those of the first batch are "
                f"{self._values.dtype}, in which they have no room; give each batch ids of one type"
            )
        here = min(values.numel(), self._room)
        self._values[:here].copy_(values[:here], non_blocking=True)
        if not self._known:
            self._values[here:].zero_()
            self._lengths.copy_(ids.lengths(), non_blocking=True)
            return
        if self._cuts and values.numel() != self._room:  # what is cut is published with the number that is known
            raise InputError(
                f"GraphTrainPipeline: a batch of {values.numel()} ids, but by its bound, which gives every bag of a "
                f"feature the same number, it has {self._room}; correct the bound's bag_sizes"
            )
        if values.numel() != self._count:
            self._count = values.numel()
            self.count.fill_(self._count)

    def copy_from(self, other: "StaticIds") -> None:
        """Copy the content of `other`, which is on the same device, into these fixed addresses."""
        self._values.copy_(other._values)
        if self._known:
            self.count.copy_(other.count)
        else:
            self._lengths.copy_(other._lengths)


class IdCut(NamedTuple):
    """Features that a model takes out of some ids: tensors on the device, which a capture cannot make itself."""

    indices: torch.Tensor
    """[n] int32: the features, in order"""
    positions: torch.Tensor
    """[the most ids of them] int32: 0, 1, 2, .."""
    capacities: torch.Tensor
    """[T] int32: the most ids of each feature of those that they are taken out of"""


class IdCuts(dict[tuple[tuple[str, ...], tuple[int, ...]], IdCut]):
    """The cuts that a model makes, by the keys of the ids, and the indices of the features, that it takes them of."""

    def of(self, ids: "BoundedIds", indices: Sequence[int]) -> IdCut:
        """Return the cut of the features `indices` out of `ids`; made in the steps before the capture."""
        if (key := (tuple(ids.keys()), tuple(indices))) not in self:
            int32 = partial(torch.tensor, dtype=torch.int32, device=ids.values().device)
            room = sum(ids.capacities[i] for i in indices)
            self[key] = IdCut(int32(indices), int32(range(room)), int32(ids.capacities))
        return self[key]


class BoundedIds(KeyedJaggedTensor):
    """Ids of one step in memory that has room for the most that a batch may have.

    Behind a batch's ids, `values` is 0. What TorchRec's class does with numbers of ids that it reads from the device is
    done here on the device: `split`, `permute`, `[]` and `to_dict` return features with room for the most ids of each.
    A method that must return the numbers themselves is refused, unless all lengths are known beforehand.

    Example: 2 samples, f of at most 1 and g of at most 2 ids a bag. f: [5] [], g: [7, 7] [1] has values 5 7 7 1 0 0 and
    lengths 1 0 2 1; `["g"]` has values 7 7 1 0 and lengths 2 1.
    """

    def __init__(
        self,
        keys: Sequence[str],
        values: torch.Tensor,
        lengths: torch.Tensor,
        samples: int,
        capacities: Sequence[int],
        known: bool,
        cuts: IdCuts,
    ) -> None:
        """Take T features of `samples` bags.

        Args:
            values: [sum of capacities] int32 or int64.
            lengths: [T * samples] int32 or int64.
            capacities: the most ids of each feature.
            known: whether each feature has as many.
            cuts: filled by what is cut out of these ids.
        """
        self.capacities, self._known, self._cuts = list(capacities), known, cuts
        super().__init__(list(keys), values, lengths=lengths, stride=samples)

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
        """Forget what TorchRec's class has found: it is of one batch."""

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
            values, lengths = self.values()[:0], self.lengths()[:0]
        else:
            cut, counts = self._cuts.of(self, indices), self.lengths().view(len(keys), samples)
            # Of a batch beyond its bound no id is read: there may be none where its lengths say, nor room for it.
            safe = counts * (counts.sum(1) <= cut.capacities).all()
            arguments = cut.indices, safe, self.values(), None, sum(capacities)
            _, values, _ = torch.ops.fbgemm.permute_2D_sparse_data(*arguments)
            values = values.where(cut.positions < safe.index_select(0, cut.indices).sum(), 0)
            # The lengths stay as they are, so that what is beyond its bound is found where the ids are published.
            lengths = counts.index_select(0, cut.indices).flatten()
        return BoundedIds([keys[i] for i in indices], values, lengths, samples, capacities, self._known, self._cuts)

    def to(self, device: torch.device, *args: Any, **kwargs: Any) -> KeyedJaggedTensor:
        """Return these ids where they are on `device`, else see `KeyedJaggedTensor.to`."""
        return self if torch.device(device) == self.device() else super().to(device, *args, **kwargs)

    def __getitem__(self, key: str) -> JaggedTensor:
        """Return one feature."""
        one = self.permute([self._key_indices()[key]])
        return JaggedTensor(one.values(), lengths=one.lengths())

    def to_dict(self, compute_offsets: bool = True) -> dict[str, JaggedTensor]:
        """Return each feature by its key."""
        return {key: self[key] for key in self.keys()}
