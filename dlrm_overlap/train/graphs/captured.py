"""Steps captured in CUDA graphs."""

import gc
import weakref
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from typing import Any

import torch

from dlrm_overlap.comm.counters import Counter, Counters
from dlrm_overlap.comm.order import CommunicationOrder, no_collection
from dlrm_overlap.config import InputError
from dlrm_overlap.embedding.exchange import Exchange, failure_of
from dlrm_overlap.embedding.exchanging_module import ExchangingModule, exchanges_of


class CapturedStep:
    """A step as a CUDA graph. Its first kernel advances the counters that the later kernels read."""

    def __init__(
        self,
        step: Callable[[], Any],
        order: CommunicationOrder,
        counters: Sequence[Counters],
        pool: Any,
        stream: torch.cuda.Stream,
    ) -> None:
        """Capture `step`, which issues the step and returns its output.

        Args:
            counters: all counters that this step advances.
            pool: memory pool of the graph that is replayed in turn with this one, or None.

        Raises:
            InputError: if `step` does not advance each counter by one.
        """
        self._graph, self._counters = torch.cuda.CUDAGraph(), counters
        before = self.values
        gc.collect()  # now, since the capture disables it
        # Thread-local, since a loader thread may pin memory during the capture.
        with (
            no_collection(),
            torch.cuda.graph(self._graph, pool=pool, stream=stream, capture_error_mode="thread_local"),
        ):
            for each in counters:
                each.advance()
            order.begin()
            try:
                self._output = step()
            finally:
                order.end()
        if self.values != [[value + 1 for value in values] for values in before]:
            raise InputError(
                "GraphTrainPipeline: an embedding module is not called once a step, with a part in the loss, and a "
                "captured step cannot leave it out; train this model by TorchRec's TrainPipelineSparseDist"
            )
        self.pool = self._graph.pool()
        self.captured_values = self.values
        self.arguments = [[counter.argument for counter in each.each] for each in counters]

    @property
    def values(self) -> list[list[int]]:
        return [[counter.value for counter in each.each] for each in self._counters]

    def launch(self) -> Any:
        """Launch the graph without advancing the host's counters; return the step's output."""
        self._graph.replay()
        return self._output

    def replay(self) -> Any:
        """Advance the host's counters, launch the graph, and return the output, which the next replay overwrites."""
        for each in self._counters:
            each.count_step()
        return self.launch()


class GraphPair:
    """The two captured steps of a pipeline, one per `buffer_index`, which also selects one window of each pair.

    The graphs are released with this object.
    """

    def __init__(
        self,
        modules: Sequence[ExchangingModule[Any]],
        dense_counters: Sequence[Counters],
        order: CommunicationOrder,
        device: torch.device,
    ) -> None:
        self._modules, self._dense_counters, self._order, self._device = modules, dense_counters, order, device
        self.each: list[CapturedStep | None] = [None, None]
        """the steps, indexed by `buffer_index`; None until captured"""
        self._captured_addresses: list[Any] = []
        self._captured_frozen: list[list[bool]] = []
        weakref.finalize(self, _release, self.each, device)

    @property
    def are_captured(self) -> bool:
        return None not in self.each

    def capture(self, buffer_index: int, step: Callable[[], Any], stream: torch.cuda.Stream) -> Any:
        for exchange in self._exchanges:
            exchange.join_stream()
            exchange.follow_rules(capture=True)
        other = self.each[1 - buffer_index]
        pool = other.pool if other is not None else None
        try:
            captured = CapturedStep(step, self._order, self._counters, pool, stream)
        except Exception as error:  # the host has counted epochs that the device has not
            for exchange in self._exchanges:
                exchange.failure = exchange.failure or failure_of("the capture of a step", error)
            raise
        self.each[buffer_index], self._captured_addresses = captured, self._addresses
        self._captured_frozen = self._frozen
        return captured.launch()

    def release(self) -> None:
        """Wait until the device has finished the graphs, and release them."""
        _release(self.each, self._device)

    @property
    def _exchanges(self) -> list[Exchange]:
        return exchanges_of(self._modules)

    @property
    def _addresses(self) -> list[Any]:
        return [(exchange, exchange.addresses) for exchange in self._exchanges]

    @property
    def _frozen(self) -> list[list[bool]]:
        return [exchange.tables.frozen for exchange in self._exchanges]

    def check_unchanged(self) -> None:
        """Raise an InputError if rows of tables or windows were moved or freed, or tables frozen, since the capture."""
        if not any(self.each):
            return
        if self._frozen != self._captured_frozen:
            raise InputError(
                "GraphTrainPipeline: tables were frozen, or are trained again, since the capture, which captured steps "
                "do not follow; call close() of this pipeline on all ranks after requires_grad of tables has changed"
            )
        if self._addresses != self._captured_addresses:
            raise InputError(
                "GraphTrainPipeline: rows or windows that captured steps use were moved or freed since the capture, as "
                "by Exchange.close or update_shards, and a replay would overwrite other data; close this pipeline and "
                "make another one"
            )

    @property
    def _counters(self) -> list[Counters]:
        return [*(exchange.counters for exchange in self._exchanges), *self._dense_counters]

    def skip_epochs(self, buffer_index: int, sending: Collection[Exchange]) -> None:
        """Skip an epoch of each counter whose next epoch, after eager steps, would use another window than the graph.

        Args:
            buffer_index: index of the next step, which may not be captured yet if the other one is.
            sending: exchanges that send ids between this call and the step, which takes one epoch of the ids.
        """
        for exchange, counter in self._in_other_windows(buffer_index, sending):
            exchange.skip(counter)

    def set_arguments(self, buffer_index: int) -> None:
        """Set the counters on the device so that the captured step with this index computes the next epochs."""
        if (captured := self._captured(buffer_index)) is not None:
            for counters, arguments in zip(self._counters, captured.arguments, strict=True):
                counters.set_arguments(arguments)
            assert not self._in_other_windows(buffer_index), "a replay would use another window than its peers"

    def are_in_step(self, buffer_index: int) -> bool:
        """Return whether the captured step with this index, if there is one, goes on from the current epochs.

        It does not if the program has called a forward, which takes epochs, since `set_arguments`.
        """
        captured = self._captured(buffer_index)
        return captured is None or captured.arguments == [
            [counter.argument for counter in counters.each] for counters in self._counters
        ]

    def _captured(self, buffer_index: int) -> CapturedStep | None:
        return self.each[buffer_index] or self.each[1 - buffer_index]

    def _in_other_windows(
        self, buffer_index: int, sending: Collection[Exchange] = ()
    ) -> list[tuple[Exchange, Counter]]:
        if (captured := self._captured(buffer_index)) is None:
            return []
        is_other, found = captured is not self.each[buffer_index], list[tuple[Exchange, Counter]]()
        for exchange, values in zip(self._exchanges, captured.captured_values, strict=False):
            counters = exchange.counters
            for counter, value in zip(counters.each, values, strict=True):
                sends = counter is counters.ids and exchange in sending
                if counter is not counters.steps and (counter.value + 1 + sends + is_other - value) % 2:
                    found.append((exchange, counter))
        return found


def _release(graphs: list[CapturedStep | None], device: torch.device) -> None:
    if any(graphs) and device.type == "cuda":
        with suppress(RuntimeError):  # of a kernel that has stopped the GPU, whose record says why
            torch.cuda.synchronize(device)
    graphs[:] = None, None
