"""`nccl`, an ablation: our lookup, then a collective; and the collective backward, which every backend can use."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Generic, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from dlrm_overlap.embedding.backends.base import Backward, Forward
from dlrm_overlap.embedding.backends.cpu import train_weights, zero_weights_gradients
from dlrm_overlap.embedding.backends.lookup import Platform, Rows
from dlrm_overlap.embedding.fbgemm_update import FbgemmUpdate, bags_of
from dlrm_overlap.embedding.options import ExchangeContext
from dlrm_overlap.embedding.steps import BatchSizes, PendingBackward, Step
from dlrm_overlap.embedding.windows import WindowPair
from dlrm_overlap.kernels.launches import StepCache

Given = TypeVar("Given")


class CollectiveState(NamedTuple, Generic[Given]):
    given: Given
    work: dist.Work
    received: torch.Tensor
    """[n] of the wire's dtype, which the collective fills"""


class CollectiveForward(Forward[CollectiveState[Step]], Generic[Rows]):
    """Pools into a send buffer [B, D_local], then `all_to_all_single`, then unpacks."""

    def __init__(self, context: ExchangeContext, windows: WindowPair | None, platform: Platform[Rows]) -> None:
        super().__init__(context, windows)
        shards = self.layout.by_owner[self.rank]
        starts = [0, *accumulate(shard.dim for shard in shards)]
        columns = dict(zip(shards, starts[:-1], strict=True))  # of the send buffer
        self._width = starts[-1]
        in_order = self.layout.sent_in_order
        self._order = None if in_order else self.layout.sent_columns.argsort().to(self.device)
        self._send = torch.empty(0, dtype=self.options.wire_dtype, device=self.device)
        self._lookup = platform.lookup(context, columns, self.bad_ids)
        self._rows = StepCache[tuple[int, BatchSizes], Rows]()

    def start(self, step: Step) -> CollectiveState[Step]:
        self.check()
        self.join_stream()  # it has waited for the previous All-to-All, which read the send buffer
        samples, wire = step.batch.total, self.options.wire_dtype
        if self._send.numel() < samples * self._width:
            self._send = torch.empty(samples * self._width, dtype=wire, device=self.device)
        send = self._send[: samples * self._width].view(samples, self._width)
        key = send.data_ptr(), step.batch
        windows = self._rows.get(key, self._lookup.rows_of_ranks, send, range(self.world_size), step.batch)
        self._lookup.refresh()
        self._lookup.store(windows, step)
        mine = step.batch.per_rank[self.rank]
        received = torch.empty(mine * self.layout.arrival_dim, dtype=wire, device=self.device)
        work = dist.all_to_all_single(
            received,
            send.view(-1),
            [mine * dim for dim in self.layout.owner_dims],
            [size * self._width for size in step.batch.per_rank],
            self.group,
            async_op=True,
        )
        assert work is not None
        return CollectiveState(step, work, received)

    def finish(self, state: CollectiveState[Step], copy: bool = False) -> torch.Tensor:
        """Return the pooled embeddings in the layout's order of columns, in new memory."""
        step, work, buffer = state
        self.join_stream()
        work.wait()
        if self._stream is not None:
            buffer.record_stream(self._stream)
        mine, dims = step.batch.per_rank[self.rank], self.layout.owner_dims
        received = buffer.split([mine * dim for dim in dims])
        pooled = buffer.new_empty(mine, self.layout.arrival_dim)
        # With `out`, autocast does not apply: it cannot concatenate tensors of the other half type.
        torch.cat([columns.view(mine, dim) for columns, dim in zip(received, dims, strict=True)], dim=1, out=pooled)
        pooled = pooled if self._order is None else pooled.index_select(1, self._order)
        if not self._partials:
            return pooled
        self.add_partials(step, pooled)
        return pooled[:, : self.layout.total_dim].data  # not a view: autograd refuses in-place changes of those

    def check(self) -> None:
        self._lookup.check()


class CollectiveBackward(Backward[CollectiveState[PendingBackward]]):
    """Sends gradients to the owners by `all_to_all_single`; FBGEMM updates the rows."""

    def __init__(self, context: ExchangeContext, windows: WindowPair | None) -> None:
        super().__init__(context, windows)
        updates = [FbgemmUpdate(tbe) for tbe in self.tables.lookups]
        self._updates = list(zip(updates, self.layout.lookups(self.rank), strict=True))
        in_order, ranks = self.layout.sent_in_order, range(self.world_size)
        self._columns = None if in_order else [self.layout.owner_columns(rank).to(self.device) for rank in ranks]

    def start(self, pending: PendingBackward, gradient: torch.Tensor) -> CollectiveState[PendingBackward]:
        batch = pending.step.batch
        mine, samples = batch.per_rank[self.rank], batch.total
        dims = self.layout.owner_dims
        if self._columns is None:
            by_owner = gradient.split(dims, dim=1)
        else:
            by_owner = [gradient.index_select(1, columns) for columns in self._columns]
        send = pack(by_owner, self.sent_scale, self.options.wire_dtype)
        sizes = [mine * dim for dim in dims]
        width = dims[self.rank]
        received = send.new_empty(samples * width)
        work = dist.all_to_all_single(
            received, send, [size * width for size in batch.per_rank], sizes, self.group, async_op=True
        )
        assert work is not None
        return CollectiveState(pending, work, received)

    def finish(self, state: CollectiveState[PendingBackward]) -> Sequence[torch.Tensor]:
        pending, work, received = state
        step = pending.step
        work.wait()
        gradient = received.view(step.batch.total, self.layout.owner_dims[self.rank]).float()
        weights_gradients = zero_weights_gradients(pending) if pending.trains_weights else []
        if pending.trains_weights:
            shards = self.layout.by_owner[self.rank]
            by_shard = dict(zip(shards, gradient.split([shard.dim for shard in shards], dim=1), strict=True))
            train_weights(self, step, by_shard, weights_gradients)
        first = 0
        for update, lookup in self._updates:
            ids, columns = bags_of(lookup, step.inputs), gradient[:, first : first + lookup.dim].contiguous()
            if not (rule := pending.rules[lookup.number]).frozen:
                update.apply(columns * self.update_scale if self.update_scale != 1.0 else columns, ids, rule)
            first += lookup.dim
        return weights_gradients


def pack(by_owner: Sequence[torch.Tensor], scale: float, wire_dtype: torch.dtype) -> torch.Tensor:
    """Return `scale` times a gradient, flat: the columns [b, D] of one owner after another."""
    send = by_owner[0].new_empty(sum(columns.numel() for columns in by_owner), dtype=wire_dtype)
    for sent, columns in zip(send.split([columns.numel() for columns in by_owner]), by_owner, strict=True):
        torch.mul(columns, scale, out=sent.view(columns.shape))
    return send
