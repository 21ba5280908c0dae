"""The streams of a train pipeline."""

from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch


class Streams:
    """The streams of a pipeline on one device; on a CPU everything runs in the order in which it is issued."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        if not self._on_gpu:
            return
        current = torch.cuda.current_stream(device)
        # A step cannot be captured on the default stream, and all steps run on the one where they are captured.
        self.main_stream = current if current != torch.cuda.default_stream(device) else torch.cuda.Stream(device, -1)
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
        """Return a context on the steps' stream, which waits for the caller's; at its end the other way."""
        return self._main() if self._on_gpu else nullcontext()

    def step_is_issued(self, parity: int) -> None:
        """Note that all readers of the other parity's landing memory have been issued."""
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

        Copies come after the caller's earlier work on the device, such as the batch itself.
        """
        return self._copies(parity) if self._on_gpu else nullcontext()

    @contextmanager
    def _beside(self) -> Any:
        self._ids.wait_stream(self.main_stream)
        with torch.cuda.stream(self._ids):
            yield

    def ids(self) -> AbstractContextManager[Any]:
        """Return a context for work beside the step, until `join_ids`."""
        return self._beside() if self._on_gpu else nullcontext()

    def join_ids(self) -> None:
        """Make the steps' stream wait for the work beside it."""
        if self._on_gpu:
            self.main_stream.wait_stream(self._ids)
