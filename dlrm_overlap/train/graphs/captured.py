"""One captured step, and the streams that a step runs on."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
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
        with torch.cuda.graph(self._graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
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


class Streams:
    """The streams of a pipeline on one device; on a CPU everything runs in the order in which it is issued."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        if not self._on_gpu:
            return
        current = torch.cuda.current_stream(device)
        # A step cannot be captured on the default stream, and all steps run on the one where they are captured.
        self.main_stream = current if current != torch.cuda.default_stream(device) else torch.cuda.Stream(device)
        self._device = device
        self._copy = torch.cuda.Stream(device)
        self._ids = torch.cuda.Stream(device, priority=-2)
        self._issued = [torch.cuda.Event() for _ in range(2)]
        self._called, self._copied = torch.cuda.Event(), torch.cuda.Event()

    @contextmanager
    def _main(self) -> Any:
        current = torch.cuda.current_stream(self._device)
        self._called.record(current)
        if current == self.main_stream:
            yield
            return
        self.main_stream.wait_stream(current)
        try:
            with torch.cuda.stream(self.main_stream):
                yield
        finally:  # whoever catches an error may read the weights next
            current.wait_stream(self.main_stream)

    def main(self) -> AbstractContextManager[Any]:
        """Return a context in which the steps' stream is the current one, behind the caller's; then the other way."""
        return self._main() if self._on_gpu else nullcontext()

    def step_is_issued(self, parity: int) -> None:
        """Note that all that reads what had landed for the other parity has been issued."""
        if self._on_gpu:
            self._issued[parity].record(self.main_stream)

    @contextmanager
    def _copies(self, parity: int) -> Any:
        self._copy.wait_event(self._issued[1 - parity])
        self._copy.wait_event(self._called)
        with torch.cuda.stream(self._copy):
            yield
            self._copied.record(self._copy)
        self.main_stream.wait_event(self._copied)

    def copies(self, parity: int) -> AbstractContextManager[Any]:
        """Return a context for copies to the landing place of `parity`; steps issued after it find them done.

        Copies come behind what the caller of the step had issued before it, such as the batch itself, on the device.
        """
        return self._copies(parity) if self._on_gpu else nullcontext()

    @contextmanager
    def _beside(self) -> Any:
        self._ids.wait_stream(self.main_stream)
        with torch.cuda.stream(self._ids):
            yield

    def ids(self) -> AbstractContextManager[Any]:
        """Return a context for what runs beside the step, until `join_ids`."""
        return self._beside() if self._on_gpu else nullcontext()

    def join_ids(self) -> None:
        """Make the steps' stream wait for what was issued beside it."""
        if self._on_gpu:
            self.main_stream.wait_stream(self._ids)
