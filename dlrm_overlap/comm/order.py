"""How a rank issues its work: one order of all that a captured step does between ranks, and streams at little cost."""

from collections.abc import Callable
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
        self._device, self._raw = device, -1
        self._stream: torch.cuda.Stream | None = None

    def __call__(self) -> torch.cuda.Stream:
        """Return the current stream."""
        raw = torch._C._cuda_getCurrentRawStream(self._device.index)
        if raw != self._raw or self._stream is None:
            self._stream, self._raw = torch.cuda.current_stream(self._device), raw
        return self._stream


def uncompiled(function: Callable[Parameters, Returned]) -> Callable[Parameters, Returned]:
    """Keep a function out of compiled graphs: no graph of tensors holds its work, which is to be done in every step."""
    disabled = torch.compiler.disable(function)

    @wraps(function)
    def run(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Returned:
        # Asked for first, since calling a disabled function takes half a microsecond more.
        return (disabled if torch.compiler.is_compiling() else function)(*args, **kwargs)  # type: ignore[return-value]

    return run
