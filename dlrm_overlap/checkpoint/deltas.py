"""The deltas of a run: every N steps, the weights that training has changed since the last delta or checkpoint.

    updates     | set a bit for each row that they change (`RowMarks`), also in captured steps
    training    | steps .. s | list marked rows, copy them to the CPU, clear the marks | steps s + 1, ..
    thread      |            |                                                         | write, rename

Of a table of any id also those rows count whose id has changed: the ids of the last delta are kept, 8 bytes a row.
"""

import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torchrec.distributed.model_parallel import DistributedModelParallel

from dlrm_overlap.checkpoint.background import BackgroundWrites
from dlrm_overlap.checkpoint.checkpoint import Checkpointer, cuts_of, world
from dlrm_overlap.checkpoint.delta_files import (
    DELTA_MANIFEST,
    EVICT,
    KEY,
    UPDATE,
    ChangedRows,
    DeltaManifest,
    check_backend,
    check_pyarrow,
    delta_name,
    deltas_in,
    read_delta,
    state_of_delta,
    write_changes,
)
from dlrm_overlap.checkpoint.extents import Extent, local_extents
from dlrm_overlap.checkpoint.manifest import MANIFEST, digest_of, write_manifest
from dlrm_overlap.checkpoint.saving import require_finite
from dlrm_overlap.checkpoint.storage import save_extents
from dlrm_overlap.comm.every_rank import faults, gathered, on_every_rank
from dlrm_overlap.config import Config, InputError
from dlrm_overlap.embedding.exchanging_module import ExchangingModule
from dlrm_overlap.embedding.tables import LocalTables
from dlrm_overlap.embedding.unpooled import UnpooledExchange
from dlrm_overlap.kernels.ids.id_map import EMPTY, unmix
from dlrm_overlap.launching.files import discard, sync_folder
from dlrm_overlap.launching.process_group import LAST_RESORT

log = logging.getLogger("dlrm_overlap")

_PARTIAL = ".partial_"  # prefix of a folder that is being written or removed
_CHUNK_BYTES = 1 << 28  # of rows that are gathered on the device at a time


class TableShard(NamedTuple):
    """This rank's part of a table whose updates are marked."""

    name: str
    """of the table's weight in the model's state dict"""
    feature: str
    tables: LocalTables
    number: tuple[int, int]
    """its lookup and its number there"""
    weights: torch.Tensor
    """[rows, D]"""
    first_row: int
    first_column: int
    ids: torch.Tensor | None
    """[rows] int64: the hashed ids of a table of any id"""

    @property
    def key(self) -> tuple[str, int, int]:
        return self.name, self.first_row, self.first_column


def mark_updates(model: DistributedModelParallel, backend: str, sends_ids: bool) -> None:
    """Mark the rows that updates change, from the first step on.

    `sends_ids` says whether `GraphTrainPipeline` takes the steps.

    Raises:
        InputError: if the backend, or a table of the model, cannot.
    """
    check_backend(backend)
    for module in _exchanging(model):
        tables = module.exchange.tables
        if tables.fractions:
            raise InputError(
                f"{KEY}: {len(tables.fractions)} tables are in host memory behind a cache, whose updates name slots, "
                f"not rows; set embedding.memory to gpu, or {KEY} to 0"
            )
        if isinstance(module.exchange, UnpooledExchange) and not sends_ids:
            raise InputError(
                f"{KEY}: train.pipeline torchrec updates histories by FBGEMM, which does not tell which rows it "
                f"changes; take --train.pipeline graph, or 0 for no deltas"
            )
        if module.exchange.options.resolved_backward == "collective":
            check_backend("nccl")
        tables.mark_updates(module.exchange.device)


def _exchanging(model: DistributedModelParallel) -> Iterator[Any]:
    for module in model.modules():
        if isinstance(module, ExchangingModule) and module.exchange is not None:
            yield module


def marked_shards(model: DistributedModelParallel) -> list[TableShard]:
    """Return this rank's shards of all tables; an InputError if updates of one are not marked."""
    owners: dict[int, tuple[Any, tuple[int, int]]] = {}
    for module in _exchanging(model):
        for number, rows in module.exchange.tables.shards():
            if rows.numel():
                owners[rows.data_ptr()] = module, number
    found = []
    for name, tensor in model.state_dict().items():
        if not isinstance(tensor, ShardedTensor) or not tensor.dtype.is_floating_point:
            continue
        for shard in tensor.local_shards():
            if not shard.tensor.numel():
                continue
            if shard.tensor.data_ptr() not in owners:
                raise InputError(
                    f"{KEY}: table {name} stays with TorchRec, whose updates are not marked; the log says why it "
                    f"stays; choose a plan that exchanges it, or set {KEY} to 0"
                )
            module, number = owners[shard.tensor.data_ptr()]
            row, column = shard.metadata.shard_offsets
            tables, id_map = module.exchange.tables, module.id_map
            names = {at: table for table, at in tables.numbers_of.items()}
            ids = None if id_map is None else id_map.shard(id_map.state.ids, names[number])
            layout = module.exchange.layout.by_owner[dist.get_rank()]
            feature = next((s.feature_name for s in layout if (s.lookup, s.table) == number), "")
            found.append(TableShard(name, feature, tables, number, shard.tensor.detach(), row, column, ids))
    return found


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
        self._ids: dict[tuple[str, int, int], torch.Tensor] = {}
        """shard of a table of any id -> its ids at `step`"""
        self._checkpoint: Future[Path] | None = None
        """the checkpoint of `step`, if there is one"""
        self._delta: tuple[int, str] | None = None
        """step of the last delta, and on rank 0 the digest of its manifest"""
        self._group: dist.ProcessGroup | None = None
        super().__init__("delta", config.embedding.wait_timeout_s)

    @property
    def every(self) -> int:
        return self._config.checkpoint.delta_every

    def prepare(self, start: int, checkpoint: Future[Path]) -> None:
        """Begin the chain at the checkpoint of step `start`, and remove deltas of later steps; a collective.

        Raises:
            InputError: on all ranks, if the deltas cannot be written.
        """
        check_pyarrow()
        on_every_rank(lambda: marked_shards(self._model), world())
        on_every_rank(lambda: self._open(start) if dist.get_rank() == 0 else None, world())
        timeout = timedelta(seconds=LAST_RESORT * self._config.embedding.wait_timeout_s)
        group = dist.new_group(backend="gloo", timeout=timeout)
        assert isinstance(group, dist.ProcessGroup), "every rank is in it"
        self._group = group
        self._forget(start)
        self.follow(start, checkpoint)

    def _open(self, start: int) -> None:
        """Make the folder, and remove deltas of steps after `start`, which a run that goes back takes again."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            for left in self.folder.glob(f"{_PARTIAL}*"):
                discard(left)
            for step, path in deltas_in(self.folder).items():
                if step > start:
                    _remove(path)
        except OSError as error:
            raise _unwritable(self.folder, error) from None
        with suppress(InputError):
            path = self.folder / delta_name(start)
            self._delta = start, state_of_delta(path, read_delta(path))["digest"]

    def follow(self, step: int, checkpoint: Future[Path]) -> None:
        """Let the next delta also follow the checkpoint of `step`, which a thread may still write."""
        assert step == self.step, "a checkpoint is saved after the delta of its step"
        self._checkpoint = checkpoint

    def _forget(self, step: int) -> None:
        """Clear what has changed."""
        for shard in marked_shards(self._model):
            marks = shard.tables.marks
            assert marks is not None
            marks.clear()
            if shard.ids is not None:
                self._ids[shard.key] = shard.ids.clone()
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
        changes, are_finite = list[ChangedRows](), torch.ones((), dtype=torch.bool, device=self._device)
        for shard in marked_shards(self._model):
            changes += self._changes(shard, are_finite)
        dense = []
        for extent in dense_extents(self._model):
            are_finite &= extent.tensor.isfinite().all()
            dense.append(replace(extent, tensor=self._to_cpu(extent.tensor)))
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

    def _to_cpu(self, tensor: torch.Tensor) -> torch.Tensor:
        copy = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
        return copy.copy_(tensor, non_blocking=True)

    def _changes(self, shard: TableShard, are_finite: torch.Tensor) -> Iterator[ChangedRows]:
        """Yield a shard's changes, copied to the CPU; clear `are_finite` if a weight is not finite."""
        assert shard.tables.marks is not None
        rows = shard.tables.marks.marked(shard.number)
        about = shard.name, shard.feature
        if shard.ids is None:
            keys = rows + shard.first_row
        else:
            ids, before = shard.ids, self._ids[shard.key]
            moved = (ids != before).nonzero().flatten()
            gone = moved[(before[moved] != EMPTY) & ~torch.isin(before[moved], ids[moved])]
            if gone.numel():
                lost = self._to_cpu(unmix(before[gone])), self._to_cpu(gone + shard.first_row)
                yield ChangedRows(*about, EVICT, shard.first_column, *lost, None)
            rows = torch.cat([rows, moved]).unique()
            rows = rows[ids[rows] != EMPTY]  # initial rows of buckets are named by ids, but stay as they are
            keys = unmix(ids[rows])
        if rows.numel():
            weights = shard.weights
            values = torch.empty((rows.numel(), weights.shape[1]), dtype=weights.dtype, pin_memory=weights.is_cuda)
            size = max(1, _CHUNK_BYTES // (weights.shape[1] * weights.itemsize))
            for part, into in zip(rows.split(size), values.split(size), strict=True):
                chosen = weights.index_select(0, part)
                are_finite &= chosen.isfinite().all()
                into.copy_(chosen, non_blocking=True)
            found = self._to_cpu(keys), self._to_cpu(rows + shard.first_row)
            yield ChangedRows(*about, UPDATE, shard.first_column, *found, values)

    def _write(
        self,
        step: int,
        base: int,
        checkpoint: Future[Path] | None,
        changes: list[ChangedRows],
        dense: list[Extent],
        waited_s: float,
    ) -> None:
        """Write a delta from all ranks; the only collectives of `self._group`."""
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)  # per thread
        group, begin = self._group, time.perf_counter()
        assert group is not None
        saved = checkpoint.result() if checkpoint is not None else None
        final = self.folder / delta_name(step)
        temporary = final.with_name(f"{_PARTIAL}{final.name}")

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
                about={"world_size": group.size()},
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

    def _base(self, base: int, saved: Path | None) -> dict[str, Any]:
        digests = [] if saved is None else [digest_of(saved / MANIFEST)]
        if self._delta is not None and self._delta[0] == base:
            digests.append(self._delta[1])
        return {"step": base, "digest": digests[0], "same": digests[1:]}

    def _commit(self, temporary: Path, final: Path, manifest: DeltaManifest) -> None:
        write_manifest(temporary, manifest, DELTA_MANIFEST)
        sync_folder(temporary)
        if os.path.lexists(final):
            _remove(final)
        os.replace(temporary, final)
        sync_folder(self.folder)
        self._delta = manifest.step, digest_of(final / DELTA_MANIFEST)
        if (keep := self._config.checkpoint.delta_keep) is not None:
            for surplus in list(deltas_in(self.folder).values())[:-keep]:
                _remove(surplus)

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


def _remove(path: Path) -> None:
    removed = path.with_name(f"{_PARTIAL}removed_{path.name}")
    with suppress(OSError):
        discard(removed)
    os.replace(path, removed)
    with suppress(OSError):  # the next run removes it
        discard(removed)
