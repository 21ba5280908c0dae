"""The exchange on CPUs, whose processes share memory: the GPUs' protocol with the reference implementations."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dlrm_overlap.comm.arena import HostArena
from dlrm_overlap.embedding.backends.base import Backward, WindowBackward, WindowState
from dlrm_overlap.embedding.backends.lookup import ColumnOf, Lookup, Unpack
from dlrm_overlap.embedding.fbgemm_update import FbgemmUpdate, bags_of
from dlrm_overlap.embedding.gradient_layout import GradientLayout
from dlrm_overlap.embedding.id_layout import IdLayout
from dlrm_overlap.embedding.layout import FeatureShard, FusedLookup
from dlrm_overlap.embedding.options import ExchangeContext
from dlrm_overlap.embedding.steps import BatchSizes, PendingBackward, Step, UpdateRule
from dlrm_overlap.embedding.tables import bad_id_message
from dlrm_overlap.embedding.windows import Signals, WindowPair, one_flag_each, skip_epoch
from dlrm_overlap.kernels import reference


def lengths_and_ids(ids: KeyedJaggedTensor, first: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
    offsets = ids.offsets()
    return ids.lengths()[first:end], ids.values()[int(offsets[first]) : int(offsets[end])]


def weights_between(ids: KeyedJaggedTensor, first: int, end: int) -> torch.Tensor | None:
    weights, offsets = ids.weights_or_none(), ids.offsets()
    return None if weights is None else weights[int(offsets[first]) : int(offsets[end])]


def pool_on_cpu(shard: FeatureShard, weight: torch.Tensor, step: Step, first: int, end: int) -> torch.Tensor:
    """Return the pooled embeddings [end - first, D] float32 of samples [first, end) of the global batch."""
    bag = shard.feature * step.batch.total
    bags = step.inputs[shard.input], bag + first, bag + end
    return reference.pool(weight, *lengths_and_ids(*bags), shard.mean, weights_between(*bags))


def ids_in_bags(
    ids: KeyedJaggedTensor, shard: FeatureShard, samples: int, weighted: bool = True
) -> tuple[torch.Tensor, ...]:
    """Return the ids [n] of a shard's bags, the sample [n] of each, and the factor [n, 1] float32 of its row.

    Factors include the ids' weights, unless `weighted` is False.
    """
    bags = ids, shard.feature * samples, (shard.feature + 1) * samples
    lengths, values = lengths_and_ids(*bags)
    sample = torch.repeat_interleave(lengths.long())
    weights = weights_between(*bags) if weighted else None
    factors = torch.ones(values.numel(), device=values.device) if weights is None else weights
    if shard.mean:
        factors = factors / lengths[sample]
    return values, sample, factors[:, None]


def zero_weights_gradients(pending: PendingBackward) -> list[torch.Tensor]:
    weights = [ids.weights_or_none() for ids in pending.step.inputs]
    return [torch.zeros_like(each) for each in weights if each is not None and each.requires_grad]


def train_weights(
    backward: Backward, step: Step, gradients: Mapping[FeatureShard, torch.Tensor], found: Sequence[torch.Tensor]
) -> None:
    """Add the gradients of the ids' weights to `found`, before the rows are updated; on any device.

    `gradients` are [B, D] for each shard, as sent. The gradient of an id's weight is the dot product of the id's row
    and its bag's gradient. As in TorchRec, the mean over ranks of the dense gradients divides it by the number of
    ranks. Captured steps have no such weights.
    """
    weights = [ids.weights_or_none() for ids in step.inputs]
    trained = [number for number, each in enumerate(weights) if each is not None and each.requires_grad]
    by_input, samples = dict(zip(trained, found, strict=True)), step.batch.total
    for shard, gradient in gradients.items():
        if shard.input not in by_input:
            continue
        ids = step.inputs[shard.input]
        values, sample, divisors = ids_in_bags(ids, shard, samples, weighted=False)
        first = int(ids.offsets()[shard.feature * samples])
        rows = backward.tables.weight(shard)[values.long()].float() * divisors / backward.sent_scale
        products = (gradient[sample].float() * rows).sum(dim=1)
        by_input[shard.input][first : first + values.numel()] += products


class CpuLookup(Lookup[list[torch.Tensor]]):
    _tables: Sequence[torch.Tensor] = ()

    def peers(self, pair: WindowPair, stride: int) -> list[list[torch.Tensor]]:
        return views_of(pair)

    def rows_of_ranks(self, rows: torch.Tensor, ranks: range, batch: BatchSizes) -> list[torch.Tensor]:
        return list(rows.split([batch.per_rank[rank] for rank in ranks]))

    def unpack(self, columns: Mapping[FeatureShard, int], stride: int) -> Unpack[list[torch.Tensor]]:
        def unpack(rows: torch.Tensor, windows: list[torch.Tensor], ranks: range, batch: BatchSizes) -> None:
            for window, here in zip(windows, self.rows_of_ranks(rows, ranks, batch), strict=True):
                first = 0
                for shard, column in columns.items():
                    window[: len(here), column : column + shard.dim] = here[:, first : first + shard.dim]
                    first += shard.dim

        return unpack

    def refresh(self) -> None:
        self._tables = [self._rows.weight(shard) for shard in self._columns]

    def store(self, windows: list[torch.Tensor], step: Step, ranks: range | None = None) -> None:
        for shard, weight in zip(self._columns, self._tables, strict=True):
            self._check(shard, weight, step)
        for window, rank in zip(windows, ranks or range(len(step.batch.per_rank)), strict=True):
            first, samples = step.batch.first_sample[rank], step.batch.per_rank[rank]
            for (shard, column), weight in zip(self._columns.items(), self._tables, strict=True):
                pooled = pool_on_cpu(shard, weight, step, first, first + samples)
                into = window[:samples, column : column + shard.dim]
                if shard in self._left_out:
                    bag = shard.feature * step.batch.total + first
                    filled = step.inputs[shard.input].lengths()[bag : bag + samples] > 0
                    into[filled] = pooled[filled].to(into.dtype)
                else:
                    into.copy_(pooled)

    def _check(self, shard: FeatureShard, weight: torch.Tensor, step: Step) -> None:
        """Replace ids outside their table by 0 or raise a ValueError, as FBGEMM's bounds check on a CPU does.

        The id -1, FBGEMM's mark of a pruned row, raises in every mode; so does any such id without bounds check.
        """
        rows, bag = weight.shape[0], shard.feature * step.batch.total
        _, here = lengths_and_ids(step.inputs[shard.input], bag, bag + step.batch.total)
        outside = (here < 0) | (here >= rows)
        if not outside.any():
            return
        message = bad_id_message(shard.name, int(here[outside].min()), rows)
        if not self.bad_ids.looks or (here == -1).any():
            raise ValueError(message)
        self.bad_ids.report(message)
        with torch.inference_mode(here.is_inference()):  # else torch does not write to such ids
            here.masked_fill_(outside, 0)


class CpuSignals(Signals):
    def signal(self, source: int | None = None, slot: int = 0) -> None:
        arena = self._pair.arena
        assert isinstance(arena, HostArena)
        for peer in arena.reached:
            arena.signal_flag(self._pair.flags, peer, slot, self._pair.counter.value, source)

    def wait(self) -> None:
        assert isinstance(self._pair.arena, HostArena)
        self._pair.arena.wait(self._pair.flags, self._counts, self._pair.counter.value, self._timeout_s, self._unit)


def views_of(windows: WindowPair) -> list[list[torch.Tensor]]:
    """Return the windows of the ranks reached, for even epochs and for odd ones."""
    return [[windows.arena.view(name, rank) for rank in windows.arena.reached] for name in windows.names]


class CpuGradientStore(NamedTuple):
    rank: int
    columns: Mapping[FeatureShard, int]
    """first column of each shard in a row of the gradient"""
    ids: IdLayout | None
    layout: GradientLayout
    windows: WindowPair
    peers: list[list[torch.Tensor]]
    signals: CpuSignals

    def store(self, step: Step, gradient: torch.Tensor, scale: float, first: int, end: int) -> None:
        if scale != 1.0:
            gradient = gradient * scale
        samples, begin = gradient.shape[0], step.batch.first_sample[self.rank]
        windows = self.peers[self.windows.counter.value % 2]
        for part in range(first, end):
            for owner, window in zip(self.windows.arena.reached, windows, strict=True):
                for shard, rows in self.layout.views(self.layout.shards[part][owner], window, step.batch.total).items():
                    column, into = self.columns[shard], rows[begin : begin + samples]
                    sent = gradient[:, column : column + shard.dim]
                    if self.ids is not None and step.own_offsets is not None and self.ids.knows_empty_bags(shard):
                        filled = reference.have_ids(step.own_offsets, self.ids.published(shard), samples)
                        into[filled] = sent[filled].to(into.dtype)
                    else:
                        into.copy_(sent)
            self.signals.signal(self.rank, part)


class CpuPush(WindowBackward):
    """Stores gradients in the owners' windows; owners update their rows once all have arrived."""

    def __init__(self, context: ExchangeContext, windows: WindowPair) -> None:
        super().__init__(context, windows)
        self._peers = views_of(windows)
        counts = self.gradients.parts * one_flag_each(range(self.world_size), self.world_size)
        self._signals = CpuSignals(windows, counts, self.options.wait_timeout_s, unit="part")
        self._make_stores(context)
        self._lookups, self._tables = self.layout.lookups(self.rank), self.layout.tables(self.rank)
        self._unfinished: WindowState | None = None

    def _store_by(self, rank: int, column: ColumnOf, ids: IdLayout | None = None) -> CpuGradientStore:
        here = [shard for owner in self.windows.arena.reached for shard in self.layout.by_owner[owner]]
        columns = {shard: column(shard) for shard in here}
        return CpuGradientStore(rank, columns, ids, self.gradients, self.windows, self._peers, self._signals)

    def start(self, pending: PendingBackward, gradient: torch.Tensor) -> WindowState:
        if self._unfinished is not None:  # peers that see this step's flags may overwrite the gradients that it reads
            self.finish(self._unfinished)
        self._unfinished = WindowState(pending, zero_weights_gradients(pending) if pending.trains_weights else ())
        self.windows.begin()
        self.push(pending.step, gradient, 0, self.gradients.parts)
        return self._unfinished

    def finish(self, state: WindowState) -> Sequence[torch.Tensor]:
        """Wait for all gradients and update the rows, unless the next `start` has done so."""
        if state is not self._unfinished:
            return state.weights_gradients
        self._unfinished = None
        pending, step = state.pending, state.pending.step
        self._signals.wait()
        gradients = self.gradients.views(self.layout.by_owner[self.rank], self.windows.local, step.batch.total)
        if pending.trains_weights:
            train_weights(self, step, gradients, state.weights_gradients)
        scale = self.update_scale
        tables = [(self.tables.weight(s), self.tables.states(s), self.tables.optimizer(s)) for s, *_ in self._tables]
        numbers_of = [None if rule.decays or rule.frozen else rule.numbers for rule in pending.rules]
        for lookup in self._lookups:
            rule = pending.rules[lookup.number]
            if rule.decays and not rule.frozen:
                self._decay(lookup, rule, step, gradients, scale)
        if (marks := self.tables.marks) is not None:
            for shards in self._tables:
                ids = [ids_in_bags(step.inputs[each.input], each, step.batch.total)[0] for each in shards]
                reference.mark_rows(marks.words_of((shards[0].lookup, shards[0].table)), torch.cat(ids).long())
        for shards, (weight, states, optimizer) in zip(self._tables, tables, strict=True):
            if (numbers := numbers_of[shards[0].lookup]) is not None:
                values, by_id = self._by_id(shards, step, gradients, scale)
                if (reserved := self.tables.reserved_rows(shards[0])) is not None:
                    trained = values % reserved.period < reserved.first
                    values, by_id = values[trained], by_id[trained]
                reference.update_rows(weight, states, values, by_id, optimizer, numbers)
        return state.weights_gradients

    def _decay(
        self,
        lookup: FusedLookup,
        rule: UpdateRule,
        step: Step,
        gradients: Mapping[FeatureShard, torch.Tensor],
        scale: float,
    ) -> None:
        """Update rows that decay by FBGEMM, which on a CPU reads the decay only for some tables; not reserved rows."""
        # Float32 before the concatenation, since autocast cannot concatenate tensors of the other half type.
        gradient = torch.cat([gradients[shard].float() for shard in lookup.shards], dim=1).mul_(scale)
        reserved = [(shard, rows) for shard in lookup.shards if (rows := self.tables.reserved_rows(shard)) is not None]
        kept = [
            (tensor, at, tensor[at])
            for shard, rows in reserved
            for tensor in (self.tables.weight(shard), *self.tables.states(shard))
            for at in [rows.among(len(tensor))]
        ]
        FbgemmUpdate(self.tables.lookups[lookup.number]).apply(gradient, bags_of(lookup, step.inputs), rule)
        for tensor, at, before in kept:
            tensor[at] = before

    def skip(self) -> None:
        if self._unfinished is not None:
            self.finish(self._unfinished)
        skip_epoch(self.windows, CpuSignals, self.options.wait_timeout_s)

    def _by_id(
        self, shards: list[FeatureShard], step: Step, of_bags: Mapping[FeatureShard, torch.Tensor], scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the ids of all features of a table, and `scale` times the gradients [n, D] float32 of their rows."""
        values, gradients = [], []
        for shard in shards:
            ids, sample, factors = ids_in_bags(step.inputs[shard.input], shard, step.batch.total)
            values.append(ids)
            gradients.append(of_bags[shard][sample].float() * (factors * scale))
        return torch.cat(values).long(), torch.cat(gradients)
