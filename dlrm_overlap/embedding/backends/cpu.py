"""The exchange on CPUs: the kernels' order and protocol, the reference's arithmetic.

Processes of one host store into each other's memory.
"""

from collections.abc import Mapping, Sequence

import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dlrm_overlap.comm.arena import HostArena
from dlrm_overlap.embedding.backends.base import Backward, Forward, WindowBackward, WindowForward
from dlrm_overlap.embedding.layout import FeatureShard, FusedLookup
from dlrm_overlap.embedding.options import ExchangeContext
from dlrm_overlap.embedding.steps import Step
from dlrm_overlap.embedding.tables import FbgemmUpdate, bad_id_message, bags_of
from dlrm_overlap.embedding.windows import WindowPair, one_flag_each
from dlrm_overlap.kernels import reference
from dlrm_overlap.kernels.schedule import staggered_peers


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


def train_weights(half: Backward, step: Step, gradients: Mapping[FeatureShard, torch.Tensor]) -> None:
    """Find the gradients of the weights of some shards' ids, before their rows are updated; on any device.

    That of a weight is the product of its bag's gradient and its row, which is not divided by the number of ranks: as
    under TorchRec, the mean of the dense gradients does that. PyTorch's operators find it, and wait for numbers of ids:
    only steps of TorchRec's pipelines have such weights.

    Args:
        half: that brings the gradients.
        gradients: the gradient [B, D] of each of these shards, as it was sent.
    """
    weights = [ids.weights_or_none() for ids in step.inputs]
    trained = [number for number, each in enumerate(weights) if each is not None and each.requires_grad]
    if not step.weights_gradients:
        step.weights_gradients = [torch.zeros_like(step.inputs[number].weights()) for number in trained]
    found, samples = dict(zip(trained, step.weights_gradients, strict=True)), step.batch.total
    for shard, gradient in gradients.items():
        if shard.input not in found:
            continue
        ids = step.inputs[shard.input]
        values, sample, divisors = ids_in_bags(ids, shard, samples, weighted=False)
        first = int(ids.offsets()[shard.feature * samples])
        rows = half.tables.weight(shard)[values.long()].float() * divisors / half.sent_scale
        products = (gradient[sample].float() * rows).sum(dim=1)
        found[shard.input][first : first + values.numel()] += products


def check_on_cpu(forward: Forward, step: Step, weights: Sequence[torch.Tensor]) -> None:
    """Look for ids outside their tables; as FBGEMM on a CPU, take row 0 instead or, by its mode, stop.

    The id -1, FBGEMM's mark of a pruned row, stops in every mode there, and so does any such id without bounds check.

    Args:
        weights: the rows of each of this rank's shards.

    Raises:
        ValueError: if the run must stop.
    """
    for shard, weight in zip(forward.layout.by_owner[forward.rank], weights, strict=True):
        rows, bag = weight.shape[0], shard.feature * step.batch.total
        _, here = lengths_and_ids(step.inputs[shard.input], bag, bag + step.batch.total)
        outside = (here < 0) | (here >= rows)
        if not outside.any():
            continue
        message = bad_id_message(shard.name, int(here[outside].min()), rows)
        if not forward.bad_ids.looks or (here == -1).any():
            raise ValueError(message)
        forward.bad_ids.report(message)
        with torch.inference_mode(here.is_inference()):  # else torch does not write to such ids
            here.masked_fill_(outside, 0)


def meet_on_cpu(windows: WindowPair, awaited: range, timeout_s: float, unit: str = "slice") -> int:
    """Raise a pair's first flag at the ranks of this host in the current epoch, and await that of each rank `awaited`.

    A flag stands for a `unit`.

    Returns:
        The epoch.
    """
    arena = windows.arena
    assert isinstance(arena, HostArena)
    counts, epoch = one_flag_each(awaited, arena.world_size), windows.epoch
    for peer in arena.reached:
        arena.raise_flag(windows.flags, peer, 0, epoch)
    arena.wait(windows.flags, counts, epoch, timeout_s, unit)
    return epoch


def skip_on_cpu(windows: WindowPair, timeout_s: float) -> None:
    """Take an epoch of a pair in which nothing is stored; only ranks of this host store into its windows."""
    windows.begin()
    meet_on_cpu(windows, windows.arena.reached, timeout_s)


def views_of(windows: WindowPair) -> list[list[torch.Tensor]]:
    """Return the windows of the ranks reached, of even epochs and of odd ones."""
    return [[windows.arena.view(name, rank) for rank in windows.arena.reached] for name in windows.names]


def turns_of(windows: WindowPair) -> list[int]:
    """Return the ranks reached, by number, in the order in which they are sent to; this one is last."""
    here = windows.arena.reached.index(windows.arena.rank)
    return [*staggered_peers(here, len(windows.arena.reached)), here]


class CpuZeroCopyForward(WindowForward):
    """`pgas` and `fused`: a rank stores all it has into the windows of its host's ranks, then raises a flag at each."""

    def __init__(self, context: ExchangeContext, windows: WindowPair) -> None:
        super().__init__(context, windows)
        assert isinstance(windows.arena, HostArena)
        self._arena, self._reached = windows.arena, windows.arena.reached
        self._turns = turns_of(windows)
        self._peers, self._epoch = views_of(windows), 0
        self._shards = [(s, self.column(s), context.leaves_out(s)) for s in self.layout.by_owner[self.rank]]

    def begin(self, step: Step, weights: Sequence[torch.Tensor]) -> None:
        """Check the ids and take the next epoch; messages to other hosts are sent after that."""
        check_on_cpu(self, step, weights)
        self._epoch = self.windows.begin()

    def pass_on(self, step: Step) -> None:
        """Bring messages of other hosts to the ranks of this host; here there are none."""

    def start(self, step: Step) -> None:
        """Pool and store rank by rank, the next one first, then raise the flags."""
        weights = [self.tables.weight(shard) for shard in self.layout.by_owner[self.rank]]
        self.begin(step, weights)
        for number in self._turns:
            rank, window = self._reached[number], self._peers[self._epoch % 2][number]
            first, samples = step.batch.first_sample[rank], step.batch.per_rank[rank]
            for (shard, column, leaves_out), weight in zip(self._shards, weights, strict=True):
                pooled = pool_on_cpu(shard, weight, step, first, first + samples)
                into = window[:samples, column : column + shard.dim]
                if leaves_out:
                    bag = shard.feature * step.batch.total + first
                    filled = step.inputs[shard.input].lengths()[bag : bag + samples] > 0
                    into[filled] = pooled[filled].to(into.dtype)
                else:
                    into.copy_(pooled)
        for peer in self._reached:
            self._raise(peer)

    def _raise(self, peer: int, source: int | None = None) -> None:
        self._arena.raise_flag(self.windows.flags, peer, 0, self._epoch, source)

    def skip(self) -> None:
        """Take an epoch in which nothing is stored."""
        skip_on_cpu(self.windows, self.options.wait_timeout_s)

    def finish(self, step: Step, copy: bool = False) -> torch.Tensor:
        """Wait for the flags, and lend the window or copy it."""
        self.pass_on(step)
        self._arena.wait(self.windows.flags, self.awaited_flags(step), self._epoch, self.options.wait_timeout_s)
        return self.output(step, copy)


class CpuPush(WindowBackward):
    """Gradients stored into the owners' windows; rows updated once all of them have arrived."""

    def __init__(self, context: ExchangeContext, windows: WindowPair) -> None:
        super().__init__(context, windows)
        assert isinstance(windows.arena, HostArena)
        self._arena, self._reached = windows.arena, windows.arena.reached
        self._peers, self._epoch = views_of(windows), 0
        self._turns = turns_of(windows)
        self._published: dict[FeatureShard, int] = {}
        """of shards whose bags without ids get no gradient, which of the published features has their ids"""
        if (ids := context.ids) is not None:
            some = [s for shards in self.layout.by_owner for s in shards if ids.knows_empty_bags(s)]
            self._published = {shard: ids.published(shard) for shard in some}
        self._lookups, self._tables = self.layout.lookups(self.rank), self.layout.tables(self.rank)
        self._output_columns = {s: self.layout.output_column(s) for shards in self.layout.by_owner for s in shards}
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
        self._epoch = self.windows.begin()
        if self.sent_scale != 1.0:
            gradient = gradient * self.sent_scale
        self.send(step, gradient)
        first = step.batch.first_sample[self.rank]
        for part, by_owner in enumerate(self.gradients.shards):
            for number in self._turns:
                owner, window = self._reached[number], self._peers[self._epoch % 2][number]
                for shard, rows in self.gradients_of(by_owner[owner], window, step.batch.total).items():
                    column, into = self._output_columns[shard], rows[first : first + gradient.shape[0]]
                    own = gradient[:, column : column + shard.dim]
                    if step.own_offsets is not None and shard in self._published:
                        filled = reference.have_ids(step.own_offsets, self._published[shard], gradient.shape[0])
                        into[filled] = own[filled].to(into.dtype)
                    else:
                        into.copy_(own)
                self._arena.raise_flag(self.windows.flags, owner, part, self._epoch)

    def finish(self, step: Step) -> None:
        """Wait for all gradients and update the rows, table by table, unless the next `start` has done so."""
        if step is not self._unfinished:
            return
        self._unfinished = None
        self.pass_on(step)
        counts = torch.full((self.world_size,), self.gradients.parts, dtype=torch.int32, device="cpu")
        self._arena.wait(self.windows.flags, counts, self._epoch, self.options.wait_timeout_s, "part")
        window = self._peers[self._epoch % 2][self._turns[-1]]
        gradients = self.gradients_of(self.layout.by_owner[self.rank], window, step.batch.total)
        scale = self.update_scale
        if step.trains_weights:
            train_weights(self, step, gradients)
        numbers = {lookup: rule.numbers for lookup, rule in enumerate(step.rules) if not rule.decays}
        trained = [lookup for lookup in self._lookups if not step.rules[lookup.number].frozen]
        for lookup in trained:
            if lookup.number not in numbers:
                self._decay(lookup, step, gradients, scale)
        ours = numbers.keys() & {lookup.number for lookup in trained}
        tables = [shards for shards in self._tables if shards[0].lookup in ours]
        held = [
            (self.tables.weight(shards[0]), self.tables.states(shards[0]), self.tables.optimizer(shards[0]))
            for shards in tables
        ]
        for shards, (weight, states, optimizer) in zip(tables, held, strict=True):
            values, gradient = self._by_id(shards, step, gradients, scale)
            reference.update_rows(weight, states, values, gradient, optimizer, numbers[shards[0].lookup])

    def _decay(
        self, lookup: FusedLookup, step: Step, gradients: Mapping[FeatureShard, torch.Tensor], scale: float
    ) -> None:
        """Update rows that decay by FBGEMM's operator, which on a CPU reads the decay for some tables alone."""
        # Float32 before they are joined: autocast refuses to join the half type that is not its own.
        gradient = torch.cat([gradients[shard].float() for shard in lookup.shards], dim=1).mul_(scale)
        rule = step.rules[lookup.number]
        FbgemmUpdate(self.tables.lookups[lookup.number]).apply(gradient, bags_of(lookup, step.inputs), rule)

    def skip(self) -> None:
        """Take an epoch in which nothing is stored, once the rows of the step before are updated."""
        if self._unfinished is not None:
            self.finish(self._unfinished)
        skip_on_cpu(self.windows, self.options.wait_timeout_s)

    def _by_id(
        self, shards: list[FeatureShard], step: Step, of_bags: Mapping[FeatureShard, torch.Tensor], scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the ids [n] of all features that share a table, and `scale` times their gradients [n, D]."""
        samples = step.batch.total
        values, gradients = [], []
        for shard in shards:
            ids, sample, factors = ids_in_bags(step.inputs[shard.input], shard, samples)
            values.append(ids)
            gradients.append(of_bags[shard][sample].float() * (factors * scale))
        return torch.cat(values).long(), torch.cat(gradients)
