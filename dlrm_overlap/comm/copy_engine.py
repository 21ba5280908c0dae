"""A GPU's copy engines: they carry bytes to a peer's memory while all multiprocessors do something else.

What a `CopyEngine` is given runs on one stream, one thing after the other: one flow of copies fills the links of an
H200, three side by side reach two thirds of that (docs/lab.md). Every call can be captured in a CUDA
graph, where a copy takes the GPU some 2 us beside its bytes; issued one by one, it takes the host 9.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch


class CopyEngine:
    """A stream of copies beside the current one.

    Example:
        engine = CopyEngine(device)
        engine.follow()  # after the kernels that write `rows` and the epoch
        engine.copy(at_the_peer, rows)
        engine.write_flag(flag_at_the_peer, epoch)
        product = a @ b
        engine.join()  # from here on `rows` may be overwritten
    """

    def __init__(self, device: torch.device, priority: int = 0) -> None:
        """Make the stream, of a priority that kernels on it have: copies have none."""
        self.stream = torch.cuda.Stream(device, priority=priority)
        """on which the copies run; kernels may be put there, too"""
        self._begun, self._done = torch.cuda.Event(), torch.cuda.Event()

    def follow(self) -> None:
        """Make all later work here wait for the work that is on the current stream by now."""
        self._begun.record(torch.cuda.current_stream(self.stream.device))
        self.stream.wait_event(self._begun)

    def join(self) -> None:
        """Make the current stream wait until all that has been issued by now is done."""
        self._done.record(self.stream)
        torch.cuda.current_stream(self.stream.device).wait_event(self._done)

    def copy(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        """Copy `source` to `destination`, contiguous and alike, in this GPU's memory or a peer's.

        This takes a quarter of the host's time of `copy_` on a stream that has to be entered first.
        """
        assert (destination.shape, destination.dtype) == (source.shape, source.dtype), "bytes are copied as they are"
        assert all(each.is_contiguous() for each in (destination, source)), "one range of bytes is copied to another"
        if source.device.type == "cpu":  # where kernels are interpreted, nothing runs beside
            destination.copy_(source)
            return
        if not (size := source.numel() * source.itemsize):  # of which no graph can hold a copy
            return
        runtime = _runtime()
        kind, stream = runtime.cudaMemcpyKind.cudaMemcpyDeviceToDevice, self.stream.cuda_stream
        _check(runtime.cudaMemcpyAsync, destination.data_ptr(), source.data_ptr(), size, kind, stream)

    def write_flag(self, flag: torch.Tensor, word: torch.Tensor) -> None:
        """Write the number in `word` to `flag` once all copies before are done, without a kernel.

        It is a copy of 8 bytes: work on a stream begins when all before it is complete, at a peer too, so whoever
        acquires the flag there sees the copied bytes. The number is read when the copy runs, so a replayed graph writes
        the number of that moment; a stream memory operation would write the number of the capture.

        Args:
            flag: [1] int64, in this GPU's memory or a peer's.
            word: [1] int64, in this GPU's memory; unchanged until the copy is done.
        """
        self.copy(flag, word)

    def wait_counter(self, word: torch.Tensor, count: int) -> None:
        """Make all later work here wait until `word` has reached `count`.

        The number is a constant, so this can be captured and replayed, if the word is set back before each time: once
        this is done, which `join` orders, and before both the kernel that raises it and, by `follow`, the next wait.
        Nothing bounds the wait: the kernel is on this GPU, and may come after bounded waits of its own.

        Launch the kernel first, and call this then. A kernel's first launch loads it, which can wait for the
        whole device, and so for the stream that waits for the kernel.

        Args:
            word: [1] int64 in this GPU's memory, which kernels raise by atomics at GPU scope or wider, 0 before.
            count: at least 1.
        """
        from cuda.bindings import driver  # pyright: ignore[reportMissingImports] # not on a CPU

        stream, address = driver.CUstream(self.stream.cuda_stream), driver.CUdeviceptr(word.data_ptr())
        reached = driver.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_GEQ.value
        _check(driver.cuStreamWaitValue64, stream, address, count, reached)


@lru_cache
def _runtime() -> Any:
    from cuda.bindings import runtime  # pyright: ignore[reportMissingImports] # not on a CPU

    return runtime


def _check(function: Callable[..., Any], *arguments: Any) -> None:
    (error,) = function(*arguments)
    if error.value != 0:
        raise RuntimeError(
            f"CUDA error: {function.__name__} returned {error.name}, where success is 0; see what failed on this GPU "
            f"before, or look the name up in CUDA's documentation"
        )
