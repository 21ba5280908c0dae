"""The forward and the backward of an exchange on one rank; `dlrm_overlap/backends.py` lists the backends."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import cached_property
from math import gcd
from typing import Generic, NamedTuple, Protocol, TypeVar

import torch

from dlrm_overlap.comm.order import CurrentStream
from dlrm_overlap.embedding.backends.internode import GradientTransport
from dlrm_overlap.embedding.backends.lookup import ColumnOf
from dlrm_overlap.embedding.gradient_layout import GradientLayout
from dlrm_overlap.embedding.id_layout import IdLayout
from dlrm_overlap.embedding.options import ExchangeContext
from dlrm_overlap.embedding.steps import PendingBackward, Step
from dlrm_overlap.embedding.tables import BadIds
from dlrm_overlap.embedding.windows import WindowPair, WindowSpec
from dlrm_overlap.kernels import reference
from dlrm_overlap.kernels.bags import EVERY_BAG, Partials
from dlrm_overlap.kernels.forward.add_partials import PartialTable, add_partials, partial_table
from dlrm_overlap.torchrec_private import get_gradient_division

State = TypeVar("State")
"""What `start` returns for `finish`."""


class ExchangeDirection(ABC):  # noqa: B024  its subclasses have the abstract methods
    """The forward or the backward of an exchange on one rank."""

    def __init__(self, context: ExchangeContext, windows: WindowPair | None) -> None:
        """`windows` are the windows that `window_spec` asks for, None if it asks for none."""
        self.layout, self.tables, self.options = context.layout, context.tables, context.options
        self.group, self.device = context.group, context.device
        self.rank, self.world_size = context.group.rank(), context.group.size()
        self.schedule, self.order = context.options.schedule, context.order

    @classmethod
    def window_spec(cls, context: ExchangeContext) -> WindowSpec | None:
        """Return the windows that every rank's arena needs; the same on every rank."""
        return None

    def skip(self) -> None:
        """Take an epoch in which nothing is stored, so that the next epoch uses the other window; a collective."""
        raise NotImplementedError(f"{type(self).__name__} is not captured")

    def check(self) -> None:  # noqa: B027  optional
        """Raise the errors that kernels have recorded since the last call; never waits for the device."""

    def close(self) -> None:  # noqa: B027  optional
        """Release resources that outlive the references to this object."""


class Forward(ExchangeDirection, Generic[State]):
    """Pools rows, and sends the pooled embeddings. Subclasses are also given a `Platform`."""

    leading = 0
    """columns in front of the arriving pooled embeddings"""

    def __init__(self, context: ExchangeContext, windows: WindowPair | None) -> None:
        super().__init__(context, windows)
        self._ids, self._internode = context.ids, context.internode
        self._nodes = context.reach.nodes if context.reach is not None else (range(self.world_size),)
        self.bad_ids = BadIds(self.tables.bounds_checks)
        self._on_gpu = self.device.type == "cuda"
        self._current = CurrentStream(self.device)
        self._stream: torch.cuda.Stream | None = None

    @abstractmethod
    def start(self, step: Step) -> State:
        """Start to pool this rank's shards and to send the pooled embeddings."""

    @abstractmethod
    def finish(self, state: State, copy: bool = False) -> torch.Tensor:
        """Return the pooled embeddings [b, D_total] of this rank's samples, in the wire's dtype, once all have arrived.

        On GPUs the current stream waits for them. Rows may have gaps between them. Unless `copy`, the result is valid
        until the next `start`.
        """

    def add_partials(self, step: Step, arrived: torch.Tensor) -> None:
        """Add up the partial sums in `arrived` [b, leading + arrival_dim] in place."""
        if self._on_gpu:
            add_partials(arrived, self._partial_table, step.own_offsets)
        else:
            reference.add_partials(arrived, self._partials, step.own_offsets)

    @cached_property
    def _partials(self) -> list[Partials]:
        """The sums that this rank makes; a sum that another node has made arrives where its first shard would."""
        number = self._ids.published if self._ids is not None else lambda _: 0
        found = []
        for each in self.layout.partial_sums:
            arriving: list[tuple[int, int]] = []
            for node in self._nodes:
                shards = each.on(node)
                if self._internode is not None and self.rank not in node and shards in self._internode.sums_on[node]:
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
        """Make the current stream wait for the stream of the last `start` or `finish`, if it is another one.

        So `finish` follows the kernels of `start`; and `start`, after which peers may overwrite the previous step's
        window, follows what has read that window.
        """
        if not self._on_gpu:
            return
        current = self._current()
        if current is not self._stream:
            if self._stream is not None:
                current.wait_stream(self._stream)
            self._stream = current


class Backward(ExchangeDirection, Generic[State]):
    """Sends gradients of pooled embeddings, and updates this rank's rows, in the order of the calls of `start`.

    Call `note_forward`, `start`, then `finish`. A step may be started before the previous one is finished.
    """

    @property
    def sent_scale(self) -> float:
        """Factor of the gradients that are sent: 1 on a 16-bit wire, where a product would be rounded, or underflow."""
        return gradient_scale(self.world_size) if self.options.wire_dtype == torch.float32 else 1.0

    @property
    def update_scale(self) -> float:
        """Factor of the received gradients in the update of rows."""
        return gradient_scale(self.world_size) / self.sent_scale

    def note_forward(
        self, step: Step, number: int = 0, trains_weights: bool = False, ids_ready: torch.Event | None = None
    ) -> PendingBackward:
        """Record the optimizers' parameters; call it right after `Forward.start`. By default the ids are ready now."""
        rules = self.tables.rules(number)
        self.tables.count_on_device()
        return PendingBackward(step, number, rules, trains_weights, ids_ready)

    def follow_rules(self, capture: bool = False) -> None:
        """Write the optimizers' parameters to the device memory from which captured steps read them.

        With `capture`, steps will be captured from now on; does nothing before that.
        """

    def prepare(self, pending: PendingBackward) -> PendingBackward:
        """Do the work that needs only the step's ids, and return `pending` with the result; optional."""
        return pending

    @abstractmethod
    def start(self, pending: PendingBackward, gradient: torch.Tensor) -> State:
        """Start to send the gradient [b, D_total], of the output's dtype and any strides."""

    @abstractmethod
    def finish(self, state: State) -> Sequence[torch.Tensor]:
        """Make the current stream wait until the step has updated this rank's rows.

        Returns, for each input whose ids' weights require a gradient, that gradient [n] float32.
        """


def gradient_scale(world_size: int) -> float:
    """Return the factor of all gradients, as in TorchRec: the loss is a mean over one rank's samples."""
    return 1.0 / world_size if get_gradient_division() else 1.0


class GradientStore(Protocol):
    """Stores the gradients of one rank's samples at the owners reached."""

    def store(self, step: Step, gradient: torch.Tensor, scale: float, first: int, end: int) -> None:
        """Store the parts [first, end) of `scale` times the gradient [b, ..], and signal each as that rank."""


class WindowState(NamedTuple):
    pending: PendingBackward
    weights_gradients: Sequence[torch.Tensor]
    """what `finish` returns; complete once it has returned"""


class WindowBackward(Backward[WindowState]):
    """A backward whose gradients arrive in this rank's window."""

    own: GradientStore
    passed_on: Mapping[int, GradientStore]
    """for samples of other nodes, by the rank that sends their gradients to this one"""

    def __init__(self, context: ExchangeContext, windows: WindowPair) -> None:
        super().__init__(context, windows)
        self.windows = windows
        self.gradients = self._gradient_layout(context)
        self._transport = GradientTransport(context, context.internode) if context.internode is not None else None

    def _make_stores(self, context: ExchangeContext) -> None:
        self.own, self.passed_on = self._store_by(self.rank, self.layout.output_column, context.ids), {}
        if (internode := context.internode) is not None:
            column = internode.gradient_columns[internode.reach.here].__getitem__
            self.passed_on = {source: self._store_by(source, column) for source in internode.reach.sources}

    @abstractmethod
    def _store_by(self, rank: int, column: ColumnOf, ids: IdLayout | None = None) -> GradientStore:
        """Return a store for gradients of a rank's samples; given `ids`, it leaves out bags that have not arrived."""

    @staticmethod
    def _gradient_layout(context: ExchangeContext) -> GradientLayout:
        bag_ids = context.ids.batch_capacity.mean_bag_sizes if context.ids is not None else None
        return GradientLayout(context.layout, context.samples_per_rank, context.options.wire_dtype, bag_ids)

    def push(self, step: Step, gradient: torch.Tensor, first: int, end: int) -> None:
        """Send the parts [first, end) on the current stream; part 0 together with all parts for other nodes."""
        transport = self._transport if first == 0 else None
        if transport is not None:
            transport.send(step, gradient, self.sent_scale)
        self.own.store(step, gradient, self.sent_scale, first, end)
        if transport is not None:
            for source, received in transport.receive(step):
                self.passed_on[source].store(step, received, 1.0, 0, self.gradients.parts)

    @classmethod
    def window_spec(cls, context: ExchangeContext) -> WindowSpec:
        return cls._gradient_layout(context).windows
