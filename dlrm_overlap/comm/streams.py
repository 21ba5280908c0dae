"""Streams of a GPU at little cost for the host: torch's own ways make several objects at each use."""

from typing import Any

import torch


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
