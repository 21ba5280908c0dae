"""The deltas of a run: every N steps, the weights that training has changed since the last delta or checkpoint.

    updates     | set a bit for each row that they change (`RowMarks`), also in captured steps
    training    | steps .. s | list marked rows, copy them to the CPU, clear the marks | steps s + 1, ..
    thread      |            |                                                         | write, rename

In a table of any id, a row whose id has changed counts as changed too, see `RowChanges`.
"""

import logging
import os
import secrets
import shutil
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torchrec.distributed.model_parallel import DistributedModelParallel

from dlrm_overlap.checkpoint.background import BackgroundWrites
from dlrm_overlap.checkpoint.checkpoint import Checkpointer, cuts_of, world
from dlrm_overlap.checkpoint.delta_files import (
    DELTA_MANIFEST,
    EVICT,
    UPDATE,
    ChangedRows,
    DeltaManifest,
    check_pyarrow,
    delta_name,
    deltas_in,
    read_delta,
    write_changes,
)
from dlrm_overlap.checkpoint.extents import Extent, local_extents
from dlrm_overlap.checkpoint.manifest import Manifest, write_manifest
from dlrm_overlap.checkpoint.row_changes import RowChanges, marked_shards, to_cpu
from dlrm_overlap.checkpoint.saving import require_finite
from dlrm_overlap.checkpoint.storage import save_extents
from dlrm_overlap.comm.every_rank import faults, gathered, on_every_rank
from dlrm_overlap.config import Config, InputError
from dlrm_overlap.launching.files import PARTIAL, discard, discard_at_once, discard_partial, sync_folder

log = logging.getLogger("dlrm_overlap")

_WRITER = "writer"
"""in `Manifest.about`: random text of the process that wrote a checkpoint or delta, if it writes deltas"""


def dense_extents(model: DistributedModelParallel) -> list[Extent]:
    """Return the extents of all weights that are in no sharded table."""
    state = {
        name: tensor
        for name, tensor in model.state_dict().items()
        if not isinstance(tensor, ShardedTensor) and tensor.is_floating_point()
    }
    return local_extents(state, {"state": {}}, cuts_of(model))


class Deltas(BackgroundWrites[None]):
    """Writes deltas. All ranks call the same methods after the same steps, with no step in flight."""

    def __init__(
        self,
        config: Config,
        checkpointer: Checkpointer,
        model: DistributedModelParallel,
        device: torch.device,
        check: Callable[[], None],
    ) -> None:
        """Take the arguments of `Saves`."""
        self.folder = config.folder / "deltas"
        self.step = 0
        """last step whose weights are in a delta or a checkpoint"""
        self._config, self._checkpointer, self._model, self._device = config, checkpointer, model, device
        self._check = check
        self._changes = RowChanges(model)
        self._checkpoint: Future[Manifest | None] | None = None
        """on rank 0, the manifest of the checkpoint of `step`, if there is one"""
        self._delta: tuple[int, str] | None = None
        """step of the last delta, and on rank 0 the digest of its manifest"""
        super().__init__("delta", config.embedding.wait_timeout_s)

    @property
    def every(self) -> int:
        return self._config.checkpoint.delta_every

    def prepare(self, start: int, checkpoint: Future[Manifest | None]) -> None:
        """Begin the chain at the checkpoint of step `start`, and remove deltas of later steps; a collective.

        Raises:
            InputError: on all ranks, if the deltas cannot be written.
        """
        check_pyarrow()
        on_every_rank(lambda: marked_shards(self._model), world())
        self._checkpointer.about[_WRITER] = secrets.token_hex(16)  # rank 0 writes it
        on_every_rank(lambda: self._open(start, checkpoint.result()) if dist.get_rank() == 0 else None, world())
        self._make_group()
        self._forget(start)
        self.follow(start, checkpoint)

    def _open(self, start: int, checkpoint: Manifest | None) -> None:
        """Make the folder, and remove deltas of steps after `start`: this run takes these steps again.

        The delta of `start` has the checkpoint's weights if one process wrote both. Otherwise it is removed: it may be
        from a run that went back to an earlier checkpoint, and ended before it saved.
        """
        assert checkpoint is not None, "rank 0 has its manifest"
        writer, self._delta = checkpoint.about.get(_WRITER), None
        with suppress(InputError):
            delta = read_delta(self.folder / delta_name(start))
            if writer is not None and delta.about.get(_WRITER) == writer:
                self._delta = start, delta.digest
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            discard_partial(self.folder)
            for step, path in deltas_in(self.folder).items():
                if step > start or (step == start and self._delta is None):
                    discard_at_once(path)
        except OSError as error:
            raise _unwritable(self.folder, error) from None

    def follow(self, step: int, checkpoint: Future[Manifest | None]) -> None:
        """Let the next delta also follow the checkpoint of `step`, which a thread may still write."""
        assert step == self.step, "a checkpoint is saved after the delta of its step"
        self._checkpoint = checkpoint

    def _forget(self, step: int) -> None:
        self._changes.clear()
        self.step, self._checkpoint = step, None

    @torch.no_grad()
    def write(self, step: int) -> None:
        """Copy what has changed since the last delta or checkpoint, and let a thread write it as the delta of `step`.

        A collective. Does nothing if the weights of `step` are in a delta or a checkpoint already.

        Raises:
            InputError: on all ranks, if a rank could not write the previous delta.
            NotFiniteError: if a weight is not finite.
        """
        if step == self.step:
            return
        self.finish()
        begin = time.perf_counter()
        self._synchronize()
        self._check()
        are_finite = torch.ones((), dtype=torch.bool, device=self._device)
        changes = self._changes.copied(are_finite)
        dense = []
        for extent in dense_extents(self._model):
            are_finite &= extent.tensor.isfinite().all()
            dense.append(replace(extent, tensor=to_cpu(extent.tensor)))
        self._synchronize()
        fault = "" if bool(are_finite) else "a weight is nan or infinite"
        require_finite(next(iter(faults(fault, world())), ""), step, self._config)
        base, checkpoint = self.step, self._checkpoint
        self._forget(step)
        self._synchronize()
        waited_s = time.perf_counter() - begin
        self._write_in_background(self._write, step, base, checkpoint, changes, dense, waited_s)

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _write(
        self,
        step: int,
        base: int,
        checkpoint: Future[Manifest | None] | None,
        changes: list[ChangedRows],
        dense: list[Extent],
        waited_s: float,
    ) -> None:
        """Write a delta from all ranks; the only collectives of `self._group`."""
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)  # per thread
        group, begin = self._group, time.perf_counter()
        assert group is not None
        saved = checkpoint.result() if checkpoint is not None else None  # it may be removed from now on
        final = self.folder / delta_name(step)
        temporary = final.with_name(f"{PARTIAL}{final.name}")

        def write_rows() -> Any:
            file = temporary / f"tables_rank{group.rank()}.parquet"
            dtype = self._config.checkpoint.delta_dtype
            return file.name, write_changes(file, changes, step, group.rank(), group.size(), dtype)

        try:
            on_every_rank(guarded(lambda: discard(temporary) if group.rank() == 0 else None, final), group)
            files = guarded(lambda: save_extents(temporary, dense, group, self._checkpointer.tick), final)()
            files |= dict(gathered(on_every_rank(guarded(write_rows, final), group), group))
            manifest = DeltaManifest(
                step,
                self._checkpointer.shape,
                self._checkpointer.settings,
                about={"world_size": group.size(), _WRITER: self._checkpointer.about[_WRITER]},
                files=dict(sorted(files.items())),
                base=self._base(base, saved) if group.rank() == 0 else {},
            )
            on_every_rank(
                guarded(lambda: self._commit(temporary, final, manifest) if group.rank() == 0 else None, final), group
            )
        except Exception:
            if group.rank() == 0:
                shutil.rmtree(temporary, ignore_errors=True)
            raise
        rows, gone = (sum(len(each.keys) for each in changes if each.source == kind) for kind in (UPDATE, EVICT))
        log.info(
            "delta: %s, %d rows%s on this rank, %.1f s in the background, for which training waited %.3f s",
            final, rows, f" and {gone} tombstones" if gone else "", time.perf_counter() - begin, waited_s,
        )  # fmt: skip

    def _base(self, base: int, saved: Manifest | None) -> dict[str, Any]:
        digests = [] if saved is None else [saved.digest]
        if self._delta is not None and self._delta[0] == base:
            digests.append(self._delta[1])
        return {"step": base, "digest": digests[0], "same": digests[1:]}

    def _commit(self, temporary: Path, final: Path, manifest: DeltaManifest) -> None:
        written = write_manifest(temporary, manifest, DELTA_MANIFEST)
        sync_folder(temporary)
        if os.path.lexists(final):
            discard_at_once(final)
        os.replace(temporary, final)
        sync_folder(self.folder)
        self._delta = written.step, written.digest
        if (keep := self._config.checkpoint.delta_keep) is not None:
            for surplus in list(deltas_in(self.folder).values())[:-keep]:
                discard_at_once(surplus)

    def close(self, error: Exception) -> None:
        if not self.ended(error):
            log.warning("delta: that of step %d was not written", self.step)


def guarded(work: Callable[[], Any], final: Path) -> Callable[[], Any]:
    """Return `work`, which raises an InputError instead of an OSError."""

    def run() -> Any:
        try:
            return work()
        except OSError as error:
            raise _unwritable(final, error) from None

    return run


def _unwritable(path: Path, error: OSError) -> InputError:
    return InputError(
        f"delta: {path} cannot be written ({error.strerror or error}); earlier deltas are unchanged; free disk space "
        f"or repair the folder, and run again: the run resumes from the newest checkpoint, and its deltas go on there"
    )
