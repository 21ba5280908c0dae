"""The rows that the backward updates on a GPU, their order by id, and the optimizers' numbers."""

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dlrm_overlap.embedding.layout import FeatureShard
from dlrm_overlap.embedding.replicated import ReplicatedGradients
from dlrm_overlap.embedding.steps import UpdateRule
from dlrm_overlap.embedding.tables import LocalTables
from dlrm_overlap.kernels.backward.mark_rows import RowMarking
from dlrm_overlap.kernels.backward.optimizers import OptimizerRows
from dlrm_overlap.kernels.backward.row_runs import InputFeatures, Preparation, PreparedRuns, SortedIds
from dlrm_overlap.kernels.backward.update_rows import RowUpdate
from dlrm_overlap.kernels.launches import StepCache
from dlrm_overlap.kernels.optimizer_params import OptimizerParams

_POSITION_BITS = 30  # of an info that hold the position of an unpooled id


class UpdateRange(NamedTuple):
    """Rows of one part and of consecutive features of an input, which one kernel call updates."""

    part: int
    lookup: int
    """the fused lookup that holds them"""
    update: RowUpdate


class InputRows:
    """The rows of one input's tables: their keys, by which ids are sorted, and the ranges in which they are updated.

    A row's key is its number among the rows of all tables of the input, so the sorted ids of a table, and of a range,
    are contiguous. Example: with tables of 10 and 20 rows, row 3 of the second has key 13. Tables of a part that share
    a cache are updated by one call; they share the keys of the cache's slots, and use different slots.
    """

    def __init__(
        self,
        shards: Sequence[FeatureShard],
        tables: LocalTables | ReplicatedGradients,
        starts: Mapping[FeatureShard, int],
        part_of: Mapping[FeatureShard, int],
    ) -> None:
        """`shards` are in the order of their features; for `starts` and `part_of` see `GradientLayout`."""
        self.input = shards[0].input
        self._tables, self._part_of = tables, part_of

        # The keys: tables of a part in the same memory share theirs.
        first_keys: list[int] = []
        shifts: list[list[int]] = []
        marks, key = tables.marks, 0
        for _, same in groupby(shards, key=lambda shard: (part_of[shard], *_memory(tables.weight(shard)))):
            together = list(same)
            first_keys += [key] * len(together)
            if marks is not None:
                shifts.append([key, marks.first_bit((together[0].lookup, together[0].table)) - key])
            key += tables.weight(together[0]).shape[0]
        self._device = device = tables.weight(shards[0]).device
        self.mark: RowMarking | None = None
        """marks the rows of a step's runs, if updates are marked"""
        if marks is not None:
            self.mark = RowMarking(marks.words, torch.tensor(shifts, dtype=torch.int64, device=device))
        # An extra feature may have padding ids, see `ArrivedIds`; their key is beyond all rows' keys.
        self._first_keys = [*first_keys, key, key + 1]
        self._key_bits = key.bit_length()
        self._device_keys: dict[int, torch.Tensor] = {}
        self._preparations = StepCache[tuple[Any, ...], Preparation]()
        """by everything that they depend on, including the dtypes of ids"""
        entries = [
            [starts[s] // 4, s.dim // 4, int(s.mean), first] for s, first in zip(shards, first_keys, strict=True)
        ]
        entries.append([0, 0, 0, key])  # of padding ids

        # The ranges: consecutive shards with the same part, lookup, memory and offsets.
        shared = [self._shared(shard, first) for shard, first in zip(shards, first_keys, strict=True)]
        self.ranges: list[UpdateRange] = []
        boundaries: list[int] = []
        for index, (_, same) in enumerate(groupby(range(len(shards)), key=lambda i: shared[i])):
            members = list(same)
            part, lookup, _, weight_at, state_at, reserved = shared[members[0]]
            any_mean = any(shards[i].mean for i in members)
            stored, dim = tables.stored(shards[members[0]]), shards[members[0]].dim
            rows = OptimizerRows(
                index, stored.weights, stored.states, weight_at, state_at, dim, any_mean, stored.optimizer,
                stored.stochastic_rounding, reserved,
            )  # fmt: skip
            self.ranges.append(UpdateRange(part, lookup, RowUpdate(rows)))
            boundaries.append(first_keys[members[0]])
        self.input_features = InputFeatures(
            entries=torch.tensor(entries, dtype=torch.int64, device=device),
            any_mean=any(shard.mean for shard in shards),
            boundaries=torch.tensor([*boundaries, key], dtype=torch.int64, device=device),
        )

    def _shared(
        self, shard: FeatureShard, first_key: int
    ) -> tuple[int, int, int, int, tuple[int, ...], tuple[int, int, int]]:
        """Return what the shards of a range share: part, lookup, address of the memory, and where in it the row and the
        states of key 0 are; and `OptimizerRows.reserved`.
        """
        stored, states = self._tables.stored(shard), self._tables.states(shard)
        weight_at = _offset(self._tables.weight(shard), stored.weights, first_key)
        state_at = [_offset(state, held, first_key) for state, held in zip(states, stored.states, strict=True)]
        reserved = self._tables.reserved_rows(shard)
        kept = (0, 0, 0)
        if reserved is not None:
            kept = reserved.period, reserved.first, first_key % reserved.period
        return self._part_of[shard], shard.lookup, stored.weights.data_ptr(), weight_at, tuple(state_at), kept

    def _keys(self, features: int) -> torch.Tensor:
        """Return [features + 1] int64 on the device, the first key of each feature's table, and the end."""
        if features not in self._device_keys:
            self._device_keys[features] = torch.tensor(self._first_keys[: features + 1], device=self._device)
        return self._device_keys[features]

    def sort(self, ids: KeyedJaggedTensor, samples: int, row_units: int = 0) -> PreparedRuns | None:
        """Sort ids by key, and prepare the update of their rows; None without ids.

        If the gradients are [samples, D_total] instead of in a window, `row_units` is the stride of their rows in units
        of 4 elements, see `Preparation`.
        """
        values, offsets = ids.values(), ids.offsets()
        if values.numel() == 0:
            return None
        features = (offsets.numel() - 1) // samples
        bits, mask = torch.ops.fbgemm.get_infos_metadata(values, samples, features)
        by_position, infos, keys, starts, count = self._sort(
            values, offsets, features, info_B_num_bits=bits, info_B_mask=mask
        )
        if (weights := ids.weights_or_none()) is not None:  # both sorts are stable, so the order is the same
            weights = weights.index_select(0, by_position.sort(stable=True).indices)
        found = SortedIds(keys, starts, count, infos, bits, offsets, samples, weights)
        key = samples, features, row_units, keys.dtype, offsets.dtype, weights is not None
        return self._preparations.get(key, Preparation, found, self.input_features, row_units)(found)

    def sort_unpooled(self, values: torch.Tensor, offsets: torch.Tensor, dim: int) -> PreparedRuns | None:
        """Sort ids by key, for gradients [n, dim]: one row for each id, in the order of `values`; None without ids.

        `offsets` are of the bags, which say which ids a feature has; all tables have `dim` columns.
        """
        count, features = values.numel(), self.input_features.entries.shape[0] - 1
        if count == 0:
            return None
        assert count <= 1 << _POSITION_BITS, f"{count} ids: at most 2^{_POSITION_BITS} unpooled ids are sorted"
        _, infos, keys, starts, runs = self._sort(values, offsets, features, nobag=True)
        # FBGEMM's info of an unpooled id is its position * features + its feature.
        found = SortedIds(keys, starts, runs, (infos // features).int(), _POSITION_BITS, offsets, samples=1)
        key = dim, keys.dtype, offsets.dtype
        return self._preparations.get(key, self._of_unpooled, found, dim // 4)(found)

    def _of_unpooled(self, found: SortedIds, units: int) -> Preparation:
        """Return the preparation for gradients of one row an id: infos are positions in one feature."""
        entries = torch.tensor([[0, units, 0, 0]] * 2, dtype=torch.int64, device=self._device)
        return Preparation(found, InputFeatures(entries, False, self.input_features.boundaries), units)

    def _sort(
        self, values: torch.Tensor, offsets: torch.Tensor, features: int, **options: Any
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the keys [n] in the order of `values`, the sorted infos [n], and the first three of `SortedIds`."""
        index_type = torch.promote_types(values.dtype, offsets.dtype) if self._key_bits < 31 else torch.int64
        by_position, _, infos, keys, _, count, starts = torch.ops.fbgemm.transpose_embedding_input(
            self._keys(features), self._key_bits, values.to(index_type), offsets.to(index_type), **options
        )
        return by_position, infos, keys, starts, count


def _memory(rows: torch.Tensor) -> tuple[int, int]:
    """Return the address and number of a table's rows or cache slots; an empty shard may have another's address."""
    return rows.data_ptr(), rows.shape[0]


def _offset(rows: torch.Tensor, held: torch.Tensor, first_key: int) -> int:
    """Return where key 0 is in `held`, the memory that has `rows`: in elements of [rows], or in fours of [rows, D]."""
    at = (rows.data_ptr() - held.data_ptr()) // rows.itemsize
    return at - first_key if rows.dim() == 1 else at // 4 - first_key * (rows.shape[1] // 4)


def in_readable_rows(gradient: torch.Tensor) -> torch.Tensor:
    """Return a gradient [b, D_total] whose rows are contiguous, at multiples of 16 bytes; a copy only if needed."""
    row_bytes = gradient.stride(0) * gradient.element_size()
    apart = gradient.stride(0) >= gradient.shape[1] or gradient.shape[0] == 0
    if apart and gradient.stride(1) == 1 and gradient.data_ptr() % 16 == 0 and row_bytes % 16 == 0:
        return gradient
    return gradient.clone(memory_format=torch.contiguous_format)


class DeviceRules:
    """The parameters of each fused lookup's optimizer in device memory, see `Rule`.

    Replays read the same memory, so the parameters are overwritten before each launch; an eager step overwrites them on
    the update stream, after the previous step's updates.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._kept: list[tuple[OptimizerParams, torch.Tensor]] = []

    def numbers(self, lookup: int) -> torch.Tensor:
        """Return the parameters of a lookup's optimizer; read them only on the stream that called `follow`."""
        return self._kept[lookup][1]

    def follow(self, rules: Sequence[UpdateRule], step: int) -> None:
        """Overwrite the parameters that differ from `rules` of step number `step`, on the current stream."""
        for lookup, rule in enumerate(rules):
            value = rule.numbers
            if rule.count:  # stored as of step 0, since kernels add the step's number
                value = value._replace(count=value.count - step)
            if lookup == len(self._kept):
                self._kept.append((value, torch.empty(len(value), device=self._device)))
            elif value == self._kept[lookup][0]:
                continue
            numbers = self._kept[lookup][1]
            for element, number in zip(numbers.split(1), value, strict=True):
                element.fill_(number)  # by a kernel, since a copy from the CPU would wait for the stream
            self._kept[lookup] = value, numbers
