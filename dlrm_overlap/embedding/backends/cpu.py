"""The exchange on CPUs: the kernels' order and protocol, the reference's arithmetic.

Processes of one host store into each other's memory. Between hosts gloo carries messages; a message that has arrived is
passed on where the stage is waited for, so a rank that never waits keeps its host's ranks waiting, for a bounded time.
"""

from collections.abc import Iterator

import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode

from dlrm_overlap.comm.arena import HostArena
from dlrm_overlap.embedding.backends.base import Forward, WindowBackward, WindowForward
from dlrm_overlap.embedding.backends.messages import MessageGroups
from dlrm_overlap.embedding.crossing import Crossing, Message
from dlrm_overlap.embedding.layout import FeatureShard
from dlrm_overlap.embedding.options import ExchangeContext
from dlrm_overlap.embedding.steps import Step, lengths_and_ids
from dlrm_overlap.embedding.tables import bad_id_message
from dlrm_overlap.embedding.windows import WindowPair, one_flag_each
from dlrm_overlap.kernels import reference
from dlrm_overlap.kernels.schedule import TaskGrid


def pool_on_cpu(shard: FeatureShard, weight: torch.Tensor, step: Step, first: int, end: int) -> torch.Tensor:
    """Return the pooled embeddings [end - first, D] float32 of samples first .. end - 1 of the global batch."""
    bag = shard.feature * step.batch.total
    return reference.pool(weight, *lengths_and_ids(step.inputs[shard.input], bag + first, bag + end), shard.mean)


def check_on_cpu(forward: Forward, step: Step) -> None:
    """Look for ids outside their tables; as FBGEMM on a CPU, take row 0 instead or, by its mode, stop.

    The id -1, FBGEMM's mark of a pruned row, stops in every mode there, and so does any such id without bounds check.

    Raises:
        ValueError: if the run must stop.
    """
    mode = forward.bad_ids.mode
    for shard in forward.layout.by_owner[forward.rank]:
        rows, bag = forward.tables.weight(shard).shape[0], shard.feature * step.batch.total
        _, here = lengths_and_ids(step.inputs[shard.input], bag, bag + step.batch.total)
        outside = (here < 0) | (here >= rows)
        if not outside.any():
            continue
        message = bad_id_message(shard.name, int(here[outside].min()), rows)
        if mode == BoundsCheckMode.NONE or (here == -1).any():
            raise ValueError(message)
        forward.bad_ids.report(message)
        with torch.inference_mode(here.is_inference()):  # else torch does not write to such ids
            here.masked_fill_(outside, 0)


def meet_on_cpu(windows: WindowPair, awaited: range, timeout_s: float, unit: str = "slice") -> None:
    """Raise a pair's first flag at the ranks of this host in the current epoch, and await that of each rank `awaited`.

    A flag stands for a `unit`.
    """
    arena = windows.arena
    assert isinstance(arena, HostArena)
    for peer in arena.reached:
        arena.raise_flag(windows.flags, peer, 0, windows.epoch)
    arena.wait(windows.flags, one_flag_each(awaited, arena.world_size), windows.epoch, timeout_s, unit)


def skip_on_cpu(windows: WindowPair, timeout_s: float) -> None:
    """Take an epoch of a pair in which nothing is stored; only ranks of this host store into its windows."""
    windows.begin()
    meet_on_cpu(windows, windows.arena.reached, timeout_s)


class CpuWindowForward(WindowForward):
    """Stores pooled embeddings into the peers' windows."""

    def __init__(self, context: ExchangeContext, windows: WindowPair) -> None:
        super().__init__(context, windows)
        assert isinstance(windows.arena, HostArena)
        self._arena, self._reached = windows.arena, windows.arena.reached

    def begin(self, step: Step) -> None:
        """Check the ids and take the next epoch; messages to other hosts are sent after that."""
        check_on_cpu(self, step)
        self.windows.begin()

    def pass_on(self, step: Step) -> None:
        """Bring messages of other hosts to the ranks of this host; here there are none."""

    def _store(self, step: Step, bags: int) -> Iterator[tuple[int, int]]:
        """Pool and store `bags` bags at a time for this host's ranks, in the schedule's order.

        Yields:
            After each store (rank stored to, number of the slice among those from here to there).
        """
        shards, place = self.layout.by_owner[self.rank], self._reached.index(self.rank)
        weights = [self.tables.weight(shard) for shard in shards]
        grid = TaskGrid(place, len(self._reached), len(shards), step.batch.most, task_bags=bags, slice_bags=bags)
        for task in grid.order(self.schedule):
            destination = self._reached[task.destination]
            shard, first = shards[task.feature], step.batch.first_sample[destination]
            begin = min(task.block * bags, step.batch.per_rank[destination])
            end = min(begin + bags, step.batch.per_rank[destination])
            column = self.column(shard)
            window = self._arena.view(self.windows.name, destination)
            pooled = pool_on_cpu(shard, weights[task.feature], step, first + begin, first + end)
            window[begin:end, column : column + shard.dim] = pooled
            yield destination, grid.slice_of(task)

    def _raise(self, peer: int, slot: int = 0, source: int | None = None) -> None:
        self._arena.raise_flag(self.windows.flags, peer, slot, self.windows.epoch, source)

    def skip(self) -> None:
        """Take an epoch in which nothing is stored."""
        skip_on_cpu(self.windows, self.options.wait_timeout_s)

    def finish(self, step: Step, copy: bool = False) -> torch.Tensor:
        """Wait for the flags, and lend the window or copy it."""
        self.pass_on(step)
        self._arena.wait(self.windows.flags, self.awaited_flags(step), self.windows.epoch, self.options.wait_timeout_s)
        return self.output(step, copy)


class CpuZeroCopyForward(CpuWindowForward):
    """`pgas`: a rank stores all it has, then raises one flag at each rank."""

    def start(self, step: Step) -> None:
        """Pool and store everything, then raise the flags."""
        self.begin(step)
        for _ in self._store(step, max(1, step.batch.most)):
            pass
        for peer in self._reached:
            self._raise(peer)


class CpuSlicedForward(CpuWindowForward):
    """`fused`: a rank raises a flag after each slice that it stores.

    The option `put` has no effect: a slice is one tensor here, which goes from where it is pooled to the peer's window
    by one copy, and there is nothing to be had by staging it.
    """

    sliced = True

    def start(self, step: Step) -> None:
        """Pool and store slice by slice; a rank that has none raises its first flag all the same."""
        self.begin(step)
        nothing = True
        for destination, slot in self._store(step, self.options.slice_bags):
            nothing = False
            if destination != self.rank:
                self._raise(destination, slot)
        if nothing:
            for peer in self._reached:
                self._raise(peer)


class CpuPush(WindowBackward):
    """Gradients stored into the owners' windows; rows updated once all of them have arrived."""

    def __init__(self, context: ExchangeContext, windows: WindowPair) -> None:
        super().__init__(context, windows)
        assert isinstance(windows.arena, HostArena)
        self._arena, self._reached = windows.arena, windows.arena.reached
        self._unfinished: Step | None = None

    def send(self, step: Step, gradient: torch.Tensor) -> None:
        """Start to send gradients to owners on other hosts; here there are none."""

    def pass_on(self, step: Step) -> None:
        """Bring messages of other hosts to the ranks of this host."""

    def start(self, step: Step, gradient: torch.Tensor) -> None:
        """Store each shard's gradient at its owner, part by part, and raise the part's flag."""
        if self._unfinished is not None:  # peers that see this step's flags may store over the gradients it reads
            self.finish(self._unfinished)
        self._unfinished = step
        epoch = self.windows.begin()
        if self.sent_scale != 1.0:
            gradient = gradient * self.sent_scale
        self.send(step, gradient)
        first, next_one = step.batch.first_sample[self.rank], self._reached.index(self.rank) + 1
        for part, by_owner in enumerate(self.gradients.shards):
            for turn in range(len(self._reached)):
                owner = self._reached[(next_one + turn) % len(self._reached)]
                window = self._arena.view(self.windows.name, owner)
                for shard in by_owner[owner]:
                    column = self.layout.column(shard)
                    rows = self.gradient_of(shard, window, step.batch.total)
                    rows[first : first + gradient.shape[0]] = gradient[:, column : column + shard.dim]
                self._arena.raise_flag(self.windows.flags, owner, part, epoch)

    def finish(self, step: Step) -> None:
        """Wait for all gradients and update the rows, table by table, unless the next `start` has done so."""
        if step is not self._unfinished:
            return
        self._unfinished = None
        self.pass_on(step)
        counts = torch.full((self.world_size,), self.gradients.parts, dtype=torch.int32, device="cpu")
        self._arena.wait(self.windows.flags, counts, self.windows.epoch, self.options.wait_timeout_s, "part")
        window = self.windows.local
        self.update_by_fbgemm(step, window)
        for shards in self.layout.tables(self.rank):
            if step.rules[shards[0].lookup].by_kernels:
                self._update_table(shards, step, window)

    def skip(self) -> None:
        """Take an epoch in which nothing is stored, once the rows of the step before are updated."""
        if self._unfinished is not None:
            self.finish(self._unfinished)
        skip_on_cpu(self.windows, self.options.wait_timeout_s)

    def _update_table(self, shards: list[FeatureShard], step: Step, window: torch.Tensor) -> None:
        """Update a table's rows by the gradients of all features that share it."""
        samples = step.batch.total
        values, gradients = [], []
        for shard in shards:
            bag = shard.feature * samples
            lengths, ids = lengths_and_ids(step.inputs[shard.input], bag, bag + samples)
            rows = self.gradient_of(shard, window, samples).float() * self.update_scale
            if shard.mean:
                rows = rows / lengths.clamp(min=1)[:, None]
            values.append(ids)
            gradients.append(rows.repeat_interleave(lengths, dim=0))
        weight, state = self.tables.weight(shards[0]), self.tables.state(shards[0])
        optimizer, rule = self.tables.optimizer(shards[0]), step.rules[shards[0].lookup]
        reference.update_rows(
            weight, state, torch.cat(values).long(), torch.cat(gradients), optimizer, rule.lr, rule.arguments.eps
        )


class _HostAcross(CpuWindowForward):
    """A forward that pools and sends for other hosts first, and then serves this host's ranks."""

    def __init__(self, context: ExchangeContext, windows: WindowPair) -> None:
        super().__init__(context, windows)
        self._crossing = Crossing(self.layout, windows.arena.reach, self.options.wire_dtype)
        self._columns = self._crossing.columns_of([self.rank])
        self._buffers = MessageGroups(context, self._crossing.pooled(context.largest_batch), way=0)

    def begin(self, step: Step) -> None:
        """Begin the step, then pool for the other hosts' ranks, and send group by group."""
        super().begin(step)
        weights = [self.tables.weight(shard) for shard in self._columns]

        def pool(message: Message, rows: torch.Tensor, group: range) -> None:
            first = step.batch.first_sample[message.host.start] + group.start
            for (shard, column), weight in zip(self._columns.items(), weights, strict=True):
                rows[:, column : column + shard.dim] = pool_on_cpu(shard, weight, step, first, first + len(group))

        step.work = self._buffers.send(self._crossing.pooled(step.batch), pool)

    def pass_on(self, step: Step) -> None:
        """Store messages of other hosts into the windows of this host's ranks, and raise the senders' flags."""
        step.work.wait()
        step.work = None
        for message in self._crossing.pooled(step.batch).received:
            rows, columns = message.within(self._buffers.received), self._crossing.columns_of([message.peer])
            for rank in self._reached:
                begin = step.batch.first_sample[rank] - step.batch.first_sample[self._reached.start]
                here = rows[begin : begin + step.batch.per_rank[rank]]
                window = self._arena.view(self.windows.name, rank)
                for shard, column in columns.items():
                    into = self.column(shard)
                    window[: len(here), into : into + shard.dim] = here[:, column : column + shard.dim]
                self._raise(rank, source=message.peer)


class CpuZeroCopyAcross(_HostAcross, CpuZeroCopyForward):
    """`pgas` between hosts."""


class CpuSlicedAcross(_HostAcross, CpuSlicedForward):
    """`fused` between hosts: slices within the host; to each other host all of a step is one message."""


class CpuPushAcross(CpuPush):
    """Gradients stored at the owners of this host, and sent to the other hosts."""

    def __init__(self, context: ExchangeContext, windows: WindowPair) -> None:
        super().__init__(context, windows)
        self._crossing = Crossing(self.layout, windows.arena.reach, self.options.wire_dtype)
        self._columns = self._crossing.columns_of(self._reached)
        self._buffers = MessageGroups(context, self._crossing.gradients(context.largest_batch), way=1)

    def send(self, step: Step, gradient: torch.Tensor) -> None:
        """Start to send gradients to the owners of other hosts, group by group."""

        def gather(message: Message, rows: torch.Tensor, group: range) -> None:
            for shard, column in self._crossing.columns_of(message.host).items():
                first = self.layout.column(shard)
                rows[:, column : column + shard.dim] = gradient[group.start : group.stop, first : first + shard.dim]

        step.work = self._buffers.send(self._crossing.gradients(step.batch), gather)

    def pass_on(self, step: Step) -> None:
        """Store messages of other hosts into the windows of this host's ranks, and raise the senders' flags."""
        step.work.wait()
        step.work = None
        for message in self._crossing.gradients(step.batch).received:
            sent, first = message.within(self._buffers.received), step.batch.first_sample[message.peer]
            for shard, column in self._columns.items():
                window = self._arena.view(self.windows.name, shard.owner)
                rows = self.gradient_of(shard, window, step.batch.total)
                rows[first : first + message.rows] = sent[:, column : column + shard.dim]
            for rank in self._reached:
                for part in range(self.gradients.parts):
                    self._arena.raise_flag(self.windows.flags, rank, part, self.windows.epoch, message.peer)
