"""Who takes part in the backward: FBGEMM's operator behind a collective, and the exchange's own ways."""

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from dlrm_overlap.bench.contenders import Contender
from dlrm_overlap.bench.limits import median_ms
from dlrm_overlap.bench.timing import greatest
from dlrm_overlap.bench.workload import Ids, Workload, exchange_options
from dlrm_overlap.config import EmbeddingConfig
from dlrm_overlap.embedding.backends.base import gradient_scale
from dlrm_overlap.embedding.backends.collective import pack
from dlrm_overlap.embedding.halves import open_halves
from dlrm_overlap.embedding.options import ExchangeContext, ExchangeOptions
from dlrm_overlap.embedding.protocol.step import BatchSizes, Step
from dlrm_overlap.embedding.tables import FbgemmUpdate
from dlrm_overlap.kernels.schedule import resolve_schedule


class GradientBatch(NamedTuple):
    """A batch's ids at their owners, and the gradient of its pooled embeddings at the samples' ranks."""

    number: int
    ids: Ids
    gradient: torch.Tensor
    """[b, D_total] float32, of this rank's samples, as autograd leaves it"""


def make_batches(workload: Workload, gradients: Sequence[torch.Tensor]) -> list[GradientBatch]:
    """Return the batches of `workload` with their gradients."""
    return [GradientBatch(i, *both) for i, both in enumerate(zip(workload.batches, gradients, strict=True))]


def pack_by_owner(gradient: torch.Tensor, dims: Sequence[int], scale: float, wire_dtype: torch.dtype) -> torch.Tensor:
    """Return `scale` times the gradient [b, D_total] as a collective sends it: [b, D] of each owner in order, flat."""
    return pack(gradient.split(list(dims), dim=1), scale, wire_dtype)


def pack_at_once(gradient: torch.Tensor, dims: Sequence[int], scale: float, wire_dtype: torch.dtype) -> torch.Tensor:
    """Do the same in one operation, where all owners have as many columns."""
    samples, owners, width = gradient.shape[0], len(dims), dims[0]
    send = gradient.new_empty(owners, samples, width, dtype=wire_dtype)
    torch.mul(gradient.view(samples, owners, width).transpose(0, 1), scale, out=send)
    return send.view(-1)


_PACKINGS = {"by_owner": pack_by_owner, "at_once": pack_at_once}


class CollectiveBaseline(Contender):
    """Packing, `all_to_all_single`, then FBGEMM's backward operator, its sort of the ids included.

    What a training step does, at its cheapest: the owners hold the tables in the model's order, so a pack is a copy of
    column ranges; the gradients are divided by the ranks on the way; and of the ways to pack the fastest here is taken.
    A rank alone only updates.
    """

    def __init__(self, workload: Workload, gradient: torch.Tensor) -> None:
        """Take a batch's gradient to choose the packing by."""
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
        """Return how it packs."""
        return {"packing": self.packing}

    def step(self, batch: GradientBatch, mark: Callable[[], None] = lambda: None) -> None:
        """Update the rows, calling `mark` between packing, All-to-All and update."""
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
    """A backward of the exchange's own: from the gradient being there to the rows being updated.

    What needs the ids alone is done once a batch, before any clock starts, as training does it beside the dense part.
    `exposed` does it in every step: what it costs where nothing hides it.
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
        self._schedule = resolve_schedule(options.schedule, load_store_peers=True)
        known = workload.layout, workload.tables, options, workload.group, workload.device
        self._halves = open_halves(ExchangeContext(*known, samples_per_rank=self._batch_sizes.most))
        self._steps = [] if exposed else [self._prepared(batch) for batch in batches]
        self.prepares = options.backward == "push"

    def _begun(self, batch: GradientBatch) -> Step:
        step = Step(list(batch.ids.inputs), self._batch_sizes)
        self._halves.backward.note_forward(step)
        return step

    def _prepared(self, batch: GradientBatch) -> Step:
        step = self._begun(batch)
        self._halves.backward.prepare(step)
        return step

    def columns(self) -> dict[str, Any]:
        """Return the order of the destinations."""
        return {"schedule": self._schedule}

    def step(self, batch: GradientBatch) -> None:
        """Send the gradient and update the rows."""
        # A copy: `update` lets go of what was made of the ids.
        step = self._begun(batch) if self._exposed else copy(self._steps[batch.number])
        self._halves.backward.start(step, batch.gradient)
        self._halves.backward.finish(step)

    def prepare(self, batch: GradientBatch, mark: Callable[[], None] = lambda: None) -> None:
        """Do what needs the ids alone, and nothing else."""
        step = self._prepared(batch)
        if self.workload.device.type == "cuda":
            self._halves.backward.finish(step)  # on GPUs but a wait for what runs beside the main stream

    def close(self) -> None:
        """Give the windows back."""
        self._halves.close()


def make_backward_contenders(
    config: EmbeddingConfig, workload: Workload, optimizer: str, batches: Sequence[GradientBatch]
) -> list[Contender]:
    """Return who takes part, the baseline first.

    Atomic additions are those of SGD alone, and of float32 rows alone: below, every one of them would round.
    """
    options = replace(exchange_options(config, "pgas"), backward="push")
    contenders: list[Contender] = [
        CollectiveBaseline(workload, batches[0].gradient),
        Push("push", workload, options, batches),
        Push("push_exposed", workload, options, batches, exposed=True),
    ]
    if optimizer == "sgd" and config.weight_dtype == "fp32":
        contenders.append(Push("atomic", workload, replace(options, backward="atomic"), batches))
    return contenders
