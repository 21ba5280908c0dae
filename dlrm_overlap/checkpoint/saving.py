"""The saves of a run: they stop it, or copy the state between two steps and have a thread write the copy.

    main thread    step s | copy | step s + 1 | step s + 2 | ...                    | step t | wait if need be, copy
    this thread                  | to the CPU, checksum, disk .... | manifest, rename |

The copy is made on the stream of the steps, and is the state after step s and nothing else. It stays on the GPU where
that has room; else it goes to page-locked memory. docs/architecture/runs.md has how long either takes. The thread has a
process group of its own, so that its collectives meet none of the training's.

Either way every element is looked at where it is written, and a checkpoint appears only if all are finite. Finite
weights may be so large that every later loss is NaN, and a good checkpoint would go for them. So a save that stops the
run looks at the loss of a held-out batch, too, unless an evaluation has; one beside it at the loss of the step after
the copy, which is the first that the saved state gives.

Example: `save(10, beside=True)`; step 11 gives `took_step(loss)`, and the file is written beside steps 11 to 40.
"""

import gc
import logging
import math
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.optim.keyed import CombinedOptimizer

from dlrm_overlap.checkpoint.checkpoint import Checkpointer, extents_to_store
from dlrm_overlap.checkpoint.storage.extents import Extent
from dlrm_overlap.checkpoint.storage.save import gather
from dlrm_overlap.checkpoint.storage.snapshot import Reader, Snapshot, device_of_copy
from dlrm_overlap.comm.record import ExchangeTimeoutError
from dlrm_overlap.config import Config, InputError, in_one_line
from dlrm_overlap.embedding.sharded_module import exchanges
from dlrm_overlap.launching.process_group import LAST_RESORT
from dlrm_overlap.launching.watch import Progress

log = logging.getLogger("dlrm_overlap")

_NOTABLE_S = 0.1
_PATIENCE_S = 10.0  # with a save under way, where the run ends by an error that other ranks may not have
_BEAT_S = 0.5


class NotFiniteError(InputError):
    """A loss or a weight is NaN or infinite. All ranks raise it at one step."""


def require_finite(finite: bool, otherwise: str, step: int, config: Config) -> None:
    """Raise `NotFiniteError` unless the state after `step` is `finite`, which is the same on all ranks."""
    if not finite:
        raise _not_finite(otherwise, step, config)


def _not_finite(fault: str, step: int, config: Config) -> NotFiniteError:
    train, embedding = config.train, config.embedding
    return NotFiniteError(
        f"step {step}: {fault} and must be finite, so the run ends here and does not save this state; lower train.lr "
        f"{train.lr:g} or embedding.lr {embedding.lr:g}, or raise train.warmup_steps {train.warmup_steps}"
    )


class Saves:
    """The saves of a run. All ranks call the same methods after the same steps."""

    def __init__(
        self,
        config: Config,
        checkpointer: Checkpointer,
        model: DistributedModelParallel,
        optimizer: CombinedOptimizer,
        device: torch.device,
        check: Callable[[], None],
        held_out_loss: Callable[[], float],
    ) -> None:
        """`check` raises recorded faults of kernels; `held_out_loss` is a collective, of one held-out batch."""
        self.step = 0
        """after which the state was saved last, or loaded"""
        self._config, self._checkpointer = config, checkpointer
        self._model, self._optimizer, self._device = model, optimizer, device
        self._check, self._held_out_loss = check, held_out_loss
        self._reader = Reader(device)
        self._snapshot: Snapshot | None = None
        """of saves beside training, where there is room for one"""
        self._copies: list[Extent] = []
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._begun = 0
        """the step of the latest save beside training"""
        self._awaits_loss = self._is_abandoned = False
        self._loss: torch.Tensor | None = None
        self._loss_known: torch.cuda.Event | None = None
        self._loss_taken = threading.Event()

    @property
    def stop_the_run(self) -> bool:
        """Whether steps wait until a save on the way is written."""
        return self._snapshot is None

    @property
    def failed(self) -> bool:
        """Whether a save that was begun has failed; `finish` raises how."""
        return self._error is not None

    def prepare(self, local_ranks: int, progress: Progress) -> None:
        """Make the folder of this run's saves, the memory of copies and a process group, before its first step.

        A collective. Where a rank has no room for a copy of the state, saves stop the run, with a warning.

        Args:
            local_ranks: number of ranks on this host.
            progress: moves on while a save is waited for.

        Raises:
            InputError: on all ranks, if one does not see the folder.
        """
        about = self._config.checkpoint
        if about.every or about.last:
            self._checkpointer.make_shared_folder()
        if not (about.every and about.asynchronous):
            return
        extents = extents_to_store(self._model, self._optimizer)
        kept_on = device_of_copy(extents, self._device, local_ranks)
        if crowded := [rank for rank, found in enumerate(gather(kept_on)) if found is None]:
            if dist.get_rank() == 0:
                text = "checkpoint.asynchronous: rank %d has no room for a copy of what it stores: saves stop the run"
                log.warning(text, crowded[0])
            return
        assert kept_on is not None
        kept = "GPU" if kept_on.type == "cuda" else "host"
        log.info("checkpoint.asynchronous: copies of the state are kept in the memory of the %s", kept)
        self._progress = progress
        # Bounds the time that a rank may write after the others are done.
        timeout = timedelta(seconds=LAST_RESORT * self._config.embedding.wait_timeout_s)
        group = dist.new_group(backend="gloo", timeout=timeout)
        assert isinstance(group, dist.ProcessGroup), "every rank is in it"
        self._group = group
        self._snapshot = Snapshot(self._device, kept_on)
        self._snapshot.reserve(extents)

    def save(self, step: int, metrics: dict[str, float] | None = None, beside: bool = False) -> None:
        """Save a checkpoint after `step`, unless that is done, and only of a state that is whole; a collective.

        A rank whose kernels have recorded a fault raises it before the collective save, so no checkpoint appears.

        Args:
            step: number of steps taken.
            metrics: of an evaluation after this step.
            beside: where `checkpoint.asynchronous` is set, only copy the state, and have it checked and written while
                training goes on; `finish` raises the faults.

        Raises:
            InputError: on all ranks, if one cannot write, be it now or in the save before.
            NotFiniteError: if a weight, an optimizer's state or the loss of a batch is not finite.
        """
        if step == self.step:
            return
        begin = time.perf_counter()
        self.finish()
        if beside and self._snapshot is not None:
            if (waited_s := time.perf_counter() - begin) > _NOTABLE_S:
                text = "checkpoint: %.1f s of waiting behind step %d, since checkpoint.every is less than a save takes"
                log.info(text, waited_s, step)
            self._begin(self._snapshot, step, metrics)
            self.step = step
            return
        begin = time.perf_counter()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._check()

        def refusal() -> InputError | None:
            loss = 0.0 if metrics is not None else self._held_out_loss()
            return self._judge(step, loss, "the loss of the first held-out batch is")

        extents = extents_to_store(self._model, self._optimizer)
        self._reader.begin(self._checkpointer.tick)
        try:
            path = self._checkpointer.write(step, extents, metrics, None, self._reader.to_cpu, refusal)
        except InputError:
            self._check()  # this rank may be the one that knows more
            raise
        self.step = step
        log.info("checkpoint: %s, %.1f s", path, time.perf_counter() - begin)

    def _judge(self, step: int, loss: float, text: str) -> InputError | None:
        """Return why a checkpoint whose elements have been read is refused, None if it is good."""
        fault = self._reader.fault or ("" if math.isfinite(loss) else f"{text} {loss}")
        return _not_finite(fault, step, self._config) if fault else None

    def _begin(self, snapshot: Snapshot, step: int, metrics: dict[str, float] | None) -> None:
        """Copy the state after `step`, all of which is issued on the current stream, and have it written."""
        begin = time.perf_counter()
        self._begun, self._awaits_loss = step, metrics is None
        self._loss = self._loss_known = None
        self._loss_taken = threading.Event()
        if not self._awaits_loss:
            self._loss_taken.set()
        self._find_extents(snapshot)
        self._reader.begin()
        for exchange in exchanges(self._model):
            exchange.write_back()
        snapshot.take()
        begun = snapshot, step, metrics, dict(self._checkpointer.about), time.perf_counter() - begin
        self._thread = threading.Thread(target=self._write, args=begun, name="save", daemon=True)
        self._thread.start()

    def took_step(self, loss: torch.Tensor) -> None:
        """Take the loss [] of the step that was just issued, which a save under way may wait for."""
        if self._snapshot is None:
            return
        self._find_extents(self._snapshot)
        if self._awaits_loss:
            self._awaits_loss = False
            self._loss = loss.detach().clone()  # a captured step writes the next one to the same place
            if loss.is_cuda:
                self._loss_known = torch.cuda.Event()
                self._loss_known.record()
            self._loss_taken.set()

    def _find_extents(self, snapshot: Snapshot) -> None:
        """Find the extents to store, after the first step: all states are made by then, and change in place.

        To find it takes longer than many a step. Python's collector may take longer still to look at all objects that
        are loaded by now, and holds up every thread for it; the thread that writes makes enough objects to set it off.
        They stay loaded anyway, so the collector leaves them out.
        """
        if not self._copies:
            self._copies = snapshot.reserve(extents_to_store(self._model, self._optimizer))
            gc.freeze()

    def finish(self) -> None:
        """Wait for the save that is under way beside training, if any; a collective.

        Raises:
            InputError: on all ranks, if one could not write; the checkpoints before it stay.
            NotFiniteError: as `save` does.
        """
        if self._awaits_loss:  # no step has followed
            self.took_step(torch.tensor(self._held_out_loss()))
        if self._thread is None:
            return
        read = 0
        while self._thread.is_alive():
            self._thread.join(_BEAT_S)
            if self._reader.read_bytes != read:
                read = self._reader.read_bytes
                self._progress.tick()
        self._thread = None
        error, self._error = self._error, None
        if error is not None:
            self._check()  # this rank may be the one that knows more
            raise error

    def close(self, error: Exception) -> None:
        """Give a save that is under way some time, where the run ends by `error`. It is not kept without its loss."""
        if self._thread is None:
            return
        patience_s = _PATIENCE_S  # other ranks may have no such error, and not be there any more
        if isinstance(error, InputError):  # all ranks have it
            patience_s = self._config.embedding.wait_timeout_s
        elif isinstance(error, ExchangeTimeoutError):  # the save has had the whole bound, and needs the same peer
            patience_s = 0.0
        self._is_abandoned |= self._awaits_loss
        self._loss_taken.set()
        self._thread.join(patience_s)
        if self._thread.is_alive() or self._error is not None:
            log.warning("checkpoint: the state after step %d was being written, and is not saved", self._begun)

    def _write(
        self,
        snapshot: Snapshot,
        step: int,
        metrics: dict[str, float] | None,
        about: dict[str, Any],
        issued_s: float,
    ) -> None:
        begin = time.perf_counter()
        try:
            if self._device.type == "cuda":
                torch.cuda.set_device(self._device)
            copied_s = snapshot.await_copies()
            to_cpu = self._reader.to_cpu
            path = self._checkpointer.write(step, self._copies, metrics, self._group, to_cpu, self._refusal, about)
            gigabytes, written_s = self._reader.read_bytes / 1e9, time.perf_counter() - begin
            text = (
                "checkpoint: %s, %.3g GB a rank copied in %.4f s, issued in %.4f s, written beside training in %.1f s"
            )
            log.info(text, path, gigabytes, copied_s, issued_s, written_s)
        except BaseException as error:
            self._error = error

    def _refusal(self) -> InputError | None:
        """Wait for the loss of the step after the copy; return why the checkpoint is refused, None if it is good."""
        self._loss_taken.wait()
        if self._is_abandoned:
            return InputError(f"step {self._begun}: the run has ended before the next loss was known; it is not saved")
        loss = 0.0
        if self._loss is not None:
            if self._loss_known is not None:
                self._loss_known.synchronize()
            loss = self._reader.land(self._loss.reshape(1)).item()
        try:
            self._check()  # kernels have recorded all faults of that step and those before
        except Exception as error:
            return InputError(f"step {self._begun}: {in_one_line(error)}; its state is not saved")
        return self._judge(self._begun, loss, "the loss of the step behind it is")
