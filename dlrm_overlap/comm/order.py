"""The order of a captured step's communication, and the streams of a step."""

import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch

Parameters = ParamSpec("Parameters")
Returned = TypeVar("Returned")


class CommunicationOrder:
    """Serializes all signals, waits and collectives of a captured step in the capture's order.

    CUDA graphs may serialize their branches. Without an order that is the same on every rank, rank 0 might wait for
    rank 1's ids before its lookup, and rank 1 for that lookup before it sends the ids.
    """

    def __init__(self) -> None:
        self.is_captured = False
        self._last: torch.Event | None = None

    def begin(self) -> None:
        self.is_captured, self._last = True, None

    def end(self) -> None:
        self.is_captured, self._last = False, None

    def __enter__(self) -> None:
        if self.is_captured and self._last is not None:
            torch.cuda.current_stream().wait_event(self._last)

    def __exit__(self, *_: Any) -> None:
        if self.is_captured:
            self._last = torch.cuda.current_stream().record_event()


class OnStream:
    """Context manager that makes a stream of the current device the current stream.

    `torch.cuda.stream` does the same, but also handles other devices, and takes 12 us of host time.
    """

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream.stream_id, stream.device_index, stream.device_type

    def __enter__(self) -> None:
        self._before = torch._C._cuda_getCurrentStream(self._stream[1])
        torch._C._cuda_setStream(*self._stream)

    def __exit__(self, *_: Any) -> None:
        torch._C._cuda_setStream(*self._before)


class CurrentStream:
    """Returns the current stream of a CUDA device, which must have an index.

    The result is the same object while the current stream does not change.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._raw = device, -1
        self._stream: torch.cuda.Stream | None = None

    def __call__(self) -> torch.cuda.Stream:
        raw = torch._C._cuda_getCurrentRawStream(self._device.index)
        if raw != self._raw or self._stream is None:
            self._stream, self._raw = torch.cuda.current_stream(self._device), raw
        return self._stream


class Streams:
    """The CUDA streams of a pipeline; on a CPU all work runs in the order of its calls."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        if not self._on_gpu:
            return
        current = torch.cuda.current_stream(device)
        # A step cannot be captured on the default stream, and all steps run on the stream of the capture.
        self.main_stream = current if current != torch.cuda.default_stream(device) else torch.cuda.Stream(device, -1)
        self._current = CurrentStream(current.device)
        self._copy = torch.cuda.Stream(device)
        self._ids = torch.cuda.Stream(device, priority=-2)
        self._on_main, self._on_copy, self._on_ids = map(OnStream, (self.main_stream, self._copy, self._ids))
        self._issued = [torch.cuda.Event() for _ in range(2)]
        self._called, self._copied, self._returned = (torch.cuda.Event() for _ in range(3))

    @contextmanager
    def main(self) -> Iterator[None]:
        """Run the block on `main_stream`, after the work of the caller's stream, which waits for the block's work."""
        if not self._on_gpu:
            yield
            return
        current = self._current()
        self._called.record(current)
        if current == self.main_stream:
            yield
            return
        self.main_stream.wait_event(self._called)
        try:
            with self._on_main:
                yield
        finally:  # also after an error, whose handler may read the weights
            self._returned.record(self.main_stream)
            current.wait_event(self._returned)

    def step_is_issued(self, buffer_index: int) -> None:
        """Note that all readers of staging buffer 1 - `buffer_index` are issued; `copies` to it waits for them."""
        if self._on_gpu:
            self._issued[buffer_index].record(self.main_stream)

    @contextmanager
    def copies(self, buffer_index: int, later: bool = False) -> Iterator[None]:
        """Run the block's copies to staging buffer `buffer_index` on a separate stream; later steps wait for them.

        The copies wait for earlier readers of the buffer and for the work that the caller issued before `main`. If
        `later`, they follow other copies of the same batch, and wait only for these.
        """
        if not self._on_gpu:
            yield
            return
        if not later:
            self._copy.wait_event(self._issued[1 - buffer_index])
            self._copy.wait_event(self._called)
        with self._on_copy:
            yield
            self._copied.record(self._copy)
        self.main_stream.wait_event(self._copied)

    def fork_ids(self) -> None:
        if self._on_gpu:
            self._ids.wait_stream(self.main_stream)

    def ids(self) -> AbstractContextManager[Any]:
        """Run the block on the stream of ids, concurrently with the step; use it between `fork_ids` and `join_ids`."""
        return self._on_ids if self._on_gpu else nullcontext()

    def join_ids(self) -> None:
        if self._on_gpu:
            self.main_stream.wait_stream(self._ids)


@contextmanager
def no_collection() -> Iterator[None]:
    """Disable garbage collection in the context.

    An unreachable exchange frees memory that peers read, which waits for the GPU: in a capture, torch would abort.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def uncompiled(function: Callable[Parameters, Returned]) -> Callable[Parameters, Returned]:
    """Make torch.compile leave `function` uncompiled, as every step needs the function's side effects."""
    disabled = torch.compiler.disable(function)

    @wraps(function)
    def run(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Returned:
        # Checked here, since calling a disabled function takes half a microsecond more.
        return (disabled if torch.compiler.is_compiling() else function)(*args, **kwargs)  # type: ignore[return-value]

    return run
