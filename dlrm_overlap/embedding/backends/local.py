"""Tables that every rank holds: looked up for this rank's samples alone, and nothing is sent.

The rows are pooled into the columns of this rank's own output window that no peer stores into, so the output is whole
without a copy. The gradient is read where autograd left it, and added to that of the dense lookups' parameters, which
belongs to the dense part: it is summed over the ranks and used as that part's is.
"""

from abc import abstractmethod
from typing import Any

import torch

from dlrm_overlap.embedding.backends.base import ExchangeDirection
from dlrm_overlap.embedding.backends.cpu import CpuLookup, ids_in_bags
from dlrm_overlap.embedding.backends.pgas import DeviceLookup
from dlrm_overlap.embedding.backends.rows import InputRows, in_readable_rows
from dlrm_overlap.embedding.options import ExchangeContext
from dlrm_overlap.embedding.replicated import ReplicatedGradients
from dlrm_overlap.embedding.steps import BatchSizes, Step, tensors_of
from dlrm_overlap.embedding.tables import BadIds
from dlrm_overlap.embedding.windows import WindowPair
from dlrm_overlap.kernels.backward.optimizers import Rule
from dlrm_overlap.kernels.backward.update_rows import RowUpdate
from dlrm_overlap.kernels.bags import Windows
from dlrm_overlap.kernels.optimizer_params import OptimizerParams
from dlrm_overlap.kernels.reference import update_rows


class LocalLookup(ExchangeDirection):
    """The lookup of replicated tables on one rank: of each step `pool`, and maybe `start_backward`, `finish_backward`.

    Who trains sets the parameters' gradients to zero before each step, as for other parameters; `start_backward` adds
    to them without autograd's knowledge. An id that several bags of a step have is added up as often.
    """

    lookup_type: Any = DeviceLookup

    def __init__(self, context: ExchangeContext, windows: WindowPair) -> None:
        """Take the windows of the outputs."""
        super().__init__(context, windows)
        assert context.replicated is not None, "a layout with replicated features comes with their tables"
        self.windows, self.replicated = windows, context.replicated
        self.gradients = ReplicatedGradients(context.replicated.lookups, context.replicated.bounds_checks)
        self.columns = {shard: self.layout.column(shard) for shard in self.layout.replicated}
        """of the output and of its gradient"""
        in_window = {shard: context.options.leading_columns + column for shard, column in self.columns.items()}
        self._lookup = self.lookup_type(context, in_window, BadIds(self.replicated.bounds_checks), self.replicated)
        self._windows = self.own_windows()

    @abstractmethod
    def own_windows(self) -> list[Any]:
        """Return this rank's window as the lookup takes it, that of even epochs and that of odd ones."""

    def own(self, step: Step) -> Step:
        """Return the step as if this rank were alone: its samples, and the ids of replicated features as input 0."""
        assert step.replicated is not None, "the ids of a step come with those of replicated features"
        return Step([step.replicated], BatchSizes.of((step.batch.per_rank[self.rank],)))

    def pool(self, step: Step) -> None:
        """Store the pooled embeddings of this rank's samples to its window of the step, which has begun."""
        self._lookup.store(self._windows[self.windows.epoch % 2], self.own(step), self._lookup.tables())

    @abstractmethod
    def start_backward(self, step: Step, gradient: torch.Tensor) -> None:
        """Start to add the gradient [b, D_total] of the output to those of the rows."""

    @abstractmethod
    def finish_backward(self, step: Step) -> None:
        """Make all that is issued on the current stream from now on see the rows' gradients."""


class CpuLocalLookup(LocalLookup):
    """`LocalLookup` on a CPU, which pools and updates as the reference does."""

    lookup_type = CpuLookup

    def own_windows(self) -> list[Any]:
        """Return tensors, one for each epoch."""
        return [[self.windows.arena.local(name)] for name in self.windows.names]

    def start_backward(self, step: Step, gradient: torch.Tensor) -> None:
        """Add the gradients of one feature's rows after the other."""
        own = self.own(step)
        for shard, column in self.columns.items():
            ids, sample, factors = ids_in_bags(own.inputs[0], shard, own.batch.total)
            rows = gradient[sample, column : column + shard.dim].float() * factors
            sums = self.gradients.weight(shard)
            update_rows(sums, (), ids.long(), rows, "sgd", OptimizerParams(self.gradients.LEARNING_RATE))

    def finish_backward(self, step: Step) -> None:
        """Do nothing: `start_backward` has added all gradients."""


class DeviceLocalLookup(LocalLookup):
    """On a GPU, by the kernels of the exchange: those that pool, as a rank alone would, and those that update rows.

    All of the backward runs beside the main stream, which needs its result for the dense parameters' reduction alone:
    the ids are sorted once the forward has looked them up, and gradients added while the others' are on their way.
    """

    def __init__(self, context: ExchangeContext, windows: WindowPair) -> None:
        super().__init__(context, windows)
        # As updates: after the work that the peers wait for, and after the main stream's.
        self._stream = torch.cuda.Stream(self.device, priority=0)
        self._issued, self._done = torch.cuda.Event(), torch.cuda.Event()
        self._storage: tuple[int, ...] | None = None
        self._rows: InputRows | None = None
        self._updates: list[RowUpdate] = []
        """of the ranges of these rows"""
        numbers = torch.tensor(OptimizerParams(self.gradients.LEARNING_RATE), device=self.device)
        self._rule = Rule(numbers, context.counters.steps.word)

    def _input_rows(self) -> InputRows:
        """Return the rows, that is gradients, which ids name, made anew when they have moved."""
        if (storage := self.gradients.storage()) != self._storage or self._rows is None:
            self._rows = InputRows(
                self.layout.replicated, self.gradients, self.columns, dict.fromkeys(self.layout.replicated, 0)
            )
            self._updates = [RowUpdate(added.rows) for added in self._rows.ranges]
            self._storage = storage
        return self._rows

    def own_windows(self) -> list[Any]:
        """Return addresses, one for each epoch."""
        stride = self.options.leading_columns + self.layout.arrival_dim
        windows = [self.windows.arena.local(name) for name in self.windows.names]
        own = [torch.tensor([each.data_ptr()], device=self.device) for each in windows]
        return [Windows(address, stride, self.options.wire_dtype) for address in own]

    def pool(self, step: Step) -> None:
        """Launch the kernels that pool into this rank's window."""
        super().pool(step)
        step.own_looked_up = torch.cuda.current_stream(self.device).record_event()

    def start_backward(self, step: Step, gradient: torch.Tensor) -> None:
        """Sort the ids, and add the gradient, all beside the main stream."""
        gradient = in_readable_rows(gradient)
        rows, own = self._input_rows(), self.own(step)
        ids = own.inputs[0]
        for tensor in (gradient, *tensors_of(ids)):
            tensor.record_stream(self._stream)
        self._stream.wait_event(step.own_looked_up)
        self._issued.record(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            runs = rows.sort(ids, own.batch.total, gradient.stride(0) // 4)
            self._stream.wait_event(self._issued)
            if runs is not None:
                for update in self._updates:
                    update(runs, gradient, self._rule)
            self._done.record(self._stream)

    def finish_backward(self, step: Step) -> None:
        """Make the current stream wait until the gradients are added."""
        torch.cuda.current_stream(self.device).wait_event(self._done)
