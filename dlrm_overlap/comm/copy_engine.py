"""Copies to a peer's memory by a GPU's copy engines, which leave its multiprocessors free (docs/results/lab.md)."""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch


class CopyEngine:
    """A stream of copies that runs concurrently with the current stream; every call can be captured in a CUDA graph.

    Example:
        engine.follow()  # after the kernels that write `rows` and the epoch
        engine.copy(at_the_peer, rows)
        engine.write_flag(flag_at_the_peer, epoch)
        product = a @ b
        engine.join()  # from here on `rows` may be overwritten
    """

    def __init__(self, device: torch.device, priority: int = 0) -> None:
        self.stream = torch.cuda.Stream(device, priority=priority)
        self._begun, self._done = torch.cuda.Event(), torch.cuda.Event()

    def follow(self) -> None:
        """Make this stream wait for the work that is now on the current stream."""
        self._begun.record(torch.cuda.current_stream(self.stream.device))
        self.stream.wait_event(self._begun)

    def join(self) -> None:
        """Make the current stream wait for the work that is now on this stream."""
        self._done.record(self.stream)
        torch.cuda.current_stream(self.stream.device).wait_event(self._done)

    def copy(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        """Copy between contiguous tensors of this GPU or a peer; takes a quarter of the host time of `Tensor.copy_`."""
        assert (destination.shape, destination.dtype) == (source.shape, source.dtype), "bytes are copied as they are"
        assert all(each.is_contiguous() for each in (destination, source)), "one range of bytes is copied to another"
        if source.device.type == "cpu":  # under Triton's interpreter nothing runs concurrently
            destination.copy_(source)
            return
        if not (size := source.numel() * source.itemsize):  # a graph cannot contain an empty copy
            return
        runtime = _runtime()
        kind, stream = runtime.cudaMemcpyKind.cudaMemcpyDeviceToDevice, self.stream.cuda_stream
        _check(runtime.cudaMemcpyAsync, destination.data_ptr(), source.data_ptr(), size, kind, stream)

    def write_flag(self, flag: torch.Tensor, word: torch.Tensor) -> None:
        """Copy `word` to `flag`, both [1] int64, after all earlier copies; a reader that acquires the flag sees them.

        A replayed graph copies the value that `word` has then. `word` must not change until the copy is done.
        """
        self.copy(flag, word)

    def wait_counter(self, word: torch.Tensor, count: int) -> None:
        """Make this stream wait, without a timeout, until `word` [1] int64 reaches the constant `count`, at least 1.

        Atomics at GPU scope or wider may increment it. Reset it before each use: after this wait (`join`), before the
        kernel that increments it, and before the next wait (`follow`). Launch that kernel first: its first launch loads
        it, which can wait for the whole device.
        """
        from cuda.bindings import driver  # pyright: ignore # compiled, and not on every CPU

        stream, address = driver.CUstream(self.stream.cuda_stream), driver.CUdeviceptr(word.data_ptr())
        reached = driver.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_GEQ.value
        _check(driver.cuStreamWaitValue64, stream, address, count, reached)


@lru_cache
def _runtime() -> Any:
    from cuda.bindings import runtime  # pyright: ignore # compiled, and not on every CPU

    return runtime


def _check(function: Callable[..., Any], *arguments: Any) -> None:
    (error,) = function(*arguments)
    if error.value != 0:
        raise RuntimeError(
            f"CUDA error: {function.__name__} returned {error.name}, where success is 0; see what failed on this GPU "
            f"before, or look the name up in CUDA's documentation"
        )
