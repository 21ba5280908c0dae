"""The backward on GPUs: gradients stored into the owners' windows, rows updated by ids that were sorted long before.

Everything runs beside the main stream. Ids are sorted once they have arrived and none is outside its table, beside the
lookup or the dense part; the CPU, which has the dense part to issue first, issues the sort with the backward.
Gradients travel on one stream, part by part. Rows are updated on another, part by part as the gradients arrive, while
the main stream goes on with the bottom MLP's backward and the dense all-reduce; it waits for the rows at the end of the
backward.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import gcd

import torch

from dlrm_overlap.comm.device_errors import DeviceErrorRecord
from dlrm_overlap.comm.order import CurrentStream, OnStream
from dlrm_overlap.embedding.backends.base import WindowBackward
from dlrm_overlap.embedding.backends.cpu import train_weights
from dlrm_overlap.embedding.backends.rows import DeviceRules, InputRows, UpdateRange, in_readable_rows
from dlrm_overlap.embedding.id_layout import IdLayout
from dlrm_overlap.embedding.layout import FeatureShard
from dlrm_overlap.embedding.options import ExchangeContext
from dlrm_overlap.embedding.steps import BatchSizes, Step, tensors_of
from dlrm_overlap.embedding.windows import PairFlags, WindowPair, one_flag_each, skip_epoch
from dlrm_overlap.kernels.backward.optimizers import Rule
from dlrm_overlap.kernels.backward.push_gradients import PartFlags, ShardTable, prepare_push_gradients
from dlrm_overlap.kernels.backward.update_rows import RowUpdate
from dlrm_overlap.kernels.bags import Windows
from dlrm_overlap.kernels.launches import Launch, prepared

_REMOTE_PROGRAMS = 8  # just fill an H200's links: more stand in the way of each other, and of the updates
_ALONE_PROGRAMS = 66  # a rank that reaches no other has no links to fill, and its memory takes more


@dataclass(eq=False)
class Pushed:
    """The gradients of one rank's samples, and where this rank's kernel stores them: its own, or another's."""

    rank: int
    """whose samples they are"""
    tables: list[ShardTable]
    """the shards and their offsets, one for each dim"""
    flags: PartFlags
    """to raise when a part is stored"""
    schedule: str
    programs: int
    """of each launch"""

    @prepared
    def store_launches(
        self,
        tensors: Sequence[torch.Tensor],
        windows: Windows,
        batch: BatchSizes,
        scale: float,
        first: int,
        end: int,
        row_elements: int,
    ) -> list[Launch]:
        """Return the launches that store the parts [first, end) of `scale` times a gradient; they take the epoch, too.

        Args:
            tensors: a gradient [b, ..], its rows `row_elements` apart, and the offsets of the rank's bags of each
                share, if they are known.
            windows: of the owners of the rows.
            batch: the samples of each rank.
            scale: see `prepare_push_gradients`.
            first: the first part.
            end: the part after the last one.
            row_elements: see `tensors`.
        """
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
    """Gradients by stores into the owners' windows, then one update of each touched row."""

    def __init__(self, context: ExchangeContext, windows: WindowPair) -> None:
        super().__init__(context, windows)
        # Where programs of several streams could start, those do that others wait for: gradients, which peers await,
        # then the main stream's (of priority -1, see `process_group`), then updates, needed by the next step.
        self._push_stream = torch.cuda.Stream(self.device, priority=-2)
        self._update_stream = torch.cuda.Stream(self.device, priority=0)
        self._current = CurrentStream(self.device)
        self._issued, self._pushed_all, self._updated = torch.cuda.Event(), torch.cuda.Event(), torch.cuda.Event()
        self._updating = False  # whether updates were issued since the main stream last waited for them
        self._record = DeviceErrorRecord(self.device)
        self._peers = windows.peers(0, self.options.wire_dtype)  # gradients have no rows of one stride
        reached = len(windows.arena.reached)
        # Of N ranks that are reached, (N - 1) / N of the rows that programs take are remote.
        self._programs = round(_REMOTE_PROGRAMS * reached / (reached - 1)) if reached > 1 else _ALONE_PROGRAMS
        one_each = one_flag_each(range(self.world_size), self.world_size)
        timeout_s, status = self.options.wait_timeout_s, self._record.status
        self._arrivals = [
            PairFlags(windows, (part + 1) * one_each, timeout_s, status) for part in range(self.gradients.parts)
        ]
        """the flags of the gradients up to each part"""
        done = torch.zeros(self.gradients.parts, dtype=torch.int32, device=self.device)
        self._flags = PartFlags(windows.arena.addresses(windows.flags), done, windows.counter.word)
        self.own = self.gradients_by(self.rank, self.layout.output_column, context.ids)
        self._storage: tuple[int, ...] | None = None
        self._inputs: list[InputRows] = []
        self._updates: list[list[RowUpdate]] = []
        """of each input, those of its ranges"""
        self._seed = torch.initial_seed() % 2**31
        self._steps = context.counters.steps
        self._rules = DeviceRules(self.device)
        self._are_captured = False  # whether captured steps read these

    def gradients_by(self, rank: int, column: Callable[[FeatureShard], int], ids: IdLayout | None = None) -> Pushed:
        """Return the gradients of a rank's samples, of this one or of one of another node, as this rank stores them.

        Args:
            column: returns the column of a shard of the ranks reached.
            ids: if known, bags that have none of a shard's are to be left out.
        """
        dims = sorted({shard.dim for shards in self.layout.by_owner for shard in shards})
        tables = [self._shard_table(dim, column, ids) for dim in dims]
        return Pushed(rank, tables, self._flags, self.schedule, self._programs)

    def _shard_table(self, dim: int, column: Callable[[FeatureShard], int], ids: IdLayout | None) -> ShardTable:
        """Return where the shards of one dim are: in a gradient, by `column`, and at the owners reached."""
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
            entries=entries.view(len(padded), len(reached), max(counts), 3),  # also where no rank reached has any
            counts=torch.tensor(counts, dtype=torch.int32, device=self.device),
            dim=dim,
            source_alignment=gcd(16, *(column for column, _, _ in every)),
            start_alignment=gcd(16, *(start for _, start, _ in every)),
        )

    def _input_rows(self) -> list[InputRows]:
        """Return the rows of each of this rank's inputs, made anew when the rows have moved."""
        if (storage := self.tables.storage()) != self._storage:
            starts, parts = self.gradients.starts, self.gradients.part_of
            by_input = groupby(self.layout.by_owner[self.rank], key=lambda shard: shard.input)
            self._inputs = [InputRows(list(shards), self.tables, starts, parts) for _, shards in by_input]
            self._updates = [[RowUpdate(each.rows) for each in rows.ranges] for rows in self._inputs]
            self._storage = storage
        return self._inputs

    def follow_rules(self, capture: bool = False) -> None:
        """Overwrite the numbers of the rows' optimizers where they have changed, see `Backward`."""
        self._are_captured = self._are_captured or capture
        if self._are_captured:
            self._rules.follow(self.tables.rules(self._steps.value), self._steps.value)

    def note_forward(self, step: Step) -> None:
        """Mark where on the stream no id is outside its table any more: the lookup replaces them, or the arrival."""
        super().note_forward(step)
        if step.ids_ready is None:
            step.ids_ready = self._current().record_event()
        for ids in step.inputs:
            for tensor in tensors_of(ids):
                tensor.record_stream(self._update_stream)

    def prepare(self, step: Step) -> None:
        """Sort the ids, beside the main stream."""
        self._update_stream.wait_event(step.ids_ready)
        with OnStream(self._update_stream):
            step.runs = [rows.sort(step.inputs[rows.input], step.batch.total) for rows in self._input_rows()]

    def start(self, step: Step, gradient: torch.Tensor) -> None:
        """Push the gradient, and update the rows as gradients arrive, all beside the main stream."""
        self.check()
        gradient = in_readable_rows(gradient)
        self.windows.begin()
        self._issued.record(self._current())
        self._push_stream.wait_event(self._issued)
        if self._updating:
            # By the step before: peers that see this one's flags may overwrite the gradients that it reads.
            self._push_stream.wait_stream(self._update_stream)
        self._updating = True
        gradient.record_stream(self._push_stream)
        arrivals: list[torch.cuda.Event] = []
        if self.order.is_captured:
            arrivals = self._push_in_order(step, gradient)
        else:
            with OnStream(self._push_stream):
                self.push(step, gradient, 0, self.gradients.parts)
        if not step.runs:
            self.prepare(step)
        inputs, window = self._input_rows(), self.windows.local
        self._update_stream.wait_event(self._issued)
        with OnStream(self._update_stream):
            if not self.order.is_captured:
                self._rules.follow(step.rules, step.number)
            for part in range(self.gradients.parts):
                if arrivals:
                    self._update_stream.wait_event(arrivals[part])
                else:
                    self._arrivals[part].wait()
                if step.trains_weights:
                    here = self.gradients.shards[part][self.rank]
                    train_weights(self, step, self.gradients_of(here, window, step.batch.total))
                for number, rows in enumerate(inputs):
                    for updated in (r for r in rows.ranges if r.part == part):
                        self.update_range(step, number, updated, window)

    def store_of(
        self,
        pushed: Pushed,
        step: Step,
        gradient: torch.Tensor,
        scale: float,
        first: int,
        end: int,
        offsets: torch.Tensor | None = None,
    ) -> None:
        """Store the parts [first, end) of `scale` times the gradient [b, ..] of `pushed`'s rank, as that rank does.

        Args:
            offsets: of that rank's bags of each share, if they are known here.
        """
        tensors = (gradient,) if offsets is None else (gradient, offsets)
        windows = self._peers[self.windows.epoch % 2]
        for launch in pushed.store_launches(tensors, windows, step.batch, scale, first, end, gradient.stride(0)):
            launch(*tensors, self.windows.counter.argument)

    def _push_in_order(self, step: Step, gradient: torch.Tensor) -> list[torch.cuda.Event]:
        """Send and await the gradient part by part, and return the events after which each part is here.

        A captured step has its waits in one order with the other ranks'. Each part is awaited before the next one is
        sent, which leaves the links idle for some microseconds, and lets the update of its rows begin at once.
        """
        arrivals = []
        with OnStream(self._push_stream):
            for part in range(self.gradients.parts):
                with self.order:
                    self.push(step, gradient, part, part + 1)
                    self._arrivals[part].wait()
                arrivals.append(self._push_stream.record_event())
        return arrivals

    def update_range(self, step: Step, number: int, updated: UpdateRange, window: torch.Tensor) -> None:
        """Update the rows of one range, all of whose gradients are in this rank's `window`, unless they are frozen.

        Args:
            number: of the input whose ids name the rows.
        """
        runs = step.runs[number]
        if runs is None or step.rules[updated.lookup].frozen:
            return
        numbers, since = self._rules.numbers(updated.lookup), self._steps.on_device
        rule = Rule(numbers, self._steps.word, step.number - since, self._seed, self.update_scale)
        self._updates[number][updated.rows.index](runs, window, rule)

    def finish(self, step: Step) -> None:
        """Make the current stream wait until the rows are updated, and so until the gradient has been read."""
        current = self._current()
        self._updated.record(self._update_stream)
        self._pushed_all.record(self._push_stream)  # which is done by then, but a capture asks for it
        current.wait_event(self._updated)
        current.wait_event(self._pushed_all)
        self._updating = False
        step.runs = ()

    def skip(self) -> None:
        """Take an epoch in which nothing is stored."""
        skip_epoch(self.windows, PairFlags, self.options.wait_timeout_s, self._record.status)

    def check(self) -> None:
        """Raise the fault that a wait has recorded.

        Raises:
            ExchangeTimeoutError: if it has expired.
        """
        self._record.raise_expired(self.options.wait_timeout_s, "part")
