"""The lookup of tables that every rank holds, for this rank's samples; nothing is sent."""

from abc import abstractmethod
from typing import Generic, NamedTuple

import torch

from dlrm_overlap.embedding.backends.base import ExchangeDirection
from dlrm_overlap.embedding.backends.cpu import CpuLookup, ids_in_bags
from dlrm_overlap.embedding.backends.lookup import DeviceLookup, Lookup, Rows
from dlrm_overlap.embedding.backends.rows import InputRows, in_readable_rows
from dlrm_overlap.embedding.options import ExchangeContext
from dlrm_overlap.embedding.replicated import ReplicatedGradients
from dlrm_overlap.embedding.steps import BatchSizes, Step, tensors_of
from dlrm_overlap.embedding.tables import BadIds
from dlrm_overlap.embedding.windows import WindowPair
from dlrm_overlap.kernels.backward.optimizers import Rule
from dlrm_overlap.kernels.bags import Windows
from dlrm_overlap.kernels.optimizer_params import OptimizerParams
from dlrm_overlap.kernels.reference import update_rows


class LocalState(NamedTuple):
    own: Step
    """a step of this rank's samples only, with the ids of replicated features as its only input"""
    looked_up: torch.Event | None = None
    """on GPUs, the event after which the backward may read the ids of `own`"""


class LocalLookup(ExchangeDirection, Generic[Rows]):
    """Looks up replicated tables, into columns of this rank's output window that no peer stores into.

    The backward adds to the gradients of the dense lookups' parameters, without autograd; the trainer zeroes them
    before each step.
    """

    lookup_type: type[Lookup[Rows]]

    def __init__(self, context: ExchangeContext, windows: WindowPair) -> None:
        super().__init__(context, windows)
        assert context.replicated is not None, "a layout with replicated features comes with their tables"
        self.windows, self.replicated = windows, context.replicated
        self.gradients = ReplicatedGradients(context.replicated.lookups, context.replicated.bounds_checks)
        self.columns = {shard: self.layout.column(shard) for shard in self.layout.replicated}
        """first column of each shard in the output, and in its gradient"""
        in_window = {shard: context.options.leading_columns + column for shard, column in self.columns.items()}
        self._lookup = self.lookup_type(context, in_window, BadIds(self.replicated.bounds_checks), self.replicated)
        self._windows = self.own_windows()

    @abstractmethod
    def own_windows(self) -> list[Rows]:
        """Return this rank's window, for even epochs and for odd ones."""

    def pool(self, step: Step) -> LocalState:
        """Pool into this rank's window of the current step, which has begun."""
        assert step.replicated is not None, "the ids of a step come with those of replicated features"
        own = Step([step.replicated], BatchSizes.of((step.batch.per_rank[self.rank],)))
        self._lookup.refresh()
        self._lookup.store(self._windows[self.windows.epoch % 2], own)
        return LocalState(own)

    @abstractmethod
    def start_backward(self, state: LocalState, gradient: torch.Tensor) -> None:
        """Start to add the gradient [b, D_total] of the output to the gradients of the rows."""

    @abstractmethod
    def finish_backward(self) -> None:
        """Make the current stream wait until the last `start_backward` is done."""


class CpuLocalLookup(LocalLookup[list[torch.Tensor]]):
    lookup_type = CpuLookup

    def own_windows(self) -> list[list[torch.Tensor]]:
        return [[self.windows.arena.local(name)] for name in self.windows.names]

    def start_backward(self, state: LocalState, gradient: torch.Tensor) -> None:
        own = state.own
        for shard, column in self.columns.items():
            ids, sample, factors = ids_in_bags(own.inputs[0], shard, own.batch.total)
            rows = gradient[sample, column : column + shard.dim].float() * factors
            sums = self.gradients.weight(shard)
            update_rows(sums, (), ids.long(), rows, "sgd", OptimizerParams(self.gradients.LEARNING_RATE))

    def finish_backward(self) -> None:
        """Do nothing: `start_backward` has added the gradients."""


class DeviceLocalLookup(LocalLookup[Windows]):
    """`LocalLookup` on a GPU; the backward has its own stream, since only the reduction of dense gradients needs it."""

    lookup_type = DeviceLookup

    def __init__(self, context: ExchangeContext, windows: WindowPair) -> None:
        super().__init__(context, windows)
        # The lowest priority, as for updates: after work that peers wait for, and after the main stream's.
        self._stream = torch.cuda.Stream(self.device, priority=0)
        self._issued, self._done = torch.cuda.Event(), torch.cuda.Event()
        self._storage: tuple[int, ...] | None = None
        self._rows: InputRows | None = None
        numbers = torch.tensor(OptimizerParams(self.gradients.LEARNING_RATE), device=self.device)
        self._rule = Rule(numbers, context.counters.steps.word)

    def _input_rows(self) -> InputRows:
        if (storage := self.gradients.storage()) != self._storage or self._rows is None:
            self._rows = InputRows(
                self.layout.replicated, self.gradients, self.columns, dict.fromkeys(self.layout.replicated, 0)
            )
            self._storage = storage
        return self._rows

    def own_windows(self) -> list[Windows]:
        stride = self.options.leading_columns + self.layout.arrival_dim
        windows = [self.windows.arena.local(name) for name in self.windows.names]
        own = [torch.tensor([each.data_ptr()], device=self.device) for each in windows]
        return [Windows(address, stride, self.options.wire_dtype) for address in own]

    def pool(self, step: Step) -> LocalState:
        return LocalState(super().pool(step).own, torch.cuda.current_stream(self.device).record_event())

    def start_backward(self, state: LocalState, gradient: torch.Tensor) -> None:
        gradient = in_readable_rows(gradient)
        rows, own = self._input_rows(), state.own
        ids = own.inputs[0]
        for tensor in (gradient, *tensors_of(ids)):
            tensor.record_stream(self._stream)
        assert state.looked_up is not None
        self._stream.wait_event(state.looked_up)
        self._issued.record(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            runs = rows.sort(ids, own.batch.total, gradient.stride(0) // 4)
            self._stream.wait_event(self._issued)
            if runs is not None:
                for added in rows.ranges:
                    added.update(runs, gradient, self._rule)
            self._done.record(self._stream)

    def finish_backward(self) -> None:
        torch.cuda.current_stream(self.device).wait_event(self._done)
