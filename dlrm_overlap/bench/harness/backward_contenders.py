"""The contenders of the backward: FBGEMM's operator behind a collective, and the exchange's own backwards."""

from collections.abc import Callable, Sequence
from copy import copy
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from dlrm_overlap.bench.harness.contenders import Contender
from dlrm_overlap.bench.harness.limits import median_ms
from dlrm_overlap.bench.harness.workload import Ids, Workload
from dlrm_overlap.comm.turns import greatest
from dlrm_overlap.embedding.backends.base import gradient_scale
from dlrm_overlap.embedding.backends.collective import pack
from dlrm_overlap.embedding.options import ExchangeOptions
from dlrm_overlap.embedding.steps import BatchSizes, Step
from dlrm_overlap.embedding.tables import FbgemmUpdate


class GradientBatch(NamedTuple):
    """A batch: its ids on the ranks that own their rows, and the gradient of its pooled embeddings."""

    number: int
    """the batch's place among the workload's batches"""
    ids: Ids
    gradient: torch.Tensor
    """[b, D_total] float32, of this rank's samples, in the layout that autograd leaves"""


def make_batches(workload: Workload, gradients: Sequence[torch.Tensor]) -> list[GradientBatch]:
    """Return the batches of `workload` with their gradients."""
    return [GradientBatch(i, *both) for i, both in enumerate(zip(workload.batches, gradients, strict=True))]


def pack_by_owner(gradient: torch.Tensor, dims: Sequence[int], scale: float, wire_dtype: torch.dtype) -> torch.Tensor:
    """Return `scale` times the gradient, packed as a collective sends it, with one operation for each owner.

    Args:
        gradient: [b, D_total] float32.
        dims: the columns of each owner, in the order of the owners; they add up to D_total.
        scale: the factor.
        wire_dtype: of the result.

    Returns:
        A flat tensor: the first owner's [b, dims[0]], then the second's, and so on.
    """
    return pack(gradient.split(list(dims), dim=1), scale, wire_dtype)


def pack_at_once(gradient: torch.Tensor, dims: Sequence[int], scale: float, wire_dtype: torch.dtype) -> torch.Tensor:
    """Return what `pack_by_owner` returns, by one operation. All owners must have the same number of columns."""
    samples, owners, width = gradient.shape[0], len(dims), dims[0]
    send = gradient.new_empty(owners, samples, width, dtype=wire_dtype)
    torch.mul(gradient.view(samples, owners, width).transpose(0, 1), scale, out=send)
    return send.view(-1)


_PACKINGS = {"by_owner": pack_by_owner, "at_once": pack_at_once}


class CollectiveBaseline(Contender):
    """Packing, `all_to_all_single`, then FBGEMM's backward operator, its sort of the ids included.

    This is what a training step does, at its cheapest. The owners hold the tables in the model's order, so packing
    copies ranges of columns; it also divides the gradients by the number of ranks. The constructor measures the ways of
    packing, and `step` takes the one that is fastest here. A rank alone only updates.
    """

    def __init__(self, workload: Workload, gradient: torch.Tensor) -> None:
        """Choose the packing that is fastest for `gradient`, a batch's; all ranks choose together."""
        super().__init__("baseline", workload)
        layout, rank = workload.layout, workload.rank
        assert layout.sent_in_order, "owners hold their tables in the model's order"
        (lookup,) = workload.tables.lookups
        self._update = FbgemmUpdate(lookup)
        self._dims, self._width = layout.owner_dims, layout.owner_dims[rank]
        self._send_sizes = [workload.batch_sizes[rank] * dim for dim in self._dims]
        self._receive_sizes = [size * self._width for size in workload.batch_sizes]
        self._scale = gradient_scale(len(self._dims))
        self.packing = self._fastest_packing(gradient) if len(self._dims) > 1 else None

    def _pack(self, gradient: torch.Tensor, packing: str) -> torch.Tensor:
        return _PACKINGS[packing](gradient, self._dims, self._scale, self.workload.wire_dtype)

    def _fastest_packing(self, gradient: torch.Tensor) -> str:
        device, group = self.workload.device, self.workload.group
        names = list(_PACKINGS) if len(set(self._dims)) == 1 else ["by_owner"]
        mine_ms = [median_ms(partial(self._pack, gradient, name), group, device) for name in names]
        slowest_ms = greatest(mine_ms, device, group)
        return names[slowest_ms.index(min(slowest_ms))]

    def columns(self) -> dict[str, Any]:
        """Return how the contender packs; None for a rank alone."""
        return {"packing": self.packing}

    def step(self, batch: GradientBatch, mark: Callable[[], None] = lambda: None) -> None:
        """Update the rows, and call `mark` after the packing and after the All-to-All."""
        received = batch.gradient
        if self.packing is None:
            mark()
        else:
            send = self._pack(batch.gradient, self.packing)
            mark()
            received = send.new_empty(sum(self._receive_sizes))
            dist.all_to_all_single(received, send, self._receive_sizes, self._send_sizes, self.workload.group)
        mark()
        bags = batch.ids.inputs[0]
        gradient, (rule,) = received.view(-1, self._width).float(), self.workload.tables.rules()
        self._update.apply(gradient, bags.values(), bags.offsets(), rule)


class Push(Contender):
    """One of the exchange's own backwards, from the moment the gradient is there until the rows are updated.

    The part that needs only the ids (`prepare`) runs beside the dense layers in training. So it is done here once for
    each batch, before any clock starts. With `exposed` every step does it: what it costs where nothing hides it.
    """

    def __init__(
        self,
        name: str,
        workload: Workload,
        options: ExchangeOptions,
        batches: Sequence[GradientBatch],
        exposed: bool = False,
    ) -> None:
        super().__init__(name, workload)
        self._exposed, self._batch_sizes = exposed, BatchSizes.of(workload.batch_sizes)
        self._schedule = options.resolved_schedule
        self._halves = workload.open_halves(options)
        self._steps = [] if exposed else [self._prepared(batch) for batch in batches]
        self.prepares = options.resolved_backward in ("push", "dma")

    def _begun(self, batch: GradientBatch) -> Step:
        step = Step(list(batch.ids.inputs), self._batch_sizes)
        self._halves.backward.note_forward(step)
        return step

    def _prepared(self, batch: GradientBatch) -> Step:
        step = self._begun(batch)
        self._halves.backward.prepare(step)
        return step

    def columns(self) -> dict[str, Any]:
        """Return the order in which a rank walks the destinations."""
        return {"schedule": self._schedule}

    def step(self, batch: GradientBatch) -> None:
        """Send the batch's gradient to the owners and update the rows there."""
        # A copy, since `finish` drops what `prepare` has made of the ids.
        step = self._begun(batch) if self._exposed else copy(self._steps[batch.number])
        self._halves.backward.start(step, batch.gradient)
        self._halves.backward.finish(step)

    def prepare(self, batch: GradientBatch, mark: Callable[[], None] = lambda: None) -> None:
        """Do the part that needs only the ids."""
        step = self._prepared(batch)
        if self.workload.device.type == "cuda":
            self._halves.backward.finish(step)  # on GPUs this only waits for the stream that prepares

    def close(self) -> None:
        """Free the windows. Every rank must have finished its steps."""
        self._halves.close()
