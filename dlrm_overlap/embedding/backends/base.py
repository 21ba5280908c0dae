"""The two halves of an exchange on one rank, forward and backward, that every backend has.

A backend is a subclass of `Forward`, which brings pooled embeddings to the samples' ranks, and the names of the
subclasses of `Backward` that bring gradients back to the rows. `dlrm_overlap/backends.py` lists them all.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from math import gcd
from typing import Any

import torch
from torchrec.distributed.comm_ops import get_gradient_division

from dlrm_overlap.comm.order import CurrentStream
from dlrm_overlap.embedding.gradient_layout import GradientLayout
from dlrm_overlap.embedding.layout import FeatureShard
from dlrm_overlap.embedding.options import ExchangeContext
from dlrm_overlap.embedding.steps import Step
from dlrm_overlap.embedding.tables import BadIds
from dlrm_overlap.embedding.windows import WindowPair, WindowSpec
from dlrm_overlap.kernels import reference
from dlrm_overlap.kernels.arguments import EVERY_BAG, Partials
from dlrm_overlap.kernels.forward.add_partials import PartialTable, add_partials, partial_table


class ExchangeDirection(ABC):  # noqa: B024  its subclasses have the abstract methods
    """One rank's side of the forward or of the backward of an exchange."""

    def __init__(self, context: ExchangeContext, windows: WindowPair | None) -> None:
        """Take the context, which stays from step to step, and the windows that `window_spec` asks for."""
        self.layout, self.tables, self.options = context.layout, context.tables, context.options
        self.group, self.device = context.group, context.device
        self.rank, self.world_size = context.group.rank(), context.group.size()
        self.schedule, self.order = context.options.schedule, context.order

    @classmethod
    def window_spec(cls, context: ExchangeContext) -> WindowSpec | None:
        """Return the windows that this half needs in every rank's arena, alike on all ranks; None needs none."""
        return None

    def skip(self) -> None:
        """Take an epoch in which nothing is stored, so that the next one has the other window; all ranks do so."""
        raise NotImplementedError(f"{type(self).__name__} is not captured")

    def check(self) -> None:  # noqa: B027  most record nothing
        """Raise the faults that kernels have recorded since the last call; never waits for the device."""

    def close(self) -> None:  # noqa: B027  nor have they anything to release
        """Release resources that outlive Python references."""


class Forward(ExchangeDirection):
    """The forward on one rank. `start` and `finish` take turns, the same steps on every rank."""

    leading = 0
    """columns in front of the pooled embeddings where they arrive"""
    with_sums = True
    """whether nodes add up their partial sums of other nodes' samples before these travel, see `Crossing`"""

    def __init__(self, context: ExchangeContext, windows: WindowPair | None) -> None:
        super().__init__(context, windows)
        self._ids = context.ids
        self._nodes = context.reach.nodes if context.reach is not None else (range(self.world_size),)
        self.bad_ids = BadIds(self.tables.bounds_checks)
        self._on_gpu = self.device.type == "cuda"
        self._current = CurrentStream(self.device)
        self._stream: torch.cuda.Stream | None = None

    @abstractmethod
    def start(self, step: Step) -> None:
        """Start to pool and to send."""

    @abstractmethod
    def finish(self, step: Step, copy: bool = False) -> torch.Tensor:
        """Return the pooled embeddings [b, D_total] of this rank's samples, of the wire's type, once all are here.

        Their rows may lie further apart than D_total elements.
        It is valid until the next `start`, unless `copy`.
        """

    def add_partials(self, step: Step, arrived: torch.Tensor) -> None:
        """Add up the partial sums of tables that are cut by rows, in place; there are some.

        Args:
            arrived: [b, leading + arrival_dim] of the wire's type, see `Layout`.
        """
        if self._on_gpu:
            add_partials(arrived, self._partial_table, step.own_offsets)
        else:
            reference.add_partials(arrived, self._partials, step.own_offsets)

    @cached_property
    def _partials(self) -> list[Partials]:
        """The sums that this rank makes, by the columns of a row with the leading ones.

        Several row shards of another node are one of the partial sums, which arrives where the first one's would.
        """
        number = self._ids.published if self._ids is not None else lambda _: 0
        found = []
        for each in self.layout.partial_sums:
            arriving: list[tuple[int, int]] = []
            for node in self._nodes:
                shards = each.on(node)
                if self.with_sums and len(shards) > 1 and self.rank not in node:
                    arriving.append((self.leading + self.layout.column(shards[0]), EVERY_BAG))
                else:
                    arriving += [(self.leading + self.layout.column(shard), number(shard)) for shard in shards]
            if len(arriving) > 1:
                columns, shares = zip(*arriving, strict=True)
                found.append(Partials(columns, each.shards[0].dim, shares))
        return found

    @cached_property
    def _partial_table(self) -> PartialTable:
        divisible = [number for each in self._partials for number in (each.dim, *each.columns)]
        return partial_table(self._partials, gcd(16, *divisible), self.device)

    def join_stream(self) -> None:
        """Make the current stream wait for the stream of the last `start` or `finish`, if that is another one.

        So `finish` comes after the launches of `start` elsewhere. And `start`, whose flags allow the peers to overwrite
        the window of the step before, comes after all that was issued to read that window where it was finished.
        """
        if not self._on_gpu:
            return
        current = self._current()
        if current is not self._stream:
            if self._stream is not None:
                current.wait_stream(self._stream)
            self._stream = current


class Backward(ExchangeDirection):
    """The backward on one rank: of each step `note_forward`, `start`, then `finish`, the same on every rank.

    Rows are updated in the order of the starts. A step may be started before the one before it is finished.
    """

    @property
    def sent_scale(self) -> float:
        """Factor by which gradients are multiplied before they are sent, of `gradient_scale`.

        On a wire of 16 bits they travel as they are, and their sums are multiplied in float32 where rows are updated:
        a product would be rounded once more, or vanish in float16.
        """
        return gradient_scale(self.world_size) if self.options.wire_dtype == torch.float32 else 1.0

    @property
    def update_scale(self) -> float:
        """Factor that is left for the update of the rows."""
        return gradient_scale(self.world_size) / self.sent_scale

    def note_forward(self, step: Step) -> None:
        """Note the optimizers' numbers now, when the forward of a step that will have a backward has just started."""
        step.rules = self.tables.rules(step.number)
        self.tables.count_on_device()

    def follow_rules(self, capture: bool = False) -> None:
        """Overwrite the optimizers' numbers that captured steps read, if there are such steps, or one is captured."""

    def prepare(self, step: Step) -> None:
        """Do the work that needs the step's ids alone. Optional: `start` does it where this has not been called."""

    @abstractmethod
    def start(self, step: Step, gradient: torch.Tensor) -> None:
        """Start to send the gradient [b, D_total] of this rank's samples to the owners of the rows.

        The gradient is of the output's type; its rows may lie further apart than D_total elements.
        On GPUs the update of the rows is issued here, too, beside the current stream.
        """

    @abstractmethod
    def finish(self, step: Step) -> None:
        """Make the current stream wait until the step has updated this rank's rows."""


def gradient_scale(world_size: int) -> float:
    """Return the factor of the gradients. As TorchRec: the loss is a mean over a rank's samples, not over all."""
    return 1.0 / world_size if get_gradient_division() else 1.0


class WindowBackward(Backward):
    """A backward that reads gradients out of this rank's window, where the samples' ranks have stored them."""

    def __init__(self, context: ExchangeContext, windows: WindowPair) -> None:
        super().__init__(context, windows)
        self.windows = windows
        self.gradients = self._gradient_layout(context)

    @staticmethod
    def _gradient_layout(context: ExchangeContext) -> GradientLayout:
        bag_ids = context.ids.bound.mean_bag_sizes if context.ids is not None else None
        return GradientLayout(context.layout, context.samples_per_rank, context.options.wire_dtype, bag_ids)

    own: Any
    """this rank's gradients, of `gradients_by`"""
    gradients_by: Callable[..., Any]
    """see `Push`"""
    store_of: Callable[..., None]
    """see `Push`"""

    def push(self, step: Step, gradient: torch.Tensor, first: int, end: int) -> None:
        """Send the parts [first, end) of the gradient, on the current stream."""
        self.store_of(self.own, step, gradient, self.sent_scale, first, end, step.own_offsets)

    @classmethod
    def window_spec(cls, context: ExchangeContext) -> WindowSpec:
        """Return the windows of the gradients, see `GradientLayout`."""
        return cls._gradient_layout(context).windows

    def gradients_of(
        self, shards: Sequence[FeatureShard], window: torch.Tensor, samples: int
    ) -> Mapping[FeatureShard, torch.Tensor]:
        """Return the gradient [B, D] of each shard, as a view of their owner's `window`; `samples` is B."""
        found: dict[FeatureShard, torch.Tensor] = {}
        for shard in shards:
            start = self.gradients.starts[shard] * samples
            found[shard] = window[start : start + samples * shard.dim].view(samples, shard.dim)
        return found
