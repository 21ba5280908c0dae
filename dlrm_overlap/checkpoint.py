"""Checkpoints through `torch.distributed.checkpoint`: tables, dense part and optimizer state, whatever the plan.

A checkpoint is a folder `step_<N>`; it appears under that name once it is whole, so a run that dies while writing
leaves the one before. Its tensors are stored unsharded by name, so it loads under another plan, number of ranks or
backend. All ranks must see the same file system.
"""

import json
import logging
import os
import re
import shutil
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint.state_dict_loader as dcp_loader
import torch.distributed.checkpoint.state_dict_saver as dcp_saver
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizer

from dlrm_overlap.config import Config, InputError
from dlrm_overlap.embedding.plan import data_parallel_tables

log = logging.getLogger("dlrm_overlap")

_STEP = re.compile(r"step_(\d+)")
_SEEN_WITHIN_S = 60.0  # for a while, a network file system may still answer that a new folder is not there
_FREE = ("workers", "prefetch", "generate")  # keys of `data` that change no sample


def checkpoint_shape(config: Config, rows: list[int]) -> dict[str, Any]:
    """Return what two runs must share for one to load the other's checkpoint."""
    return {
        "model": vars(config.model) | {"dense_features": config.data.dense_features},
        "rows": rows,
        "optimizers": [config.embedding.optimizer, config.train.optimizer],
        "weight_dtype": config.embedding.weight_dtype,
        "data_parallel": data_parallel_tables(config.embedding, rows),
    }


def trained_with(config: Config, global_batch: int) -> dict[str, Any]:
    """Return the keys and values that say which samples a step takes, and from which weights the first one started.

    Step s takes the samples from s times the global batch on, so the number of ranks is not among them. Nor is what may
    well change on the way: learning rates, backend, plan, number of steps.
    """
    data = config.as_dict()["data"]
    tables = data.pop("tables")
    for key in ("path", "eval_path"):
        data[key] = data[key] and str(Path(data[key]).absolute())
    return {
        "train.global_batch_size": global_batch,
        "train.seed": config.train.seed,
        **{f"data.{key}": value for key, value in data.items() if key not in _FREE},
        **{f"data.tables.{key}": tables[key] for key in ("max_rows", "multi_hot", "zipf_alpha")},
    }


def newest_checkpoint(folder: Path) -> Path | None:
    """Return the newest checkpoint in `folder`, None without any."""
    return (_checkpoints(folder) or [None])[-1]


def _checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints in `folder`, oldest first."""
    found = [(int(m[1]), path) for path in folder.glob("step_*") if (m := _STEP.fullmatch(path.name))]
    return [path for _, path in sorted(found)]


def step_of(checkpoint: Path) -> int:
    """Return the step after which `checkpoint` was written."""
    return _read(checkpoint)["step"]


def _read(checkpoint: Path) -> dict[str, Any]:
    return json.loads((checkpoint / "checkpoint.json").read_text())


def weights_are_finite(model: DistributedModelParallel, device: torch.device) -> bool:
    """Return whether all weights of all ranks are finite; a collective. It adds them up, which needs no memory."""
    total = torch.zeros((), device=device)
    for tensor in model.state_dict().values():
        for part in [s.tensor for s in tensor.local_shards()] if isinstance(tensor, ShardedTensor) else [tensor]:
            total += part.sum(dtype=torch.float32)
    dist.all_reduce(total)
    return bool(total.isfinite())


def make_folder(folder: Path) -> None:
    """Make `folder` unless it is there.

    Raises:
        InputError: if it cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(
            f"log.dir: {folder} cannot be made ({error.strerror}); give a folder that can be written to"
        ) from None


class Checkpointer:
    """Writes the checkpoints of one run to a folder, keeps the newest few, and finds where to go on."""

    def __init__(self, folder: Path, keep: int, shape: dict[str, Any], settings: dict[str, Any] | None = None) -> None:
        """Keep the newest `keep` checkpoints in `folder`.

        Args:
            folder: of the checkpoints, each a folder in it.
            keep: number of checkpoints.
            shape: what a checkpoint must have in common with this run to be loaded, `checkpoint_shape`.
            settings: what it should have in common unless a change is allowed, `trained_with`.
        """
        self.folder = folder
        self.keep = keep
        self.shape = shape
        self.settings = settings or {}

    def find(self, resume: str, changed: bool = False) -> Path | None:
        """Return the checkpoint that `checkpoint.resume` names: the newest for `auto`, None for `never`.

        Raises:
            InputError: if the path is not a checkpoint, if it is one of another model, or, unless `changed` is set, if
                it was trained with other settings.
        """
        path = newest_checkpoint(self.folder) if resume == "auto" else Path(resume)
        if path is None or resume == "never":
            return None
        if not (path / "checkpoint.json").is_file():
            raise InputError(f"checkpoint.resume: {path} is not a checkpoint; give a folder named step_<N>")
        saved = _read(path)
        for key, value in self.shape.items():
            had = saved["shape"].get(key, [])  # older ones had no data-parallel tables
            if had != value:
                raise InputError(
                    f"checkpoint.resume: {path} has {key} {_short(had)}, this run has {_short(value)}; "
                    f"use the same, or start anew with --checkpoint.resume never and another --log.name"
                )
        before = saved.get("settings", {})  # which older checkpoints lack
        changes = ", ".join(
            f"{key} {_short(before[key])}, now {_short(value)}"
            for key, value in self.settings.items()
            if key in before and before[key] != value
        )
        if changes and not changed:
            raise InputError(
                f"checkpoint.resume: {path} was trained with {changes}; set what it had, take the change by "
                f"--checkpoint.resume_changed true, or start anew with another --log.name"
            )
        if changes:
            log.info("resume: %s was trained with %s", path, changes)
        return path

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
        seen = torch.tensor(int(found))
        dist.all_reduce(seen, dist.ReduceOp.MIN)
        if not seen:
            raise InputError(
                f"log.dir: {self.folder} is not seen by all ranks, which write checkpoints together; put it on a file "
                f"system of all hosts, or save none by --checkpoint.last false --checkpoint.every 0"
            )

    def save(self, step: int, model: DistributedModelParallel, optimizer: CombinedOptimizer) -> Path:
        """Write `step_<step>` from all ranks, remove checkpoints past the newest `keep`, and return the new one."""
        final = self.folder / f"step_{step}"
        temporary = self.folder / f".writing_{step}"
        if dist.get_rank() == 0:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
        dist.barrier()
        dcp_saver.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, checkpoint_id=temporary)
        if dist.get_rank() == 0:
            about = {"step": step, "shape": self.shape, "settings": self.settings}
            (temporary / "checkpoint.json").write_text(json.dumps(about))
            shutil.rmtree(final, ignore_errors=True)
            os.replace(temporary, final)
            for old in _checkpoints(self.folder)[: -self.keep]:
                shutil.rmtree(old)
        dist.barrier()
        return final

    def load(self, path: Path, model: DistributedModelParallel, optimizer: CombinedOptimizer) -> int:
        """Load `path` in place on all ranks and return the step it was written after."""
        for _, part in optimizer.optimizers:
            if isinstance(part, KeyedOptimizer):
                part.init_state()  # some optimizers make it at their first step, and loading needs it
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        dcp_loader.load(state, checkpoint_id=path)
        model.load_state_dict(state["model"])  # type: ignore[arg-type]
        optimizer.load_state_dict(state["optimizer"])
        return step_of(path)


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 80 else text[:77] + "..."
