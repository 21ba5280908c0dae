"""Captured steps: one, and the two that take turns."""

import gc
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch

from dlrm_overlap.comm.counters import Counter, Counters
from dlrm_overlap.comm.order import CommunicationOrder
from dlrm_overlap.config import InputError
from dlrm_overlap.embedding.exchange import Exchange
from dlrm_overlap.embedding.exchanging_module import ExchangingModule, exchanges_of


class CapturedStep:
    """A step as a CUDA graph. Its first kernel advances the counters that the others read.

    Example: steps 1 to 3 were eager. Capturing counts step 4 on the host, `launch` takes it; step 5 is captured by
    another `CapturedStep`, for the other windows; step 6 is this one's `replay`.
    """

    def __init__(
        self,
        step: Callable[[], Any],
        order: CommunicationOrder,
        counters: Sequence[Counters],
        pool: Any,
        stream: torch.cuda.Stream,
    ) -> None:
        """Capture `step`, in which each number of `counters` rises by one.

        Args:
            pool: of a graph that is replayed in turn with this one, whose memory they can share; or None.
            stream: the current one, on which everything before was issued.
        """
        self._graph, self._counters = torch.cuda.CUDAGraph(), counters
        before = self.values
        # Loader threads that pin memory meanwhile are none of the capture's business.
        with (
            _no_collection(),
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
        """The counters' values now."""
        return [[counter.value for counter in each.each] for each in self._counters]

    def launch(self) -> Any:
        """Take the step, which is counted already, and return its output."""
        self._graph.replay()
        return self._output

    def replay(self) -> Any:
        """Count the step and take it; return its output, whose memory the next replay overwrites."""
        for each in self._counters:
            each.count_step()
        return self.launch()


class GraphPair:
    """The captured steps of a pipeline, one for each of the two windows that steps take in turn.

    Graphs hold addresses, and keep nothing alive. They are released with the pair, or when the process ends.
    """

    def __init__(
        self,
        modules: Sequence[ExchangingModule[Any]],
        dense_counters: Sequence[Counters],
        order: CommunicationOrder,
        device: torch.device,
    ) -> None:
        """Take the embedding modules of a model, whose exchanges count steps, as `dense_counters` do."""
        self._modules, self._dense_counters, self._order, self._device = modules, dense_counters, order, device
        self.each: list[CapturedStep | None] = [None, None]
        """by buffer_index"""
        self._captured_addresses: list[Any] = []
        weakref.finalize(self, _release, self.each, device)

    @property
    def are_captured(self) -> bool:
        """True if both steps are captured."""
        return None not in self.each

    def capture(self, buffer_index: int, step: Callable[[], Any], stream: torch.cuda.Stream) -> Any:
        """Capture the step of `buffer_index`, take it, and return its output."""
        for exchange in self._exchanges:
            exchange.follow_rules(capture=True)
        other = self.each[1 - buffer_index]
        pool = other.pool if other is not None else None
        captured = CapturedStep(step, self._order, self._counters, pool, stream)
        self.each[buffer_index], self._captured_addresses = captured, self._addresses
        return captured.launch()

    def release(self) -> None:
        """Release the graphs, once the device is through with them."""
        _release(self.each, self._device)

    @property
    def _exchanges(self) -> list[Exchange]:
        return exchanges_of(self._modules)

    @property
    def _addresses(self) -> list[Any]:
        return [(exchange, exchange.addresses) for exchange in self._exchanges]

    def check_addresses(self) -> None:
        """Check that the memory of captured steps is still there.

        Raises:
            InputError: if it is not.
        """
        if any(self.each) and self._addresses != self._captured_addresses:
            raise InputError(
                "GraphTrainPipeline: rows or windows that captured steps use were moved or given back since, as "
                "Exchange.close and update_shards do, and the graphs would go on where others' data may be; close this "
                "pipeline and make another one"
            )

    @property
    def _counters(self) -> list[Counters]:
        return [*(exchange.counters for exchange in self._exchanges), *self._dense_counters]

    def skip_epochs(self, buffer_index: int, sending: Collection[Exchange]) -> None:
        """Let the step of `buffer_index` use the windows that it was captured with; before its ids are sent.

        Eager steps since the capture have advanced the epochs, and an epoch's parity says which of two windows it uses.
        Where the next epoch has the other window, one epoch is skipped. Dense gradients have one window.

        Args:
            buffer_index: of the step, which may be the one that is not captured yet.
            sending: exchanges whose ids will be sent before the step, which takes an epoch of the ids' windows.
        """
        for exchange, counter in self._in_other_windows(buffer_index, sending):
            exchange.skip(counter)

    def set_arguments(self, buffer_index: int) -> None:
        """Set the numbers on the device so that captured kernels, whose arguments stay, find the next epochs."""
        if (captured := self._captured(buffer_index)) is not None:
            for counters, arguments in zip(self._counters, captured.arguments, strict=True):
                counters.set_arguments(arguments)
            assert not self._in_other_windows(buffer_index), "a replay would meet the peers in another window"

    def _captured(self, buffer_index: int) -> CapturedStep | None:
        return self.each[buffer_index] or self.each[1 - buffer_index]

    def _in_other_windows(
        self, buffer_index: int, sending: Collection[Exchange] = ()
    ) -> list[tuple[Exchange, Counter]]:
        """Return the counters whose next epoch has another window than the captured step has."""
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
        with suppress(RuntimeError):  # a kernel that has stopped the GPU has left its record
            torch.cuda.synchronize(device)
    graphs[:] = None, None


@contextmanager
def _no_collection() -> Iterator[None]:
    """Collect garbage now, and none within.

    An exchange that is garbage, such as an earlier pipeline's, frees memory that peers see. That waits for the GPU,
    which a capture forbids, and torch aborts the process.
    """
    gc.collect()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
