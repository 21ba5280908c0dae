"""The backward on GPUs: gradients are stored in the owners' windows, and the owners update each row once.

One stream sends gradients, part by part. Another updates the rows of each part once its gradients have arrived. Both
run concurrently with the rest of the dense backward. The ids are sorted during the forward: in a captured step on a
third stream, else on the updates' stream.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from math import gcd

import torch

from dlrm_overlap.comm.device_errors import DeviceErrorRecord
from dlrm_overlap.comm.order import CurrentStream, OnStream
from dlrm_overlap.embedding.backends.base import WindowBackward, WindowState
from dlrm_overlap.embedding.backends.cpu import train_weights, zero_weights_gradients
from dlrm_overlap.embedding.backends.lookup import ColumnOf
from dlrm_overlap.embedding.backends.rows import DeviceRules, InputRows, UpdateRange, in_readable_rows
from dlrm_overlap.embedding.backends.sort_graph import SortGraph
from dlrm_overlap.embedding.id_layout import IdLayout
from dlrm_overlap.embedding.layout import FeatureShard
from dlrm_overlap.embedding.options import ExchangeContext
from dlrm_overlap.embedding.steps import BatchSizes, PendingBackward, Step, tensors_of
from dlrm_overlap.embedding.windows import DeviceSignals, WindowPair, one_flag_each, skip_epoch
from dlrm_overlap.kernels.backward.optimizers import Rule
from dlrm_overlap.kernels.backward.push_gradients import PartFlags, ShardTable, prepare_push_gradients
from dlrm_overlap.kernels.backward.row_runs import PreparedRuns
from dlrm_overlap.kernels.bags import Windows
from dlrm_overlap.kernels.launches import Launch, prepared

_REMOTE_PROGRAMS = 8  # enough to fill an H200's links; more would slow each other and the updates
_ALONE_PROGRAMS = 66  # if this rank reaches no other: its memory takes more programs than links


@dataclass(eq=False)
class DeviceGradientStore:
    """A `GradientStore` on a GPU, by one kernel for each dim."""

    rank: int
    tables: list[ShardTable]
    """one for each dim, in ascending order"""
    leaves_out: bool
    """True if bags that have not arrived are left out"""
    flags: PartFlags
    windows: WindowPair
    peers: list[Windows]
    schedule: str
    programs: int

    def store(self, step: Step, gradient: torch.Tensor, scale: float, first: int, end: int) -> None:
        offsets = step.own_offsets if self.leaves_out else None
        tensors = (gradient,) if offsets is None else (gradient, offsets)
        windows = self.peers[self.windows.epoch % 2]
        for launch in self._launches(tensors, windows, step.batch, scale, first, end, gradient.stride(0)):
            launch(*tensors, self.windows.counter.argument)

    @prepared
    def _launches(
        self,
        tensors: Sequence[torch.Tensor],
        windows: Windows,
        batch: BatchSizes,
        scale: float,
        first: int,
        end: int,
        row_elements: int,
    ) -> list[Launch]:
        """Return the launches for a gradient with rows `row_elements` apart, and maybe offsets."""
        return prepare_push_gradients(
            tensors[0],
            self.tables,
            windows,
            self.flags,
            rank=self.rank,
            schedule=self.schedule,
            first_sample=batch.first_sample[self.rank],
            batch=batch.total,
            most_samples=batch.most,
            scale=scale,
            programs=self.programs,
            first_part=first,
            end_part=end,
            offsets=tensors[1] if len(tensors) > 1 else None,
        )


class Push(WindowBackward):
    def __init__(self, context: ExchangeContext, windows: WindowPair) -> None:
        super().__init__(context, windows)
        # The GPU starts programs in the order of priority: first gradients, for which peers wait, then the main
        # stream's (-1, see `process_group`) and sorts, then updates, which only the next step needs. Sorts precede
        # lookups (0), so that they end before the first products, and do not take turns with them.
        self._push_stream = torch.cuda.Stream(self.device, priority=-2)
        self._sort_stream = torch.cuda.Stream(self.device, priority=-1)
        self._update_stream = torch.cuda.Stream(self.device, priority=0)
        self._current = CurrentStream(self.device)
        self._issued, self._pushed_all, self._updated = torch.cuda.Event(), torch.cuda.Event(), torch.cuda.Event()
        self._updating = False  # updates have been issued since the main stream last waited for them
        self._record = DeviceErrorRecord(self.device)
        self._peers = windows.peers(0, self.options.wire_dtype)  # gradients have no rows of one stride
        reached = len(windows.arena.reached)
        # If N ranks are reached, (N - 1) / N of a program's rows are remote.
        self._programs = round(_REMOTE_PROGRAMS * reached / (reached - 1)) if reached > 1 else _ALONE_PROGRAMS
        one_each = one_flag_each(range(self.world_size), self.world_size)
        timeout_s, status = self.options.wait_timeout_s, self._record.status
        self._arrivals = [
            DeviceSignals(windows, (part + 1) * one_each, timeout_s, status) for part in range(self.gradients.parts)
        ]
        """for each part, the flags of all parts up to it"""
        done = torch.zeros(self.gradients.parts, dtype=torch.int32, device=self.device)
        self._flags = PartFlags(windows.arena.addresses(windows.flags), done, windows.counter.word)
        self._make_stores(context)
        self._storage: tuple[int, ...] | None = None
        self._inputs: list[InputRows] = []
        self._sorts: list[SortGraph] = []
        """the sorts of `_inputs` in eager steps"""
        self._seed = torch.initial_seed() % 2**31
        self._steps = context.counters.steps
        self._rules = DeviceRules(self.device)
        self._are_captured = False  # captured steps read these

    def _store_by(self, rank: int, column: ColumnOf, ids: IdLayout | None = None) -> DeviceGradientStore:
        dims = sorted({shard.dim for shards in self.layout.by_owner for shard in shards})
        tables = [self._shard_table(dim, column, ids) for dim in dims]
        how = self.schedule, self._programs
        return DeviceGradientStore(rank, tables, ids is not None, self._flags, self.windows, self._peers, *how)

    def _shard_table(self, dim: int, column: ColumnOf, ids: IdLayout | None) -> ShardTable:
        starts, reached = self.gradients.starts, self.windows.arena.reached

        def present(shard: FeatureShard) -> int:
            return 1 if ids is None or not ids.knows_empty_bags(shard) else 2 + ids.published(shard)

        offsets = [
            [[[column(s), starts[s], present(s)] for s in by_owner[owner] if s.dim == dim] for owner in reached]
            for by_owner in self.gradients.shards
        ]
        counts = [max(map(len, shards)) for shards in offsets]
        every = [shard for shards in offsets for owned in shards for shard in owned]
        padded = [[[*owned, *[[0, 0, 0]] * (max(counts) - len(owned))] for owned in shards] for shards in offsets]
        entries = torch.tensor(padded, dtype=torch.int64, device=self.device)
        return ShardTable(
            entries=entries.view(len(padded), len(reached), max(counts), 3),  # also if no rank reached has shards
            counts=torch.tensor(counts, dtype=torch.int32, device=self.device),
            dim=dim,
            source_alignment=gcd(16, *(column for column, _, _ in every)),
            start_alignment=gcd(16, *(start for _, start, _ in every)),
        )

    def _input_rows(self) -> list[InputRows]:
        if (storage := self.tables.storage()) != self._storage:
            starts, parts = self.gradients.starts, self.gradients.part_of
            by_input = groupby(self.layout.by_owner[self.rank], key=lambda shard: shard.input)
            for sort in self._sorts:
                sort.forget()
            self._inputs = [InputRows(list(shards), self.tables, starts, parts) for _, shards in by_input]
            self._sorts = [SortGraph(rows) for rows in self._inputs]
            self._storage = storage
        return self._inputs

    def follow_rules(self, capture: bool = False) -> None:
        self._are_captured = self._are_captured or capture
        if self._are_captured:
            self._rules.follow(self.tables.rules(self._steps.value), self._steps.value)

    def note_forward(
        self, step: Step, number: int = 0, trains_weights: bool = False, ids_ready: torch.Event | None = None
    ) -> PendingBackward:
        """Record when all ids are inside their tables: at `ids_ready`, or by default now, after the lookup."""
        if ids_ready is None:
            ids_ready = self._current().record_event()
        for ids in step.inputs:
            for tensor in tensors_of(ids):
                tensor.record_stream(self._update_stream)
        return super().note_forward(step, number, trains_weights, ids_ready)

    def prepare(self, pending: PendingBackward) -> PendingBackward:
        return pending._replace(runs=self.sort(pending))

    def sort(self, pending: PendingBackward) -> list[PreparedRuns | None]:
        inputs, samples = pending.step.inputs, pending.step.batch.total
        assert pending.ids_ready is not None
        stream = self._sort_stream if self.order.is_captured else self._update_stream
        stream.wait_event(pending.ids_ready)
        with OnStream(stream):
            runs = [rows.sort(inputs[rows.input], samples) for rows in self._input_rows()]
        if stream is not self._update_stream:
            self._update_stream.wait_stream(stream)
            # PyTorch has a pool of 32 streams for each priority, so this one may also be the main stream, which would
            # reuse the memory of the runs before they are read.
            for prepared in runs:
                if prepared is not None:
                    prepared.record_stream(self._update_stream)
        return runs

    def _sorted(self, pending: PendingBackward) -> list[PreparedRuns | None]:
        """Sort the ids of an eager step, by a graph if possible: the result is valid until the next step's sort."""
        if self.order.is_captured or not pending.step.repeats:
            return self.sort(pending)
        inputs, samples = pending.step.inputs, pending.step.batch.total
        assert pending.ids_ready is not None
        self._update_stream.wait_event(pending.ids_ready)
        with OnStream(self._update_stream):
            return [
                graph(inputs[rows.input], samples) for rows, graph in zip(self._input_rows(), self._sorts, strict=True)
            ]

    def start(self, pending: PendingBackward, gradient: torch.Tensor) -> WindowState:
        self.check()
        step, gradient = pending.step, in_readable_rows(gradient)
        self.windows.begin()
        self._issued.record(self._current())
        self._push_stream.wait_event(self._issued)
        if self._updating:
            # The previous step's update is not done: peers that see this step's flags may overwrite its gradients.
            self._push_stream.wait_stream(self._update_stream)
        self._updating = True
        gradient.record_stream(self._push_stream)

        # Send. An eager step waits for gradients on the update stream instead.
        arrivals: list[torch.cuda.Event] = []
        if self.order.is_captured:
            arrivals = self._push_in_order(step, gradient)
        else:
            with OnStream(self._push_stream):
                self.push(step, gradient, 0, self.gradients.parts)

        # Update the rows of each part.
        runs = self._sorted(pending) if pending.runs is None else pending.runs
        inputs, window = self._input_rows(), self.windows.local
        self._update_stream.wait_event(self._issued)
        with OnStream(self._update_stream):
            found = zero_weights_gradients(pending) if pending.trains_weights else ()
            if not self.order.is_captured:
                self._rules.follow(pending.rules, pending.number)
            for rows, prepared in zip(inputs, runs, strict=True):
                if rows.mark is not None and prepared is not None:
                    rows.mark(prepared)
            for part in range(self.gradients.parts):
                if arrivals:
                    self._update_stream.wait_event(arrivals[part])
                else:
                    self._arrivals[part].wait()
                if pending.trains_weights:
                    here = self.gradients.shards[part][self.rank]
                    train_weights(self, step, self.gradients.views(here, window, step.batch.total), found)
                for rows, prepared in zip(inputs, runs, strict=True):
                    for updated in rows.ranges:
                        if updated.part == part and prepared is not None:
                            self.update_range(pending, updated, prepared, window)
        return WindowState(pending, found)

    def _push_in_order(self, step: Step, gradient: torch.Tensor) -> list[torch.cuda.Event]:
        """Send each part, and wait for it, in the order of communication; return the event of each arrival.

        To wait before the next part is sent leaves the links idle for some microseconds, but starts updates earlier.
        """
        arrivals = []
        with OnStream(self._push_stream):
            for part in range(self.gradients.parts):
                with self.order:
                    self.push(step, gradient, part, part + 1)
                    self._arrivals[part].wait()
                arrivals.append(self._push_stream.record_event())
        return arrivals

    def update_range(
        self, pending: PendingBackward, updated: UpdateRange, runs: PreparedRuns, window: torch.Tensor
    ) -> None:
        """Update the rows of one range, whose gradients have arrived in `window`."""
        if pending.rules[updated.lookup].frozen:
            return
        numbers, since = self._rules.numbers(updated.lookup), self._steps.on_device
        rule = Rule(numbers, self._steps.word, pending.number - since, self._seed, self.update_scale)
        updated.update(runs, window, rule)

    def finish(self, state: WindowState) -> Sequence[torch.Tensor]:
        current = self._current()
        self._updated.record(self._update_stream)
        self._pushed_all.record(self._push_stream)  # done by then, but a capture requires that its streams are joined
        current.wait_event(self._updated)
        current.wait_event(self._pushed_all)
        self._updating = False
        for gradient in state.weights_gradients:  # read on this stream, while a later step sorts on the update stream
            gradient.record_stream(current)
        return state.weights_gradients

    def skip(self) -> None:
        skip_epoch(self.windows, DeviceSignals, self.options.wait_timeout_s, self._record.status)

    def check(self) -> None:
        self._record.raise_expired(self.options.wait_timeout_s, "part")
