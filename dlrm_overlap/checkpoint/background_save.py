"""Saving while training goes on: the state is copied between two steps, and a thread writes the copy.

    main thread    step s | copy | step s + 1 | step s + 2 | ...                    | step t | wait if need be, copy
    this thread                  | to the CPU, checksum, disk .... | manifest, rename |

The copy is made on the stream of the steps, and is the state after step s and nothing else. It stays on the GPU where
that has room; else it goes to page-locked memory. docs/architecture/runs.md has how long either takes. The
thread has a process group of its own, so that its collectives meet none of the training's.
"""

import gc
import logging
import math
import threading
import time
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.optim.keyed import CombinedOptimizer

from dlrm_overlap.checkpoint.checkpoint import Checkpointer, extents_to_store
from dlrm_overlap.checkpoint.storage.extents import Extent
from dlrm_overlap.checkpoint.storage.save import Refusal
from dlrm_overlap.checkpoint.storage.snapshot import Snapshot
from dlrm_overlap.config import in_one_line
from dlrm_overlap.launching.watch import Progress

log = logging.getLogger("dlrm_overlap")

_BEAT_S = 0.5


class BackgroundSaves:
    """Saves one checkpoint at a time beside training. All ranks call the same methods after the same steps.

    Finite weights may be so large that every later loss is NaN. A save that stops the run looks at the loss of a
    held-out batch for that; here the loss of the step after the copy, which is the first that the saved state gives,
    takes its place: a checkpoint is kept once all ranks know theirs to be finite.

    Example: `begin(10)`; step 11 gives `take_loss(loss)`, and the file is written beside steps 11 to 40. `begin(50)`
    may follow after `wait()`, which returns at once then.
    """

    def __init__(
        self,
        checkpointer: Checkpointer,
        model: DistributedModelParallel,
        optimizer: CombinedOptimizer,
        device: torch.device,
        kept_on: torch.device,
        timeout_s: float,
        progress: Progress,
        check: Callable[[], None],
    ) -> None:
        """Make the process group and the memory of the copies; a collective.

        Args:
            checkpointer: writes the checkpoints.
            model: of this rank.
            optimizer: its optimizers.
            device: of this rank.
            kept_on: device of the copies, `device_of_copy`.
            timeout_s: the longest that a rank may write after the others are done.
            progress: moves on while `wait` sees something being written.
            check: raises recorded faults of kernels.
        """
        self.step = 0
        """after which the latest save was begun"""
        self.awaits_loss = False
        """whether the save under way needs `take_loss`"""
        self._checkpointer, self._model, self._optimizer = checkpointer, model, optimizer
        self._device, self._progress, self._check = device, progress, check
        group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
        assert isinstance(group, dist.ProcessGroup), "every rank is in it"
        self._group = group
        self._copies: list[Extent] = []
        self._snapshot = Snapshot(device, kept_on)
        self._snapshot.reserve(extents_to_store(model, optimizer))
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._loss: torch.Tensor | None = None
        self._loss_known: torch.cuda.Event | None = None
        self._loss_taken = threading.Event()
        self._is_abandoned = False

    @property
    def failed(self) -> bool:
        """Whether the latest save has failed; `wait` says how."""
        return self._error is not None

    def begin(self, step: int, metrics: dict[str, float] | None = None) -> None:
        """Copy the state after `step` and have it written. No other save is under way.

        Args:
            step: number of steps taken, all of which are issued on the current stream.
            metrics: of an evaluation after this step; without one the save needs `take_loss`.
        """
        assert self._thread is None, "the save before is waited for"
        begin = time.perf_counter()
        self.step, self.awaits_loss = step, metrics is None
        self._loss = self._loss_known = None
        self._loss_taken = threading.Event()
        if not self.awaits_loss:
            self._loss_taken.set()
        self._find_extents()
        self._snapshot.take()
        begun = step, metrics, time.perf_counter() - begin
        self._thread = threading.Thread(target=self._write, args=begun, name="save", daemon=True)
        self._thread.start()

    def take_loss(self, loss: torch.Tensor) -> None:
        """Take `loss` [], of the step that was taken last, which the save under way may wait for."""
        self._find_extents()
        if self.awaits_loss:
            self.awaits_loss = False
            self._loss = loss.detach().clone()  # a captured step writes the next one to the same place
            if loss.is_cuda:
                self._loss_known = torch.cuda.Event()
                self._loss_known.record()
            self._loss_taken.set()

    def _find_extents(self) -> None:
        """Find the extents to store, after the first step: all states are made by then, and change in place.

        To find it takes longer than many a step. Python's collector may take longer still to look at all objects that
        are loaded by now, and holds up every thread for it; the thread that writes makes enough objects to set it off.
        They stay loaded anyway, so the collector leaves them out.
        """
        if not self._copies:
            self._copies = self._snapshot.reserve(extents_to_store(self._model, self._optimizer))
            gc.freeze()

    def wait(self) -> None:
        """Wait until the save under way, if any, is done.

        Raises:
            InputError: on all ranks, if one cannot write; the checkpoints before it stay.
            RefusedError: the same, if one refuses the state.
            RuntimeError: of CUDA or of a collective.
        """
        assert not self.awaits_loss, "take_loss comes first"
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
        if self._thread is None:
            return
        self._is_abandoned |= self.awaits_loss
        self._loss_taken.set()
        self._thread.join(patience_s)
        if self._thread.is_alive() or self._error is not None:
            log.warning("checkpoint: the state after step %d was being written, and is not saved", self.step)

    def _write(self, step: int, metrics: dict[str, float] | None, issued_s: float) -> None:
        begin = time.perf_counter()
        try:
            if self._device.type == "cuda":
                torch.cuda.set_device(self._device)
            copied_s = self._snapshot.await_copies()
            to_cpu = self._snapshot.to_cpu
            path = self._checkpointer.write(step, self._copies, metrics, self._group, to_cpu, self._refusal)
            gigabytes, written_s = self._snapshot.read_bytes / 1e9, time.perf_counter() - begin
            text = (
                "checkpoint: %s, %.3g GB a rank copied in %.4f s, issued in %.4f s, written beside training in %.1f s"
            )
            log.info(text, path, gigabytes, copied_s, issued_s, written_s)
        except BaseException as error:
            self._error = error

    def _refusal(self) -> Refusal | None:
        """Wait for the loss of the step after the copy; return why the checkpoint is refused, None if it is good."""
        self._loss_taken.wait()
        if self._is_abandoned:
            return Refusal("the run has ended before the loss of the step behind it was known")
        fault, loss = self._snapshot.fault, 0.0  # `to_cpu` would take a loss that is not finite for a state
        if self._loss is not None:
            if self._loss_known is not None:
                self._loss_known.synchronize()
            loss = self._snapshot.to_cpu("loss", self._loss.reshape(1)).item()
        try:
            self._check()  # kernels have recorded all faults of that step and those before
        except Exception as error:
            return Refusal(in_one_line(error))
        if fault:
            return Refusal(fault, not_finite=True)
        return None if math.isfinite(loss) else Refusal(f"the loss of the step behind it is {loss}", not_finite=True)
