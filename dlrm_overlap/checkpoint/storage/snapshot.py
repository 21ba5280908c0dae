"""A copy of the state that a rank stores, to be written while the state goes on to change."""

import time
from collections.abc import Callable
from dataclasses import replace

import psutil
import torch

from dlrm_overlap.checkpoint.storage.extents import Extent
from dlrm_overlap.checkpoint.storage.tensor_file import CHUNK_BYTES

_SHARE = 0.5  # of the memory that is free before the first step: activations and graphs come later


def device_of_copy(extents: list[Extent], device: torch.device, local_ranks: int) -> torch.device | None:
    """Return where a copy of `extents` is to be kept, or None where there is no room for it.

    That is `device` if the copy takes at most half of its free memory; else the host, if the copies of its
    `local_ranks` ranks take at most half of the available memory there.
    """
    sizes = [extent.tensor.nbytes for extent in extents]
    if device.type == "cuda":
        if sum(sizes) <= _SHARE * torch.cuda.mem_get_info(device)[0]:
            return device
        sizes = [1 << max(0, size - 1).bit_length() for size in sizes]  # how PyTorch allots page-locked memory
    fits = sum(sizes) * local_ranks <= _SHARE * psutil.virtual_memory().available
    return torch.device("cpu") if fits else None


class Reader:
    """Brings elements of a state to the CPU, for a file, and looks at them."""

    def __init__(self, device: torch.device) -> None:
        """Read tensors that are on `device` or on the CPU."""
        self._device, self._landing = device, torch.empty(0, dtype=torch.uint8, device="cpu")
        self.begin()

    def begin(self, tick: Callable[[], None] = lambda: None) -> None:
        """Begin to read a state; `tick` is called for each piece."""
        self._tick = tick
        self.fault = ""
        """the first fault in the elements read so far, one that is not finite; or nothing"""
        self.read_bytes = 0
        """bytes that `to_cpu` has returned"""

    def land(self, elements: torch.Tensor) -> torch.Tensor:
        """Return at most CHUNK_BYTES of elements on the CPU, where they last until the next call.

        Work that writes them is done when this is called; work that was issued since goes on beside.
        """
        if not elements.is_cuda:
            return elements
        if not self._landing.numel():
            self._stream = torch.cuda.Stream(self._device)
            self._landing = torch.empty(CHUNK_BYTES, dtype=torch.uint8, device="cpu", pin_memory=True)
        landed = self._landing[: elements.nbytes].view(elements.dtype)
        with torch.cuda.stream(self._stream):
            landed.copy_(elements, non_blocking=True)
        self._stream.synchronize()
        return landed

    def to_cpu(self, name: str, elements: torch.Tensor) -> torch.Tensor:
        """Return some elements on the CPU, as `ToCpu` asks for; records in `fault` what is not finite."""
        self._tick()
        elements = self.land(elements)
        self.read_bytes += elements.nbytes
        if elements.is_floating_point() and elements.numel():
            least, greatest = elements.aminmax()  # NaN, if there is one
            if not (least.isfinite() and greatest.isfinite()):
                is_weight = name.startswith("model.")
                fault = "a weight is nan or infinite" if is_weight else "an optimizer's state is nan or infinite"
                self.fault = self.fault or fault
        return elements


class Snapshot:
    """A copy of the extents that this rank stores. Its memory is made once and serves one save after the other."""

    def __init__(self, device: torch.device, kept_on: torch.device) -> None:
        """Prepare copies of state on `device`, to be kept on `kept_on`."""
        self._on_gpu, self._kept_on = device.type == "cuda", kept_on
        self._held: dict[str, torch.Tensor] = {}
        self._pairs: dict[torch.dtype, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
        self._taken_s = 0.0
        if self._on_gpu:
            self._begin, self._end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def reserve(self, extents: list[Extent]) -> list[Extent]:
        """Make room for copies of `extents`, which takes longer than to copy them, and return what `take` will fill."""
        self._pairs = {}
        for extent in extents:
            source, held = extent.tensor, self._held.get(extent.key)
            if held is None or (held.shape, held.dtype) != (source.shape, source.dtype):
                target = self._kept_on if source.is_cuda else source.device
                pinned = source.is_cuda and target.type == "cpu"
                held = torch.empty(source.shape, dtype=source.dtype, device=target, pin_memory=pinned)
                self._held[extent.key] = held
            targets, sources = self._pairs.setdefault(source.dtype, ([], []))
            targets.append(held)
            sources.append(source)
        return [replace(extent, tensor=self._held[extent.key]) for extent in extents]

    @torch.no_grad()
    def take(self) -> None:
        """Copy the extents of `reserve` on the current stream, after all work issued there.

        On a GPU the copies are only issued; `await_copies` waits for them. Those that stay there are a kernel for
        dozens of tensors of one type: a copy for each would take the host and the GPU longer, between two steps.
        """
        begin = time.perf_counter()
        if self._on_gpu:
            self._begin.record()
        for targets, sources in self._pairs.values():
            torch._foreach_copy_(targets, sources, non_blocking=True)  # type: ignore[no-untyped-call]
        if self._on_gpu:
            self._end.record()
        self._taken_s = time.perf_counter() - begin

    def await_copies(self) -> float:
        """Wait until the copies are made, and return the seconds that they took."""
        if not self._on_gpu:
            return self._taken_s
        self._end.synchronize()
        return self._begin.elapsed_time(self._end) / 1e3
