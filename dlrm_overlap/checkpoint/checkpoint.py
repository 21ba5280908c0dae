"""Checkpoints of a run, independent of plan, number of ranks and backend (docs/architecture/runs.md).

A checkpoint is a folder `step_<N>` that gets this name once it is complete.
"""

import logging
import math
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import torch.distributed as dist
from torch import nn
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizer

from dlrm_overlap.checkpoint.extents import Cut, Extent, local_extents
from dlrm_overlap.checkpoint.loading import load_into
from dlrm_overlap.checkpoint.manifest import (
    ENCODING_FILES,
    HELD_OUT,
    Manifest,
    check_fits,
    is_checkpoint,
    last_saves_first,
    newest_first,
    read_complete,
    read_manifest,
    without_checksums,
    write_manifest,
)
from dlrm_overlap.checkpoint.pieces import ChecksummedFile, DamagedError, Piece, UnreadableError
from dlrm_overlap.checkpoint.storage import save_extents
from dlrm_overlap.comm.every_rank import gathered, on_every_rank
from dlrm_overlap.config import EVAL_FRACTION, Config, InputError, flatten
from dlrm_overlap.data.batch import Dataset
from dlrm_overlap.data.encoding import FILES, FOLDER, Encoded
from dlrm_overlap.dense.tensor_parallel import shards_of
from dlrm_overlap.launching.files import (
    PARTIAL,
    discard_at_once,
    discard_partial,
    make_folder,
    open_file,
    sync_folder,
    temporary_of,
)

log = logging.getLogger("dlrm_overlap")

_COPIED_BYTES = 1 << 24  # at a time
_SEEN_WITHIN_S = 60.0  # network file systems may show a new file late
_OF_TABLES = ("max_rows", "multi_hot", "zipf_alpha", "ids", "half_life", "drift")  # keys of `data.tables`
_FREE = ("workers", "prefetch", "eval_window")  # keys of `data` that change no sample
Loaded = TypeVar("Loaded")


def checkpoint_shape(config: Config, rows: Sequence[int | None], dense_features: int) -> dict[str, Any]:
    """Return the settings that must be equal for one run to load another's checkpoint; `rows` are per table."""
    history = config.model.sequence.history
    model = flatten(config.as_dict()["model"], "model.")
    # The stored tensors do not depend on `top_parallel`.
    free = {"model.top_parallel", *(key for key in model if key.startswith("model.sequence.") and history is None)}
    return {
        **{key: value for key, value in model.items() if key not in free},
        "model.sequence.history": history,
        "model.dense_features": dense_features,
        "rows": list(rows),
        "optimizers": [config.embedding.optimizer, config.train.optimizer],
        "weight_dtype": config.embedding.weight_dtype,
    }


def trained_with(config: Config, global_batch: int) -> dict[str, Any]:
    """Return the settings that decide the initial weights and the samples of each step (all ranks' `global_batch`)."""
    data = config.as_dict()["data"]
    tables = data.pop("tables")
    for key in ("path", "eval_path"):
        data[key] = data[key] and str(Path(data[key]).absolute())
    if data["eval_fraction"] is None:
        data["eval_fraction"] = EVAL_FRACTION  # as earlier versions stored it
    return {
        "train.global_batch_size": global_batch,
        "train.seed": config.train.seed,
        **{f"data.{key}": value for key, value in data.items() if key not in _FREE},
        **{f"data.tables.{key}": tables[key] for key in _OF_TABLES},
        # Files say how many rows their tables have, and the shape of a checkpoint has them.
        **({"data.tables.rows": config.data.tables.synthetic_rows} if config.data.kind == "synthetic" else {}),
    }


def samples_of(train: Dataset, held_out: Dataset) -> dict[str, str]:
    """Return what identifies the samples in files, as further settings; nothing if the configuration does.

    Example: {"training samples": "750 of 1000 samples, 5b9d4c0be1f2", "held-out samples": "250 of 1000 samples, ..}
    """
    named = {"training samples": train, HELD_OUT: held_out}
    return {
        key: f"{dataset.num_samples} of {found}" for key, dataset in named.items() if (found := dataset.fingerprint())
    }


def extents_to_store(model: DistributedModelParallel, optimizer: CombinedOptimizer) -> list[Extent]:
    return local_extents(model.state_dict(), optimizer.state_dict(), cuts_of(model))


def with_stored_rows(config: Config, manifest: Manifest) -> Config:
    """Return `config` with the rows that the tables of any id of a checkpoint had grown to.

    If `embedding.id_tables.rows` is not what it was in the checkpoint's run, it is what the user wants now.
    """
    had = manifest.about.get("config", {}).get("embedding", {}).get("id_tables", {}).get("rows")
    rows = manifest.about.get("id_table_rows")
    if not rows or had != config.embedding.id_tables.rows:
        return config
    return with_id_rows(config, list(rows.values()))


def with_id_rows(config: Config, rows: list[int]) -> Config:
    """Return `config` with `rows` for each table of any id."""
    embedding = config.embedding
    return replace(config, embedding=replace(embedding, id_tables=replace(embedding.id_tables, rows=rows)))


def world() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None, "a checkpoint is found and written by all ranks"
    return dist.group.WORLD


def agree_on(path: Path) -> Manifest:
    """Check the files of the checkpoint `path` and return its manifest; a collective.

    Raises:
        DamagedError: on all ranks, if it is incomplete.
        InputError: on all ranks, if its format is unknown, or they see different checkpoints.
    """
    kind: type[InputError] = DamagedError
    try:
        seen = read_complete(path)
    except InputError as error:
        seen, kind = str(error), type(error)
    for rank, other in enumerate(everywhere := gathered(seen, world())):
        if other != everywhere[0]:
            raise InputError(
                f"checkpoint: rank {rank} and rank 0 see different files in {path}; put it on a file system shared by "
                f"all machines"
            )
    if isinstance(seen, str):
        raise kind(seen)
    if not seen.has_checksums and dist.get_rank() == 0:
        log.warning("checkpoint: %s", without_checksums(path))
    return seen


class Checkpointer:
    def __init__(
        self,
        folder: Path,
        keep: int,
        shape: dict[str, Any],
        settings: dict[str, Any] | None = None,
        encoded: Encoded | None = None,
    ) -> None:
        """Take the results of `checkpoint_shape` and `trained_with`, and the training samples' encoding.

        `keep` is `checkpoint.keep`.
        """
        self.folder = folder
        self.keep = keep
        self.shape = shape
        self.settings = settings or {}
        self._encoded, self._is_encoding_intact = encoded, False
        self._damaged: set[Path] = set()  # found by `resume`
        self.about: dict[str, Any] = {}  # facts about this run, for readers of manifests
        self.tick: Callable[[], None] = lambda: None
        """called for each piece read or written, as a sign of progress"""
        self.written: Manifest | None = None
        """on rank 0, the manifest of the checkpoint that `write` has written last"""

    def resume(self, resume: str, changed: bool, load: Callable[[Path, Manifest], Loaded]) -> Loaded | None:
        """Call `load` for the checkpoint to resume from and return its result; None if there is none. A collective.

        `resume` is the key `checkpoint.resume`; "auto" takes the newest save for which `load` raises no DamagedError on
        any rank. `changed` is the key `checkpoint.allow_config_mismatch`.

        Raises:
            InputError: if the checkpoint is damaged, cannot be read now, differs between ranks, or does not fit this
                run.
        """
        if resume == "never":
            return None
        paths = [Path(resume)]
        if resume == "auto":
            paths = gathered(last_saves_first(self.folder), world())[0]
        faults: list[str] = []
        for path in paths:
            try:
                manifest = agree_on(path)
                check_fits(path, manifest, self.shape, self.settings, changed, self._encoded)
                loaded = load(path, manifest)
            except DamagedError as error:
                faults.append(str(error))
                self._damaged.add(path)
                continue
            if faults and dist.get_rank() == 0:
                log.warning("checkpoint.resume: %s; resuming from %s, the newest complete one", faults[0], path)
            return loaded
        if not faults:
            return None
        others = ", and no earlier checkpoint is complete" if resume == "auto" else ""
        raise InputError(
            f"checkpoint.resume: {faults[0]}{others}; name another checkpoint, or start over with --checkpoint.resume "
            f"never and another --log.name"
        )

    def make_shared_folder(self) -> None:
        """Make the folder of checkpoints, in which all ranks must see what rank 0 writes; a collective.

        Raises:
            InputError: on all ranks, if a rank does not see it, though it may see a folder of this name.
        """

        @_writing(self.folder)
        def make() -> str:
            make_folder(self.folder)
            probe = temporary_of(self.folder / "probe")
            probe.touch()
            return probe.name

        name = on_every_rank(lambda: make() if dist.get_rank() == 0 else "", world())
        probe = self.folder / gathered(name, world())[0]
        deadline = time.monotonic() + _SEEN_WITHIN_S
        while not (found := probe.exists()) and time.monotonic() < deadline:
            time.sleep(0.5)
        missing = [rank for rank, seen in enumerate(gathered(found, world())) if not seen]
        if dist.get_rank() == 0:
            probe.unlink(missing_ok=True)
        if missing:
            raise InputError(
                f"log.dir: rank {missing[0]} does not see what rank 0 writes to {self.folder}, to which all ranks "
                f"write checkpoints; put it on a file system shared by all machines, or save none: --checkpoint.last "
                f"false --checkpoint.every 0"
            )

    def write(
        self,
        step: int,
        extents: list[Extent],
        metrics: dict[str, float] | None = None,
        group: dist.ProcessGroup | None = None,
        about: dict[str, Any] | None = None,
    ) -> Path:
        """Write `step_<step>` from all ranks, remove surplus checkpoints, and return the new one; a collective.

        Args:
            metrics: metrics of an evaluation after this step, if there was one.
            group: process group of all ranks, which nothing else uses during the call.
            about: value of `self.about` when `extents` were copied.

        Raises:
            InputError: on all ranks, if a rank cannot write; earlier checkpoints stay.
        """
        final = self.folder / f"step_{step}"
        temporary, ranks = final.with_name(f"{PARTIAL}{final.name}"), group or world()
        manifest = Manifest(
            step,
            self.shape,
            self.settings,
            metrics={key: value for key, value in (metrics or {}).items() if math.isfinite(value)},
            about=self.about if about is None else about,
            encoding=self._encoded.digest if self._encoded else None,
        )

        def on_rank_0(act: Callable[[], Loaded]) -> Loaded | None:
            guarded = _writing(final)(act)
            return on_every_rank(lambda: guarded() if dist.get_rank() == 0 else None, ranks)

        try:
            on_rank_0(lambda: discard_partial(self.folder, temporary))
            with _writing(final):
                files = save_extents(temporary, extents, group, self.tick)
            on_rank_0(lambda: files.update(self._copy_encoding(temporary)))
            self.written = on_rank_0(lambda: self._commit(temporary, final, replace(manifest, files=files)))
        except Exception:
            if dist.get_rank() == 0:
                shutil.rmtree(temporary, ignore_errors=True)
            raise
        return final

    def _copy_encoding(self, checkpoint: Path) -> dict[str, list[Piece]]:
        if self._encoded is None:
            return {}
        if not self._is_encoding_intact:
            self._encoded.read()
            self._is_encoding_intact = True
        copies = {}
        (checkpoint / FOLDER).mkdir()
        for name, source in zip(ENCODING_FILES, FILES, strict=True):
            with open_file(self._encoded.folder / source) as file, ChecksummedFile(checkpoint / name) as copy:
                shutil.copyfileobj(file, copy, _COPIED_BYTES)
            copies[name] = copy.pieces
        sync_folder(checkpoint / FOLDER)
        return copies

    def _commit(self, temporary: Path, final: Path, manifest: Manifest) -> Manifest:
        manifests, unreadable = newest_first(self.folder)
        saved = 1 + max((each.saved for each in manifests.values()), default=0)
        written = write_manifest(temporary, replace(manifest, saved=saved))
        sync_folder(temporary)
        if os.path.lexists(final):  # an abandoned or damaged checkpoint of the same step
            discard_at_once(final)
        os.replace(temporary, final)
        sync_folder(self.folder)
        self._damaged.discard(final)
        others = [path for path in (*manifests, *unreadable) if path != final]
        others.sort(key=lambda path: path in self._damaged)  # remove damaged ones first
        for surplus in others[self.keep - 1 :]:
            discard_at_once(surplus)
        return written

    def load(self, path: Path, model: DistributedModelParallel, optimizer: CombinedOptimizer) -> int:
        """Load the checkpoint `path` into `model` and `optimizer` and return its step; a collective.

        Raises:
            DamagedError: if it is damaged. The state is then partly overwritten.
            InputError: if it lacks a tensor of this model or its optimizers.
        """
        for _, each in optimizer.optimizers:
            if isinstance(each, KeyedOptimizer):
                each.init_state()  # else some optimizers would have none before their first step
        state = model.state_dict(), optimizer.state_dict()
        try:
            load_into(model, path, local_extents(*state, cuts_of(model)), self.tick)
        except (DamagedError, UnreadableError):
            raise
        except InputError as error:
            raise InputError(f"checkpoint.resume: {error}; name another checkpoint") from None
        model.load_state_dict(state[0])  # type: ignore[arg-type]
        optimizer.load_state_dict(state[1])
        return read_manifest(path).step


@contextmanager
def _writing(final: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise InputError(
            f"checkpoint: {final} cannot be written ({error.strerror or error}); earlier checkpoints are unchanged; "
            f"free disk space or repair the folder, and run again: the run resumes from the newest checkpoint, or "
            f"starts over if there is none"
        ) from None


def cuts_of(model: nn.Module) -> dict[str, Cut]:
    return {name: (shard.shape, shard.offsets) for name, shard in shards_of(model).items()}


def check_resume_fits(
    config: Config,
    rows: Sequence[int | None],
    dense_features: int,
    global_batch: int,
    encoded: Encoded | None = None,
    samples: Mapping[str, str] = MappingProxyType({}),
) -> Config:
    """Check by the manifests that a run of `config` can resume, see `check_fits`; needs no process group.

    `samples` is the result of `samples_of`.

    Returns:
        `with_stored_rows` of the checkpoint to resume from; `config` if there is none.
    """
    resume = config.checkpoint.resume
    if resume == "never":
        return config
    manifests, _ = newest_first(config.folder / "checkpoints")
    path = next(iter(manifests), None) if resume == "auto" else Path(resume)
    if resume != "auto" and not is_checkpoint(Path(resume)):
        raise InputError(
            f"checkpoint.resume: {resume!r} is not auto, never or a checkpoint; give a folder named step_<N>"
        )
    if path is not None:
        shape = checkpoint_shape(config, rows, dense_features)
        settings = {**trained_with(config, global_batch), **samples}
        manifest = read_manifest(path)
        check_fits(path, manifest, shape, settings, config.checkpoint.allow_config_mismatch, encoded)
        return with_stored_rows(config, manifest)
    return config
