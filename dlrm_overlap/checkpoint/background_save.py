"""Saving while training goes on: the state is copied between two steps, and a thread writes the copy.

    main thread    step s | copy | step s + 1 | copy on | step s + 2 | copy on | ...  | step t | wait if need be, copy
    this thread                                                 | to the host, checksum, disk .... | manifest, rename |

The copy is made on the stream of the steps, and is the state after step s and nothing else. It stays on the GPU where
that has room. Rows, by far the most of it, are copied a few at a time, between steps, and each step puts by those that
it is about to update and the copy has not come to (`embedding.device.kept_rows`). All else is copied at once between
step s and step s + 1, and no rows with it: the dense part, and rows that our kernels do not update. Without room on the
GPU, all of it goes to page-locked memory of the host at once, as fast as the bus is. The thread starts when all of it
has been issued. It has a process group of its own, so that its collectives meet none of the training's.
"""

import gc
import logging
import math
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.optim.keyed import CombinedOptimizer

from dlrm_overlap.checkpoint.checkpoint import Checkpointer, parts_to_store
from dlrm_overlap.checkpoint.storage.parts import Part
from dlrm_overlap.checkpoint.storage.save import Refusal
from dlrm_overlap.checkpoint.storage.snapshot import Snapshot
from dlrm_overlap.config import in_one_line
from dlrm_overlap.embedding.sharded_module import exchanges
from dlrm_overlap.launching.watch import Progress

if TYPE_CHECKING:
    from dlrm_overlap.embedding.device.kept_rows import KeptRows

log = logging.getLogger("dlrm_overlap")

_BEAT_S = 0.5
_PIECE_BYTES = 1 << 26  # of rows, copied behind each step: 1% of a step that reads and writes 12 GB
_ALL = 1 << 62


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
        check: Callable[[], None],
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
            check: raises what kernels have recorded.
        """
        self.step = 0
        """behind which the latest save was begun"""
        self.awaits_loss = False
        """whether the save under way needs `tell_loss`"""
        self._checkpointer, self._model, self._optimizer = checkpointer, model, optimizer
        self._device, self._progress, self._check = device, progress, check
        group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
        assert isinstance(group, dist.ProcessGroup), "every rank is in it"
        self._group = group
        self._kept: list[KeptRows] = []
        if place.type == "cuda":
            self._kept = [kept for each in exchanges(model) if (kept := each.keep_rows()) is not None]
        self._copies: list[Part] = []
        """of all parts: those made between two steps, then those made beside steps"""
        self._is_spreading = False
        self._snapshot = Snapshot(device, place)
        if not self._kept:
            self._snapshot.reserve(parts_to_store(model, optimizer))
        self._thread: threading.Thread | None = None
        self._begun: tuple[int, dict[str, float] | None, float] = 0, None, 0.0
        """step, metrics and the seconds of `begin`, of the save under way"""
        self._is_spreading = False
        """whether the copies are still to be completed, behind which the thread starts"""
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
        assert not self._is_spreading, "the save before is waited for"
        begin = time.perf_counter()
        self.step, self.awaits_loss = step, metrics is None
        self._loss = self._loss_known = None
        self._told = threading.Event()
        if not self.awaits_loss:
            self._told.set()
        self._find_parts()
        self._snapshot.take()
        for kept in self._kept:
            kept.begin()
        # All else is left to `tell_loss`: the GPU may be waiting for the next step, which puts by the most rows, too.
        self._is_spreading = True
        self._begun = step, metrics, time.perf_counter() - begin

    def tell_loss(self, loss: torch.Tensor) -> None:
        """Take `loss` [], of the step that was taken last, which the save under way may wait for."""
        self._find_parts()
        self._copy_on(_PIECE_BYTES)
        if self.awaits_loss:
            self.awaits_loss = False
            self._loss = loss.detach().clone()  # a captured step writes the next one to the same place
            if loss.is_cuda:
                self._loss_known = torch.cuda.Event()
                self._loss_known.record()
            self._told.set()

    def _find_parts(self) -> None:
        """Find what is to be stored, behind the first step: all states are made by then, and change in place.

        To find it takes longer than many a step. Python's collector may take longer still to look at all objects that
        are loaded by now, and holds up every thread for it; the thread that writes makes enough objects to set it off.
        They stay loaded anyway, so the collector is told to leave them out.
        """
        if not self._copies:
            at_once, spread = [], []
            for part in parts_to_store(self._model, self._optimizer):
                copy = next((copy for kept in self._kept if (copy := kept.of(part.tensor)) is not None), None)
                if copy is None:
                    at_once.append(part)
                else:
                    spread.append(replace(part, tensor=copy))
            self._copies = [*self._snapshot.reserve(at_once), *spread]
            gc.freeze()

    def _copy_on(self, most_bytes: int) -> None:
        """Copy so many bytes more of the rows, where a copy is under way, and start the thread behind the last."""
        if not self._is_spreading:
            return
        complete = [kept.advance(most_bytes) for kept in self._kept]
        if all(complete):
            if complete:
                self._snapshot.end_copies()
            self._is_spreading = False
            self._thread = threading.Thread(target=self._write, args=self._begun, name="save", daemon=True)
            self._thread.start()

    def wait(self) -> None:
        """Wait until the save under way, if any, is done.

        Raises:
            InputError: on all ranks, if one cannot write; the checkpoints before it stay.
            RefusedError: the same, if one refuses the state.
            RuntimeError: what CUDA or a collective has reported.
        """
        assert not self.awaits_loss, "tell_loss comes first"
        self._copy_on(_ALL)
        if self._thread is None:
            return
        read = 0
        while self._thread.is_alive():
            self._thread.join(_BEAT_S)
            if self._snapshot.read_bytes != read:
                read = self._snapshot.read_bytes
                self._progress.tick()
        self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def close(self, patience_s: float) -> None:
        """Give the save under way so many seconds, where the run ends by an error. It is not kept without its loss."""
        if self._thread is None and not self._is_spreading:
            return
        self._is_abandoned |= self.awaits_loss
        self._told.set()
        try:
            self._copy_on(_ALL)
        except RuntimeError:  # the GPU has stopped
            self._is_abandoned = True
        if self._thread is not None:
            self._thread.join(patience_s)
        if self._thread is None or self._thread.is_alive() or self._error is not None:
            log.warning("checkpoint: the state after step %d was being written, and is not saved", self.step)

    def _write(self, step: int, metrics: dict[str, float] | None, issued_s: float) -> None:
        begin = time.perf_counter()
        try:
            if self._device.type == "cuda":
                torch.cuda.set_device(self._device)
            copied_s = self._snapshot.await_copies()
            to_host = self._snapshot.to_host
            path = self._checkpointer.write(step, self._copies, metrics, self._group, to_host, self._refusal)
            gigabytes, written_s = self._snapshot.read_bytes / 1e9, time.perf_counter() - begin
            text = (
                "checkpoint: %s, %.3g GB a rank copied in %.4f s, issued in %.4f s, written beside training in %.1f s"
            )
            log.info(text, path, gigabytes, copied_s, issued_s, written_s)
        except BaseException as error:
            self._error = error

    def _refusal(self) -> Refusal | None:
        """Return why the checkpoint is not to be kept, once the loss behind it is there; None if it is good."""
        self._told.wait()
        if self._is_abandoned:
            return Refusal("the run has ended before the loss of the step behind it was known")
        fault, loss = self._snapshot.fault, 0.0  # `to_host` would take a loss that is not finite for a state
        if self._loss is not None:
            if self._loss_known is not None:
                self._loss_known.synchronize()
            loss = self._snapshot.to_host("loss", self._loss.reshape(1)).item()
        try:
            self._check()  # kernels have recorded by now whatever they had against that step and those before
        except Exception as error:
            return Refusal(in_one_line(error))
        if fault:
            return Refusal(fault, not_finite=True)
        return None if math.isfinite(loss) else Refusal(f"the loss of the step behind it is {loss}", not_finite=True)
