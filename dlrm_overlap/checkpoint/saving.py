"""The saves of a run, which stop it or are written beside it, and the checks of a state before it is saved."""

import logging
import math
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.optim.keyed import CombinedOptimizer

from dlrm_overlap.checkpoint.background_save import BackgroundSaves
from dlrm_overlap.checkpoint.checkpoint import Checkpointer, extents_to_store
from dlrm_overlap.checkpoint.storage.save import RefusedError, gather
from dlrm_overlap.checkpoint.storage.snapshot import device_of_copy
from dlrm_overlap.comm.record import ExchangeTimeoutError
from dlrm_overlap.config import Config, InputError
from dlrm_overlap.launching.process_group import LAST_RESORT
from dlrm_overlap.launching.watch import Progress

log = logging.getLogger("dlrm_overlap")

_NOTABLE_S = 0.1
_PATIENCE_S = 10.0  # with a save under way, where the run ends by an error that other ranks may not have


class NotFiniteError(InputError):
    """A loss or a weight is NaN or infinite. All ranks raise it at one step."""


def require_finite(finite: bool, otherwise: str, step: int, config: Config) -> None:
    """Raise `NotFiniteError` unless the state after `step` is `finite`, which is the same on all ranks."""
    if not finite:
        train, embedding = config.train, config.embedding
        raise NotFiniteError(
            f"step {step}: {otherwise} and must be finite, so the run ends here and does not save this state; "
            f"lower train.lr {train.lr:g} or embedding.lr {embedding.lr:g}, or raise train.warmup_steps "
            f"{train.warmup_steps}"
        )


def weights_are_finite(model: DistributedModelParallel, device: torch.device) -> bool:
    """Return whether all weights of all ranks are finite; a collective. It adds them up, which needs no memory."""
    return _sum_is_finite(model.state_dict(), device, torch.float32)


def state_is_finite(optimizer: CombinedOptimizer, device: torch.device) -> bool:
    """Return whether the state of `optimizer` is finite on all ranks; a collective.

    Infinity in Adagrad's sum of squares, from one gradient too large to be squared, gives finite weights and a finite
    loss: such a row is never updated again. The state is added up in float64, which needs no memory.
    """
    return _sum_is_finite(optimizer.state_dict()["state"], device, torch.float64)


def _sum_is_finite(tree: Any, device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether the sum in `dtype` of all floating-point tensors in `tree`, of all ranks, is finite."""
    total = torch.zeros((), dtype=dtype, device=device)
    for tensor in _tensors(tree):
        if tensor.is_floating_point():
            total += tensor.sum(dtype=dtype)
    dist.all_reduce(total)
    return bool(total.isfinite())


def _tensors(tree: Any) -> Iterator[torch.Tensor]:
    if isinstance(tree, ShardedTensor):
        yield from (shard.tensor for shard in tree.local_shards())
    elif isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, dict):
        for value in tree.values():
            yield from _tensors(value)


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
        self._beside: BackgroundSaves | None = None

    @property
    def stop_the_run(self) -> bool:
        """Whether steps wait until a save on the way is written."""
        return self._beside is None

    @property
    def failed(self) -> bool:
        """Whether a save that was begun has failed; `finish` raises how."""
        return self._beside is not None and self._beside.failed

    def prepare(self, local_ranks: int, progress: Progress) -> None:
        """Make the folder of this run's saves and the memory of copies, before its first step; a collective.

        Where a rank has no room for a copy of the state, saves stop the run, with a warning.

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
        self._beside = BackgroundSaves(
            self._checkpointer,
            self._model,
            self._optimizer,
            self._device,
            kept_on,
            LAST_RESORT * self._config.embedding.wait_timeout_s,
            progress,
            self._check,
        )

    def took_step(self, loss: torch.Tensor) -> None:
        """Take the loss [] of the step that was just issued."""
        if self._beside is not None:
            self._beside.take_loss(loss)

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
        if beside and self._beside is not None:
            if (waited_s := time.perf_counter() - begin) > _NOTABLE_S:
                text = "checkpoint: %.1f s of waiting behind step %d, since checkpoint.every is less than a save takes"
                log.info(text, waited_s, step)
            self._beside.begin(step, metrics)
            self.step = step
            return
        begin = time.perf_counter()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._check()
        finite = weights_are_finite(self._model, self._device)
        require_finite(finite, "a weight is nan or infinite", step, self._config)
        finite = state_is_finite(self._optimizer, self._device)
        require_finite(finite, "an optimizer's state is nan or infinite", step, self._config)
        if metrics is None:  # an evaluation has looked at the loss of all held-out batches
            # Finite weights may be so large that the next loss is not, and a good checkpoint would go for them.
            loss = self._held_out_loss()
            text = f"the loss of the first held-out batch is {loss}"
            require_finite(math.isfinite(loss), text, step, self._config)
        path = self._checkpointer.save(step, self._model, self._optimizer, metrics)
        self.step = step
        log.info("checkpoint: %s, %.1f s", path, time.perf_counter() - begin)

    def finish(self) -> None:
        """Wait for the save that is under way beside training, if any; a collective.

        Raises:
            InputError: on all ranks, if one could not write.
            NotFiniteError: as `save` does.
        """
        if self._beside is None:
            return
        if self._beside.awaits_loss:  # no step has followed
            self._beside.take_loss(torch.tensor(self._held_out_loss()))
        try:
            self._beside.wait()
        except RefusedError as error:
            self._check()  # this rank may be the one that knows more
            require_finite(not error.refusal.not_finite, error.refusal.text, self._beside.step, self._config)
            raise InputError(f"step {self._beside.step}: {error}; its state is not saved") from None

    def close(self, error: Exception) -> None:
        """Give a save that is under way some time, where the run ends by `error`."""
        if self._beside is None:
            return
        patience_s = _PATIENCE_S  # other ranks may have no such error, and not be there any more
        if isinstance(error, InputError):  # all ranks have it
            patience_s = self._config.embedding.wait_timeout_s
        elif isinstance(error, ExchangeTimeoutError):  # the save has had the whole bound, and needs the same peer
            patience_s = 0.0
        self._beside.close(patience_s)
