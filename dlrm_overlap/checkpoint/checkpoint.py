"""Checkpoints of a run: tables, dense part and optimizer state, whatever the plan.

A checkpoint is a folder `step_<N>`; it appears under that name once it is whole, so a run that dies while writing
leaves the one before. Its tensors are stored by their names in the unsharded model, in files that nothing can be
executed from, so it loads under another plan, number of ranks or backend. All ranks must see the same file system.
`storage` has the files.
"""

import logging
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizer

from dlrm_overlap.checkpoint.storage.branches import check_fits, line, read_manifests, same_checkpoint, surplus
from dlrm_overlap.checkpoint.storage.extents import Cut, Extent, deal, local_extents
from dlrm_overlap.checkpoint.storage.load import agree_on, fill_state
from dlrm_overlap.checkpoint.storage.manifest import Manifest, read_manifest
from dlrm_overlap.checkpoint.storage.save import gather, remove_checkpoint, write_checkpoint
from dlrm_overlap.checkpoint.storage.tensor_file import ToCpu, copy_to_cpu
from dlrm_overlap.config import Config, InputError, flatten
from dlrm_overlap.dense.tensor_parallel import shards_of
from dlrm_overlap.launching.files import make_folder

log = logging.getLogger("dlrm_overlap")

_SEEN_WITHIN_S = 60.0  # for a while, a network file system may still answer that a new folder is not there
_FREE = ("workers", "prefetch")  # keys of `data` that change no sample


def checkpoint_shape(config: Config, rows: list[int], dense_features: int) -> dict[str, Any]:
    """Return the facts that two runs must share for one to load the other's checkpoint."""
    history = config.model.sequence.history
    model = flatten(config.as_dict()["model"], "model.")
    # By the first, ranks share the model, whatever is stored.
    free = {"model.top_parallel", *(key for key in model if key.startswith("model.sequence.") and history is None)}
    return {
        **{key: value for key, value in model.items() if key not in free},
        "model.sequence.history": history,
        "model.dense_features": dense_features,
        "rows": rows,
        "optimizers": [config.embedding.optimizer, config.train.optimizer],
        "weight_dtype": config.embedding.weight_dtype,
    }


def trained_with(config: Config, global_batch: int) -> dict[str, Any]:
    """Return the keys and values that decide which samples a step takes, and the weights before the first one.

    The number of ranks is not among them, nor keys that may change in between: learning rates, backend, plan, steps.
    """
    data = config.as_dict()["data"]
    tables = data.pop("tables")
    for key in ("path", "eval_path"):
        data[key] = data[key] and str(Path(data[key]).absolute())
    return {
        "train.global_batch_size": global_batch,
        "train.seed": config.train.seed,
        **{f"data.{key}": value for key, value in data.items() if key not in _FREE},
        **{f"data.tables.{key}": tables[key] for key in ("max_rows", "multi_hot", "zipf_alpha", "half_life")},
    }


def step_of(checkpoint: Path) -> int:
    """Return the step after which `checkpoint` was written."""
    return read_manifest(checkpoint).step


def extents_to_store(model: DistributedModelParallel, optimizer: CombinedOptimizer) -> list[Extent]:
    """Return the extents that this rank stores, which share memory with the state."""
    extents = local_extents(model.state_dict(), optimizer.state_dict(), cuts_of(model))
    return deal(extents, dist.get_rank(), dist.get_world_size())


class Checkpointer:
    """Writes the checkpoints of one run to a folder, keeps the newest few, and finds where to go on."""

    def __init__(self, folder: Path, keep: int, shape: dict[str, Any], settings: dict[str, Any] | None = None) -> None:
        """Keep the newest `keep` checkpoints that led to the last one in `folder`.

        `shape` is this run's `checkpoint_shape`, `settings` its `trained_with`: see `check_fits`.
        """
        self.folder = folder
        self.keep = keep
        self.shape = shape
        self.settings = settings or {}
        self.about: dict[str, Any] = {}  # of this run, for readers of manifests
        self.tick: Callable[[], None] = lambda: None
        """called for every piece that is read, or written while steps wait: other ranks wait until all are"""
        self._line: tuple[int, ...] = ()  # steps of the checkpoints in the folder that led to this run's next one
        self._parent: str | None = None

    def find(self, resume: str, changed: bool = False) -> Path | None:
        """Return the checkpoint that `checkpoint.resume` names, once its files were found whole; a collective.

        For `auto` it is the one written last, or, where that is damaged, the newest before it that is whole; None
        without any, and for `never`. Rank 0 finds it, and each rank reads a share of its files.

        Raises:
            InputError: if the checkpoint is damaged, if ranks see different ones, or if it does
                not fit this run, see `check_fits`.
        """
        if resume == "never":
            return None
        faults: list[str] = []
        if resume == "auto":
            is_first = not (dist.is_initialized() and dist.get_rank())
            manifests, broken = read_manifests(self.folder) if is_first else ({}, {})
            found = line(manifests)
            newest = manifests[found[0]].step if found else -1
            faults = [fault for path, fault in broken.items() if int(path.name.split("_")[1]) > newest]
            found, faults = gather((found, faults))[0]
            if not found and not faults:
                return None
        else:
            found = [Path(resume)]
        for path in found:
            manifest, wrong = agree_on(path, self.tick)
            if manifest is not None and not wrong:
                check_fits(path, manifest, self.shape, self.settings, changed)
                if faults and not (dist.is_initialized() and dist.get_rank()):
                    log.warning("checkpoint.resume: %s; going on from %s, the newest that is whole", faults[0], path)
                return path
            faults += wrong
        others = ", and no checkpoint before it is whole" if resume == "auto" else ""
        raise InputError(
            f"checkpoint.resume: {faults[0]}{others}; name another checkpoint, or start anew with --checkpoint.resume "
            f"never and another --log.name"
        )

    def make_shared_folder(self) -> None:
        """Make the folder and check that every rank sees it, before anything is trained; a collective.

        Raises:
            InputError: on all ranks, if one does not see it.
        """
        if dist.get_rank() == 0:
            make_folder(self.folder)
        dist.barrier()
        deadline = time.monotonic() + _SEEN_WITHIN_S
        while not (found := self.folder.is_dir()) and time.monotonic() < deadline:
            time.sleep(0.5)
        if blind := [rank for rank, seen in enumerate(gather(found)) if not seen]:
            raise InputError(
                f"log.dir: {self.folder} is not seen by all ranks (not by rank {blind[0]}), which write checkpoints "
                f"together; put it on a file system of all hosts, or save none by --checkpoint.last false "
                f"--checkpoint.every 0"
            )

    def write(
        self,
        step: int,
        extents: list[Extent],
        metrics: dict[str, float] | None = None,
        group: dist.ProcessGroup | None = None,
        to_cpu: ToCpu = copy_to_cpu,
        refusal: Callable[[], InputError | None] = lambda: None,
        about: dict[str, Any] | None = None,
    ) -> Path:
        """Write `step_<step>` from all ranks, remove surplus checkpoints, and return the new one; a collective.

        Args:
            step: number of steps taken.
            extents: `extents_to_store`, or a copy of it.
            metrics: of an evaluation after this step.
            group: see `write_checkpoint`, like `to_cpu` and `refusal`.
            to_cpu: see there.
            refusal: see there.
            about: as it was when `extents` were copied; None takes that of now.

        Raises:
            InputError: as `write_checkpoint` does.
        """
        final = self.folder / f"step_{step}"
        manifests, broken = read_manifests(self.folder) if dist.get_rank() == 0 else ({}, {})
        self._line = (*self._line, step)

        def manifest() -> Manifest:
            return Manifest(
                step,
                self.shape,
                self.settings,
                saved=1 + max((each.saved for each in manifests.values()), default=0),
                line=self._line,
                parent=self._parent,
                metrics={key: value for key, value in (metrics or {}).items() if math.isfinite(value)},
                about=self.about if about is None else about,
            )

        write_checkpoint(final, extents, manifest, group, to_cpu, refusal)
        self._parent = final.name
        if dist.get_rank() == 0:
            broken.pop(final, None)
            manifests[final] = read_manifest(final)
            for old in surplus(manifests, list(broken), self.keep):
                remove_checkpoint(old)
        dist.barrier(group)
        return final

    def load(self, path: Path, model: DistributedModelParallel, optimizer: CombinedOptimizer) -> int:
        """Load `path` on all ranks and return its step. Later saves follow it, if it is in this run's folder.

        Raises:
            InputError: if it lacks a tensor of this model or its optimizers.
        """
        manifest = read_manifest(path)
        for _, each in optimizer.optimizers:
            if isinstance(each, KeyedOptimizer):
                each.init_state()  # some optimizers make it at their first step, and loading needs it
        state = model.state_dict(), optimizer.state_dict()
        try:
            fill_state(path, manifest, *state, cuts_of(model), self.tick)
        except InputError as error:
            raise InputError(f"checkpoint.resume: {error}") from None
        model.load_state_dict(state[0])  # type: ignore[arg-type]
        optimizer.load_state_dict(state[1])
        source = same_checkpoint(self.folder, path)
        self._parent = source.name if source else str(path.absolute())
        self._line = manifest.line if source else ()
        return manifest.step


def cuts_of(model: nn.Module) -> dict[str, Cut]:
    """Return the shape of each dense parameter that is divided over the ranks, and the offsets of this rank's share."""
    return {name: (shard.shape, shard.offsets) for name, shard in shards_of(model).items()}


def check_resume_fits(config: Config, rows: list[int], dense_features: int, global_batch: int) -> None:
    """Check before ranks meet, by the manifests, that a run of `config` can go on from the checkpoint it will find.

    Raises:
        InputError: with every difference, see `check_fits`.
    """
    resume = config.checkpoint.resume
    if resume == "never":
        return
    path = (line(read_manifests(config.folder / "checkpoints")[0]) or [None])[0] if resume == "auto" else Path(resume)
    if path is not None:
        shape = checkpoint_shape(config, rows, dense_features)
        settings = trained_with(config, global_batch)
        check_fits(path, read_manifest(path), shape, settings, config.checkpoint.resume_changed)
