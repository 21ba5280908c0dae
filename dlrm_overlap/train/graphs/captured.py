"""Captured steps: one, and the two that take turns."""

import gc
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch

from dlrm_overlap.comm.counters import Counter, Counters
from dlrm_overlap.comm.order import CommunicationOrder
from dlrm_overlap.config import InputError
from dlrm_overlap.embedding.exchange import Exchange
from dlrm_overlap.train.graphs.dense_step import DenseStep
from dlrm_overlap.train.graphs.input_prefetcher import InputPrefetcher


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
        self, ahead: InputPrefetcher, dense: DenseStep, order: CommunicationOrder, device: torch.device
    ) -> None:
        self._ahead, self._dense, self._order, self._device = ahead, dense, order, device
        self.each: list[CapturedStep | None] = [None, None]
        """by buffer_index"""
        self._captured_places: list[Any] = []
        weakref.finalize(self, _release, self.each, device)

    def capture(self, buffer_index: int, step: Callable[[], Any], stream: torch.cuda.Stream) -> Any:
        """Capture the step of `buffer_index`, take it, and return its output."""
        for exchange in self._ahead.exchanges:
            exchange.follow_rules(capture=True)
        other = self.each[1 - buffer_index]
        pool = other.pool if other is not None else None
        captured = CapturedStep(step, self._order, self._counters, pool, stream)
        self.each[buffer_index], self._captured_places = captured, self._places
        return captured.launch()

    def release(self) -> None:
        """Release the graphs, once the device is through with them."""
        _release(self.each, self._device)

    @property
    def _places(self) -> list[Any]:
        """Each module's exchange, and where it has rows and windows."""
        return [(exchange, exchange.addresses) for exchange in self._ahead.exchanges]

    def check_places(self) -> None:
        """Check that the memory of captured steps is still there.

        Raises:
            InputError: if it is not.
        """
        if self._places != self._captured_places:
            raise InputError(
                "GraphTrainPipeline: rows or windows that captured steps use were moved or given back since, as "
                "Exchange.close and update_shards do, and the graphs would go on where others' data may be; close this "
                "pipeline and make another one"
            )

    @property
    def _counters(self) -> list[Counters]:
        """All that counts steps: of each exchange, then that of the dense gradients where they have one."""
        return [*(exchange.counters for exchange in self._ahead.exchanges), *self._dense.buckets.counters]

    def align(self, buffer_index: int, takes_ids: bool) -> None:
        """Send the ids of the batch at `buffer_index`, where none are under way and the exchanges take ids.

        Eager steps since the capture have moved the epochs on. Captured steps go on with the windows and the arguments
        that they were captured with. So where the next epoch has the other window, one epoch is skipped, and the words
        on the device are set to make up the difference. Dense gradients have one window, and skip nothing.
        """
        captured = self.each[buffer_index] or self.each[1 - buffer_index]
        if captured is None:
            if takes_ids:
                self._ahead.send_ids(buffer_index)
            return
        for exchange, counter in self._in_other_windows(captured, buffer_index):
            exchange.skip(counter)
        self._ahead.send_ids(buffer_index)
        for counters, arguments in zip(self._counters, captured.arguments, strict=True):
            counters.set_arguments(arguments)
        assert not self._in_other_windows(captured, buffer_index), "a replay would meet the peers in another window"

    def _in_other_windows(self, captured: CapturedStep, buffer_index: int) -> list[tuple[Exchange, Counter]]:
        """Return counters whose next epoch has another window than `captured` has in the step of `buffer_index`."""
        is_other, found = captured is not self.each[buffer_index], list[tuple[Exchange, Counter]]()
        for exchange, values in zip(self._ahead.exchanges, captured.captured_values, strict=False):
            counters = exchange.counters
            for counter, value in zip(counters.each, values, strict=True):
                sends = counter is counters.ids and not self._ahead.ids_are_sent and self._ahead.sends(exchange)
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
