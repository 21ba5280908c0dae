"""How a rank issues its work: one order of all that a captured step does between ranks, and the streams of a step."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch

Parameters = ParamSpec("Parameters")
Returned = TypeVar("Returned")


class CommunicationOrder:
    """Issues all that raises or awaits a peer's flag, collectives included, one after the other in a captured step.

    A CUDA graph does not promise that its branches run side by side. If each rank could take its waits in an order of
    its own, rank 0 might wait for rank 1's ids in front of the lookup that rank 1 waits for in front of those ids. With
    one order, that of the capture, which is the same on every rank, the rank that is furthest behind never waits for
    one that waits for it. Whatever else a branch does is not ordered by this.

    Example:
        with order:
            wait_flags(flags, rank, epoch)
    """

    def __init__(self) -> None:
        self.is_captured = False
        """whether the step that is issued now is captured in a CUDA graph; otherwise it is eager"""
        self._last: torch.Event | None = None

    def begin(self) -> None:
        """Begin the order of a step that is captured from now on."""
        self.is_captured, self._last = True, None

    def end(self) -> None:
        """End it: later work is ordered by its streams alone."""
        self.is_captured, self._last = False, None

    def __enter__(self) -> None:
        if self.is_captured and self._last is not None:
            torch.cuda.current_stream().wait_event(self._last)

    def __exit__(self, *_: Any) -> None:
        if self.is_captured:
            self._last = torch.cuda.current_stream().record_event()


class OnStream:
    """A block whose work is issued on a stream of the current device, as by `torch.cuda.stream`.

    That takes a slow host 12 us, since it makes two `Stream` objects to come back by.

    Example:
        with OnStream(self._push_stream):
            push()
    """

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream.stream_id, stream.device_index, stream.device_type

    def __enter__(self) -> None:
        self._before = torch._C._cuda_getCurrentStream(self._stream[1])
        torch._C._cuda_setStream(*self._stream)

    def __exit__(self, *_: Any) -> None:
        torch._C._cuda_setStream(*self._before)


class CurrentStream:
    """The current stream of a device: called, it returns the object of the last call, if that is still the stream."""

    def __init__(self, device: torch.device) -> None:
        """Take a device with its index; a CPU has no stream to ask for."""
        self._device, self._raw = device, -1
        self._stream: torch.cuda.Stream | None = None

    def __call__(self) -> torch.cuda.Stream:
        """Return the current stream."""
        raw = torch._C._cuda_getCurrentRawStream(self._device.index)
        if raw != self._raw or self._stream is None:
            self._stream, self._raw = torch.cuda.current_stream(self._device), raw
        return self._stream


class Streams:
    """The streams of a pipeline on one device; on a CPU everything runs in the order in which it is issued."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        if not self._on_gpu:
            return
        current = torch.cuda.current_stream(device)
        # A step cannot be captured on the default stream, and all steps run on the one where they are captured.
        self.main_stream = current if current != torch.cuda.default_stream(device) else torch.cuda.Stream(device, -1)
        self._current = CurrentStream(current.device)
        self._copy = torch.cuda.Stream(device)
        self._ids = torch.cuda.Stream(device, priority=-2)
        self._on_main, self._on_copy, self._on_ids = map(OnStream, (self.main_stream, self._copy, self._ids))
        self._issued = [torch.cuda.Event() for _ in range(2)]
        self._called, self._copied, self._returned = (torch.cuda.Event() for _ in range(3))

    @contextmanager
    def main(self) -> Iterator[None]:
        """Return a context on the steps' stream, which waits for the caller's; at its end the other way."""
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
        finally:  # whoever catches an error may read the weights next
            self._returned.record(self.main_stream)
            current.wait_event(self._returned)

    def step_is_issued(self, buffer_index: int) -> None:
        """Note that all readers of the other buffer's staging memory have been issued."""
        if self._on_gpu:
            self._issued[buffer_index].record(self.main_stream)

    @contextmanager
    def copies(self, buffer_index: int, later: bool = False) -> Iterator[None]:
        """Return a context for copies to the staging part of `buffer_index`; steps issued after it find them done.

        Copies come after the caller's earlier work on the device, such as the batch itself. With `later`, they are of a
        batch for which there was such a context before, and wait for nothing else.
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
        """Let the work of `ids` begin where the steps' stream is now."""
        if self._on_gpu:
            self._ids.wait_stream(self.main_stream)

    def ids(self) -> AbstractContextManager[Any]:
        """Return a context for work beside the step, between `fork_ids` and `join_ids`."""
        return self._on_ids if self._on_gpu else nullcontext()

    def join_ids(self) -> None:
        """Make the steps' stream wait for the work beside it."""
        if self._on_gpu:
            self.main_stream.wait_stream(self._ids)


def uncompiled(function: Callable[Parameters, Returned]) -> Callable[Parameters, Returned]:
    """Keep a function out of compiled graphs: no graph of tensors holds its work, which is to be done in every step."""
    disabled = torch.compiler.disable(function)

    @wraps(function)
    def run(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Returned:
        # Asked for first, since calling a disabled function takes half a microsecond more.
        return (disabled if torch.compiler.is_compiling() else function)(*args, **kwargs)  # type: ignore[return-value]

    return run
