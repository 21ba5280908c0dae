"""Checkpoints through `torch.distributed.checkpoint`: tables, dense part and optimizer state, whatever the plan.

A checkpoint is a folder `step_<N>`; it appears under that name once it is whole, so a run that dies while writing
leaves the one before. Its tensors are stored unsharded by name, so it loads under another plan, number of ranks or
backend. All ranks must see the same file system.
"""

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint.state_dict_loader as dcp_loader
import torch.distributed.checkpoint.state_dict_saver as dcp_saver
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizer

from dlrm_overlap.config import Config, InputError

_STEP = re.compile(r"step_(\d+)")


def checkpoint_shape(config: Config, rows: list[int]) -> dict[str, Any]:
    """Return what two runs must share for one to load the other's checkpoint."""
    return {
        "model": vars(config.model) | {"dense_features": config.data.dense_features},
        "rows": rows,
        "optimizers": [config.embedding.optimizer, config.train.optimizer],
        "weight_dtype": config.embedding.weight_dtype,
    }


class Checkpointer:
    """Writes the checkpoints of one run to a folder, keeps the newest few, and finds where to go on."""

    def __init__(self, folder: Path, keep: int, shape: dict[str, Any]) -> None:
        self.folder = folder
        self.keep = keep
        self.shape = shape

    def find(self, resume: str, every: int) -> Path | None:
        """Return the checkpoint that `checkpoint.resume` names: the newest for `auto`, None for `never`.

        Raises:
            InputError: if the path is no checkpoint, or one of another model, or if a run that starts anew would save,
                every `every` steps, among an earlier run's checkpoints.
        """
        if resume == "never":
            if every and (newest := self._newest()):
                raise InputError(
                    f"checkpoint.resume: never, but {newest} is an earlier run's, which a later resume would take for "
                    f"this one's; remove {self.folder}, or give another --log.name"
                )
            return None
        path = self._newest() if resume == "auto" else Path(resume)
        if path is None:
            return None
        if not (path / "checkpoint.json").is_file():
            raise InputError(f"checkpoint.resume: {path} is not a checkpoint; give a folder named step_<N>")
        saved = json.loads((path / "checkpoint.json").read_text())["shape"]
        for key, value in self.shape.items():
            if saved[key] != value:
                raise InputError(
                    f"checkpoint.resume: {path} has {key} {_short(saved[key])}, this run has {_short(value)}; "
                    f"use the same, or start anew with --checkpoint.resume never and another --log.name"
                )
        return path

    def save(self, step: int, model: DistributedModelParallel, optimizer: CombinedOptimizer) -> None:
        """Write `step_<step>` from all ranks, then remove checkpoints past the newest `keep`."""
        final = self.folder / f"step_{step}"
        temporary = self.folder / f".writing_{step}"
        if dist.get_rank() == 0:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
        dist.barrier()
        dcp_saver.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, checkpoint_id=temporary)
        if dist.get_rank() == 0:
            (temporary / "checkpoint.json").write_text(json.dumps({"step": step, "shape": self.shape}))
            shutil.rmtree(final, ignore_errors=True)
            os.replace(temporary, final)
            for old in self._all()[: -self.keep]:
                shutil.rmtree(old)
        dist.barrier()

    def load(self, path: Path, model: DistributedModelParallel, optimizer: CombinedOptimizer) -> int:
        """Load `path` in place on all ranks and return the step it was written after."""
        for _, part in optimizer.optimizers:
            if isinstance(part, KeyedOptimizer):
                part.init_state()  # optimizers that make their state at the first step need it to load into
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        dcp_loader.load(state, checkpoint_id=path)
        model.load_state_dict(state["model"])  # type: ignore[arg-type]
        optimizer.load_state_dict(state["optimizer"])
        return json.loads((path / "checkpoint.json").read_text())["step"]

    def _all(self) -> list[Path]:
        """Return the checkpoints of the folder, oldest first."""
        found = [(int(m[1]), path) for path in self.folder.glob("step_*") if (m := _STEP.fullmatch(path.name))]
        return [path for _, path in sorted(found)]

    def _newest(self) -> Path | None:
        return (self._all() or [None])[-1]


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 80 else text[:77] + "..."
