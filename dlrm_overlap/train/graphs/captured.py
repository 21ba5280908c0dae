"""One captured step."""

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from dlrm_overlap.comm.counters import Counters
from dlrm_overlap.comm.order import CommunicationOrder
from dlrm_overlap.config import InputError


class CapturedStep:
    """A step as a CUDA graph. Its first kernel advances the counters that the others read.

    Capturing counts the step on the host, as taking it would; `launch` then takes it. Each later one is a `replay`.

    Example: steps 1 to 3 were eager. Capturing counts step 4, `launch` takes it; step 5 is captured by another
    `CapturedStep`, for the other windows; step 6 is this one's `replay`.
    """

    def __init__(
        self,
        step: Callable[[], Any],
        order: CommunicationOrder,
        counters: Sequence[Counters],
        pool: Any,
        stream: torch.cuda.Stream,
    ) -> None:
        """Capture `step`.

        Args:
            order: of all that the step does between ranks.
            counters: each of whose numbers rises by one in the step.
            pool: of a graph that is replayed in turn with this one, whose memory they can share; or None.
            stream: the current one, on which everything before was issued.
        """
        self._graph, self._counters = torch.cuda.CUDAGraph(), counters
        before = self.values
        for each in counters:
            each.settle()
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
