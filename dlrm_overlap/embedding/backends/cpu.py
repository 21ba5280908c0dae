"""The exchange on CPUs: the kernels' order and protocol, the reference's arithmetic.

Processes of one node store into each other's memory.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dlrm_overlap.comm.device_errors import DeviceErrorRecord
from dlrm_overlap.embedding.backends.base import Backward, WindowBackward
from dlrm_overlap.embedding.backends.pgas import ZeroCopyForward
from dlrm_overlap.embedding.fbgemm_update import FbgemmUpdate, bags_of
from dlrm_overlap.embedding.id_layout import IdLayout
from dlrm_overlap.embedding.layout import FeatureShard, FusedLookup
from dlrm_overlap.embedding.options import ExchangeContext
from dlrm_overlap.embedding.replicated import ReplicatedTables
from dlrm_overlap.embedding.steps import BatchSizes, Step
from dlrm_overlap.embedding.tables import BadIds, bad_id_message
from dlrm_overlap.embedding.windows import PairFlags, WindowPair, one_flag_each, skip_epoch
from dlrm_overlap.kernels import reference


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


class CpuLookup:
    """`DeviceLookup` on a CPU: the reference pools this rank's shards, and windows are tensors."""

    def __init__(
        self,
        context: ExchangeContext,
        columns: Mapping[FeatureShard, int],
        bad_ids: BadIds,
        replicated: ReplicatedTables | None = None,
    ) -> None:
        self._columns, self._bad_ids, self._rows = columns, bad_ids, replicated or context.tables
        self._left_out = {shard for shard in columns if context.leaves_out(shard)}
        self.record = DeviceErrorRecord(context.device)
        """of no faults: `store` raises them"""

    def peers(self, pair: WindowPair, stride: int) -> list[list[torch.Tensor]]:
        """Return the windows of the ranks reached, of even epochs and of odd ones."""
        return views_of(pair)

    def rows_of_ranks(self, rows: torch.Tensor, ranks: range, batch: BatchSizes) -> list[torch.Tensor]:
        """Return the rows of each of `ranks` in [rows, pitch] of all of them."""
        return list(rows.split([batch.per_rank[rank] for rank in ranks]))

    def tables(self) -> list[torch.Tensor]:
        """Return the rows of each shard."""
        return [self._rows.weight(shard) for shard in self._columns]

    def store(
        self,
        windows: Sequence[torch.Tensor],
        step: Step,
        tables: Sequence[torch.Tensor],
        ranks: range | None = None,
    ) -> None:
        """Pool every bag of the samples of `ranks`, None for all, into its rank's window, rank by rank."""
        for shard, weight in zip(self._columns, tables, strict=True):
            self._check(shard, weight, step)
        for window, rank in zip(windows, ranks or range(len(step.batch.per_rank)), strict=True):
            first, samples = step.batch.first_sample[rank], step.batch.per_rank[rank]
            for (shard, column), weight in zip(self._columns.items(), tables, strict=True):
                pooled = pool_on_cpu(shard, weight, step, first, first + samples)
                into = window[:samples, column : column + shard.dim]
                if shard in self._left_out:
                    bag = shard.feature * step.batch.total + first
                    filled = step.inputs[shard.input].lengths()[bag : bag + samples] > 0
                    into[filled] = pooled[filled].to(into.dtype)
                else:
                    into.copy_(pooled)

    def _check(self, shard: FeatureShard, weight: torch.Tensor, step: Step) -> None:
        """Look for ids outside their table; as FBGEMM on a CPU, take row 0 instead or, by its mode, stop.

        The id -1, FBGEMM's mark of a pruned row, stops in every mode there, and so does any such id without bounds
        check.

        Raises:
            ValueError: if the run must stop.
        """
        rows, bag = weight.shape[0], shard.feature * step.batch.total
        _, here = lengths_and_ids(step.inputs[shard.input], bag, bag + step.batch.total)
        outside = (here < 0) | (here >= rows)
        if not outside.any():
            return
        message = bad_id_message(shard.name, int(here[outside].min()), rows)
        if not self._bad_ids.looks or (here == -1).any():
            raise ValueError(message)
        self._bad_ids.report(message)
        with torch.inference_mode(here.is_inference()):  # else torch does not write to such ids
            here.masked_fill_(outside, 0)

    def first_samples(self, *_: Any) -> None:
        """Do nothing: a CPU copies nothing to a device."""

    def check(self) -> None:
        """Do nothing: `store` has raised all faults."""


class CpuFlags(PairFlags):
    """The flags of a pair, raised and awaited by this CPU."""

    def __init__(
        self, pair: WindowPair, counts: torch.Tensor, timeout_s: float, status: Any = None, unit: str = "slice"
    ) -> None:
        self._pair, self._counts, self._timeout_s, self._unit = pair, counts, timeout_s, unit
        self._arena: Any = pair.arena

    def raise_at_all(self, source: int | None = None, slot: int = 0) -> None:
        """Raise a flag of this rank, or of `source`, at the ranks of this node."""
        for peer in self._arena.reached:
            self._arena.signal_flag(self._pair.flags, peer, slot, self._pair.counter.value, source)

    def wait(self) -> None:
        """Wait for the flags, see `HostArena.wait`."""
        self._arena.wait(self._pair.flags, self._counts, self._pair.counter.value, self._timeout_s, self._unit)


def views_of(windows: WindowPair) -> list[list[torch.Tensor]]:
    """Return the windows of the ranks reached, of even epochs and of odd ones."""
    return [[windows.arena.view(name, rank) for rank in windows.arena.reached] for name in windows.names]


class CpuZeroCopyForward(ZeroCopyForward):
    """`pgas` and `fused` on a CPU."""

    lookup_type = CpuLookup
    flags_type = CpuFlags


Pushed = tuple[int, Mapping[FeatureShard, int]]
"""the gradients of a rank's samples: that rank, and the column of each shard of the ranks reached"""


class CpuPush(WindowBackward):
    """Gradients stored into the owners' windows; rows updated once all of them have arrived."""

    def __init__(self, context: ExchangeContext, windows: WindowPair) -> None:
        super().__init__(context, windows)
        self._peers, self._ids = views_of(windows), context.ids
        counts = self.gradients.parts * one_flag_each(range(self.world_size), self.world_size)
        self._flags = CpuFlags(windows, counts, self.options.wait_timeout_s, unit="part")
        self.own = self.gradients_by(self.rank, self.layout.output_column)
        self._lookups, self._tables = self.layout.lookups(self.rank), self.layout.tables(self.rank)
        self._unfinished: Step | None = None

    def gradients_by(self, rank: int, column: Callable[[FeatureShard], int], ids: IdLayout | None = None) -> Pushed:
        """Return the gradients of a rank's samples, see `push.Push`."""
        here = [shard for owner in self.windows.arena.reached for shard in self.layout.by_owner[owner]]
        return rank, {shard: column(shard) for shard in here}

    def start(self, step: Step, gradient: torch.Tensor) -> None:
        """Store each shard's gradient at its owner, part by part, and raise the part's flag."""
        if self._unfinished is not None:  # peers that see this step's flags may store over the gradients it reads
            self.finish(self._unfinished)
        self._unfinished = step
        self.windows.begin()
        self.push(step, gradient, 0, self.gradients.parts)

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
        """Store parts of a gradient, see `push.Push`."""
        if scale != 1.0:
            gradient = gradient * scale
        (rank, columns), samples = pushed, gradient.shape[0]
        begin, windows = step.batch.first_sample[rank], self._peers[self.windows.counter.value % 2]
        for part in range(first, end):
            for owner, window in zip(self.windows.arena.reached, windows, strict=True):
                shards = self.gradients.shards[part][owner]
                for shard, rows in self.gradients_of(shards, window, step.batch.total).items():
                    column, into = columns[shard], rows[begin : begin + samples]
                    sent = gradient[:, column : column + shard.dim]
                    if offsets is not None and self._ids is not None and self._ids.knows_empty_bags(shard):
                        filled = reference.have_ids(offsets, self._ids.published(shard), samples)
                        into[filled] = sent[filled].to(into.dtype)
                    else:
                        into.copy_(sent)
            self._flags.raise_at_all(rank, part)

    def finish(self, step: Step) -> None:
        """Wait for all gradients and update the rows, table by table, unless the next `start` has done so."""
        if step is not self._unfinished:
            return
        self._unfinished = None
        self._flags.wait()
        window, scale = self.windows.local, self.update_scale
        gradients = self.gradients_of(self.layout.by_owner[self.rank], window, step.batch.total)
        if step.trains_weights:
            train_weights(self, step, gradients)
        tables = [(self.tables.weight(s), self.tables.states(s), self.tables.optimizer(s)) for s, *_ in self._tables]
        numbers_of = [None if rule.decays or rule.frozen else rule.numbers for rule in step.rules]
        for lookup in self._lookups:
            rule = step.rules[lookup.number]
            if rule.decays and not rule.frozen:
                self._decay(lookup, step, gradients, scale)
        for shards, (weight, states, optimizer) in zip(self._tables, tables, strict=True):
            if (numbers := numbers_of[shards[0].lookup]) is not None:
                values, by_id = self._by_id(shards, step, gradients, scale)
                reference.update_rows(weight, states, values, by_id, optimizer, numbers)

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
        skip_epoch(self.windows, CpuFlags, self.options.wait_timeout_s, None)

    def _by_id(
        self, shards: list[FeatureShard], step: Step, of_bags: Mapping[FeatureShard, torch.Tensor], scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the ids of all features that share a table, and `scale` times their gradients [n, D] float32."""
        values, gradients = [], []
        for shard in shards:
            ids, sample, factors = ids_in_bags(step.inputs[shard.input], shard, step.batch.total)
            values.append(ids)
            gradients.append(of_bags[shard][sample].float() * (factors * scale))
        return torch.cat(values).long(), torch.cat(gradients)
