"""Saving while training goes on: the state is copied between two steps, and a thread writes the copy.

    main thread    step s | copy | step s + 1 | step s + 2 | ...  | step t | wait if need be, copy | ...
    this thread                  | to the host, checksum, disk .... | manifest, rename |

The copy is made on the stream of the steps, between the last kernel of step s and the first of step s + 1, so it is the
state after step s and nothing else. It stays on the GPU where that has room: there it takes as long as the GPU's memory
needs to read and write it once, and only this one step is longer. Otherwise it goes to page-locked memory of the host,
as fast as the bus is. The thread has a process group of its own, so that its collectives meet none of the training's.
"""

import gc
import logging
import math
import threading
import time
from dataclasses import replace
from datetime import timedelta

import psutil
import torch
import torch.distributed as dist
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.optim.keyed import CombinedOptimizer

from dlrm_overlap.checkpoint import Checkpointer, parts_to_store
from dlrm_overlap.launching.watch import Progress
from dlrm_overlap.storage.parts import Part
from dlrm_overlap.storage.save import gather
from dlrm_overlap.storage.tensor_file import CHUNK_BYTES

log = logging.getLogger("dlrm_overlap")

_SHARE = 0.5  # of the memory that is free before the first step: activations and graphs come later
_BEAT_S = 0.5


def place_of_copy(parts: list[Part], device: torch.device, local_ranks: int) -> torch.device | None:
    """Return where a copy of `parts` is to be kept, or None where there is no room for it.

    That is `device` if the copy takes at most half of its free memory; else the host, if the copies of its
    `local_ranks` ranks take at most half of what is available there.
    """
    sizes = [part.tensor.nbytes for part in parts]
    if device.type == "cuda":
        if sum(sizes) <= _SHARE * torch.cuda.mem_get_info(device)[0]:
            return device
        sizes = [1 << max(0, size - 1).bit_length() for size in sizes]  # how PyTorch allots page-locked memory
    fits = sum(sizes) * local_ranks <= _SHARE * psutil.virtual_memory().available
    return torch.device("cpu") if fits else None


class Snapshot:
    """A copy of what this rank stores. Its memory is made once and serves one save after the other."""

    def __init__(self, device: torch.device, place: torch.device) -> None:
        """Prepare copies of what is on `device`, to be kept at `place`."""
        self._on_gpu, self._place = device.type == "cuda", place
        self._held: dict[str, torch.Tensor] = {}
        self._taken_s = 0.0
        self.fault = ""
        """what is not finite in what was read so far, or nothing"""
        self.read_bytes = 0
        """bytes that `to_host` has returned since the copy was taken"""
        if self._on_gpu:
            self._stream = torch.cuda.Stream(device)
            self._begin, self._end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            self._landing = torch.empty(CHUNK_BYTES, dtype=torch.uint8, pin_memory=True)

    def reserve(self, parts: list[Part]) -> None:
        """Make room for copies of `parts`, which takes longer than to copy them."""
        for part in parts:
            source, held = part.tensor, self._held.get(part.key)
            if held is None or (held.shape, held.dtype) != (source.shape, source.dtype):
                place = self._place if source.is_cuda else source.device
                pinned = source.is_cuda and place.type == "cpu"
                self._held[part.key] = torch.empty(source.shape, dtype=source.dtype, device=place, pin_memory=pinned)

    @torch.no_grad()
    def take(self, parts: list[Part]) -> list[Part]:
        """Copy `parts` on the current stream, behind all that was issued there, and return the copies.

        On a GPU the copies are only issued; `to_host` waits for them.
        """
        begin = time.perf_counter()
        self.fault, self.read_bytes = "", 0
        self.reserve(parts)
        if self._on_gpu:
            self._begin.record()
        for part in parts:
            self._held[part.key].copy_(part.tensor, non_blocking=True)
        if self._on_gpu:
            self._end.record()
        self._taken_s = time.perf_counter() - begin
        return [replace(part, tensor=self._held[part.key]) for part in parts]

    def await_copies(self) -> float:
        """Wait until the copies are made, and return the seconds that they took."""
        if not self._on_gpu:
            return self._taken_s
        self._end.synchronize()
        return self._begin.elapsed_time(self._end) / 1e3

    def to_host(self, name: str, elements: torch.Tensor) -> torch.Tensor:
        """Return some elements of a copy on the host, as `ToHost` asks for; takes down in `fault` what is not finite.

        All copies are made when this is called.
        """
        if elements.is_cuda:
            landed = self._landing[: elements.nbytes].view(elements.dtype)
            with torch.cuda.stream(self._stream):
                landed.copy_(elements, non_blocking=True)
            self._stream.synchronize()
            elements = landed
        self.read_bytes += elements.nbytes
        if elements.is_floating_point() and elements.numel():
            least, greatest = elements.aminmax()  # NaN, if there is one
            if not (least.isfinite() and greatest.isfinite()):
                what = "a weight" if name.startswith("model.") else "an optimizer's state"
                self.fault = self.fault or f"{what} is nan or infinite"
        return elements


class BackgroundSaves:
    """Saves one checkpoint at a time beside training. All ranks call the same methods behind the same steps.

    Finite weights may be so large that every later loss is NaN. A save that stops the run looks at the loss of a
    held-out batch for that; here the loss of the step behind the copy, which is the first that the saved state gives,
    takes its place: a checkpoint is kept once all ranks know theirs to be finite.

    Example: `begin(10)`; step 11 gives `tell_loss(loss)`, and the file is written beside steps 11 to 40. `begin(50)`
    may follow after `wait()`, which returns at once then.
    """

    def __init__(
        self,
        checkpointer: Checkpointer,
        model: DistributedModelParallel,
        optimizer: CombinedOptimizer,
        device: torch.device,
        place: torch.device,
        timeout_s: float,
        progress: Progress,
    ) -> None:
        """Make the process group and what memory is known to be needed; a collective.

        Args:
            checkpointer: writes the checkpoints.
            model: of this rank.
            optimizer: its optimizers.
            device: of this rank.
            place: of the copies, `place_of_copy`.
            timeout_s: the longest that a rank may be behind the others in writing.
            progress: moves on while `wait` sees something being written.
        """
        self.step = 0
        """behind which the latest save was begun"""
        self.awaits_loss = False
        """whether the save under way needs `tell_loss`"""
        self._checkpointer, self._model, self._optimizer = checkpointer, model, optimizer
        self._device, self._progress = device, progress
        group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
        assert isinstance(group, dist.ProcessGroup), "every rank is in it"
        self._group = group
        self._parts: list[Part] = []
        self._snapshot = Snapshot(device, place)
        self._snapshot.reserve(parts_to_store(model, optimizer))
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._loss: torch.Tensor | None = None
        self._loss_known: torch.cuda.Event | None = None
        self._told = threading.Event()
        self._is_abandoned = False

    @property
    def failed(self) -> bool:
        """Whether the latest save has failed; `wait` says how."""
        return self._error is not None

    def begin(self, step: int, metrics: dict[str, float] | None = None) -> None:
        """Copy the state after `step` and have it written. No other save is under way.

        Args:
            step: number of steps taken, all of which are issued on the current stream.
            metrics: of an evaluation after this step; without one the save needs `tell_loss`.
        """
        assert self._thread is None, "the save before is waited for"
        begin = time.perf_counter()
        self.step, self.awaits_loss = step, metrics is None
        self._loss = self._loss_known = None
        self._told = threading.Event()
        if not self.awaits_loss:
            self._told.set()
        self._find_parts()
        parts = self._snapshot.take(self._parts)
        issued_s = time.perf_counter() - begin
        self._thread = threading.Thread(
            target=self._write, args=(step, parts, metrics, issued_s), name="save", daemon=True
        )
        self._thread.start()

    def tell_loss(self, loss: torch.Tensor) -> None:
        """Take `loss` [], of the step that was taken last, which the save under way may wait for."""
        self._find_parts()
        if self.awaits_loss:
            self.awaits_loss = False
            self._loss = loss.detach().clone()  # a captured step writes the next one to the same place
            if loss.is_cuda:
                self._loss_known = torch.cuda.Event()
                self._loss_known.record()
            self._told.set()

    def _find_parts(self) -> None:
        """Find what is to be stored, behind the first step: all states are made by then, and steps change them in place.

        To find it takes longer than many a step. Python's collector takes longer still to look at all objects that are
        loaded by now, and holds up every thread for it; the thread that writes makes enough objects to set it off. They
        stay loaded anyway, so the collector is told to leave them out.
        """
        if not self._parts:
            self._parts = parts_to_store(self._model, self._optimizer)
            self._snapshot.reserve(self._parts)
            gc.freeze()

    def wait(self) -> None:
        """Wait until the save under way, if any, is done.

        Raises:
            InputError: on all ranks, if one cannot write; the checkpoints before it stay.
            RefusedError: the same, if the state or the loss is not finite.
            RuntimeError: what CUDA or a collective has reported.
        """
        assert not self.awaits_loss, "tell_loss comes first"
        if self._thread is None:
            return
        read = 0
        while self._thread.is_alive():
            self._thread.join(_BEAT_S)
            if self._snapshot.read_bytes != read:
                read = self._snapshot.read_bytes
                self._progress.batch += 1
        self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def close(self, patience_s: float) -> None:
        """Give the save under way so many seconds, where the run ends by an error. It is not kept without its loss."""
        if self._thread is None:
            return
        self._is_abandoned = self.awaits_loss
        self._told.set()
        self._thread.join(patience_s)
        if self._thread.is_alive() or self._error is not None:
            log.warning("checkpoint: the state after step %d was being written, and is not saved", self.step)

    def _write(self, step: int, parts: list[Part], metrics: dict[str, float] | None, issued_s: float) -> None:
        begin = time.perf_counter()
        try:
            if self._device.type == "cuda":
                torch.cuda.set_device(self._device)
            copied_s = self._snapshot.await_copies()
            to_host = self._snapshot.to_host
            path = self._checkpointer.write(step, parts, metrics, self._group, to_host, self._refusal)
            gigabytes, written_s = self._snapshot.read_bytes / 1e9, time.perf_counter() - begin
            text = (
                "checkpoint: %s, %.3g GB a rank copied in %.4f s, issued in %.4f s, written beside training in %.1f s"
            )
            log.info(text, path, gigabytes, copied_s, issued_s, written_s)
        except BaseException as error:
            self._error = error

    def _refusal(self) -> str:
        """Return why the checkpoint is not to be kept, once the loss behind it is there; nothing if it is good."""
        self._told.wait()
        if self._is_abandoned:
            return "the run has ended before the loss of the step behind it was known"
        if self._snapshot.fault:
            return self._snapshot.fault
        if self._loss is None:
            return ""
        if self._loss_known is not None:
            self._loss_known.synchronize()
        loss = self._snapshot.to_host("loss", self._loss.reshape(1)).item()
        return "" if math.isfinite(loss) else f"the training loss of the step behind it is {loss}"


def begin_saving_beside(
    checkpointer: Checkpointer,
    model: DistributedModelParallel,
    optimizer: CombinedOptimizer,
    device: torch.device,
    local_ranks: int,
    timeout_s: float,
    progress: Progress,
) -> BackgroundSaves | None:
    """Return what saves beside training, or None, with a warning, where a rank has no room for a copy; a collective.

    Args:
        local_ranks: number of ranks on this host.
        checkpointer: as `BackgroundSaves` takes it, and so are the others.
        model: the same.
        optimizer: the same.
        device: the same.
        timeout_s: the same.
        progress: the same.
    """
    parts = parts_to_store(model, optimizer)
    place = place_of_copy(parts, device, local_ranks)
    if crowded := [rank for rank, found in enumerate(gather(place)) if found is None]:
        if dist.get_rank() == 0:
            text = "checkpoint.asynchronous: rank %d has no room for a copy of its %.3g GB: steps wait for each save"
            log.warning(text, crowded[0], sum(part.tensor.nbytes for part in parts) / 1e9)
        return None
    assert place is not None
    kept = "GPU" if place.type == "cuda" else "host"
    log.info("checkpoint.asynchronous: copies of the state are kept in the memory of the %s", kept)
    return BackgroundSaves(checkpointer, model, optimizer, device, place, timeout_s, progress)
