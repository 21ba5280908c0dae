"""The exchange on CPUs: the kernels' order and protocol, the reference's arithmetic.

Processes of one host store into each other's memory.
"""

from collections.abc import Callable, Iterable

import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dlrm_overlap.comm.arena import HostArena
from dlrm_overlap.embedding.backends.base import Backward, Forward, WindowBackward, WindowForward
from dlrm_overlap.embedding.layout import FeatureShard
from dlrm_overlap.embedding.options import ExchangeContext
from dlrm_overlap.embedding.steps import Step
from dlrm_overlap.embedding.tables import FbgemmUpdate, bad_id_message, bags_of
from dlrm_overlap.embedding.windows import WindowPair, one_flag_each
from dlrm_overlap.kernels import reference
from dlrm_overlap.kernels.backward.reference import update_rows
from dlrm_overlap.kernels.schedule import TaskGrid


def lengths_and_ids(ids: KeyedJaggedTensor, first: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the lengths of the bags [first, end) and, as a view, their ids."""
    offsets = ids.offsets()
    return ids.lengths()[first:end], ids.values()[int(offsets[first]) : int(offsets[end])]


def weights_between(ids: KeyedJaggedTensor, first: int, end: int) -> torch.Tensor | None:
    """Return the weights of the ids in the bags [first, end), as a view, or None if ids have none."""
    weights, offsets = ids.weights_or_none(), ids.offsets()
    return None if weights is None else weights[int(offsets[first]) : int(offsets[end])]


def pool_on_cpu(shard: FeatureShard, weight: torch.Tensor, step: Step, first: int, end: int) -> torch.Tensor:
    """Return the pooled embeddings [end - first, D] float32 of samples first .. end - 1 of the global batch."""
    bag = shard.feature * step.batch.total
    bags = step.inputs[shard.input], bag + first, bag + end
    return reference.pool(weight, *lengths_and_ids(*bags), shard.mean, weights_between(*bags))


def ids_in_bags(
    ids: KeyedJaggedTensor, shard: FeatureShard, samples: int, weighted: bool = True
) -> tuple[torch.Tensor, ...]:
    """Return the ids [n] of a shard's bags, the sample [n] of each, and what multiplies its row, [n, 1] float32.

    Args:
        ids: of the shard's input, with `samples` bags a feature.
        weighted: whether the ids' weights are among the factors, if ids have some.
    """
    bags = ids, shard.feature * samples, (shard.feature + 1) * samples
    lengths, values = lengths_and_ids(*bags)
    sample = torch.repeat_interleave(lengths.long())
    weights = weights_between(*bags) if weighted else None
    factors = torch.ones(values.numel(), device=values.device) if weights is None else weights
    if shard.mean:
        factors = factors / lengths[sample]
    return values, sample, factors[:, None]


def train_weights(
    half: Backward, step: Step, gradient_of: Callable[[FeatureShard], torch.Tensor], shards: Iterable[FeatureShard]
) -> None:
    """Find the gradients of the weights of some shards' ids, before their rows are updated; on any device.

    That of a weight is the product of its bag's gradient and its row, which is not divided by the number of ranks: as
    under TorchRec, the mean of the dense gradients does that. PyTorch's operators find it, and wait for numbers of ids:
    only steps of TorchRec's pipelines have such weights.

    Args:
        half: that brings the gradients.
        gradient_of: returns the gradient [B, D] of a shard as it was sent.
        shards: of this rank, all whose gradients are here.
    """
    weights = [ids.weights_or_none() for ids in step.inputs]
    trained = [number for number, each in enumerate(weights) if each is not None and each.requires_grad]
    if not step.weights_gradients:
        step.weights_gradients = [torch.zeros_like(step.inputs[number].weights()) for number in trained]
    gradients, samples = dict(zip(trained, step.weights_gradients, strict=True)), step.batch.total
    for shard in (each for each in shards if each.input in gradients):
        ids = step.inputs[shard.input]
        values, sample, divisors = ids_in_bags(ids, shard, samples, weighted=False)
        first = int(ids.offsets()[shard.feature * samples])
        rows = half.tables.weight(shard)[values.long()].float() * divisors / half.sent_scale
        products = (gradient_of(shard)[sample].float() * rows).sum(dim=1)
        gradients[shard.input][first : first + values.numel()] += products


def check_on_cpu(forward: Forward, step: Step) -> None:
    """Look for ids outside their tables; as FBGEMM on a CPU, take row 0 instead or, by its mode, stop.

    The id -1, FBGEMM's mark of a pruned row, stops in every mode there, and so does any such id without bounds check.

    Raises:
        ValueError: if the run must stop.
    """
    shards = forward.layout.by_owner[forward.rank]
    for shard, weight in zip(shards, forward.tables.weights(shards), strict=True):
        rows, bag = weight.shape[0], shard.feature * step.batch.total
        _, here = lengths_and_ids(step.inputs[shard.input], bag, bag + step.batch.total)
        outside = (here < 0) | (here >= rows)
        if not outside.any():
            continue
        message = bad_id_message(shard.name, int(here[outside].min()), rows)
        if forward.bad_ids.mode_of(shard) == BoundsCheckMode.NONE or (here == -1).any():
            raise ValueError(message)
        forward.bad_ids.report(message, [shard])
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


class CpuZeroCopyForward(WindowForward):
    """`pgas`: a rank stores all it has into the windows of its host's ranks, then raises one flag at each."""

    def __init__(self, context: ExchangeContext, windows: WindowPair) -> None:
        super().__init__(context, windows)
        assert isinstance(windows.arena, HostArena)
        self._arena, self._reached = windows.arena, windows.arena.reached
        self._shards = [(s, self.column(s), context.leaves_out(s)) for s in self.layout.by_owner[self.rank]]

    def begin(self, step: Step) -> None:
        """Check the ids and take the next epoch; messages to other hosts are sent after that."""
        check_on_cpu(self, step)
        self.windows.begin()

    def pass_on(self, step: Step) -> None:
        """Bring messages of other hosts to the ranks of this host; here there are none."""

    def start(self, step: Step) -> None:
        """Pool and store in the schedule's order, and raise the flags: after each slice or, without slices, at the end.

        A rank that has no slice raises its first flag all the same.
        """
        self.begin(step)
        reached, batch = self._reached, step.batch
        weights = self.tables.weights(self.layout.by_owner[self.rank])
        windows = {rank: self._arena.view(self.windows.name, rank) for rank in reached}
        bags = self.options.slice_bags if self.sliced else max(1, batch.most)
        here = reached.index(self.rank)
        grid = TaskGrid(here, len(reached), len(weights), batch.most, task_bags=bags, slice_bags=bags)
        tasks = [(task, grid.slice_of(task)) for task in grid.order(self.schedule)]
        for task, slot in tasks:
            destination, (shard, column, leaves_out) = reached[task.destination], self._shards[task.feature]
            samples, first = batch.per_rank[destination], batch.first_sample[destination]
            begin = min(task.block * bags, samples)
            end = min(begin + bags, samples)
            pooled = pool_on_cpu(shard, weights[task.feature], step, first + begin, first + end)
            into = windows[destination][begin:end, column : column + shard.dim]
            if leaves_out:
                bag = shard.feature * batch.total + first
                filled = step.inputs[shard.input].lengths()[bag + begin : bag + end] > 0
                into[filled] = pooled[filled].to(into.dtype)
            else:
                into.copy_(pooled)
            if self.sliced and destination != self.rank:
                self._raise(destination, slot)
        if not (self.sliced and tasks):
            for peer in reached:
                self._raise(peer)

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


class CpuSlicedForward(CpuZeroCopyForward):
    """`fused`: a rank raises a flag after each slice that it stores. The option `put` has no effect."""

    sliced = True


class CpuPush(WindowBackward):
    """Gradients stored into the owners' windows; rows updated once all of them have arrived."""

    def __init__(self, context: ExchangeContext, windows: WindowPair) -> None:
        super().__init__(context, windows)
        assert isinstance(windows.arena, HostArena)
        self._arena, self._reached = windows.arena, windows.arena.reached
        self._published: dict[FeatureShard, int] = {}
        """of shards whose bags without ids get no gradient, which of the published features has their ids"""
        if (ids := context.ids) is not None:
            some = [s for shards in self.layout.by_owner for s in shards if ids.knows_empty_bags(s)]
            self._published = {shard: ids.published(shard) for shard in some}
        self._lookups = self.layout.lookups(self.rank)
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
                window, shards = self._arena.view(self.windows.name, owner), by_owner[owner]
                columns = [self.layout.output_column(shard) for shard in shards]
                targets = [self.gradient_of(shard, window, step.batch.total) for shard in shards]
                for shard, column, rows in zip(shards, columns, targets, strict=True):
                    here, into = gradient[:, column : column + shard.dim], rows[first : first + gradient.shape[0]]
                    if step.own_offsets is not None and shard in self._published:
                        filled = reference.have_ids(step.own_offsets, self._published[shard], gradient.shape[0])
                        into[filled] = here[filled].to(into.dtype)
                    else:
                        into.copy_(here)
                self._arena.raise_flag(self.windows.flags, owner, part, epoch)

    def finish(self, step: Step) -> None:
        """Wait for all gradients and update the rows, table by table, unless the next `start` has done so."""
        if step is not self._unfinished:
            return
        self._unfinished = None
        self.pass_on(step)
        counts = torch.full((self.world_size,), self.gradients.parts, dtype=torch.int32, device="cpu")
        self._arena.wait(self.windows.flags, counts, self.windows.epoch, self.options.wait_timeout_s, "part")
        window, samples = self.windows.local, step.batch.total
        if step.trains_weights:
            own = self.layout.by_owner[self.rank]
            train_weights(self, step, lambda shard: self.gradient_of(shard, window, samples), own)
        self._decay(step, window)
        ours = [lookup for lookup, rule in enumerate(step.rules) if not (rule.frozen or rule.decays)]
        tables = [shards for shards in self.layout.tables(self.rank) if shards[0].lookup in ours]
        weights = self.tables.weights([shards[0] for shards in tables])
        states = [self.tables.states(shards[0]) for shards in tables]
        optimizers = [self.tables.optimizer(shards[0]) for shards in tables]
        scale = self.update_scale
        for shards, weight, state, optimizer in zip(tables, weights, states, optimizers, strict=True):
            values, gradients = self._gradients_of(shards, step, window, scale)
            update_rows(weight, state, values, gradients, optimizer, step.rules[shards[0].lookup].numbers)

    def _decay(self, step: Step, window: torch.Tensor) -> None:
        """Update rows that decay by FBGEMM's operator, which on a CPU reads the decay for some tables alone."""
        for lookup in self._lookups:
            if (rule := step.rules[lookup.number]).decays and not rule.frozen:
                ids, samples = bags_of(lookup, step.inputs), step.batch.total
                # Float32 before they are joined: autocast refuses to join the half type that is not its own.
                gradients = [self.gradient_of(shard, window, samples).float() for shard in lookup.shards]
                gradient = torch.cat(gradients, dim=1).mul_(self.update_scale)
                FbgemmUpdate(self.tables.lookups[lookup.number]).apply(gradient, ids, rule)

    def skip(self) -> None:
        """Take an epoch in which nothing is stored, once the rows of the step before are updated."""
        if self._unfinished is not None:
            self.finish(self._unfinished)
        skip_on_cpu(self.windows, self.options.wait_timeout_s)

    def _gradients_of(
        self, shards: list[FeatureShard], step: Step, window: torch.Tensor, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the ids [n] of all features that share a table, and `scale` times their gradients [n, D]."""
        samples = step.batch.total
        values, gradients = [], []
        for shard in shards:
            ids, sample, factors = ids_in_bags(step.inputs[shard.input], shard, samples)
            values.append(ids)
            gradients.append(self.gradient_of(shard, window, samples)[sample].float() * (factors * scale))
        return torch.cat(values).long(), torch.cat(gradients)
