"""The backward on GPUs: gradients stored into the owners' windows, rows updated by ids that were sorted long before.

Everything runs beside the main stream. Ids are sorted once the forward has looked them up, while the dense part
computes; the host, which has the dense part to issue first, does so with the backward. Gradients travel on one stream,
part by part; rows are updated on another, part by part as they arrive, while the main stream goes on with the bottom
MLP's backward and the dense all-reduce; it waits at the end of the backward.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from math import gcd
from typing import Any

import torch

from dlrm_overlap.comm.arena import Arena, ExchangeTimeoutError, Record
from dlrm_overlap.embedding.backends.base import Step
from dlrm_overlap.embedding.backends.host import WindowBackward
from dlrm_overlap.embedding.protocol.gradients import GRADIENT_FLAGS, GRADIENT_WINDOWS, GradientLayout
from dlrm_overlap.embedding.protocol.layout import FeatureShard
from dlrm_overlap.kernels.arguments import Windows
from dlrm_overlap.kernels.backward.add_to_rows import add_to_rows
from dlrm_overlap.kernels.backward.optimizers import RowRange, Rule
from dlrm_overlap.kernels.backward.push_gradients import PartFlags, ShardTable, push_gradients
from dlrm_overlap.kernels.backward.row_runs import InputFeatures, PreparedRuns, SortedIds, prepare
from dlrm_overlap.kernels.backward.update_rows import update_rows
from dlrm_overlap.kernels.flags import Flags, wait_flags

_PUSH_PROGRAMS = 11  # just fill an H200's links: more stand in the way of each other, and of the updates
_SEED = 0x5EED


@dataclass(frozen=True)
class _Range:
    """Rows of one part that are updated alike: positions [first, end) of an input."""

    part: int
    first: int
    end: int
    rows: RowRange
    shard: FeatureShard
    """one of them: whose optimizer and learning rate hold for all"""


class _Input:
    """The rows that one input of this rank names, and how they are updated."""

    def __init__(self, shards: Sequence[FeatureShard], backward: "DevicePush") -> None:
        """Take the shards of one source in the order of their positions."""
        tables, starts = backward.tables, backward.gradients.starts
        self.source = shards[0].source
        first_keys: list[int] = []
        key = 0
        for table in backward.layout.tables(backward.rank):
            if table[0].source == self.source:
                first_keys += [key] * len(table)
                key += tables.weight(table[0]).shape[0]
        device = backward.device
        self.first_keys = torch.tensor([*first_keys, key], dtype=torch.int64, device=device)
        self.key_bits = key.bit_length()
        self.features = len(shards)

        self.ranges: list[_Range] = []
        boundaries: list[int] = []
        entries = [
            [starts[p] // 4, p.dim // 4, int(p.mean), first] for p, first in zip(shards, first_keys, strict=True)
        ]
        alike = [self._alike(shard, first, backward) for shard, first in zip(shards, first_keys, strict=True)]
        for index, (_, group) in enumerate(groupby(range(len(shards)), key=lambda i: alike[i])):
            members = list(group)
            shard = shards[members[0]]
            part, _, weight_at, state_at = alike[members[0]]
            tbe = tables.lookups[shard.group]
            weights = tbe.weights_dev.detach()  # type: ignore[union-attr]
            optimizer = tables.optimizer(shard)
            rows = RowRange(
                index=index,
                weights=weights,
                states=weights if optimizer == "sgd" else tbe.momentum1_dev.detach(),  # type: ignore[union-attr]
                weight_at=weight_at,
                state_at=state_at,
                dim=shard.dim,
                any_mean=any(shards[i].mean for i in members),
                optimizer=optimizer,
                stochastic_rounding=bool(tbe.stochastic_rounding),
            )
            self.ranges.append(_Range(part, members[0], members[-1] + 1, rows, shard))
            boundaries.append(first_keys[members[0]])
        self.positions = InputFeatures(
            entries=torch.tensor(entries, dtype=torch.int64, device=device),
            any_mean=any(shard.mean for shard in shards),
            boundaries=torch.tensor([*boundaries, key], dtype=torch.int64, device=device),
        )

    @staticmethod
    def _alike(shard: FeatureShard, first_key: int, backward: "DevicePush") -> tuple[int, int, int, int]:
        """Return what neighbours must share to be one range: part, lookup, where key 0 would lie, and its state."""
        tables = backward.tables
        tbe, weight, state = tables.lookups[shard.group], tables.weight(shard), tables.state(shard)
        units = shard.dim // 4
        base: Any = tbe.weights_dev
        weight_at = (weight.data_ptr() - base.data_ptr()) // (4 * weight.itemsize) - first_key * units
        if state is None:
            return backward.gradients.part_of[shard], shard.group, weight_at, 0
        base = tbe.momentum1_dev
        state_at = (state.data_ptr() - base.data_ptr()) // state.itemsize
        state_at = state_at - first_key if state.dim() == 1 else state_at // 4 - first_key * units
        return backward.gradients.part_of[shard], shard.group, weight_at, state_at

    def sort(self, step: Step) -> PreparedRuns | None:
        """Sort the ids by row, by FBGEMM's own radix sort, and prepare their update; None if there are none."""
        ids = step.inputs[self.source]
        values, offsets, samples = ids.values(), ids.offsets(), step.batch.total
        if values.numel() == 0:
            return None
        bits, mask = torch.ops.fbgemm.get_infos_metadata(values, samples, self.features)
        _, _, infos, keys, _, count, starts = torch.ops.fbgemm.transpose_embedding_input(
            self.first_keys,
            self.key_bits,
            values.long(),
            offsets.long(),
            info_B_num_bits=bits,
            info_B_mask=mask,
        )
        return prepare(SortedIds(keys, starts, count, infos, bits, offsets, samples), self.positions)


class DevicePush(WindowBackward):
    """Gradients by stores into the owners' windows, then one update of each touched row, or atomic additions."""

    def __init__(self, *args: Any, gradients: GradientLayout, arena: Arena) -> None:
        """Take the layout and the arena of the windows."""
        super().__init__(*args, gradients=gradients, arena=arena)
        self._atomic = self.options.backward == "atomic"
        # Where programs of several streams could start, those do that others wait for: gradients, which peers await,
        # then the main stream's (of priority -1, see `launcher`), then updates, which nobody awaits but the next step.
        self._push_stream = torch.cuda.Stream(self.device, priority=-2)
        self._update_stream = torch.cuda.Stream(self.device, priority=0)
        self._issued = torch.cuda.Event()
        self._updating = False  # since the main stream last waited for the updates
        self._record = Record(self.device)
        self._windows = [Windows(arena.addresses(name), 0, self.options.wire_dtype, 16) for name in GRADIENT_WINDOWS]
        self._local = [arena.local(name) for name in GRADIENT_WINDOWS]
        self._flags = [self._flags_of(part) for part in range(gradients.parts)]
        done = torch.zeros(gradients.parts, dtype=torch.int32, device=self.device)
        self._part_flags = PartFlags(arena.addresses(GRADIENT_FLAGS), done)
        dims = {shard.dim for shards in self.layout.by_owner for shard in shards}
        self._pushed = [self._shard_table(dim) for dim in sorted(dims)]
        self._storage: tuple[int, ...] | None = None
        self._inputs: list[_Input] = []
        self._seed = torch.initial_seed()

    def _flags_of(self, part: int) -> Flags:
        counts = torch.full((self.world_size,), part + 1, dtype=torch.int32, device=self.device)
        return Flags(
            addresses=self._arena.addresses(GRADIENT_FLAGS),
            local=self._arena.local(GRADIENT_FLAGS),
            counts=counts,
            timeout=int(self.options.wait_timeout_s * 1e9),
            status=self._record.status,
        )

    def _shard_table(self, dim: int) -> ShardTable:
        """Return what travels of one dim."""
        starts = self.gradients.starts
        places = [
            [[[self.layout.column(p), starts[p], 1] for p in owned if p.dim == dim] for owned in shards]
            for shards in self.gradients.shards
        ]
        counts = [max(map(len, shards)) for shards in places]
        every = [place for shards in places for owned in shards for place in owned]
        padded = [[[*owned, *[[0, 0, 0]] * (max(counts) - len(owned))] for owned in shards] for shards in places]
        return ShardTable(
            entries=torch.tensor(padded, dtype=torch.int64, device=self.device),
            counts=torch.tensor(counts, dtype=torch.int32, device=self.device),
            dim=dim,
            source_alignment=gcd(16, *(column for column, _, _ in every)),
            start_alignment=gcd(16, *(start for _, start, _ in every)),
        )

    def _sources(self) -> list[_Input]:
        """Return this rank's inputs, made anew when the rows have moved."""
        if (storage := self.tables.storage()) != self._storage:
            shards = self.layout.by_owner[self.rank]
            self._inputs = [_Input(list(group), self) for _, group in groupby(shards, key=lambda shard: shard.source)]
            self._storage = storage
        return self._inputs

    def follow(self, step: Step) -> None:
        """Mark where the forward has looked the ids up, and so has checked them."""
        super().follow(step)
        step.looked_up = torch.cuda.current_stream(self.device).record_event()
        for ids in step.inputs:
            ids.values().record_stream(self._update_stream)
            ids.offsets().record_stream(self._update_stream)

    def prepare(self, step: Step) -> None:
        """Sort the ids, beside the main stream. Atomic additions take them as they are."""
        if self._atomic:
            return
        self._update_stream.wait_event(step.looked_up)
        with torch.cuda.stream(self._update_stream):
            step.runs = [source.sort(step) for source in self._sources()]

    def send(self, step: Step, gradient: torch.Tensor) -> None:
        """Push the gradient, and update the rows as gradients arrive, all beside the main stream."""
        self.check()
        gradient = gradient.float()
        if gradient.stride(1) != 1 or gradient.data_ptr() % 16:
            gradient = gradient.clone(memory_format=torch.contiguous_format)
        self._epoch += 1
        self._issued.record(torch.cuda.current_stream(self.device))
        self._push_stream.wait_event(self._issued)
        if self._updating:  # a step before: peers that see this one's flags may write the window that it reads
            self._push_stream.wait_stream(self._update_stream)
        self._updating = True
        gradient.record_stream(self._push_stream)
        with torch.cuda.stream(self._push_stream):
            push_gradients(
                gradient,
                self._pushed,
                self._windows[self._epoch % 2],
                self._part_flags,
                rank=self.rank,
                epoch=self._epoch,
                schedule=self.schedule,
                first_sample=step.batch.first_sample[self.rank],
                batch=step.batch.total,
                most_samples=step.batch.most,
                scale=self.scale,
                programs=_PUSH_PROGRAMS,
            )
        if not step.runs:
            self.prepare(step)
        sources = self._sources()
        self._update_stream.wait_event(self._issued)
        with torch.cuda.stream(self._update_stream):
            for part, flags in enumerate(self._flags):
                wait_flags(flags, self.rank, self._epoch)
                for index, source in enumerate(sources):
                    for rows in (r for r in source.ranges if r.part == part):
                        self._update(step, index, source, rows)
            self._update_by_fbgemm(step, self._local[self._epoch % 2])

    def _update(self, step: Step, index: int, source: _Input, rows: _Range) -> None:
        window, rule = self._local[self._epoch % 2], step.rules[rows.shard.group]
        if rule.only_fbgemm:
            return
        if self._atomic:
            ids = step.inputs[source.source]
            places = source.positions, rows.first, rows.end
            add_to_rows(ids.values(), ids.offsets(), step.batch.total, *places, rows.rows, window, Rule(rule.lr))
        elif (runs := step.runs[index]) is not None:
            seed = (self._seed + _SEED * step.number) % 2**31
            update_rows(runs, rows.rows, window, Rule(rule.lr, rule.arguments.eps, seed))

    def update(self, step: Step) -> None:
        """Make the current stream wait for the rows, and so until the gradient has been read."""
        torch.cuda.current_stream(self.device).wait_stream(self._update_stream)
        self._updating = False
        step.runs = ()

    def check(self) -> None:
        """Raise what a wait has recorded.

        Raises:
            ExchangeTimeoutError: if it has expired.
        """
        if not self._record.empty and (expired := self._record.expired()):
            raise ExchangeTimeoutError(expired, self.options.wait_timeout_s, "part")

    def close(self) -> None:
        """Forget the windows: nothing may keep a view of them."""
        self._windows, self._local, self._flags = [], [], []
