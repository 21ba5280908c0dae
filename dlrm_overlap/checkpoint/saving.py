"""The saves of a run. Training stops during a save, or a thread writes a copy of the state while training goes on.

    training  | steps 1 .. s | check, copy to the CPU | steps s + 1, .. | next save: wait for the thread
    thread    |                                       | write, rename   |

The check refuses weights, optimizer states and held-out losses that are not finite.
"""

import logging
import math
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace

import torch
import torch.distributed as dist
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.optim.keyed import CombinedOptimizer

from dlrm_overlap.checkpoint.background import BackgroundWrites
from dlrm_overlap.checkpoint.checkpoint import Checkpointer, extents_to_store, world
from dlrm_overlap.checkpoint.extents import Extent, is_finite
from dlrm_overlap.checkpoint.manifest import Manifest
from dlrm_overlap.comm.every_rank import faults, on_every_rank
from dlrm_overlap.config import Config, InputError
from dlrm_overlap.launching.resources import available_memory_bytes

log = logging.getLogger("dlrm_overlap")


class NotFiniteError(InputError):
    """A loss or a weight is NaN or infinite; all ranks raise it at the same step."""


def require_finite(fault: str, step: int, config: Config) -> None:
    """Raise a NotFiniteError unless `fault`, which says what is wrong after `step`, is empty; the same on all ranks."""
    train, embedding = config.train, config.embedding
    if fault:
        raise NotFiniteError(
            f"step {step}: {fault} and must be finite, so the run ends here and does not save this state; lower "
            f"train.lr {train.lr:g} or embedding.lr {embedding.lr:g}, or raise train.warmup_steps {train.warmup_steps}"
        )


class Saves(BackgroundWrites[Manifest | None]):
    """Saves checkpoints. All ranks call the same methods after the same steps, with no step in flight."""

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
        """`check` raises errors that kernels have recorded. `held_out_loss` evaluates one batch, as a collective."""
        self.step = 0
        """last step whose state was saved, or loaded from the checkpoint that a later run would resume from"""
        self.written: Future[Manifest | None] | None = None
        """on rank 0, the manifest of the checkpoint that `save` has written last, or that a thread is writing"""
        self._config, self._checkpointer = config, checkpointer
        self._model, self._optimizer, self._device = model, optimizer, device
        self._check, self._held_out_loss = check, held_out_loss
        self._copies: dict[tuple[str, tuple[int, ...]], torch.Tensor] = {}
        super().__init__("save", config.embedding.wait_timeout_s)

    def prepare(self, local_ranks: int) -> None:
        """Make the folder and, for background saves, a process group; a collective.

        This machine has `local_ranks` ranks.

        Raises:
            InputError: on all ranks, if one does not see the folder or lacks memory for copies.
        """
        about = self._config.checkpoint
        if about.every or about.last or about.delta_every:
            self._checkpointer.make_shared_folder()
        if not (about.every and about.asynchronous):
            return

        def check_memory() -> None:
            extents = extents_to_store(self._model, self._optimizer)
            held = sum(_bytes_of_copy(extent.tensor) for extent in extents) * local_ranks
            if held > (free := available_memory_bytes()):
                raise InputError(
                    f"checkpoint.asynchronous: copies of the state need {held / 1e9:.3g} GB of this machine's memory, "
                    f"but {free / 1e9:.3g} GB are free; set it to false"
                )

        on_every_rank(check_memory, world())
        self._make_group()

    def save_initial(self) -> None:
        """Save the state before the first step; a collective."""
        self.step = -1
        self.save(0, {})  # no held-out loss: a pipeline may learn sizes from its first batch

    def save(self, step: int, metrics: dict[str, float] | None = None, background: bool = False) -> None:
        """Save a checkpoint after `step` steps, unless this step is already saved; a collective.

        `metrics` are the results of an evaluation after this step. If `background` and the key
        `checkpoint.asynchronous` are true, a thread writes a copy of the state, and `finish` raises its errors. An
        error that a kernel has recorded is raised before anything is saved.

        Raises:
            InputError: on all ranks, if a rank cannot write, now or in the previous save.
            NotFiniteError: if a weight, an optimizer state or the loss of a held-out batch is not finite.
        """
        if step == self.step:
            return
        self.finish()
        begin = time.perf_counter()
        self._synchronize()
        self._check()
        loss = 0.0 if metrics is not None else self._held_out_loss()
        extents = extents_to_store(self._model, self._optimizer)
        fault = "" if math.isfinite(loss) else f"the loss of the first held-out batch is {loss}"
        require_finite(next(iter(faults(_fault_of(extents) or fault, world())), ""), step, self._config)
        about = dict(self._checkpointer.about)

        def write(extents: list[Extent], group: dist.ProcessGroup | None) -> Manifest | None:
            waited_s = time.perf_counter() - begin
            if self._device.type == "cuda":
                torch.cuda.set_device(self._device)  # per thread; else DCP would use another rank's GPU
            path = self._checkpointer.write(step, extents, metrics, group, about)
            text = f", in the background except for {waited_s:.3f} s" if group else ""
            log.info("checkpoint: %s, %.1f s%s", path, time.perf_counter() - begin, text)
            return self._checkpointer.written

        if background and self._group is not None:
            self.written = self._write_in_background(write, self._copy(extents), self._group)
        else:
            self.written = Future()
            self.written.set_result(write(extents, None))
        self.step = step

    def follow(self, model: DistributedModelParallel, optimizer: CombinedOptimizer) -> None:
        """Save another model from now on; no save is under way."""
        self._model, self._optimizer = model, optimizer

    def release(self) -> None:
        """Keep no reference to the model; `follow` comes before the next save."""
        assert self._background is None, "the last save has finished"
        del self._model, self._optimizer
        self._copies.clear()

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    @torch.no_grad()
    def _copy(self, extents: list[Extent]) -> list[Extent]:
        copies = []
        for extent in extents:
            source, key = extent.tensor, (extent.stored_name, extent.offsets)
            if key not in self._copies:
                self._copies[key] = torch.empty_like(source, device="cpu", pin_memory=source.is_cuda)
            self._copies[key].copy_(source, non_blocking=True)
            copies.append(replace(extent, tensor=self._copies[key]))
        self._synchronize()
        return copies

    def close(self, error: Exception) -> None:
        if not self.ended(error):
            log.warning("checkpoint: the save of the state after step %d did not finish", self.step)


def _bytes_of_copy(tensor: torch.Tensor) -> int:
    # Pinned memory is rounded up to a power of 2.
    return 1 << max(0, tensor.nbytes - 1).bit_length() if tensor.is_cuda else tensor.nbytes


def _fault_of(extents: list[Extent]) -> str:
    for extent in extents:
        if not is_finite(extent.tensor):
            is_weight = extent.path[0] == "model"
            return "a weight is nan or infinite" if is_weight else "an optimizer's state is nan or infinite"
    return ""
