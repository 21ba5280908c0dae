"""The collective's part: the forward of the ablation `nccl`, and the gradients' way back to their owners."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist

from dlrm_overlap.embedding.backends.base import Forward, Step, check_on_host, pool_on_host
from dlrm_overlap.embedding.backends.host import Backward
from dlrm_overlap.embedding.row_update import RowUpdate, bags_of


class CollectiveForward(Forward):
    """Our lookup, then `all_to_all_single`, then the unpacking: tells what fusing gains from what a lookup gains.

    The lookup's windows are the parts [b_w, D_local] of one send buffer [B, D_local].
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        shards = self.layout.by_owner[self.rank]
        starts = [0, *accumulate(shard.dim for shard in shards)]
        self._columns = dict(zip(shards, starts[:-1], strict=True))
        self._width = starts[-1]
        layout = self.layout
        self._order = None if layout.sent_in_order else layout.sent_columns.argsort().to(self.device)
        self._send = torch.empty(0, dtype=self.options.wire_dtype, device=self.device)
        self._device: Any = None
        if self.device.type == "cuda":
            from dlrm_overlap.embedding.backends.device_forward import DeviceLookup

            self._device = DeviceLookup(self, self._columns)

    def launch(self, step: Step) -> None:
        """Pool into the send buffer and start the All-to-All."""
        self.check()
        self.join_stream()  # which has waited for the All-to-All before, and so for the send buffer
        samples, wire = step.batch.total, self.options.wire_dtype
        if self._send.numel() < samples * self._width:
            self._send = torch.empty(samples * self._width, dtype=wire, device=self.device)
        send = self._send[: samples * self._width].view(samples, self._width)
        if self._device is None:
            self._pool_on_host(step, send)
        else:
            self._device.store(self._device.parts(send, step), step, self._device.tables())
        mine = step.batch.per_rank[self.rank]
        step.received = torch.empty(mine * self.layout.total_dim, dtype=wire, device=self.device)
        step.work = dist.all_to_all_single(
            step.received,
            send.view(-1),
            [mine * dim for dim in self.layout.owner_dims],
            [size * self._width for size in step.batch.per_rank],
            self.group,
            async_op=True,
        )

    def _pool_on_host(self, step: Step, send: torch.Tensor) -> None:
        check_on_host(self, step)
        for shard, column in self._columns.items():
            weight = self.tables.weight(shard)
            send[:, column : column + shard.dim] = pool_on_host(shard, weight, step, 0, send.shape[0])

    def check(self) -> None:
        """Raise what a kernel has recorded."""
        if self._device is not None:
            self._device.check()

    def collect(self, step: Step, copy: bool = False) -> torch.Tensor:
        """Wait for the collective and put each owner's columns where the model reads them, in memory of their own."""
        self.join_stream()
        step.work.wait()
        assert step.received is not None
        if self._stream is not None:
            step.received.record_stream(self._stream)
        mine, dims = step.batch.per_rank[self.rank], self.layout.owner_dims
        parts = step.received.split([mine * dim for dim in dims])
        pooled = torch.cat([part.view(mine, dim) for part, dim in zip(parts, dims, strict=True)], dim=1)
        step.work = step.received = None
        return pooled if self._order is None else pooled.index_select(1, self._order)


class CollectiveBackward(Backward):
    """Gradients to their owners by `all_to_all_single`, then FBGEMM's own update of the rows."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        updates = [RowUpdate(lookup) for lookup in self.tables.lookups]
        self._updates = list(zip(updates, self.layout.groups(self.rank), strict=True))
        in_order, ranks = self.layout.sent_in_order, range(self.world_size)
        self._columns = None if in_order else [self.layout.owner_columns(rank).to(self.device) for rank in ranks]

    def send(self, step: Step, gradient: torch.Tensor) -> None:
        """Start to send the gradient [b, D_total] of this rank's samples to the owners of its columns."""
        mine, samples = step.batch.per_rank[self.rank], step.batch.total
        dims = self.layout.owner_dims
        if self._columns is None:
            by_owner = gradient.split(dims, dim=1)
        else:
            by_owner = [gradient.index_select(1, columns) for columns in self._columns]
        send = pack(by_owner, self.scale, self.options.wire_dtype)
        sizes = [mine * dim for dim in dims]
        width = dims[self.rank]
        step.received = send.new_empty(samples * width)
        step.work = dist.all_to_all_single(
            step.received, send, [size * width for size in step.batch.per_rank], sizes, self.group, async_op=True
        )

    def update(self, step: Step) -> None:
        """Wait for the gradients of this rank's columns and update its rows."""
        step.work.wait()
        assert step.received is not None
        gradient = step.received.view(step.batch.total, self.layout.owner_dims[self.rank]).float()
        step.work = step.received = None
        first = 0
        for update, group in self._updates:
            ids, columns = bags_of(group, step.inputs), gradient[:, first : first + group.dim].contiguous()
            update.apply(columns, ids.values(), ids.offsets(), step.rules[group.number])
            first += group.dim


def pack(by_owner: Sequence[torch.Tensor], scale: float, wire_dtype: torch.dtype) -> torch.Tensor:
    """Return `scale` times the owners' columns of a gradient, [b, D] each, as a collective sends them: flat, in order.

    One multiplication an owner copies, casts and divides by the number of ranks.
    """
    send = by_owner[0].new_empty(sum(columns.numel() for columns in by_owner), dtype=wire_dtype)
    for part, columns in zip(send.split([columns.numel() for columns in by_owner]), by_owner, strict=True):
        torch.mul(columns, scale, out=part.view(columns.shape))
    return send
