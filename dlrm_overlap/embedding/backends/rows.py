"""Which rows the backward updates on a GPU, from which ids, by which kernel calls and by which numbers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dlrm_overlap.embedding.layout import FeatureShard
from dlrm_overlap.embedding.replicated import ReplicatedGradients
from dlrm_overlap.embedding.steps import UpdateRule
from dlrm_overlap.embedding.tables import LocalTables
from dlrm_overlap.kernels.backward.optimizers import OptimizerRows
from dlrm_overlap.kernels.backward.row_runs import InputFeatures, Preparation, PreparedRuns, SortedIds
from dlrm_overlap.kernels.launches import StepCache
from dlrm_overlap.kernels.optimizer_params import OptimizerParams


@dataclass(frozen=True)
class UpdateRange:
    """Rows of one part that one call of a kernel updates: of some consecutive features of an input."""

    part: int
    rows: OptimizerRows
    lookup: int
    """the fused lookup that holds them, whose optimizer and learning rate are theirs"""


class InputRows:
    """The rows that the ids of one input name: their order by key, and the ranges in which they are updated.

    A row's key counts the rows of the input's tables one after the other. Example: tables of 10 and 20 rows: row 3 of
    the second has key 13. Sorted by key, the ids of a table, and so of a range, are together. Tables that are in one
    cache name different slots of it, so those of a part count them once, and are updated by one call.
    """

    def __init__(
        self,
        shards: Sequence[FeatureShard],
        tables: LocalTables | ReplicatedGradients,
        starts: Mapping[FeatureShard, int],
        part_of: Mapping[FeatureShard, int],
    ) -> None:
        """Take the shards of one input in the order of their features, in which those of a table are together.

        Args:
            starts: the column at which each shard's gradient begins, see `GradientLayout`.
            part_of: the part of the gradients with which each shard's arrives.
        """
        self.input = shards[0].input
        self._tables, self._part_of = tables, part_of
        first_keys: list[int] = []
        key = 0
        for _, same in groupby(shards, key=lambda shard: (part_of[shard], *_place(tables.weight(shard)))):
            together = list(same)
            first_keys += [key] * len(together)
            key += tables.weight(together[0]).shape[0]
        self._device = device = tables.weight(shards[0]).device
        # The ids of one feature more may pad their number, see `ArrivedIds`; their key is beyond those of all rows.
        self._first_keys = [*first_keys, key, key + 1]
        self._key_bits = key.bit_length()
        self._device_keys: dict[int, torch.Tensor] = {}
        self._preparations = StepCache[tuple[Any, ...], Preparation]()
        """by all that they were made of, but the ids, whose types are among it"""
        entries = [
            [starts[s] // 4, s.dim // 4, int(s.mean), first] for s, first in zip(shards, first_keys, strict=True)
        ]
        entries.append([0, 0, 0, key])  # of the ids that pad, whose infos name a feature more
        alike = [self._alike(shard, first) for shard, first in zip(shards, first_keys, strict=True)]
        self.ranges: list[UpdateRange] = []
        boundaries: list[int] = []
        for index, (_, same) in enumerate(groupby(range(len(shards)), key=lambda i: alike[i])):
            members = list(same)
            part, lookup, _, weight_at, state_at = alike[members[0]]
            any_mean = any(shards[i].mean for i in members)
            stored, dim = tables.stored(shards[members[0]]), shards[members[0]].dim
            rows = OptimizerRows(
                index, stored.weights, stored.states, weight_at, state_at, dim, any_mean, stored.optimizer,
                stored.stochastic_rounding,
            )  # fmt: skip
            self.ranges.append(UpdateRange(part, rows, lookup))
            boundaries.append(first_keys[members[0]])
        self.input_features = InputFeatures(
            entries=torch.tensor(entries, dtype=torch.int64, device=device),
            any_mean=any(shard.mean for shard in shards),
            boundaries=torch.tensor([*boundaries, key], dtype=torch.int64, device=device),
        )

    def _alike(self, shard: FeatureShard, first_key: int) -> tuple[int, int, int, int, tuple[int, ...]]:
        """Return the values that neighbours in a range share: part, lookup, memory, offsets of key 0 and its states."""
        stored, states = self._tables.stored(shard), self._tables.states(shard)
        weight_at = _offset(self._tables.weight(shard), stored.weights, first_key)
        state_at = [_offset(state, held, first_key) for state, held in zip(states, stored.states, strict=True)]
        return self._part_of[shard], shard.lookup, stored.weights.data_ptr(), weight_at, tuple(state_at)

    def _keys(self, features: int) -> torch.Tensor:
        """Return [features + 1] int64 on the device: the first key of each feature's table, and the end."""
        if features not in self._device_keys:
            self._device_keys[features] = torch.tensor(self._first_keys[: features + 1], device=self._device)
        return self._device_keys[features]

    def sort(self, ids: KeyedJaggedTensor, samples: int, row_units: int = 0) -> PreparedRuns | None:
        """Sort the ids by key, by FBGEMM's radix sort, and prepare the update of their rows; None if there are none.

        Args:
            ids: of the input, with the bags of `samples` samples a feature.
            samples: whose gradients are there.
            row_units: where gradients are [samples, D_total] and not in a window: a row's length, see `Preparation`.
        """
        values, offsets = ids.values(), ids.offsets()
        if values.numel() == 0:
            return None
        features = (offsets.numel() - 1) // samples
        bits, mask = torch.ops.fbgemm.get_infos_metadata(values, samples, features)
        index_type = torch.promote_types(values.dtype, offsets.dtype) if self._key_bits < 31 else torch.int64
        by_position, _, infos, keys, _, count, starts = torch.ops.fbgemm.transpose_embedding_input(
            self._keys(features),
            self._key_bits,
            values.to(index_type),
            offsets.to(index_type),
            info_B_num_bits=bits,
            info_B_mask=mask,
        )
        if (weights := ids.weights_or_none()) is not None:  # in the same order, since both sorts are stable
            weights = weights.index_select(0, by_position.sort(stable=True).indices)
        found = SortedIds(keys, starts, count, infos, bits, offsets, samples, weights)
        key = samples, features, row_units, keys.dtype, offsets.dtype, weights is not None
        return self._preparations.get(key, Preparation, found, self.input_features, row_units)(found)


def _place(rows: torch.Tensor) -> tuple[int, int]:
    """Return the address of a table's rows, or of its cache's slots, and their number, which an empty shard needs."""
    return rows.data_ptr(), rows.shape[0]


def _offset(rows: torch.Tensor, held: torch.Tensor, first_key: int) -> int:
    """Return where key 0 would be in the allocation `held` that holds `rows`, whose first key is `first_key`.

    In elements where rows are numbers [rows], else in units of 4 elements.
    """
    at = (rows.data_ptr() - held.data_ptr()) // rows.itemsize
    return at - first_key if rows.dim() == 1 else at // 4 - first_key * (rows.shape[1] // 4)


def in_readable_rows(gradient: torch.Tensor) -> torch.Tensor:
    """Return a gradient [b, D_total] as it is read: rows without strides or overlap, at multiples of 16 bytes.

    It is the gradient itself if that is so, and a copy otherwise.
    """
    row_bytes = gradient.stride(0) * gradient.element_size()
    apart = gradient.stride(0) >= gradient.shape[1] or gradient.shape[0] == 0
    if apart and gradient.stride(1) == 1 and gradient.data_ptr() % 16 == 0 and row_bytes % 16 == 0:
        return gradient
    return gradient.clone(memory_format=torch.contiguous_format)


class DeviceRules:
    """The numbers of each fused lookup's optimizer, see `Rule`, on the device, where every step reads them.

    A captured step reads the same memory in every replay, so numbers are overwritten before it is launched; an eager
    step overwrites them on the stream of its updates, after those of the step before.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._kept: list[tuple[OptimizerParams, torch.Tensor]] = []

    def numbers(self, lookup: int) -> torch.Tensor:
        """Return the numbers of a lookup, as they are when all work on the current stream is done."""
        return self._kept[lookup][1]

    def follow(self, rules: Sequence[UpdateRule], step: int) -> None:
        """Overwrite the numbers that differ from `rules`, after all work that is issued on the current stream.

        Args:
            rules: as they are at step number `step`. Their counts are kept as of step 0: kernels add the step's number.
        """
        for lookup, rule in enumerate(rules):
            value = rule.numbers
            if rule.count:
                value = value._replace(count=value.count - step)
            if lookup == len(self._kept):
                self._kept.append((value, torch.empty(len(value), device=self._device)))
            elif value == self._kept[lookup][0]:
                continue
            numbers = self._kept[lookup][1]
            for element, number in zip(numbers.split(1), value, strict=True):
                element.fill_(number)  # by a kernel: a copy from the CPU would wait for the stream
            self._kept[lookup] = value, numbers
