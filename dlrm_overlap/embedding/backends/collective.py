"""`nccl`, an ablation: our lookup, then a collective; and the collective's backward, which every backend can take."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist

from dlrm_overlap.embedding.backends.base import Backward, Forward
from dlrm_overlap.embedding.backends.cpu import CpuLookup, train_weights
from dlrm_overlap.embedding.backends.pgas import DeviceLookup
from dlrm_overlap.embedding.fbgemm_update import FbgemmUpdate, bags_of
from dlrm_overlap.embedding.options import ExchangeContext
from dlrm_overlap.embedding.steps import BatchSizes, Step, StepCache
from dlrm_overlap.embedding.windows import WindowPair


class CollectiveForward(Forward):
    """Our lookup, then `all_to_all_single`, then the unpacking: shows the gain of the lookup without fusing.

    The lookup stores into one send buffer [B, D_local], of which rank w is sent the rows of its samples.
    """

    lookup_type: Any = DeviceLookup

    def __init__(self, context: ExchangeContext, windows: WindowPair | None) -> None:
        super().__init__(context, windows)
        shards = self.layout.by_owner[self.rank]
        starts = [0, *accumulate(shard.dim for shard in shards)]
        columns = dict(zip(shards, starts[:-1], strict=True))  # of the send buffer
        self._width = starts[-1]
        in_order = self.layout.sent_in_order
        self._order = None if in_order else self.layout.sent_columns.argsort().to(self.device)
        self._send = torch.empty(0, dtype=self.options.wire_dtype, device=self.device)
        self._lookup = self.lookup_type(context, columns, self.bad_ids)
        self._rows = StepCache[tuple[int, BatchSizes], Any]()

    def start(self, step: Step) -> None:
        """Pool into the send buffer and start the All-to-All."""
        self.check()
        self.join_stream()  # which has waited for the All-to-All before, and so for the send buffer
        samples, wire = step.batch.total, self.options.wire_dtype
        if self._send.numel() < samples * self._width:
            self._send = torch.empty(samples * self._width, dtype=wire, device=self.device)
        send = self._send[: samples * self._width].view(samples, self._width)
        key = send.data_ptr(), step.batch
        windows = self._rows.get(key, self._lookup.rows_of_ranks, send, range(self.world_size), step.batch)
        self._lookup.store(windows, step, self._lookup.tables())
        mine = step.batch.per_rank[self.rank]
        step.received = torch.empty(mine * self.layout.arrival_dim, dtype=wire, device=self.device)
        step.work = dist.all_to_all_single(
            step.received,
            send.view(-1),
            [mine * dim for dim in self.layout.owner_dims],
            [size * self._width for size in step.batch.per_rank],
            self.group,
            async_op=True,
        )

    def finish(self, step: Step, copy: bool = False) -> torch.Tensor:
        """Wait for the All-to-All and copy each owner's columns to where the model reads them, in new memory."""
        self.join_stream()
        step.work.wait()
        assert step.received is not None
        if self._stream is not None:
            step.received.record_stream(self._stream)
        mine, dims = step.batch.per_rank[self.rank], self.layout.owner_dims
        received = step.received.split([mine * dim for dim in dims])
        pooled = step.received.new_empty(mine, self.layout.arrival_dim)
        # `out` keeps autocast away, which refuses to join tensors of the half type that is not its own.
        torch.cat([columns.view(mine, dim) for columns, dim in zip(received, dims, strict=True)], dim=1, out=pooled)
        step.work = step.received = None
        pooled = pooled if self._order is None else pooled.index_select(1, self._order)
        if not self._partials:
            return pooled
        self.add_partials(step, pooled)
        return pooled[:, : self.layout.total_dim].data  # no view, which autograd lets nobody change in place

    def check(self) -> None:
        """Raise the faults that kernels have recorded, see `DeviceLookup.check`."""
        self._lookup.check()


class CpuCollectiveForward(CollectiveForward):
    """`CollectiveForward` on a CPU, which looks up as the reference does."""

    lookup_type = CpuLookup


class CollectiveBackward(Backward):
    """Gradients sent to their owners by `all_to_all_single`, then FBGEMM's own update of the rows."""

    def __init__(self, context: ExchangeContext, windows: WindowPair | None) -> None:
        super().__init__(context, windows)
        updates = [FbgemmUpdate(tbe) for tbe in self.tables.lookups]
        self._updates = list(zip(updates, self.layout.lookups(self.rank), strict=True))
        in_order, ranks = self.layout.sent_in_order, range(self.world_size)
        self._columns = None if in_order else [self.layout.owner_columns(rank).to(self.device) for rank in ranks]

    def start(self, step: Step, gradient: torch.Tensor) -> None:
        """Pack the gradient [b, D_total] of this rank's samples by owner and start the All-to-All."""
        mine, samples = step.batch.per_rank[self.rank], step.batch.total
        dims = self.layout.owner_dims
        if self._columns is None:
            by_owner = gradient.split(dims, dim=1)
        else:
            by_owner = [gradient.index_select(1, columns) for columns in self._columns]
        send = pack(by_owner, self.sent_scale, self.options.wire_dtype)
        sizes = [mine * dim for dim in dims]
        width = dims[self.rank]
        step.received = send.new_empty(samples * width)
        step.work = dist.all_to_all_single(
            step.received, send, [size * width for size in step.batch.per_rank], sizes, self.group, async_op=True
        )

    def finish(self, step: Step) -> None:
        """Wait for the gradients of this rank's columns and update its rows."""
        step.work.wait()
        assert step.received is not None
        gradient = step.received.view(step.batch.total, self.layout.owner_dims[self.rank]).float()
        step.work = step.received = None
        if step.trains_weights:
            shards = self.layout.by_owner[self.rank]
            by_shard = dict(zip(shards, gradient.split([shard.dim for shard in shards], dim=1), strict=True))
            train_weights(self, step, by_shard)
        first = 0
        for update, lookup in self._updates:
            ids, columns = bags_of(lookup, step.inputs), gradient[:, first : first + lookup.dim].contiguous()
            if not (rule := step.rules[lookup.number]).frozen:
                update.apply(columns * self.update_scale if self.update_scale != 1.0 else columns, ids, rule)
            first += lookup.dim


def pack(by_owner: Sequence[torch.Tensor], scale: float, wire_dtype: torch.dtype) -> torch.Tensor:
    """Return `scale` times a gradient as a collective sends it: flat, one owner's columns [b, D] after the other's.

    One multiplication an owner copies, casts and divides by the number of ranks.
    """
    send = by_owner[0].new_empty(sum(columns.numel() for columns in by_owner), dtype=wire_dtype)
    for sent, columns in zip(send.split([columns.numel() for columns in by_owner]), by_owner, strict=True):
        torch.mul(columns, scale, out=sent.view(columns.shape))
    return send
